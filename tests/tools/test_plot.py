"""`titanlite plot`: what is in metrics.jsonl is what the picture shows, and faults are named."""

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from titanlite.cli import main, parse_options
from titanlite.errors import UserError
from titanlite.observe.metrics import JsonLines, StepRecord
from titanlite.tools import plot as plot_command
from titanlite.tools.plot_charts import smooth, thin
from titanlite.tools.plot_scale import Axis, tick_texts

SVG = "{http://www.w3.org/2000/svg}"
SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def plot(argv: list[str]) -> int:
    """Run the command as cli.main does, with errors raised."""
    arguments, overrides = parse_options("plot", plot_command, argv)
    return plot_command.run(arguments, overrides)


def record(step, loss, **changed):
    plain = StepRecord(step, loss, loss, 1.0, 1e-3, step * 100, 5000.0, 1.0, None, 1.0, 1.0, 1.0, 0.0, 1.0, 0)
    return replace(plain, **changed)


def write(folder: Path, records, validation=(), torn="") -> Path:
    """A dump folder, by the sink that training writes with."""
    folder.mkdir(parents=True)
    sink = JsonLines(folder / "metrics.jsonl")
    for one in records:
        sink.step(one, {})
    for step, loss in validation:
        sink.validation(step, loss)
    sink.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(torn)
    return folder


class Picture:
    """The charts of an HTML file, read back: places are turned into values by the ticks alone."""

    def __init__(self, path: Path, *words):
        assert plot([*map(str, words), "--out", str(path)]) == 0
        self.text = path.read_text()
        found = re.findall(r"<svg .*?</svg>", self.text, re.DOTALL)
        self.svgs = [ElementTree.fromstring(svg.replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1)) for svg in found]
        self.data = json.loads(re.search(r'id="data">(.*?)</script>', self.text, re.DOTALL)[1])
        assert [self.words(chart, "title") for chart in range(4)] == [
            ["Loss"],
            ["Gradient norm"],
            ["Learning rate"],
            ["Throughput"],
        ]

    def words(self, chart, kind):
        return [text.text for text in self.svgs[chart].iter(f"{SVG}text") if text.get("class") == kind]

    def ticks(self, chart, kind, side):
        found = [text for text in self.svgs[chart].iter(f"{SVG}text") if text.get("class") == kind]
        return [(float(text.get(side)), number(text.text)) for text in found]

    def points(self, chart, kind, run=0):
        """Values of the curves of this kind, a list for each unbroken piece."""
        log = any("log scale" in (words or "") for words in self.words(chart, "unit"))
        x, y = self.ticks(chart, "tick-x", "x"), self.ticks(chart, "tick-y", "y")
        y = [(place - 4, value) for place, value in y]  # a baseline lies 4 below the middle of its digits
        lines = [
            line
            for line in self.svgs[chart].iter(f"{SVG}polyline")
            if line.get("class") == kind and line.get("data-color") == f"run{run}"
        ]
        pieces = [[tuple(map(float, pair.split(","))) for pair in line.get("points").split()] for line in lines]
        return [[(read(px, x), read(py, y, log)) for px, py in piece] for piece in pieces]


def number(text):
    return float(text[:-1]) * SCALES[text[-1]] if text[-1] in SCALES else float(text)


def read(place, ticks, log=False):
    (p0, v0), (p1, v1) = ticks[0], ticks[-1]
    share = (place - p0) / (p1 - p0)
    return v0 * (v1 / v0) ** share if log else v0 + share * (v1 - v0)


def close(got, expected):
    assert len(got) == len(expected)
    for (x, y), (a, b) in zip(got, expected, strict=True):
        assert abs(x - a) < 0.1 and abs(y / b - 1) < 0.01, (x, y, a, b)


def test_every_curve_shows_what_was_logged(tmp_path):
    steps = [record(s, 4 - s / 10, grad_norm=2 + s / 9, lr=s * 1e-4, tps=4e3 + 70 * s) for s in range(1, 21)]
    picture = Picture(tmp_path / "out.html", write(tmp_path / "run", steps, [(10, 3.5), (20, 2.5)]))
    for chart, key in enumerate(("loss", "grad_norm", "lr", "tps")):
        close(picture.points(chart, "raw")[0], [(s.step, getattr(s, key)) for s in steps])
    close(picture.points(0, "validation")[0], [(10, 3.5), (20, 2.5)])
    assert len(list(picture.svgs[0].iter(f"{SVG}circle"))) == 2


def test_a_log_scale_is_marked_and_shows_what_was_logged(tmp_path):
    steps = [record(s, 3.0, grad_norm=100.0 if s == 5 else 0.5 + s / 100) for s in range(1, 15)]
    picture = Picture(tmp_path / "out.html", write(tmp_path / "run", steps))
    assert picture.words(1, "unit") == ["before clipping · log scale"] and picture.words(0, "unit") == ["training"]
    got = picture.points(1, "raw")[0]
    assert all(math.isclose(y, s.grad_norm, rel_tol=0.03) for (_, y), s in zip(got, steps, strict=True))


def test_over_tokens_validation_stands_where_its_step_was(tmp_path):
    """Its lines hold no tokens; steps 5 and 12 lie between, and after, the logged ones."""
    steps = [record(s, 4 - s / 10, tokens=t) for s, t in ((2, 100), (4, 200), (10, 1400))]
    folder = write(tmp_path / "run", steps, [(1, 3.9), (5, 3.7), (12, 3.0)])
    picture = Picture(tmp_path / "out.html", folder, "--x=tokens")
    assert [round(x) for x, _ in picture.points(0, "raw")[0]] == [100, 200, 1400]
    assert [round(x) for x, _ in picture.points(0, "validation")[0]] == [50, 400, 1800]
    assert picture.words(0, "over") == ["tokens"]


def test_a_noisy_curve_is_thin_under_its_mean_and_a_clean_one_bold(tmp_path):
    steps = [record(s, 3 + (-1) ** s / 5, lr=s * 1e-5) for s in range(1, 201)]
    picture = Picture(tmp_path / "out.html", write(tmp_path / "run", steps))
    close(picture.points(0, "raw")[0], [(s.step, s.loss) for s in steps])
    means = [y for _, y in picture.points(0, "smooth")[0]]
    assert len(means) == 200 and all(abs(y - 3) < 0.05 for y in means[3:])
    assert not picture.points(2, "smooth") and len(picture.points(2, "raw")[0]) == 200
    kinds = [line.get("class") for line in picture.svgs[0].iter(f"{SVG}polyline")]
    assert kinds.index("raw") < kinds.index("smooth")


def test_the_mean_is_centred_and_keeps_a_straight_line_straight():
    line = [(float(i), 2.0 * i) for i in range(600)]
    assert all(math.isclose(y, b, abs_tol=1e-6) for (_, y), (_, b) in zip(smooth(line)[:-10], line, strict=False))
    assert smooth(line)[-1] == (599.0, sum(2.0 * i for i in range(589, 600)) / 11)


def test_a_long_run_is_thinned_and_keeps_its_spikes(tmp_path):
    points = [(i / 100, 1.0) for i in range(20000)]
    points[7777], points[12345] = (77.77, 9.0), (123.45, -9.0)
    kept = thin(points)
    assert len(kept) <= 400 and {points[0], points[7777], points[12345], points[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_nan_and_infinity_break_the_curve_and_are_marked(tmp_path):
    losses = [4.0, 3.0, math.nan, 2.5, 2.4, math.inf, 2.2]
    folder = write(tmp_path / "run", [record(s, loss) for s, loss in enumerate(losses, 1)], [(3, math.nan), (7, 2.3)])
    picture = Picture(tmp_path / "out.html", folder)
    assert [len(piece) for piece in picture.points(0, "raw")] == [2, 2]  # the last value alone is a ring
    close([point for piece in picture.points(0, "raw") for point in piece], [(1, 4), (2, 3), (4, 2.5), (5, 2.4)])
    rings = [str(ring.get("class")) for ring in picture.svgs[0].iter(f"{SVG}circle")]
    assert sorted(rings) == ["raw", "validation"]
    assert "crosses: NaN or infinite" in picture.words(0, "unit")[0]
    crosses = sorted({round(sum(x for x, _ in cross) / 2) for cross in picture.points(0, "nonfinite")})
    assert crosses == [3, 6]
    training = picture.data["charts"][0]["curves"][0]["points"]
    assert [y for *_, y in training] == [4.0, 3.0, "NaN", 2.5, 2.4, "Infinity", 2.2]
    assert "2.30000 at step 7" in picture.text


def test_a_run_of_nothing_but_nan_is_drawn(tmp_path):
    folder = write(tmp_path / "run", [record(1, math.nan, grad_norm=math.inf), record(2, math.nan, tps=math.nan)])
    picture = Picture(tmp_path / "out.html", folder)
    assert not picture.points(0, "raw") and len(picture.points(0, "nonfinite")) == 4


@pytest.mark.parametrize("out", ["out.html", "out.png"])
def test_one_logged_step_is_drawn(tmp_path, out):
    assert plot([str(write(tmp_path / "run", [record(1, 4.0)])), "--out", str(tmp_path / out)]) == 0


def test_a_torn_last_line_is_left_out_and_said(tmp_path, capsys):
    folder = write(tmp_path / "run", [record(1, 4.0), record(2, 3.0)], torn='{"step": 3, "lo')
    picture = Picture(tmp_path / "out.html", folder)
    assert [round(x) for x, _ in picture.points(0, "raw")[0]] == [1, 2]
    said = capsys.readouterr().err
    assert "line 3" in said and str(folder / "metrics.jsonl") in said and "cut off" in said


def test_several_runs_have_a_colour_and_a_row_each_and_the_shortest_names_that_differ(tmp_path):
    one = write(tmp_path / "wide" / "outputs", [record(1, 4.0), record(2, 3.0)])
    two = write(tmp_path / "deep" / "outputs", [record(1, 5.0), record(2, 4.5)])
    picture = Picture(tmp_path / "out.html", one, two / "metrics.jsonl")
    close(picture.points(0, "raw", 0)[0], [(1, 4.0), (2, 3.0)])
    close(picture.points(0, "raw", 1)[0], [(1, 5.0), (2, 4.5)])
    assert picture.data["runs"] == ["wide/outputs", "deep/outputs"]
    assert Picture(tmp_path / "out.html", one).data["runs"] == ["outputs"]
    rows = re.findall(r'--run(\d)\)"></i>(.*?)</td>.*?<td>([\d.]+\.\d{5})</td>', picture.text)
    assert rows == [("0", "wide/outputs", "3.00000"), ("1", "deep/outputs", "4.50000")]


def test_the_hover_knows_the_values_in_full_precision(tmp_path):
    steps = [record(1, 4.123456789), record(2, 3.0)]
    picture = Picture(tmp_path / "out.html", write(tmp_path / "run", steps))
    assert picture.data["charts"][0]["curves"][0]["points"][0][2:] == [1, 4.123456789]


def test_the_html_needs_nothing_from_outside_and_has_both_themes(tmp_path):
    text = Picture(tmp_path / "out.html", write(tmp_path / "run", [record(1, 4.0), record(2, 3.0)])).text
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text
    used = set(re.findall(r"var\(--([a-z]+\d?)\)", text))
    light, dark = re.findall(r"color-scheme:(?:light|dark);(.*?)\}", text)[:2]
    for theme in (light, dark):
        assert used - {"columns"} <= set(re.findall(r"--([a-z]+\d?):#", theme))
    assert light != dark


def test_a_name_with_markup_stays_text(tmp_path):
    folder = write(tmp_path / "<b>&<" / "script>", [record(1, 4.0), record(2, 3.0)])
    other = write(tmp_path / "x" / "script>", [record(1, 4.0)])
    picture = Picture(tmp_path / "out.html", folder, other)
    assert picture.data["runs"] == ["<b>&</script>", "x/script>"]
    assert "<b>" not in picture.text and picture.text.count("</script>") == 2


def test_the_png_shows_the_same_curves_at_twice_the_size(tmp_path):
    image_module = pytest.importorskip("PIL.Image")
    folder = write(tmp_path / "run", [record(s, 4 - s / 10) for s in range(1, 21)])
    assert plot([str(folder), "--out", str(tmp_path / "out.png")]) == 0
    image = image_module.open(io.BytesIO((tmp_path / "out.png").read_bytes())).convert("RGB")
    html = Picture(tmp_path / "out.html", folder)
    line = next(line for line in html.svgs[0].iter(f"{SVG}polyline") if line.get("class") == "raw")
    top = 92 + 22 * 2 + 18  # below the title and a table of one row
    for pair in line.get("points").split()[1:-1]:
        x, y = (round(2 * (float(place) + off)) for place, off in zip(pair.split(","), (36, top), strict=True))
        assert image.getpixel((x, y)) == (0, 0x72, 0xB2)
        assert image.getpixel((x, y - 24)) != (0, 0x72, 0xB2)


def test_a_png_without_pillow_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "titanlite.tools.plot_png", raising=False)
    folder = write(tmp_path / "run", [record(1, 4.0)])
    with pytest.raises(UserError, match="pip install -U pillow"):
        plot([str(folder), "--out", str(tmp_path / "out.png")])
    assert not (tmp_path / "out.png").exists()


def test_neither_torch_nor_pillow_is_imported_for_html(tmp_path):
    folder = write(tmp_path / "run", [record(1, 4.0)])
    code = (
        "import sys; from titanlite.cli import main; main(['plot', *sys.argv[1:]]); "
        "print({'torch', 'numpy', 'PIL', 'pydantic'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, str(folder), "--out", str(tmp_path / "out.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.endswith("\nset()\n")


def test_faults_are_named_with_their_file(tmp_path):
    good = write(tmp_path / "good", [record(1, 4.0)])
    cases = [
        ([], "DUMP"),
        ([tmp_path / "none"], f"{tmp_path / 'none'} is no file or folder"),
        ([tmp_path], f"{tmp_path / 'metrics.jsonl'} does not exist; there is one in {good}"),
        ([good, good / "metrics.jsonl"], "more than once"),
        ([good, "--x", "time"], "--x: unknown value 'time'; use steps, tokens"),
        ([good, "--out", "a.pdf"], "a.pdf: must end in .html or .png"),
        ([good, "--out"], "--out: expected one argument"),
        ([good, "--uot=a.png"], "unknown option --uot; did you mean --out?"),
        ([good, "--out", tmp_path / "absent" / "a.html"], f"{tmp_path / 'absent' / 'a.html'} can't be written"),
        ([good] * 9, "at most 8"),
    ]
    files = [
        ("", "holds no logged step yet"),
        ('{"step": 1, "validation_loss": 2.0}\n', "holds no logged step yet"),
        ('{"step": 1, "lo', "holds no logged step yet"),
        ('{"step": 1, "lo\n{"step": 2}\n', "line 1 of"),
        ("[1]\n{}\n", "line 1 of"),
        ('{"step": 1, "loss": "x"}\n', 'loss must be a number, not "x"'),
        ('{"step": 1, "loss": 2.0}\n', "grad_norm must be a number, not null"),
        ('{"step": NaN, "loss": 2.0}\n', "step must be a number, not NaN"),
    ]
    for i, (text, expected) in enumerate(files):
        file = tmp_path / "files" / f"{i}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        cases.append(([file], expected))
        with pytest.raises(UserError, match=re.escape(str(file))):
            plot([str(file)])
    for words, expected in cases:
        with pytest.raises(UserError, match=re.escape(expected)) as raised:
            plot([str(word) for word in words])
        assert "\n" not in str(raised.value)


def test_help_answers_without_a_run(capsys):
    assert main(["plot", "--help"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("titanlite plot", "--out", "--x", "tokens"))


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (Axis(0, 300), ["0", "50", "100", "150", "200", "250", "300"]),
        (Axis(0, 1.06e-3), ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]),
        (Axis(0, 2.1e9), ["0", "0.5B", "1B", "1.5B", "2B"]),
        (Axis(0.05, 2e3, log=True), ["0.1", "1", "10", "100", "1k"]),
        (Axis(1.5, 7, log=True), ["1.5", "2", "3", "4", "6"]),
    ],
)
def test_ticks_are_round_and_keep_apart(axis, expected):
    ticks = axis.ticks(300, 45)
    assert tick_texts(ticks, axis.log) == expected
    places = [300 * axis.share(tick) for tick in ticks]
    assert all(b - a >= 45 for a, b in zip(places, places[1:], strict=False))
