"""`titanlite verify`: check that a model trains the same on every mesh, with every technique, as in
one process.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlite.config.options import declare, positive_int
from titanlite.errors import UserError, counted
from titanlite.observe.progress import track
from titanlite.registry import get_optimizer
from titanlite.verify.model_under_test import ModelUnderTest, build_job, read_model
from titanlite.verify.table import (
    BEYOND,
    EXTRA,
    INDUCTOR,
    LAYOUTS,
    OF_DEVICE,
    ONLY_FULL,
    Choices,
    Row,
    beyond,
    choices,
    full,
    pairwise,
)

if TYPE_CHECKING:
    from titanlite.verify.runner import Result

NumberedRows = dict[int, Row]  # by their numbers in the printed table
DESCRIPTION = """\
Train a few steps on up to 8 local processes, for a table of layouts and techniques, and compare
each row with the plain module in one process: initial values, gradients, their norm, and weights. \
No GPU is needed.
--optimizer.name checks a registered optimizer of your own, in the float64 rows, and --lora.rank
adapters.
The exit code is 0 if all rows are equal, 1 if one is not."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options; of the config keys only [model]'s, [lora]'s and
    optimizer.name are accepted.
    """
    parser.set_defaults(takes_overrides=True)
    parser.description = DESCRIPTION
    parser.epilog = "example: titanlite verify --model gpt2 --model.flavor 124M --full"
    options = {
        "--model NAME": "same as --model.name (default flavor: the one to debug with)",
        "--full": "every layout with every recomputation, accumulation and variant; "
        "continues where a stopped run ended",
        "--beyond": "all rows of the further layouts, of inductor, and of optimizer state on the "
        "host or a disk; without options only the first of each runs",
        "--out FILE.md": ("page of --full (default: parity-MODEL.md)", Path),
        "--device NAME": "cpu or cuda: run a table in float32 and bfloat16 on it, and compare with "
        "float64 on a CPU",
        "--ranks N": (
            "most ranks of a row of --device (default: the GPUs); more than GPUs share them",
            positive_int,
        ),
        "--only ROW,…": "run only these rows of the table: layouts or numbers, "
        "such as tp2,dp2,#40; 1 is the layout, #1 the row",
    }
    declare(parser, options)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run the table's rows, or those of --only."""
    if arguments.out and not arguments.full:
        raise UserError("--out is the page that --full writes: remove it, or add --full")
    given = []
    for option in ("only", "beyond", "full", "device"):
        if getattr(arguments, option) not in (None, False):
            given.append(option)
    if len(given) > 1 and given != ["only", "device"]:
        raise UserError(
            f"--{given[0]} and --{given[-1]} each select rows of a table: remove --{given[-1]}"
        )
    if arguments.ranks and not arguments.device:
        raise UserError("--ranks is the limit of --device's table: add --device cuda, or remove it")
    arguments.resumable = arguments.full
    name = []
    if arguments.model:
        name = [f"--model.name={arguments.model}"]
    model = read_model([*overrides, *name], os.environ)
    every = table(model)
    if arguments.device:
        model = replace(model, device=arguments.device)
        every = rows_of_device(model, arguments.ranks)
    if arguments.full:
        rows = full_table(model)
    elif arguments.only is not None:
        rows = selected(model, every, arguments.only)
    elif arguments.device:
        rows = every
    else:
        rows = further_rows(every) if arguments.beyond else first_rows(every)
    return _run_rows(model, rows, arguments)


def first_rows(rows: NumberedRows) -> NumberedRows:
    """Return the rows that run without options, among them only the first of each further layout,
    of inductor, and of state elsewhere.
    """
    first = {_further(row): number for number, row in reversed(rows.items())}
    found = {}
    for number, row in rows.items():
        if not _further(row) or first[_further(row)] == number:
            found[number] = row
    return found


def further_rows(rows: NumberedRows) -> NumberedRows:
    """Return all rows of the further layouts, of inductor, and of state elsewhere."""
    return {number: row for number, row in rows.items() if _further(row)}


def _further(row: Row) -> str:
    """Return the group of a row of which one is enough without options (a further layout, inductor,
    or state elsewhere), or an empty string.
    """
    if row.extra.startswith("state on"):
        return "state"
    if row.extra:
        return ""
    if row.layout in BEYOND:
        return row.layout
    if row.compile == "inductor":
        return row.compile
    return ""


def table(model: ModelUnderTest) -> NumberedRows:
    """Return the rows that cover every pair, those of single techniques, and those of further
    layouts.
    """
    rows = pairwise(_choices(model, LAYOUTS)) + _of_single_techniques(model)
    for layout in filter(model.layouts.get, BEYOND):
        rows += beyond(_choices(model, [layout]))
    if model.spec.unsplit:  # transformers' classes compute norms and scans in float32
        rows = [replace(row, precision=row.precision.replace("64", "32")) for row in rows]
    return numbered(rows)


def rows_of_device(model: ModelUnderTest, most: int | None = None) -> NumberedRows:
    """Return the rows that the model and the number of ranks allow."""
    import torch

    if model.device not in ("cpu", "cuda"):
        raise UserError(f"--device: unknown device '{model.device}'; legal: cpu, cuda")
    ranks = most or 8
    if model.device == "cuda":
        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch finds no usable GPU on this node")
        ranks = most or torch.cuda.device_count()
    return numbered([row for row in OF_DEVICE if _allows(model, row) and row.mesh.world <= ranks])


def _allows(model: ModelUnderTest, row: Row) -> bool:
    return row.layout in model.layouts and (bool(model.spec.core) or row.documents == "off")


def full_table(model: ModelUnderTest) -> NumberedRows:
    """Return for every layout the product of the choices that change the mathematics most."""
    rows = full(_choices(model, LAYOUTS))
    for layout in filter(model.layouts.get, [*BEYOND, *ONLY_FULL]):
        rows += full(_choices(model, [layout]))
    return numbered(rows + _of_single_techniques(model))


def _choices(model: ModelUnderTest, layouts: Iterable[str]) -> Choices:
    """Return the choices of every column in layouts with the same dimensions of SPLIT_BY."""
    allowed = [layout for layout in layouts if layout in model.layouts]
    documents = ["off"]
    if model.spec.core:
        documents.append("on")
    return choices(allowed, [*model.variants], documents, **model.layouts[allowed[0]])


def _of_single_techniques(model: ModelUnderTest) -> list[Row]:
    config = build_job(model.command_line(Row("1"), Path()), 1).config
    streams = get_optimizer(config.optimizer.name, config.model.package).elementwise
    has: dict[str, Any] = {
        "state on host": streams,
        "state on disk": streams,
        "imported": model.spec.hf and not model.spec.adapters,  # no folder has adapters
        "kept whole": model.kept_whole,
        "large": any("vocab_size" in override for override in model.overrides),
    }
    rows = []
    for row in (*EXTRA, *INDUCTOR):
        if _allows(model, row) and has.get(row.extra, True):
            rows.append(row)
    return rows


def numbered(rows: Sequence[Row]) -> NumberedRows:
    """Number rows as in the printed table."""
    return dict(enumerate(rows, 1))


def selected(model: ModelUnderTest, rows: NumberedRows, only: str) -> NumberedRows:
    """Return the rows that --only names by number or layout, in the table's order and with the
    table's numbers.
    """
    names = {name.strip() for name in only.split(",")} - {""}
    has_rows = {row.layout for row in rows.values()}
    layouts = [layout for layout in model.layouts if layout in has_rows]
    meant = {}
    for number in rows:
        for name in (f"#{number}", f"{number}"):
            meant[name] = {number}
    for layout in layouts:
        meant[layout] = {number for number, row in rows.items() if row.layout == layout}
    unknown = sorted(names - meant.keys())
    if unknown or not names:
        known = dict.fromkeys(ONLY_FULL, "in --full only") | {**model.refused_layouts}
        reasons = [f"{name} ({known.get(name, 'unknown')})" for name in unknown]
        what = f'"{only}" names no row'
        if unknown:
            what = f"{model.name} has no row {', '.join(reasons)}"
        legal = f"the rows #1 to #{len(rows)}, {', '.join(layouts)}"
        raise UserError(f"--only: {what}; legal: {legal}")
    chosen = set()
    for name in names:
        chosen.update(meant[name])
    return {number: row for number, row in rows.items() if number in chosen}


def _run_rows(model: ModelUnderTest, rows: NumberedRows, arguments: Namespace) -> int:
    """Run and print the rows that are not cached, and with --full write the page."""
    from titanlite.verify.report import TablePrinter, page
    from titanlite.verify.runner import check_tables, open_pool, row_runner

    check_tables(model)
    start = time.monotonic()
    printer = TablePrinter()
    out = arguments.out or Path(f"parity-{model.name.split()[0]}.md")
    cache = None
    if arguments.full:
        cache = ResultCache(out.with_suffix(".jsonl"), model)
    cached: dict[Row, Result] = {}
    if cache:
        cached = cache.passed
    printer.head(_introduction(model, rows.values(), len(cached), arguments.only is None))
    results: list[Result] = []
    told = bool(model.device)  # faults of the table are diagnosed on a CPU
    with (
        open_pool(max(row.mesh.world for row in rows.values()), model.device) as pool,
        row_runner(model, pool) as run,
    ):
        for number, row in track(rows.items(), len(rows), "rows"):
            if row in cached:
                results.append(cached[row])
                continue
            result = run(row)
            results.append(result)
            printer.row(number, result)
            if not (result.passed or row.mesh.tp == 1 or told):
                told = True
                printer.table_fault(run.wrong_role(row.layout))
            if cache:
                cache.add(result)
        printer.foot(results, time.monotonic() - start, pool.log)
    if cache:
        out.write_text(
            page(model.name, shlex.join(["titanlite", *arguments.argv]), results), encoding="utf-8"
        )
        print(f"wrote {out}")
    if all(result.passed for result in results):
        return 0
    return 1


def _introduction(
    model: ModelUnderTest, rows: Collection[Row], cached: int, of_table: bool
) -> Iterator[str]:
    """Yield the lines above the rows; only for a whole table they name what is skipped."""
    world = max(row.mesh.world for row in rows)
    yield f"titanlite verify: {model.name}, {counted(len(rows), 'row')} on up to {world} processes"
    if of_table:
        for reason in dict.fromkeys(model.refused_layouts.values()):
            layouts = [layout for layout, why in model.refused_layouts.items() if why == reason]
            yield f"skipping layout {', '.join(layouts)}: {reason}"
        if not model.spec.core:
            yield "skipping documents: the model names no core of attention that would take them"
    if cached:
        yield f"{cached} rows passed in an earlier run of the same code"


class ResultCache:
    """Rows that passed, one per line, so that a stopped run continues; with another model, torch or
    code it starts over.
    """

    def __init__(self, path: Path, model: ModelUnderTest) -> None:
        from titanlite.verify.runner import Result

        self._path = path
        self._of = _identity(model)
        self.passed: dict[Row, Result] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            values = json.loads(line)
            if values.pop("of", None) == self._of:
                row = Row(**values.pop("row"))
                self.passed[row] = Result(row=row, **values)

    def add(self, result: Result) -> None:
        """Append a result, if it passed."""
        if result.passed:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"of": self._of, **asdict(result)}) + "\n")


def _identity(model: ModelUnderTest) -> dict[str, object]:
    """Return what results depend on: the model's overrides, torch, and the code of titanlite and
    the model.
    """
    code = hashlib.sha256()
    for path in sorted(source_files(model)):
        code.update(path.read_bytes())
    return {"model": [*model.overrides], "torch": version("torch"), "code": code.hexdigest()[:16]}


def source_files(model: ModelUnderTest) -> set[Path]:
    """Return the code and tables of titanlite and the model's packages; for a lone module, all
    modules in its folder.
    """
    files: set[Path] = set()
    # titanlite.models is a link in a checkout, which rglob does not follow.
    for module in ("titanlite", "titanlite.models", *model.modules):
        name = module
        if not module.startswith("titanlite"):
            name = module.partition(".")[0]
        package = find_spec(name)
        assert package is not None, "the model was imported"
        if package.submodule_search_locations is not None:
            for folder in package.submodule_search_locations:
                files.update(Path(folder).rglob("*.py"))
                files.update(Path(folder).rglob("*.toml"))
        elif package.origin:
            files.update(Path(package.origin).parent.glob("*.py"))
    return files
