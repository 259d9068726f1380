"""`titanlite plot`: curves show what metrics.jsonl holds, and errors name the file."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.messages import says
from tests.tools.conftest import record, write
from titanlite.tools.plot import draw
from titanlite.tools.record import read_run, smooth

FALLING = [record(1, 4.0), record(2, 3.0)]
NOTHING = [record(1, math.nan, lr=math.inf), record(2, math.nan)]


def panels(*dumps: Path, keys: str = "loss", x_axis: str = "steps") -> list[list[np.ndarray]]:
    """Return the lines of each panel: raw and smoothed for each run."""
    figure = draw([read_run(dump) for dump in dumps], keys.split(), x_axis)
    return [[np.array(line.get_xydata()) for line in axes.get_lines()] for axes in figure.axes]


def test_every_metric_shows_what_was_logged(tmp_path):
    steps = [record(s, 4 - s / 10, grad_norm=2 + s / 9, lr=s * 1e-4) for s in range(1, 21)]
    folder = write(tmp_path / "run", steps, [(10, 3.5), (20, 2.5)])
    keys = "loss grad_norm lr"
    *drawn, validation = panels(folder, keys=f"{keys} validation_loss")
    for key, (raw, _) in zip(keys.split(), drawn, strict=True):
        np.testing.assert_allclose(raw, [(s.step, getattr(s, key)) for s in steps])
    np.testing.assert_allclose(validation[1], [(10, 3.5), (20, 2.5)])


def test_validation_lies_at_the_tokens_of_its_step(tmp_path):
    """Validation records hold no tokens; steps 5 and 12 lie between, and after, the logged ones."""
    steps = [record(s, 4 - s / 10, tokens=t) for s, t in ((2, 100), (4, 200), (10, 1400))]
    folder = write(tmp_path / "run", steps, [(1, 3.9), (5, 3.7), (12, 3.0)])
    loss, validation = panels(folder, keys="loss validation_loss", x_axis="tokens")
    assert loss[0][:, 0].tolist() == [100, 200, 1400]
    assert validation[0][:, 0] == pytest.approx([50, 400, 1680])


def test_the_smoothed_curve_is_a_centered_mean_that_does_not_lag():
    straight = 2.0 * np.arange(600)
    smoothed = smooth(straight)
    assert np.allclose(smoothed[:-10], straight[:-10]) and smoothed[-1] == straight[-11:].mean()
    noisy = 3 + np.where(np.arange(200) % 2, 0.2, -0.2)
    assert np.abs(smooth(noisy)[3:] - 3).max() < 0.05


def test_nan_and_infinity_break_the_curve(tmp_path, tool):
    losses = [4.0, 3.0, math.nan, 2.5, 2.4, math.inf, 2.2]
    steps = [record(s, loss) for s, loss in enumerate(losses, 1)]
    folder = write(tmp_path / "run", steps, [(3, math.nan), (7, 2.3)])
    ((_, smoothed),) = panels(folder)
    assert np.isfinite(smoothed[:, 1]).tolist() == np.isfinite(losses).tolist()
    says(tool("plot", folder), "2.30000 at step 7")


@pytest.mark.parametrize(
    ("suffix", "start", "records"),
    [("png", b"\x89PNG", FALLING[:1]), ("svg", b"<?xml", NOTHING)],
)
def test_a_picture_is_written_for_one_step_and_for_nothing_but_nan(
    tmp_path, tool, suffix, start, records
):
    out = tmp_path / f"out.{suffix}"
    tool("plot", write(tmp_path / "run", records), "--out", out)
    assert out.read_bytes().startswith(start)


def test_several_runs_share_panels_and_names_are_no_mathematics(tmp_path, tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a") / "$x$", FALLING)
    write(Path("b"), [record(1, 5.0), record(2, 4.5)])
    assert len(panels(Path("b"), Path("a/$x$"))[0]) == 4
    says(tool("plot a/$x$ b/metrics.jsonl --out c.svg"), "a/$x$", "4.50000", "wrote c.svg")
    assert ">a/$x$<" in Path("c.svg").read_text()


def test_an_incomplete_last_line_is_skipped_with_a_warning(tmp_path, capsys):
    folder = write(tmp_path / "run", FALLING, torn='{"step": 3, "lo')
    assert read_run(folder).steps == [1, 2]
    says(capsys.readouterr().err, f"line 3 of {folder}/metrics.jsonl")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"step": 1, "validation_loss": 2.0}\n', "logged step"),
        ('{"step": 1, "lo\n{"step": 2}\n', "line 1 of"),
        ("7\n{}\n", "line 1 of"),
        ('{"step": 1, "loss": "x"}\n', "'x'"),
        ('{"loss": 2.0}\n', "'step'"),
        ('{"step": NaN, "validation_loss": 2.0}\n', "NaN"),
    ],
)
def test_a_file_that_training_did_not_write_is_an_error(tmp_path, tool, text, named):
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    says(tool("plot", file, code=2).splitlines()[-1], named, file)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "outputs does not exist"),
        ("/nonexistent", "/nonexistent does not exist"),
        (".", "metrics.jsonl does not exist"),
        ("run --ot x", "--out?"),
        ("run --x token", "'tokens'?"),
        ("run --metrics los", "--metrics los: no run has los; did you mean loss?"),
        ("run --metrics zebra", "zebra; they have data_seconds, "),
        ("run --out a.gif", "--out a.gif: "),
        ("run --out absent/a.png", "absent/a.png"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, tool, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    write(Path("run"), FALLING)
    out = tool(f"plot {words}", code=2)
    says(" ".join(out.split()), named)
    assert out.count("\n") <= 2 or "usage: " in out


def test_of_several_files_those_that_are_no_run_are_skipped_with_a_line(tmp_path, tool):
    write(tmp_path / "run", FALLING)
    stray = tmp_path / "stray.log"
    stray.write_text("no record\nat all\n")
    said = tool("plot", stray, tmp_path / "run")
    says(said, f"skipped: line 1 of {stray}", "3.00000")
    tool("plot", stray, stray, code=2)


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_has_the_losses_of_every_run_without_matplotlib(
    tmp_path, tool, monkeypatch, width
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(Path("falls"), [record(s, 5 - s / 20) for s in range(1, 81)])
    write(Path("rises"), [record(s, math.inf if s < 9 else s / 20) for s in range(1, 41)])
    write(Path("nowhere"), NOTHING[1:])
    table, charts = tool("plot falls rises nowhere").split("\n\n")
    says(table, "1.00000", "nan")
    title, falls, rises, nowhere = charts.splitlines()
    assert title == "loss" and len(falls) == width and nowhere.strip() == "nowhere"
    assert re.fullmatch("falls  +█+▇.*▂+", falls) and re.fullmatch("rises +▁+▂.*▃+", rises)
    assert abs(len(rises) - 9 - (width - 9) / 2) <= 1, "half as many steps, on the same scale"
    # In a narrow one the values of a run are lines.
    table = tool("plot falls")
    assert re.match(r"run +falls\nsteps +80\n" if width == 40 else "run +steps +tokens", table)
    assert max(map(len, table.splitlines())) <= width
