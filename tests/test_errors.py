"""What messages share: tables, sizes, and numbers of options."""

import subprocess
import sys
from argparse import ArgumentTypeError

import pytest

from titanlite.config.options import positive_int
from titanlite.errors import format_bytes, format_table, nearest, some_of


def test_a_table_has_aligned_columns_and_no_trailing_spaces():
    rows = [("a", "1", ""), ("longer", "20", "x 2")]
    assert (
        format_table(rows, ("name", "n", ""), align="<>")
        == "name     n\na        1\nlonger  20  x 2"
    )
    assert format_table([("a", "b")], align="<>>>", indent=2) == "  a  b"
    assert format_table([]) == ""


def test_messages_abbreviate_and_suggest():
    assert some_of([str(i) for i in range(10)], most=2) == "\n  0\n  1\n  and 8 more"
    assert nearest("perpare", ["prepare", "show"]) == "prepare" and nearest("x", ["prepare"]) == ""
    sizes = [format_bytes(size) for size in (5, 1536, 3 << 30, 5 << 42)]
    assert sizes == ["5 B", "1.5 KiB", "3.0 GiB", "20.0 TiB"]


def test_a_message_with_an_install_command_leaves_inductor_working():
    """Python 3.11: once a process looked for pip, setuptools, which inductor imports, fails."""
    code = "from titanlite.errors import install_command as f; f('wandb'); import setuptools"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_option_that_counts_is_a_whole_number_from_1():
    assert positive_int("12") == 12
    for text in ("0", "-1", "1.5", "x", ""):
        with pytest.raises(ArgumentTypeError, match="whole number >= 1"):
            positive_int(text)
