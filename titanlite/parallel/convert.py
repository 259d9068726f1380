"""Converters: what swaps a model's layers before anything else looks at them, such as float8.

A converter leaves every parameter in place under its name: checkpoints and the model's table know it by that.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Protocol

from torch import nn

from titanlite.config.job import Job
from titanlite.config.torchtitan import FLOAT8_CONVERTERS
from titanlite.errors import UserError
from titanlite.parallel.build import Context, shared_names
from titanlite.registry import find_converter


class Converter(Protocol):
    """Built with the Job on every rank; `apply(model, context)`, if it has that, is called instead of `convert`."""

    def convert(self, model: nn.Module) -> list[str]:
        """Swap layers of the whole model on the meta device; return lines for the log."""

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        """React to new weights: before the first step and after each one."""


def build_converters(job: Job) -> list[Converter]:
    """Build the job's converters in the order of model.converters, float8 last if only its section enables it."""
    names = ["float8" if name in FLOAT8_CONVERTERS else name for name in job.config.model.converters]
    if job.config.quantize.linear.float8.enable:
        names.append("float8")
    else:
        names = [name for name in names if name != "float8"]
    return [resolve_name(find_converter(name))(job) for name in dict.fromkeys(names)]


def apply(model: nn.Module, context: Context) -> list[str]:
    """Run each converter; an error names the first that changed the parameters' names."""
    notes = []
    for converter in context.converters:
        names, ties = {name for name, _ in model.named_parameters()}, shared_names(model)
        technique = getattr(converter, "apply", None)
        notes += technique(model, context) if technique else converter.convert(model)
        if changed := sorted(names ^ {name for name, _ in model.named_parameters()}):
            verb = "removed" if changed[0] in names else "added"
            raise UserError(
                f"the converter {type(converter).__name__} {verb} the parameter {changed[0]}: a converter must keep "
                "parameter names, since checkpoints and the model's table refer to them"
            )
        assert shared_names(model) == ties, f"{type(converter).__name__} broke a tie"
    return notes
