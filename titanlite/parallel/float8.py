"""Float8: a converter whose linear layers multiply in float8, through torchao.

A layer's input, weight and output gradient are scaled into float8's range and rounded right before
each product; parameters, gradients and optimizer state stay as they are. With one scale per tensor,
weights and tensor parallel's activations are gathered in float8. Choosing the layers does not need
torchao.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel
from torch.torch_version import TorchVersion

from titanlite.config.job import Job
from titanlite.config.schema import KEYS
from titanlite.errors import (
    UserError,
    counted_rows,
    format_table,
    install_command,
    nearest,
    some_of,
)
from titanlite.parallel.build import Context, layer_pattern
from titanlite.registry import Rule
from titanlite.runtime.torch_private import (
    default_all_gather,
    gather_float8_as_bytes,
    round_between_fused_operations,
)

MULTIPLE = 16
"""GPUs multiply float8 matrices with widths that are multiples of this."""
KEY = "quantize.linear.float8"
ROWWISE_SCALES_ON_CPU = TorchVersion(torch.__version__) >= "2.13"
Cast = Callable[[DTensor], DTensor]


class Float8:
    """The converter of [quantize.linear.float8]."""

    def __init__(self, job: Job) -> None:
        if find_spec("torchao") is None:
            raise UserError(
                f"{KEY}.enable = true: the package torchao is not installed; "
                f"{install_command('torchao>=0.18')}, or remove the key"
            )
        self._settings = job.config.quantize.linear.float8

    def apply(self, model: nn.Module, context: Context) -> list[str]:
        layers = plan(model, context.job, context.table)
        converted = [layer for layer in layers if not layer.skip_reason]
        for gathered in (False, True):
            names = {layer.name for layer in converted if layer.gathered == gathered}
            if names:
                self._convert(model, names, gathered)
        compiler = context.job.config.compile
        is_compiled = compiler.enable and "model" in compiler.components
        if is_compiled and self._settings.recipe_name == "rowwise":
            # If the backward pass recomputes a norm with other bits than those that its rows were
            # scaled by, the loss becomes NaN after a few dozen steps (pytorch#150859). TorchTitan
            # does the same.
            round_between_fused_operations()
        if context.device.type == "cpu":
            gather_float8_as_bytes()  # activations, under tensor parallel
        # A converted layer's output is a view. Still so in torch 2.14: it warns against changing a
        # view in place, which nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return _table(layers, model, context)

    def _convert(self, model: nn.Module, names: set[str], gathered: bool) -> None:
        """Swap these layers; FSDP gathers their weights in float8 if `gathered`."""
        with _quiet_import():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        settings = self._settings
        config = replace(
            Float8LinearConfig.from_recipe_name(settings.recipe_name),
            emulate=settings.emulate,
            enable_fsdp_float8_all_gather=gathered,
        )
        convert_to_float8_training(
            model, module_filter_fn=lambda module, name: name in names, config=config
        )
        has_one_scale = settings.recipe_name == "tensorwise"
        for name in names:
            setattr(model.get_submodule(name), _WHOLE_TENSOR_SCALE, has_one_scale)

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        if not self._settings.precompute_float8_dynamic_scale_for_fsdp:
            return
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for part in parts:
            precompute_float8_dynamic_scale_for_fsdp(part)


def check_device(job: Job, device: str, capability: tuple[int, int] | None) -> None:
    """Raise a UserError if this device can't multiply float8 as configured.

    `capability` is a GPU's compute capability.
    """
    settings = job.config.quantize.linear.float8
    if settings.emulate:
        return
    instead = f"{KEY}.emulate computes in high precision with float8's rounding"
    if capability and capability < (8, 9):
        major, minor = capability
        reason = f"this GPU has compute capability {major}.{minor}, and float8 needs 8.9 or newer"
        raise UserError(f"{KEY}.enable = true: {reason}; {instead}")
    if device == "cpu" and settings.recipe_name != "tensorwise" and not ROWWISE_SCALES_ON_CPU:
        reason = f"torch {torch.__version__} can't scale rows on a CPU (2.13 can); use tensorwise"
        raise UserError(f'{KEY}.recipe_name = "{settings.recipe_name}": {reason}, or {instead}')


# ---------------------------------------------------------------- which layers


@dataclass(frozen=True)
class Layer:
    """A linear layer, and what happens to it."""

    name: str
    rows: int
    columns: int
    skip_reason: str
    """Why it stays in high precision; empty if it is converted."""
    gather_reason: str
    """Why FSDP gathers its weight in high precision though float8 is configured; else empty."""
    gathered: bool
    """FSDP gathers its weight in float8."""


def plan(model: nn.Module, job: Job, table: dict[str, Rule]) -> list[Layer]:
    """Decide about every linear layer of a model part.

    Raise a UserError if the config would have no effect.
    """
    settings = job.config.quantize.linear.float8
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            layers.append(_decide(name, module, table.get(f"{name}.weight"), job))
    _check_filter(settings.filter_fqns, [layer.name for layer in layers], table)
    is_part = bool(table.keys() - dict(model.named_parameters()))
    if is_part:  # other parts may have layers that can be converted
        return layers
    converted = [layer for layer in layers if not layer.skip_reason]
    if not converted:
        reasons = some_of([f"{layer.name}: {layer.skip_reason}" for layer in layers])
        raise UserError(f"{KEY}.enable: no layer can be converted:{reasons}")
    if settings.enable_fsdp_float8_all_gather and not any(layer.gathered for layer in converted):
        reasons = some_of([f"{layer.name}: {layer.gather_reason}" for layer in converted])
        raise UserError(
            f"{KEY}.enable_fsdp_float8_all_gather: no weight can be gathered in float8:{reasons}"
        )
    return layers


def _check_filter(patterns: Sequence[str], linear: Sequence[str], table: dict[str, Rule]) -> None:
    """Raise a UserError if one of the user's patterns is in no linear layer's name."""
    if patterns == KEYS[f"{KEY}.filter_fqns"].default:  # a model may give its head another name
        return
    names = set(linear)
    for name, rule in table.items():
        if rule.tensor in ("column", "row", "head"):  # linear layers, which other parts may hold
            names.add(name.removesuffix(".weight"))
    for pattern in patterns:
        if any(pattern in name for name in names):
            continue
        close = nearest(pattern, names)
        hint = ""
        if close:
            hint = f"; did you mean {close}?"
        raise UserError(
            f'{KEY}.filter_fqns: "{pattern}" is not in the name of any linear layer{hint}'
        )


def _decide(name: str, module: nn.Linear, rule: Rule | None, job: Job) -> Layer:
    """Decide about one layer; `rule` is None if the table lists its weight under another name."""
    rows, columns = module.weight.shape
    skip_reason = _skip_reason(name, module, rule, job)
    gather_reason = ""
    gathered = False
    is_wanted = job.config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if rule and is_wanted and not skip_reason:
        gather_reason = _gather_reason(name, rows // _splits(rule, job)[0], job)
        gathered = not gather_reason
    return Layer(name, rows, columns, skip_reason, gather_reason, gathered)


def _splits(rule: Rule, job: Job) -> tuple[int, int]:
    """Return the number of ranks that split a weight's rows, and its columns."""
    if rule.tensor in ("column", "head", "embedding"):
        return job.layout.tp, 1
    return 1, job.layout.tp


def _skip_reason(name: str, module: nn.Linear, rule: Rule | None, job: Job) -> str:
    """Return why a layer stays in high precision; empty if it is converted."""
    for pattern in job.config.quantize.linear.float8.filter_fqns:
        if pattern in name:
            return f'filter_fqns has "{pattern}"'
    if rule is None or rule.tied:
        return "it shares its weight"
    if type(module) is not nn.Linear:
        return f"{type(module).__name__} is more than a linear layer"
    if job.layout.tp > 1 and rule.tensor == "replicated":
        return "tensor parallel replicates it"
    rows, columns = module.weight.shape
    row_splits, column_splits = _splits(rule, job)
    if rows % (MULTIPLE * row_splits) or columns % (MULTIPLE * column_splits):
        size = f"{rows // row_splits} x {columns // column_splits}"
        return f"{size} on a rank, and {MULTIPLE} must divide both"
    odd = _odd_chunk(job)
    if rule.tensor == "head" and odd:
        return f"training.loss_chunks has one of {odd} tokens, and {MULTIPLE} must divide all"
    return ""


def _gather_reason(name: str, local_rows: int, job: Job) -> str:
    """Return why a layer's weight is gathered in high precision; empty if it need not be."""
    for pattern in job.config.parallelism.fsdp_keep_whole:
        if fnmatchcase(f"{name}.weight", pattern):
            return "parallelism.fsdp_keep_whole replicates it"
    if local_rows % job.layout.fsdp:
        return f"{local_rows} rows do not split evenly over {job.layout.fsdp} ranks"
    return ""


def _odd_chunk(job: Job) -> int:
    """Return the tokens of a loss chunk that float8 can't sum a weight's gradient over, or 0."""
    training = job.config.training
    float8 = job.config.quantize.linear.float8
    chunks = training.loss_chunks
    if chunks == 1 or float8.emulate or float8.recipe_name == "rowwise_with_gw_hp":
        return 0
    longer = -(-training.seq_len // chunks)
    shorter = training.seq_len // chunks
    for length in (longer, shorter):
        tokens = training.local_batch_size * length
        if tokens % MULTIPLE:
            return tokens
    return 0


def _table(layers: Sequence[Layer], model: nn.Module, context: Context) -> list[str]:
    """Return lines for the log: a row for each layer, but one for equal layers of all blocks."""
    job = context.job
    settings = job.config.quantize.linear.float8
    high = job.config.training.mixed_precision_param
    rows: Counter[tuple[str, ...]] = Counter()
    for layer in layers:
        result = "float8"
        if layer.skip_reason:
            result = f"{high}: {layer.skip_reason}"
        if layer.gathered:
            result += ", gathered in float8"
        if layer.gather_reason:
            result += f", gathered in {high}: {layer.gather_reason}"
        pattern = layer_pattern(layer.name, job.spec.blocks)
        rows[pattern, f"{layer.rows} x {layer.columns}", result] += 1
    for name, rule in context.table.items():
        if rule.tensor == "expert":
            pattern = layer_pattern(name, job.spec.blocks)
            size = " x ".join(map(str, model.get_parameter(name).shape))
            rows[pattern, size, f"{high}: experts multiply in groups"] += 1
    details = settings.recipe_name
    if settings.emulate:
        details += ", emulated"
    if settings.precompute_float8_dynamic_scale_for_fsdp:
        details += ", scales precomputed"
    converted = sum(not layer.skip_reason for layer in layers)
    title = f"Applied float8 to {converted} of {len(layers)} linear layers ({details})"
    return [title, *format_table(counted_rows(rows), indent=2).splitlines()]


# ---------------------------------------------------------------- collectives in float8

_WHOLE_TENSOR_SCALE = "titanlite_whole_tensor_scale"
"""An attribute that the converter sets on its layers, since importing their class takes seconds."""


def scales_whole_tensors(module: nn.Module) -> bool:
    """Return whether this is a converted layer with one scale per tensor.

    Scales of rows can't be gathered.
    """
    return getattr(module, _WHOLE_TENSOR_SCALE, False)


def shared_cast(layers: Sequence[nn.Module]) -> Cast | None:
    """Return a cast of these layers' shared input to float8, with one scale on all ranks.

    None unless all layers take such an input.
    """
    if not all(map(scales_whole_tensors, layers)):
        return None
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    layer: Any = layers[0]
    dtype = layer.config.cast_config_input.target_dtype
    products = layer.linear_mm_config
    return lambda sequence: hp_tensor_to_float8_dynamic(sequence, dtype, products)  # type: ignore


def row_style(module: nn.Module) -> type[RowwiseParallel]:
    """Return the style that splits a row layer.

    With one scale per tensor, the gradient of its output is gathered in float8.
    """
    if not scales_whole_tensors(module):
        return RowwiseParallel
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    return Float8RowwiseParallel


def bytes_all_gather() -> Any:
    """Return FSDP2's all-gather, but of bytes.

    FSDP2 would gather a group of float8 weights as float8, which gloo lacks.
    """

    class BytesAllGather(default_all_gather()):  # type: ignore[misc]
        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            *args: Any,
            **options: Any,
        ) -> Any:
            gathered = output_tensor.view(torch.uint8)
            own = input_tensor.view(torch.uint8)
            return super().__call__(gathered, own, *args, **options)

    return BytesAllGather()


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence the warnings of importing torchao, such as those about unused kernels.

    torchao's variable for that warns too.
    """
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
