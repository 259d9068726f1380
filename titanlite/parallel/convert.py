"""Converters: what changes a model's layers before anything else looks at them, such as float8.

A converter swaps modules in place and leaves parameters, with their names, where they are: names are in checkpoints,
and the model's table says how each begins. The trainer knows two moments of it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from titanlite.config.job import Job
from titanlite.config.torchtitan import FLOAT8_CONVERTERS
from titanlite.errors import UserError
from titanlite.parallel.build import shared_names
from titanlite.registry import find_converter, import_object


class Converter(Protocol):
    """Built with the Job, on every rank alike."""

    def convert(self, model: nn.Module) -> list[str]:
        """Swap layers of a whole model on the meta device, first of all; lines that say what was done."""
        ...

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        """The weights are new: after a step, and before the first one."""
        ...


def build_converters(job: Job) -> list[Converter]:
    """Those that a job asks for, in the order of model.converters; float8 last where only its section asks."""
    names = ["float8" if name in FLOAT8_CONVERTERS else name for name in job.config.model.converters]
    if job.config.quantize.linear.float8.enable:
        names.append("float8")
    else:
        names = [name for name in names if name != "float8"]
    return [import_object(find_converter(name))(job) for name in dict.fromkeys(names)]


def convert(model: nn.Module, converters: Sequence[Converter], say: Callable[[str], object]) -> None:
    """Let each converter do its work; an error names the first that did not leave the parameters' names."""
    for converter in converters:
        names, ties = {name for name, _ in model.named_parameters()}, shared_names(model)
        for line in converter.convert(model):
            say(line)
        if strange := sorted(names ^ {name for name, _ in model.named_parameters()}):
            what = "took away" if strange[0] in names else "made"
            raise UserError(
                f"the converter {type(converter).__name__} {what} the parameter {strange[0]}: parameters keep their "
                "names, which checkpoints and the model's table know"
            )
        assert shared_names(model) == ties, f"{type(converter).__name__} broke a tie"
