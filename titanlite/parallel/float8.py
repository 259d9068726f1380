"""Float8: linear layers multiply in float8, through torchao; the first converter.

A layer's input, weight and output gradient are scaled into float8's range and rounded right before each product;
parameters, gradients and optimizer state stay as they are. With one scale per tensor, weights and tensor parallel's
activations are gathered in float8. Which layers are converted is decided without torchao.
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
from titanlite.errors import UserError, format_table, install_command, nearest, some_of
from titanlite.parallel.build import Context, layer_pattern
from titanlite.registry import Rule
from titanlite.runtime.torch_private import (
    default_all_gather,
    gather_float8_as_bytes,
    round_between_fused_operations,
)

MULTIPLE = 16
"""GPUs multiply float8 matrices whose widths this number divides."""
KEY = "quantize.linear.float8"
ROWWISE_SCALES_ON_CPU = TorchVersion(torch.__version__) >= "2.13"
Cast = Callable[[DTensor], DTensor]


class Float8:
    """The converter of [quantize.linear.float8]."""

    def __init__(self, job: Job) -> None:
        if find_spec("torchao") is None:
            raise UserError(
                f"{KEY}.enable = true: the package torchao is not installed; {install_command('torchao>=0.18')}, "
                "or remove the key"
            )
        self._settings = job.config.quantize.linear.float8

    def apply(self, model: nn.Module, context: Context) -> list[str]:
        layers = plan(model, context.job, context.table)
        with _quiet_import():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        config = Float8LinearConfig.from_recipe_name(self._settings.recipe_name)
        config = replace(config, emulate=self._settings.emulate)
        for gathered in {layer.gathered for layer in layers if not layer.skip_reason}:
            names = {layer.name for layer in layers if not layer.skip_reason and layer.gathered == gathered}
            recipe = replace(config, enable_fsdp_float8_all_gather=gathered)
            convert_to_float8_training(
                model, module_filter_fn=lambda module, name, names=names: name in names, config=recipe
            )
            for name in names:
                setattr(model.get_submodule(name), _WHOLE_TENSOR_SCALE, self._settings.recipe_name == "tensorwise")
        compiler = context.job.config.compile
        if self._settings.recipe_name == "rowwise" and compiler.enable and "model" in compiler.components:
            # Where the backward pass recomputes a norm in other bits than its rows were scaled by, the loss becomes
            # NaN after some dozen steps: pytorch#150859; TorchTitan sets the same.
            round_between_fused_operations()
        if context.device.type == "cpu":
            gather_float8_as_bytes()  # activations, under tensor parallel
        # A converted layer's output is a view, and torch 2.13 warns of changing one in place, as nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return _table(layers, model, context)

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        if self._settings.precompute_float8_dynamic_scale_for_fsdp:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            for part in parts:
                precompute_float8_dynamic_scale_for_fsdp(part)


def check_device(job: Job, device: str, capability: tuple[int, int] | None) -> None:
    """Raise UserError if this device, a GPU of this compute capability, can't multiply float8 as configured."""
    settings = job.config.quantize.linear.float8
    if settings.emulate:
        return
    instead = f"{KEY}.emulate computes in high precision with float8's rounding"
    if capability and capability < (8, 9):
        reason = "this GPU has compute capability {}.{}, and float8 needs 8.9".format(*capability)
        raise UserError(f"{KEY}.enable = true: {reason} or newer; {instead}")
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
    """Why FSDP gathers its weight in high precision although the config asks for float8; else empty."""
    gathered: bool
    """FSDP gathers its weight in float8."""


def plan(model: nn.Module, job: Job, table: dict[str, Rule]) -> list[Layer]:
    """Decide for every linear layer of a model part; raise UserError where the config would have no effect."""
    settings = job.config.quantize.linear.float8
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    split = ("column", "row", "head")  # the roles of linear layers, which other parts may hold
    all_names = {*linear, *(name.removesuffix(".weight") for name, rule in table.items() if rule.tensor in split)}
    is_default = settings.filter_fqns == KEYS[f"{KEY}.filter_fqns"].default  # a model may call its head otherwise
    for pattern in settings.filter_fqns:
        if not is_default and not any(pattern in name for name in all_names):
            hint = f"; did you mean {close}?" if (close := nearest(pattern, all_names)) else ""
            raise UserError(f'{KEY}.filter_fqns: "{pattern}" is not in the name of any linear layer{hint}')
    layers = [_decide(name, module, table.get(f"{name}.weight"), job) for name, module in linear.items()]
    if table.keys() - dict(model.named_parameters()):  # a part: other parts may have what can be converted
        return layers
    converted = [layer for layer in layers if not layer.skip_reason]
    if not converted:
        reasons = some_of([f"{layer.name}: {layer.skip_reason}" for layer in layers])
        raise UserError(f"{KEY}.enable: no layer can be converted:{reasons}")
    if settings.enable_fsdp_float8_all_gather and not any(layer.gathered for layer in converted):
        reasons = some_of([f"{layer.name}: {layer.gather_reason}" for layer in converted])
        raise UserError(f"{KEY}.enable_fsdp_float8_all_gather: no weight can be gathered in float8:{reasons}")
    return layers


def _decide(name: str, module: nn.Linear, rule: Rule | None, job: Job) -> Layer:
    """Decide about one layer; `rule` is None if the table has its weight under another name."""
    settings, tp = job.config.quantize.linear.float8, job.layout.tp
    rows, columns = module.weight.shape
    skip = next((f'filter_fqns has "{pattern}"' for pattern in settings.filter_fqns if pattern in name), "")
    if not skip and (rule is None or rule.tied):
        skip = "it shares its weight"
    elif not skip and type(module) is not nn.Linear:
        skip = f"{type(module).__name__} is more than a linear layer"
    elif not skip and tp > 1 and rule and rule.tensor == "replicated":
        skip = "tensor parallel replicates it"
    by_rows = rule is None or rule.tensor in ("column", "head", "embedding")
    split_rows, split_columns = (tp, 1) if by_rows else (1, tp)  # over how many ranks each is split
    local_rows, local_columns = rows // split_rows, columns // split_columns
    if not skip and (rows % (MULTIPLE * split_rows) or columns % (MULTIPLE * split_columns)):
        skip = f"{local_rows} x {local_columns} on a rank, and {MULTIPLE} must divide both"
    elif not skip and rule and rule.tensor == "head" and (odd := _odd_chunk(job)):
        skip = f"training.loss_chunks has one of {odd} tokens, and {MULTIPLE} must divide all"
    reason = ""
    if any(fnmatchcase(f"{name}.weight", pattern) for pattern in job.config.parallelism.fsdp_keep_whole):
        reason = "parallelism.fsdp_keep_whole replicates it"
    elif local_rows % job.layout.fsdp:
        reason = f"{local_rows} rows do not split evenly over {job.layout.fsdp} ranks"
    wanted = settings.enable_fsdp_float8_all_gather and not skip
    return Layer(name, rows, columns, skip, reason if wanted else "", wanted and not reason)


def _odd_chunk(job: Job) -> int:
    """Return the tokens of a loss chunk that float8 can't sum a weight's gradient over, or 0."""
    training, float8 = job.config.training, job.config.quantize.linear.float8
    if training.loss_chunks == 1 or float8.emulate or float8.recipe_name == "rowwise_with_gw_hp":
        return 0
    shorter, longer = training.seq_len // training.loss_chunks, -(-training.seq_len // training.loss_chunks)
    sizes = (training.local_batch_size * length for length in (longer, shorter))
    return next((size for size in sizes if size % MULTIPLE), 0)


def _table(layers: Sequence[Layer], model: nn.Module, context: Context) -> list[str]:
    """Return lines for the log: a row for each layer, and one for those of all blocks that are alike."""
    job = context.job
    settings, high = job.config.quantize.linear.float8, job.config.training.mixed_precision_param
    rows: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        result = f"{high}: {layer.skip_reason}" if layer.skip_reason else "float8"
        result += ", gathered in float8" * layer.gathered
        result += f", gathered in {high}: {layer.gather_reason}" * bool(layer.gather_reason)
        rows[layer_pattern(layer.name, job.spec.blocks), f"{layer.rows} x {layer.columns}", result] += 1
    for name in (name for name, rule in context.table.items() if rule.tensor == "expert"):
        size = " x ".join(map(str, model.get_parameter(name).shape))
        rows[layer_pattern(name, job.spec.blocks), size, f"{high}: experts multiply in groups"] += 1
    converted = sum(not layer.skip_reason for layer in layers)
    details = [settings.recipe_name] + ["emulated"] * settings.emulate
    details += ["scales precomputed"] * settings.precompute_float8_dynamic_scale_for_fsdp
    lines = [f"Applied float8 to {converted} of {len(layers)} linear layers ({', '.join(details)})"]
    cells = [(*row, f"x {count}" if count > 1 else "") for row, count in rows.items()]
    return lines + format_table(cells, indent=2).splitlines()


# ---------------------------------------------------------------- collectives in float8

_WHOLE_TENSOR_SCALE = "titanlite_whole_tensor_scale"
"""The attribute that the converter sets on converted layers, since their class costs seconds to import."""


def scales_whole_tensors(module: nn.Module) -> bool:
    """Return whether this is a converted layer with one scale per tensor: scales of rows can't be gathered."""
    return getattr(module, _WHOLE_TENSOR_SCALE, False)


def shared_cast(layers: Sequence[nn.Module]) -> Cast | None:
    """Return the cast to float8, by one scale on all ranks, of an input of these layers; None unless all take it."""
    if not all(map(scales_whole_tensors, layers)):
        return None
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    layer: Any = layers[0]
    dtype, products = layer.config.cast_config_input.target_dtype, layer.linear_mm_config
    return lambda sequence: hp_tensor_to_float8_dynamic(sequence, dtype, products)  # type: ignore[return-value]


def row_style(module: nn.Module) -> type[RowwiseParallel]:
    """Return the split of a row layer; with one scale per tensor its output's gradient is gathered in float8."""
    if not scales_whole_tensors(module):
        return RowwiseParallel
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    return Float8RowwiseParallel


def bytes_all_gather() -> Any:
    """Return FSDP2's all-gather, but of bytes: it gathers a group of float8 weights as float8, which gloo lacks."""

    class BytesAllGather(default_all_gather()):  # type: ignore[misc]
        def __call__(
            self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **options: Any
        ) -> Any:
            return super().__call__(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), *args, **options)

    return BytesAllGather()


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Silence what importing torchao warns of, such as unused kernels; its own variable for that warns as well."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)
