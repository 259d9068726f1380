"""`titanlite plot`: curves of one or several runs from their metrics.jsonl, in one HTML or PNG file.

Reads what runs recorded and says what is shown; plot_charts.py turns that into marks, plot_html.py and
plot_png.py put marks into a file. Nothing here imports torch, so that the answer comes at once.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from titanlite import __version__
from titanlite.errors import UserError
from titanlite.tools.plot_charts import RUN_COLOURS, Chart, Curve, Page
from titanlite.tools.plot_html import html


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "example: titanlite plot outputs/a outputs/b --out curves.html"
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMP", help="a run's dump folder or metrics.jsonl")
    parser.add_argument("--out", type=Path, default=Path("curves.html"), help=".html (the default) or .png")
    parser.add_argument("--x", choices=("steps", "tokens"), default="steps", help="the horizontal axis")


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Draw the runs' curves into one file."""
    out = arguments.out
    if out.suffix.lower() not in (".html", ".png"):
        raise UserError(f"--out {out}: must end in .html or .png")
    if len(arguments.dumps) > len(RUN_COLOURS):
        raise UserError(f"{len(arguments.dumps)} runs; at most {len(RUN_COLOURS)} are drawn in one file")
    files = [_metrics_file(dump) for dump in arguments.dumps]
    runs = [_read(file, name) for file, name in zip(files, _names(files), strict=True)]
    page = _page(runs, arguments.x)
    try:
        out.write_bytes(_png(page) if out.suffix.lower() == ".png" else html(page).encode())
    except OSError as error:
        raise UserError(f"--out {out} can't be written: {error.strerror}") from error
    print(f"wrote {out}")
    return 0


@dataclass(frozen=True)
class Step:
    """What is drawn of a logged step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tps: float


@dataclass(frozen=True)
class Run:
    """One metrics.jsonl, in order of steps; losses may be NaN or infinite."""

    name: str
    steps: list[Step] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def tokens_at(self, step: int) -> float:
        """Tokens seen at a step that may lie between or after logged ones: validation lines hold no tokens."""
        i = bisect_left(self.steps, step, key=lambda logged: logged.step)
        i = min(i, len(self.steps) - 1)
        s1, t1 = self.steps[i].step, self.steps[i].tokens
        s0, t0 = (self.steps[i - 1].step, self.steps[i - 1].tokens) if i else (0, 0)
        return t0 + (t1 - t0) * (step - s0) / (s1 - s0) if s1 > s0 else t1


def _metrics_file(dump: Path) -> Path:
    """The metrics.jsonl of a dump folder, or the file itself."""
    file = dump / "metrics.jsonl" if dump.is_dir() else dump
    if file.is_file():
        return file
    if not dump.is_dir():
        raise UserError(f"{dump} is no file or folder; give a run's dump folder, or its metrics.jsonl")
    inside = sorted(path.parent for path in dump.glob("*/metrics.jsonl"))
    hint = f"; there is one in {inside[-1]}" if inside else "; give the folder that job.dump_folder names"
    raise UserError(f"{file} does not exist{hint}")


def _names(files: list[Path]) -> list[str]:
    """The shortest ends of the runs' folders that tell them apart."""
    resolved = [file.resolve() for file in files]
    folders = [file.parent if file.name == "metrics.jsonl" else file for file in resolved]
    repeated = [str(file) for file, folder in zip(files, folders, strict=True) if folders.count(folder) > 1]
    if repeated:
        raise UserError(f"the same run is given more than once: {', '.join(repeated)}")
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read(file: Path, name: str) -> Run:
    """Read a run's metrics; lines that are neither a step nor a validation are left to others."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").rstrip().split("\n")
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error
    steps: dict[int, Step] = {}
    validation: dict[int, float] = {}
    for number, text in enumerate(lines, 1):
        where = f"line {number} of {file}"
        try:
            line = json.loads(text) if text.strip() else {}
        except ValueError as error:
            if number < len(lines):
                raise UserError(f"{where} is not JSON; is this a metrics.jsonl that titanlite wrote?") from error
            print(f"{where} is cut off (the run was killed, or is writing it) and is left out", file=sys.stderr)
            continue
        if not isinstance(line, dict):
            raise UserError(f"{where} is no JSON object; is this a metrics.jsonl that titanlite wrote?")
        if "loss" in line:
            get = _getter(line, where)
            at = int(get("step"))
            steps[at] = Step(at, get("loss"), get("grad_norm"), get("lr"), int(get("tokens")), get("tps"))
        elif "validation_loss" in line:
            get = _getter(line, where)
            validation[int(get("step"))] = get("validation_loss")
    if not steps:
        raise UserError(f"{file} holds no logged step yet; there is nothing to draw")
    return Run(name, [steps[at] for at in sorted(steps)], sorted(validation.items()))


def _getter(line: dict[str, object], where: str) -> Callable[[str], float]:
    """Look up numbers in a line; `step` and `tokens` have to be finite."""

    def get(key: str) -> float:
        value = line.get(key)
        if not isinstance(value, int | float) or (key in ("step", "tokens") and not math.isfinite(value)):
            raise UserError(f"{where}: {key} must be a number, not {json.dumps(value)}")
        return value

    return get


def _png(page: Page) -> bytes:
    try:
        from titanlite.tools.plot_png import png
    except ImportError as error:  # Pillow comes with tensorboard, and is no dependency of ours
        raise UserError(
            "a PNG needs Pillow 10.4: `pip install -U pillow`; --out curves.html needs nothing"
        ) from error
    return png(page)


def _page(runs: list[Run], over: str) -> Page:
    def curves(name: str, value: Callable[[Step], float]) -> list[Curve]:
        return [
            Curve(i, name, [(s.tokens if over == "tokens" else s.step, value(s)) for s in run.steps])
            for i, run in enumerate(runs)
        ]

    validation = [
        Curve(
            i, "validation", [(run.tokens_at(s) if over == "tokens" else s, loss) for s, loss in run.validation], True
        )
        for i, run in enumerate(runs)
        if run.validation
    ]
    return Page(
        title=f"Training curves of {runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}",
        subtitle=f"over {over} · thin: as logged · bold: moving mean over 1/30 of the run · titanlite {__version__}",
        columns=["run", "steps", "tokens", "last loss", "best validation loss", "tokens/s per device (median)"],
        rows=[_row(run) for run in runs],
        over=over,
        charts=[
            Chart(
                "Loss",
                "training; validation with rings" if validation else "training",
                [*curves("training", lambda s: s.loss), *validation],
                may_log=True,
            ),
            Chart("Gradient norm", "before clipping", curves("gradient norm", lambda s: s.grad_norm), may_log=True),
            Chart("Learning rate", "", curves("learning rate", lambda s: s.lr), from_zero=True),
            Chart("Throughput", "tokens/s per device", curves("tokens/s", lambda s: s.tps), from_zero=True),
        ],
    )


def _row(run: Run) -> list[str]:
    last = run.steps[-1]
    finite = [(loss, step) for step, loss in run.validation if math.isfinite(loss)]
    best = "{:.5f} at step {:,}".format(*min(finite)) if finite else "none"
    speeds = [s.tps for s in run.steps if math.isfinite(s.tps)]
    speed = f"{median(speeds):,.0f}" if speeds else "none"
    return [run.name, f"{last.step:,}", f"{last.tokens:,}", f"{last.loss:.5f}".replace("nan", "NaN"), best, speed]
