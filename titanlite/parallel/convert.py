"""Converters, such as float8, which swap a model's layers before any other technique sees them.

A converter leaves every parameter in place under its name, since checkpoints and the model's table
refer to parameters by name.
"""

from pkgutil import resolve_name

from torch import nn

from titanlite.config.job import Job
from titanlite.config.torchtitan import FLOAT8_CONVERTERS
from titanlite.errors import UserError
from titanlite.parallel.build import Context, Converter, shared_names
from titanlite.registry import find_converter


def build_converters(job: Job) -> list[Converter]:
    """Build each of the job's converters once, in the order of model.converters.

    float8 is built if its section enables it, and comes last unless model.converters names it.
    """
    has_float8 = job.config.quantize.linear.float8.enable
    names: list[str] = []
    for name in job.config.model.converters:
        if name not in FLOAT8_CONVERTERS:
            names.append(name)
        elif has_float8:
            names.append("float8")
    if has_float8:
        names.append("float8")
    return [resolve_name(find_converter(name))(job) for name in dict.fromkeys(names)]


def apply(model: nn.Module, context: Context) -> list[str]:
    """Run each converter; raise a UserError if one changes the parameters' names."""
    notes: list[str] = []
    for converter in context.converters:
        names = dict(model.named_parameters()).keys()
        ties = shared_names(model)
        technique = getattr(converter, "apply", None)
        if technique is None:
            notes += converter.convert(model)
        else:
            notes += technique(model, context)
        kind = type(converter).__name__
        changed = sorted(names ^ dict(model.named_parameters()).keys())
        if changed:
            verb = "added"
            if changed[0] in names:
                verb = "removed"
            raise UserError(
                f"the converter {kind} {verb} the parameter {changed[0]}: a converter must keep "
                "parameter names, since checkpoints and the model's table refer to them"
            )
        assert shared_names(model) == ties, f"{kind} broke a tie"
    return notes
