"""`titanlite verify`: is a model's parallel training equal to one process, for every technique and mesh?"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.errors import UserError, nearest
from titanlite.verify.model_under_test import ModelUnderTest, read_subject
from titanlite.verify.table import INDUCTOR, Row, choices, full, pairwise

if TYPE_CHECKING:
    from titanlite.verify.runner import Result

DESCRIPTION = """Train a few steps on up to 8 local processes, for a table of layouts and techniques, and compare
each row with the plain module in one process: initial values, gradients, their norm, and weights. No GPU is needed.
The exit code is 0 if all rows are equal, 1 if one is not."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options; of the config keys only [model]'s are accepted."""
    parser.set_defaults(takes_overrides=True)
    parser.description = DESCRIPTION
    parser.epilog = "example: titanlite verify --model gpt2 --model.flavor 124M --full"
    parser.add_argument(
        "--model", metavar="NAME", help="the same as --model.name; by default its flavor for debugging"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="every layout with every recomputation, accumulation and variant, the rest covered in pairs; a stopped "
        "run continues where it stopped",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.md", help="the page that --full writes (default: parity-MODEL.md)"
    )
    parser.add_argument(
        "--fault", metavar="NAME", help="put a known fault in, which the table must notice; list prints their names"
    )


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run the table's rows, or those that can show a fault."""
    if arguments.out and not arguments.full:
        raise UserError("--out is the page that --full writes: remove it, or add --full")
    if arguments.fault and arguments.full:
        raise UserError("--fault runs the rows that can show the fault: remove --full")
    if arguments.fault == "list":
        from titanlite.verify.known_faults import FAULTS

        print("\n".join(FAULTS))
        return 0
    arguments.resumable = arguments.full
    model = [f"--model.name={arguments.model}"] if arguments.model else []
    subject = read_subject([*overrides, *model], os.environ)
    return _run(subject, _rows(subject, arguments), arguments, shlex.join(["titanlite", *arguments.argv]))


def _rows(subject: ModelUnderTest, arguments: Namespace) -> list[Row]:
    if arguments.fault:
        return fault_rows(subject, arguments.fault)
    of = choices(subject.layouts, list(subject.variants))
    compiled = [row for row in INDUCTOR if row.layout in subject.layouts]
    return [*(full(of) if arguments.full else pairwise(of)), *compiled]


def fault_rows(subject: ModelUnderTest, name: str) -> list[Row]:
    """The rows that can show a fault, of those that the model allows."""
    from titanlite.verify.known_faults import FAULTS

    if name not in FAULTS:
        close = nearest(name, FAULTS)
        raise UserError(f'there is no fault "{name}"; ' + (f"did you mean {close}?" if close else ", ".join(FAULTS)))
    wanted = FAULTS[name].rows
    if subject.tied:
        wanted = tuple(replace(row, variant="plain") if row.variant == "tied" else row for row in wanted)
    rows = [row for row in wanted if row.layout in subject.layouts and row.variant in subject.variants]
    if not rows:
        raise UserError(f"{subject.name} has no row that could show {name}: {wanted[0]}")
    return rows


def _run(subject: ModelUnderTest, rows: Sequence[Row], arguments: Namespace, command: str) -> int:
    """Run what is not known yet, and tell it row by row."""
    from titanlite.verify.report import Printed, page
    from titanlite.verify.runner import proof

    began, printed = time.monotonic(), Printed()
    out = arguments.out or Path(f"parity-{subject.name.split()[0]}.md")
    book = Book(out.with_suffix(".jsonl"), subject) if arguments.full else None
    known = book.passed if book else {}
    printed.head(_introduction(subject, rows, arguments.fault or "", len(known)))
    results: list[Result] = []
    with proof(subject) as run:
        for number, row in enumerate(rows, 1):
            result = known.get(row) or run(row, arguments.fault or "")
            results.append(result)
            if row not in known:
                printed.row(number, result)
                if book:
                    book.add(result)
    printed.foot(results, time.monotonic() - began)
    if book:
        out.write_text(page(subject.name, command, results), encoding="utf-8")
        printed.head([f"wrote {out}"])
    return 0 if all(result.passed for result in results) else 1


def _introduction(subject: ModelUnderTest, rows: Sequence[Row], fault: str, known: int) -> Iterator[str]:
    yield f"titanlite verify: {subject.name}, {len(rows)} rows on up to {max(r.mesh.world for r in rows)} processes"
    if fault:
        from titanlite.verify.known_faults import FAULTS

        yield f"with a fault put in, which must be noticed: {FAULTS[fault].says}"
    for layout, why in subject.left_out.items():
        yield f"left out: {layout}: {why}"
    if known:
        yield f"{known} rows are known from an earlier run of the same code"


class Book:
    """Rows that passed, one a line, so that a stopped run goes on; another model, torch or code begins anew."""

    def __init__(self, path: Path, subject: ModelUnderTest) -> None:
        self._path, self._identity = path, _identity(subject)
        self.passed: dict[Row, Result] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and json.loads(lines[0]) == self._identity:
            self._read(lines[1:])
        else:
            path.write_text(json.dumps(self._identity) + "\n", encoding="utf-8")

    def _read(self, lines: Sequence[str]) -> None:
        from titanlite.verify.runner import Result

        for line in lines:
            values = json.loads(line)
            row = Row(**values.pop("row"))
            self.passed[row] = Result(row=row, **values)

    def add(self, result: Result) -> None:
        if result.passed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")


def _identity(subject: ModelUnderTest) -> dict[str, object]:
    """What the rows hold for: the model as asked for, torch, and the code of titanlite and of the model."""
    code = hashlib.sha256()
    for path in sorted(sources(subject)):
        code.update(path.read_bytes())
    return {"model": [*subject.words], "torch": version("torch"), "code": code.hexdigest()[:16]}


def sources(subject: ModelUnderTest) -> set[Path]:
    """The files of titanlite, and of the packages that the model is in; of a lone module, those beside it too."""
    ours = Path(__file__).parents[1]
    found = {*ours.rglob("*.py"), *(ours / "models").resolve().rglob("*.py")}  # in a checkout that is a link
    for module in subject.modules:
        top = find_spec(module.partition(".")[0])
        assert top is not None, "the model was imported"
        if top.submodule_search_locations is not None:
            found.update(path for place in top.submodule_search_locations for path in Path(place).rglob("*.py"))
        elif top.origin:
            found.update(Path(top.origin).parent.glob("*.py"))
    return found
