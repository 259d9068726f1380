"""Kernel packages, which classes call if they are installed, and which do not support a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

PACKAGES = {
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
}
"""Each module, with its distribution."""


def found() -> str:
    """Return the installed packages, with their versions."""
    return " ".join(f"{name} {_version(PACKAGES[name])}" for name in PACKAGES if find_spec(name))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


@contextmanager
def torch_functions() -> Iterator[None]:
    """Let classes call torch's functions instead of kernels, as they do under torch.export."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.integrations import hub_kernels

    names = vars(hub_kernels)
    before = {name: names[name] for name in ("is_torchdynamo_exporting",) if name in names}
    names["is_torchdynamo_exporting"] = lambda: True
    try:
        yield
    finally:
        del names["is_torchdynamo_exporting"]  # not every version has it
        names.update(before)
