"""`titanlite plot`: the picture shows what metrics.jsonl holds, and errors name the file."""

import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from titanlite.cli import main
from titanlite.observe.metrics import JsonLines, StepRecord

pytest.importorskip("matplotlib")
from titanlite.tools.plot import draw, draw_by, read_run, smooth  # noqa: E402


def record(step, loss, **changed):
    plain = StepRecord(
        step, loss, loss, 1.0, 1e-3, step * 100, 5000.0, 1.0, None, 3600.0, 1.0, 1.0, 0.0, 1.0, 0
    )
    return replace(plain, **changed)


def write(folder: Path, records, validation=(), torn="") -> Path:
    """Make a dump folder with the sink that training writes with."""
    folder.mkdir(parents=True)
    sink = JsonLines(folder / "metrics.jsonl")
    for one in records:
        sink.write(one.step, asdict(one), {})
    for step, loss in validation:
        sink.write(step, {"validation_loss": loss}, {})
    sink.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(torn)
    return folder


def panels(*dumps, x_axis="steps"):
    """Return the lines of each panel by the first words of its title: (raw, smoothed, crosses) for
    each run.
    """
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
    keys = {
        "Training loss": "loss",
        "Gradient norm before clipping": "grad_norm",
        "Learning rate": "lr",
    }
    for title, key in {**keys, "Tokens per second per device": "tps"}.items():
        np.testing.assert_allclose(drawn[title][0], [(s.step, getattr(s, key)) for s in steps])
    np.testing.assert_allclose(drawn["Validation loss"][1], [(10, 3.5), (20, 2.5)])


def test_a_few_high_values_make_the_axis_logarithmic_and_the_title_says_so(tmp_path):
    steps = [record(s, 3.0, grad_norm=100.0 if s == 5 else 0.5 + s / 100) for s in range(1, 15)]
    drawn = panels(write(tmp_path / "run", steps))
    assert "Gradient norm before clipping, log scale" in drawn and "Training loss" in drawn
    assert "Validation loss" not in drawn, "the run never validated"


def test_validation_lies_at_the_tokens_and_hours_of_its_step(tmp_path):
    """Validation records hold no tokens; steps 5 and 12 lie between, and after, the logged ones."""
    steps = [record(s, 4 - s / 10, tokens=t) for s, t in ((2, 100), (4, 200), (10, 1400))]
    folder = write(tmp_path / "run", steps, [(1, 3.9), (5, 3.7), (12, 3.0)])
    by_tokens, by_hours = (panels(folder, x_axis=axis) for axis in ("tokens", "hours"))
    assert by_tokens["Training loss"][0][:, 0].tolist() == [100, 200, 1400]
    assert by_tokens["Validation loss"][0][:, 0] == pytest.approx([50, 400, 1680])
    assert by_hours["Training loss"][0][:, 0].tolist() == [1, 3, 9], (
        "from the first logged step, an hour each"
    )


def test_the_smoothed_curve_is_a_centered_mean_that_does_not_lag():
    straight = 2.0 * np.arange(600)
    assert (
        np.allclose(smooth(straight)[:-10], straight[:-10])
        and smooth(straight)[-1] == straight[-11:].mean()
    )
    noisy = 3 + np.where(np.arange(200) % 2, 0.2, -0.2)
    assert np.abs(smooth(noisy)[3:] - 3).max() < 0.05


def test_nan_and_infinity_break_the_curve_and_are_crosses(tmp_path, capsys):
    losses = [4.0, 3.0, math.nan, 2.5, 2.4, math.inf, 2.2]
    folder = write(
        tmp_path / "run",
        [record(s, loss) for s, loss in enumerate(losses, 1)],
        [(3, math.nan), (7, 2.3)],
    )
    raw, smoothed, crosses = panels(folder)["Training loss"]
    assert crosses[:, 0].tolist() == [3, 6] and np.isfinite(smoothed[:, 1]).sum() == 5
    assert main(["plot", str(folder), "--out", str(tmp_path / "out.png")]) == 0
    assert "2.30000 at step 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "records", [[record(1, 4.0)], [record(1, math.nan, lr=math.inf), record(2, math.nan)]]
)
@pytest.mark.parametrize(
    "suffix, start", {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!D"}.items()
)
def test_every_format_is_written_for_one_step_and_for_nothing_but_nan(
    tmp_path, records, suffix, start
):
    out = tmp_path / f"out.{suffix}"
    assert main(["plot", str(write(tmp_path / "run", records)), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(start)


def test_several_runs_share_panels_and_the_page_needs_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("a") / "$x$<b>", [record(1, 4.0), record(2, 3.0)])
    write(Path("b"), [record(1, 5.0), record(2, 4.5)])
    assert len(panels(Path("b"), Path("a/$x$<b>"))["Training loss"]) == 6
    assert main(["plot", "a/$x$<b>", "b/metrics.jsonl"]) == 0
    page, printed = Path("curves.html").read_text(), capsys.readouterr().out
    assert page.count("a/$x$&lt;b&gt;") == 3 and "<b>" not in page, (
        "in two legends and in the table"
    )
    assert not any(word in page for word in ("src=", "@import", "<script", "<image"))
    assert "a/$x$<b>" in printed and "4.50000" in printed and "wrote curves.html" in printed


def test_the_page_of_one_run_lies_in_its_folder(tmp_path, capsys):
    folder = write(tmp_path / "run", [record(1, 4.0), record(2, 3.0)])
    assert main(["plot", str(folder)]) == 0
    assert f"wrote {folder}/curves.html" in capsys.readouterr().out
    assert (folder / "curves.html").exists()


def test_in_a_narrow_terminal_the_losses_of_a_run_are_lines(tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "run", [record(1, 4.0), record(2, 3.0)])
    monkeypatch.chdir(folder.parent)
    for width, begin in {"40": r"run +run\nsteps +2\n", "200": "run +steps +tokens"}.items():
        monkeypatch.setenv("COLUMNS", width)
        assert main(["plot", "run", "--text"]) == 0
        out = capsys.readouterr().out
        assert re.match(begin, out) and max(map(len, out.splitlines())) <= int(width)


def test_on_a_narrow_screen_a_page_has_a_panel_a_line(tmp_path):
    steps = [record(s, 4 - s / 10) for s in range(1, 6)]
    run = read_run(write(tmp_path / "run", steps, [(5, 3.5)]))
    places = [axes.get_subplotspec().colspan for axes in draw([run], "steps", narrow=True).axes]
    assert places == [range(1)] * 5
    out = tmp_path / "out.html"
    assert main(["plot", run.name, "--out", str(out)]) == 0
    page = out.read_text()
    rule = "@media (max-width: 600px) { .wide { display: none } .narrow { display: block } }"
    assert rule in page and page.count('<div class="narrow">') == 1
    assert "min-width: 820px" not in page, "nothing is cut off at the right"


def test_an_incomplete_last_line_is_skipped_with_a_warning(tmp_path, capsys):
    folder = write(tmp_path / "run", [record(1, 4.0), record(2, 3.0)], torn='{"step": 3, "lo')
    assert len(read_run(folder).logged) == 2
    assert f"line 3 of {folder / 'metrics.jsonl'} is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, expected",
    {
        '{"step": 1, "validation_loss": 2.0}\n': "no logged step yet",
        '{"step": 1, "lo\n{"step": 2}\n': "line 1 of",
        "7\n{}\n": "line 1 of",
        '{"step": 1, "tokens": 1, "step_seconds": 1, "loss": "x"}\n': (
            "could not convert string to float: 'x'"
        ),
        '{"step": 1, "loss": 2.0}\n': "'tokens' is missing",
        '{"step": NaN, "validation_loss": 2.0}\n': "cannot convert float NaN",
    }.items(),
)
def test_a_file_that_training_did_not_write_is_an_error(tmp_path, capsys, text, expected):
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    assert main(["plot", str(file)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert expected in error and str(file) in error


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    run = str(write(tmp_path / "run", [record(1, 4.0)]))
    mistakes = {
        (): "DUMP",
        ("/nonexistent",): "/nonexistent does not exist",
        (str(tmp_path),): f"{tmp_path / 'metrics.jsonl'} does not exist",
        (run, "--ot", "x"): "did you mean --out?",
        (run, "--x", "token"): "did you mean 'tokens'?",
        (run, "--out", "a.gif"): "--out a.gif: must end in .html, .png, .svg or .pdf",
        (run, "--out", f"{tmp_path}/absent/a.html"): "absent/a.html can't be written: No such file",
    }
    for argv, expected in mistakes.items():
        assert main(["plot", *argv]) == 2
        error = capsys.readouterr().err
        assert expected in error.splitlines()[0] and (error.count("\n") == 1 or "usage: " in error)


def test_of_several_files_those_that_are_no_run_are_skipped_with_a_line(tmp_path, capsys):
    write(tmp_path / "run", [record(1, 2.0)])
    (tmp_path / "stray.log").write_text("no record\nat all\n")
    words = [
        str(tmp_path / "stray.log"),
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "curves.svg"),
    ]
    assert main(["plot", *words]) == 0
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "titanlite: skipped: line 1 of" in said
        and (tmp_path / "curves.svg").exists()
    )
    assert main(["plot", words[0], words[0], *words[2:]]) == 2


@pytest.mark.parametrize("width", ["40", "80"])
def test_a_terminal_has_the_losses_of_every_run_without_matplotlib(
    tmp_path, capsys, monkeypatch, width
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write(Path("falls"), [record(s, 5 - s / 20) for s in range(1, 81)])
    write(Path("rises"), [record(s, math.inf if s < 9 else s / 20) for s in range(1, 81)])
    write(Path("nowhere"), [record(1, math.nan)])
    assert main(["plot", "falls", "rises", "nowhere", "--text"]) == 0
    table, charts = capsys.readouterr().out.split("\n\n")
    assert "1.00000" in table and "nan" in table
    falls, rises, nowhere = charts.splitlines()
    assert re.fullmatch("falls  +█+▇.*▂▁+", falls) and re.fullmatch("rises +▁+▂.*▇█+", rises)
    assert len(falls) == int(width) and nowhere.strip() == "nowhere"
    assert not list(tmp_path.glob("*.html"))


def test_torch_is_not_imported(tmp_path):
    code = (
        "import sys; from titanlite.cli import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    argv = [
        "plot",
        str(write(tmp_path / "run", [record(1, 4.0)])),
        "--out",
        str(tmp_path / "out.svg"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")


def swept(folder: Path, *ends: tuple[float, float]) -> list[str]:
    """Make the folders of runs of 3 steps, each with a learning rate and a last loss."""
    runs = []
    for number, (rate, loss) in enumerate(ends):
        steps = 2 if number == 0 else 3  # the first one is not finished
        run = write(folder / f"run{number}", [record(s, loss) for s in range(1, steps + 1)])
        text = f"[optimizer]\nname = 'AdamW'\nlr = {rate}\n[training]\nsteps = 3\n"
        (run / "config.toml").write_text(text)
        runs.append(str(run))
    return runs


def test_by_a_key_the_last_losses_lie_over_its_values(tmp_path, capsys):
    runs = swept(tmp_path, (0.1, 2.0), (0.001, 5.0), (0.1, 3.0), (9.0, math.nan))
    assert main(["plot", *runs, "--by", "optimizer.lr", "--text"]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
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
    (band,) = axes.collections
    assert {(0.1, 2.0), (0.1, 3.0)} <= {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    assert main(["plot", *runs, "--by", "optimizer.lr", "--out", str(tmp_path / "by.html")]) == 0


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("optimizer.lrr", "run0/config.toml; did you mean optimizer.lr?"),
        ("optimizer.name", "it is AdamW in all of these runs"),
        ("seed", "no such key in"),
    ],
)
def test_a_key_that_tells_no_run_from_another_is_one_line(tmp_path, capsys, key, line):
    assert main(["plot", *swept(tmp_path, (0.1, 2.0), (0.2, 3.0)), "--by", key]) == 2
    assert line in " ".join(capsys.readouterr().err.split())
