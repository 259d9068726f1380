"""`titanlite plot`: the picture shows what metrics.jsonl holds, and errors name the file."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.lanes import sample
from tests.messages import says
from tests.tools.conftest import record, write

pytest.importorskip("matplotlib")
from titanlite.tools.plot import draw, draw_by, read_run, smooth  # noqa: E402

FALLING = [record(1, 4.0), record(2, 3.0)]
NOTHING = [record(1, math.nan, lr=math.inf), record(2, math.nan)]


def panels(*dumps, x_axis="steps"):
    """Return the lines of each panel by its title: (raw, smoothed, crosses) for each run."""
    figure = draw([read_run(dump) for dump in dumps], x_axis)
    return {
        axes.get_title(loc="left"): [line.get_xydata() for line in axes.get_lines()]
        for axes in figure.axes
    }


def test_every_curve_shows_what_was_logged(tmp_path):
    steps = [
        record(s, 4 - s / 10, grad_norm=2 + s / 9, lr=s * 1e-4, tps=4e3 + 70 * s)
        for s in range(1, 21)
    ]
    drawn = panels(write(tmp_path / "run", steps, [(10, 3.5), (20, 2.5)]))
    for word, key in {
        "Training": "loss",
        "norm": "grad_norm",
        "rate": "lr",
        "Tokens": "tps",
    }.items():
        (title,) = [title for title in drawn if word in title]
        np.testing.assert_allclose(drawn[title][0], [(s.step, getattr(s, key)) for s in steps])
    np.testing.assert_allclose(drawn["Validation loss"][1], [(10, 3.5), (20, 2.5)])


def test_two_validations_are_points_and_no_line(tmp_path):
    steps = [record(s, 4 - s / 10) for s in range(1, 21)]
    figure = draw([read_run(write(tmp_path / "run", steps, [(10, 3.5), (20, 2.5)]))], "steps")
    loss, validation = ([line.get_linewidth() for line in axes.get_lines()[:2]]
                        for axes in figure.axes[:2])  # fmt: skip
    assert all(loss) and not any(validation)


def test_a_few_high_values_make_the_axis_logarithmic_and_the_title_says_so(tmp_path):
    steps = [record(s, 3.0, grad_norm=100.0 if s == 5 else 0.5 + s / 100) for s in range(1, 15)]
    drawn = panels(write(tmp_path / "run", steps))
    assert [title for title in drawn if title.endswith("log scale")] == [list(drawn)[1]]
    assert "Training loss" in drawn and "Validation loss" not in drawn, "it never validated"


def test_validation_lies_at_the_tokens_and_hours_of_its_step(tmp_path):
    """Validation records hold no tokens; steps 5 and 12 lie between, and after, the logged ones."""
    steps = [record(s, 4 - s / 10, tokens=t) for s, t in ((2, 100), (4, 200), (10, 1400))]
    folder = write(tmp_path / "run", steps, [(1, 3.9), (5, 3.7), (12, 3.0)])
    by_tokens, by_hours = (panels(folder, x_axis=axis) for axis in ("tokens", "hours"))
    assert by_tokens["Training loss"][0][:, 0].tolist() == [100, 200, 1400]
    assert by_tokens["Validation loss"][0][:, 0] == pytest.approx([50, 400, 1680])
    # From the first logged step, an hour each.
    assert by_hours["Training loss"][0][:, 0].tolist() == [1, 3, 9]


def test_the_smoothed_curve_is_a_centered_mean_that_does_not_lag():
    straight = 2.0 * np.arange(600)
    smoothed = smooth(straight)
    assert np.allclose(smoothed[:-10], straight[:-10]) and smoothed[-1] == straight[-11:].mean()
    noisy = 3 + np.where(np.arange(200) % 2, 0.2, -0.2)
    assert np.abs(smooth(noisy)[3:] - 3).max() < 0.05


def test_nan_and_infinity_break_the_curve_and_are_crosses(tmp_path, tool):
    losses = [4.0, 3.0, math.nan, 2.5, 2.4, math.inf, 2.2]
    steps = [record(s, loss) for s, loss in enumerate(losses, 1)]
    folder = write(tmp_path / "run", steps, [(3, math.nan), (7, 2.3)])
    _, smoothed, crosses = panels(folder)["Training loss"]
    assert crosses[:, 0].tolist() == [3, 6] and np.isfinite(smoothed[:, 1]).sum() == 5
    says(tool("plot", folder, "--text"), "2.30000 at step 7")


@pytest.mark.parametrize(
    ("suffix", "start", "records"),
    sample(
        [
            png := ("png", b"\x89PNG", FALLING[:1]),
            svg := ("svg", b"<?xml", NOTHING),
            ("pdf", b"%PDF", FALLING),
            ("html", b"<!D", NOTHING),
        ],
        png,
        svg,
    ),
)
def test_every_format_is_written_for_one_step_and_for_nothing_but_nan(
    tmp_path, tool, suffix, start, records
):
    out = tmp_path / f"out.{suffix}"
    tool("plot", write(tmp_path / "run", records), "--out", out)
    assert out.read_bytes().startswith(start)


def test_several_runs_share_panels_and_the_page_needs_nothing_else(tmp_path, tool, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a") / "$x$<b>", FALLING)
    write(Path("b"), [record(1, 5.0), record(2, 4.5)])
    assert len(panels(Path("b"), Path("a/$x$<b>"))["Training loss"]) == 6
    says(tool("plot a/$x$<b> b/metrics.jsonl"), "a/$x$<b>", "4.50000", "wrote curves.html")
    page = Path("curves.html").read_text()
    assert page.count("a/$x$&lt;b&gt;") == 3, "in two legends and in the table"
    for outside in ("<b>", "src=", "@import", "<script", "<image"):
        assert outside not in page


@pytest.mark.long
def test_on_a_narrow_screen_a_page_has_a_panel_a_line(tmp_path, tool):
    folder = write(tmp_path / "run", FALLING, [(2, 3.5)])
    axes = draw([read_run(folder)], "steps", narrow=True).axes
    assert [each.get_subplotspec().colspan for each in axes] == [range(1)] * 5
    says(tool("plot", folder), f"wrote {folder}/curves.html")
    page = (folder / "curves.html").read_text()
    rule = "@media (max-width: 600px) { .wide { display: none } .narrow { display: block } }"
    assert rule in page and page.count('<div class="narrow">') == 1
    assert "min-width: 820px" not in page, "nothing is cut off at the right"


def test_an_incomplete_last_line_is_skipped_with_a_warning(tmp_path, capsys):
    folder = write(tmp_path / "run", FALLING, torn='{"step": 3, "lo')
    assert len(read_run(folder).logged) == 2
    says(capsys.readouterr().err, f"line 3 of {folder}/metrics.jsonl")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"step": 1, "validation_loss": 2.0}\n', "logged step"),
        ('{"step": 1, "lo\n{"step": 2}\n', "line 1 of"),
        ("7\n{}\n", "line 1 of"),
        ('{"step": 1, "tokens": 1, "step_seconds": 1, "loss": "x"}\n', "'x'"),
        ('{"step": 1, "loss": 2.0}\n', "'tokens'"),
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
        ("run --out a.gif", "--out a.gif: "),
        ("run --out absent/a.html", "absent/a.html"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, tool, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    write(Path("run"), FALLING)
    out = tool(f"plot {words}", code=2)
    says(out.splitlines()[0], named)
    assert out.count("\n") == 1 or "usage: " in out


def test_of_several_files_those_that_are_no_run_are_skipped_with_a_line(tmp_path, tool):
    write(tmp_path / "run", FALLING)
    stray, out = tmp_path / "stray.log", tmp_path / "curves.svg"
    stray.write_text("no record\nat all\n")
    said = tool("plot", stray, tmp_path / "run", "--out", out)
    says(said, f"skipped: line 1 of {stray}", f"wrote {out}")
    tool("plot", stray, stray, "--out", out, code=2)


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
    table, charts = tool("plot falls rises nowhere --text").split("\n\n")
    says(table, "1.00000", "nan")
    falls, rises, nowhere = charts.splitlines()
    assert re.fullmatch("falls  +█+▇.*▂+", falls) and re.fullmatch("rises +▁+▂.*▃+", rises)
    assert len(falls) == width and nowhere.strip() == "nowhere"
    assert abs(len(rises) - 9 - (width - 9) / 2) <= 1, "half as many steps, on the same scale"
    assert not list(tmp_path.glob("*.html"))
    # In a narrow one the values of a run are lines.
    table = tool("plot falls --text")
    assert re.match(r"run +falls\nsteps +80\n" if width == 40 else "run +steps +tokens", table)
    assert max(map(len, table.splitlines())) <= width


def swept(folder: Path, *ends: tuple[float, float]) -> list[str]:
    """Make the folders of runs of 3 steps, each with a learning rate and a last loss; the first
    one is not finished.
    """
    runs = []
    for number, (rate, loss) in enumerate(ends):
        steps = range(1, 3 if number == 0 else 4)
        run = write(folder / f"run{number}", [record(s, loss) for s in steps])
        text = f"[optimizer]\nname = 'AdamW'\nlr = {rate}\n[training]\nsteps = 3\n"
        (run / "config.toml").write_text(text)
        runs.append(str(run))
    return runs


def test_by_a_key_the_last_losses_lie_over_its_values(tmp_path, tool):
    runs = swept(tmp_path, (0.1, 2.0), (0.001, 5.0), (0.1, 3.0), (9.0, math.nan))
    printed = tool("plot", *runs, "--by", "optimizer.lr", "--out", tmp_path / "by.html")
    assert [line.split()[:3] for line in printed.splitlines()[1:5]] == [
        ["0.001", "5.00000", "3"],
        ["0.1", "2.00000", "2"],
        ["0.1", "3.00000", "3"],
        ["9.0", "nan", "3"],
    ]
    figure, _ = draw_by([read_run(Path(run)) for run in runs], "optimizer.lr")
    (axes,) = figure.axes
    mean, finished, hollow, lost = (line.get_xydata().tolist() for line in axes.get_lines())
    assert mean[:2] == [[0.001, 5.0], [0.1, 2.5]]
    assert finished[:2] == [[0.001, 5.0], [0.1, 3.0]]
    assert hollow == [[0.1, 2.0]] and [x for x, _ in lost] == [9.0]
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("optimizer.lrr", "run0/config.toml; did you mean optimizer.lr?"),
        ("optimizer.name", "AdamW in all"),
        ("seed", "--by seed: "),
    ],
)
def test_a_key_that_tells_no_run_from_another_is_one_line(tmp_path, tool, key, named):
    out = tool("plot", *swept(tmp_path, (0.1, 2.0), (0.2, 3.0)), "--by", key, code=2)
    says(" ".join(out.split()), named)
