"""The table of GPUs and nodes in hardware.toml, used for MFU and by the planner, and files that
override it. Imports no torch.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.config.toml import read_toml
from titanlite.errors import UserError

GIB = 1 << 30
_SHIPPED = Path(__file__).with_name("hardware.toml")


def hardware_table(files: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the shipped table, overridden key by key by those of the files, from left to right."""
    table: dict[str, Any] = {}
    for file in (_SHIPPED, *files):
        try:
            above = read_toml(file)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        unknown = [key for key in above if table and key not in table]
        if unknown:
            known = ", ".join(table)
            raise UserError(f"{file}: unknown table {', '.join(unknown)}; known: {known}")
        _lay_over(table, above, f"{file}: ")
        for section in ("gpu", "node"):
            for name, entry in table[section].items():
                if not isinstance(entry, dict):
                    raise UserError(f"{file}: {section}.{name} must be a table")
    return table


def recognize(name: str, memory: int | None, files: Iterable[Path] = ()) -> str:
    """Return the table's GPU for a driver's name and bytes of memory, or an empty string."""
    words = set(name.replace("-", " ").split())
    gpus = hardware_table(files)["gpu"]
    alike = [key for key, gpu in gpus.items() if words.issuperset(gpu["words"].split())]
    # The table lists entries with more words first.
    same = [key for key in alike if gpus[key]["words"] == gpus[alike[0]]["words"]]
    return min(same, key=lambda key: abs(gpus[key]["memory_gib"] * GIB - (memory or 0)), default="")


def _lay_over(below: dict[str, Any], above: dict[str, Any], place: str) -> None:
    for key, value in above.items():
        is_table = isinstance(below.get(key), dict)
        if is_table and not isinstance(value, dict):
            raise UserError(f"{place}{key} must be a table")
        if is_table:
            _lay_over(below[key], value, f"{place}{key}.")
        else:
            below[key] = value
