"""Print a line for each row when it is done and a summary at the end; write the results page."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version

from rich.console import Console

from titanlite.verify.measurements import BOUNDS
from titanlite.verify.runner import Result
from titanlite.verify.table import COLUMNS

_ABOUT = """\
Every layout with every recomputation, accumulation and variant. In the other columns every valid
pair of choices occurs, but not every combination. Each row is compared with the plain module in
one process on the whole batch, in which at least one data-parallel rank has no valid token: initial
values bit for bit, then gradients, their norm (p = 2 and inf), the loss, and the weights after one
step of SGD, three of AdamW and, in float64, one of Muon. bfloat16 is mixed precision, compared with
float32; pure bf16 has bf16 weights, like its reference. Errors are of full tensors,
||x - ref|| / ||ref||, with ||ref|| at least a thousandth of the norm of all tensors of its kind.
"""
_WIDTHS = {
    "layout": 16,
    "accumulation": 5,
    "chunks": 6,
    "prefetch": 8,
    "reshard": 7,
    "sequence": 8,
    "variant": 7,
    "schedule": 21,
}


class TablePrinter:
    """Prints the table row by row, with color on a terminal."""

    def __init__(self) -> None:
        self._print = Console(highlight=False, soft_wrap=True, markup=False, emoji=False).print

    def head(self, lines: Iterable[str]) -> None:
        titles = {column: column for column in COLUMNS} | {"accumulation": "accum"}
        self._print("\n".join([*lines, f"\n{'':>4}  {_cells(titles)}   error  bound"]))

    def row(self, number: int, result: Result) -> None:
        row = result.row
        self._print(
            f"{number:>4}  {_cells(vars(row))} {_error(result.error):>7}  {result.bound:.0e}  ",
            end="",
        )
        what = f"  {result.what}"
        if row.extra:
            what = f"  {row.extra}: {result.what}"
        if result.passed:
            self._print("pass", style="green", end="")
            self._print(what)
            return
        if result.rank:
            what += f" (rank {result.rank})"
        self._print("FAIL", style="bold red", end="")
        self._print(what)

    def table_fault(self, what: str) -> None:
        if what:
            self._print(f"      the model's table: {what}", style="bold red")

    def foot(self, results: Sequence[Result], seconds: float, log: str) -> None:
        failed = [result for result in results if not result.passed]
        took = f"in {seconds:.0f} s"
        if seconds >= 100:
            took = f"in {seconds / 60:.1f} minutes"
        if failed:
            self._print(
                f"\n{len(failed)} of {len(results)} rows FAILED ({took}); the first:",
                style="bold red",
            )
            self._print(f"  {failed[0].row}\n  {failed[0].what}")
        else:
            count = "the row equals"
            if len(results) != 1:
                count = f"all {len(results)} rows equal"
            self._print(f"\n{count} one process ({took})", style="green")
        if os.path.getsize(log):
            self._print(f"tracebacks and torch's log of the ranks: {log}")


def _cells(values: Mapping[str, str]) -> str:
    return " ".join(f"{values[column]:<{_WIDTHS.get(column, 9)}}" for column in COLUMNS)


def _error(error: float) -> str:
    if math.isinf(error):
        return "-"
    return f"{error:.1e}"


def page(model: str, command: str, results: Sequence[Result]) -> str:
    """Return the results as Markdown: the command, counts for every choice, and the rows with the
    largest errors.
    """
    failed = [result for result in results if not result.passed]
    lines = [
        f"# Parity of {model}\n",
        f"`{command}`, torch {version('torch')}, {time.strftime('%Y-%m-%d')}:",
        f"{len(results)} rows, {len(failed)} failed.\n",
        _ABOUT,
        f"| column | choice | rows | failed | largest error in {' | '.join(BOUNDS)} |",
        "|---|---|---|---|" + "---|" * len(BOUNDS),
    ]
    for column in COLUMNS:
        for choice in dict.fromkeys(getattr(result.row, column) for result in results):
            rows = [result for result in results if getattr(result.row, column) == choice]
            worst = " | ".join(_worst(rows, precision) for precision in BOUNDS)
            lines.append(
                f"| {column} | {choice} | {len(rows)} | "
                f"{sum(not r.passed for r in rows)} | {worst} |"
            )
    lines += ["", "| error | bound | worst | row |", "|---|---|---|---|"]
    for result in sorted(results, key=lambda result: -result.error / result.bound)[:10]:
        row = str(result.row).removeprefix("layout ")
        lines.append(f"| {_error(result.error)} | {result.bound:.0e} | {result.what} | {row} |")
    return "\n".join(lines) + "\n"


def _worst(results: Sequence[Result], precision: str) -> str:
    errors = [result.error for result in results if result.row.precision == precision]
    if not errors:
        return ""
    return _error(max(errors))
