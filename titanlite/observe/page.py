"""Tables, as text or on a page: one self-contained HTML file without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from titanlite.errors import UserError, format_table


@dataclass(frozen=True)
class Number:
    """An exact number, shown in a unit with a number of digits; nan is shown as a dash."""

    value: float
    digits: int = 0
    unit: float = 1

    def __str__(self) -> str:
        if self.value != self.value:
            return "-"
        return f"{self.value / self.unit:,.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Number]]
    """A table; the cells of a column are either all texts or all numbers."""
    assumed: Sequence[str] = ()
    note: str = ""

    def __str__(self) -> str:
        lines = [self.title]
        if self.rows:
            align = "".join("<" if isinstance(cell, str) else ">" for cell in self.rows[0])
            lines.append(
                format_table([[*map(str, row)] for row in self.rows], self.header, align, indent=2)
            )
        if self.note:
            lines.append(f"  {self.note}")
        if self.assumed:
            lines += ["  assumed:", *(f"    {text}" for text in self.assumed)]
        return "\n".join(lines)


def write_html(path: Path, title: str, body: str) -> None:
    """Write a page with an HTML body."""
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    text = template.substitute(title=escape(title), body=body)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path} can't be written: {error.strerror}") from error


def html_table(table: Table, picture: str = "") -> str:
    """Return a table below its title and a picture; numbers carry their exact values."""

    def cell(value: str | Number) -> str:
        shown = escape(f"{value}")
        if isinstance(value, Number):
            shown = f'<data value="{value.value}">{value}</data>'
        return f"<td>{shown}</td>"

    heads = "".join(f"<th>{escape(head)}</th>" for head in table.header)
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows)
    notes = [table.note, *(f"assumed: {text}" for text in table.assumed)]
    below = "".join(f'<p class="note">{escape(note)}</p>' for note in notes if note)
    above = f"<h2>{escape(table.title)}</h2>{picture}"
    return (
        f'{above}<table id="{table.name}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{below}"
    )
