"""Float8: linear layers multiply in float8, through torchao; the first converter.

A linear layer's input, weight and output gradient are scaled into float8's range and rounded right before each
product; parameters, gradients and optimizer state stay what they are. With scales of whole tensors, weights can be
gathered in float8, and tensor parallel gathers activations in float8. Which layers are converted, and why the others
are not, is decided here without torchao, and said at the start.
"""

from __future__ import annotations

import logging
import re
import sys
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
from torch.distributed.tensor.parallel import ParallelStyle

from titanlite.config.job import Job
from titanlite.errors import UserError, nearest, some_of
from titanlite.parallel.build import shared_names
from titanlite.registry import Rule, assign

MULTIPLE = 16
"""Widths that GPUs multiply float8 in."""
KEY = "quantize.linear.float8"
Cast = Callable[[DTensor], DTensor]


class Float8:
    """The converter of [quantize.linear.float8]."""

    def __init__(self, job: Job) -> None:
        if find_spec("torchao") is None:
            raise UserError(
                f"{KEY}.enable = true: the package torchao is not installed; {sys.executable} -m pip install "
                '"torchao>=0.18", or leave the key out'
            )
        self._job, self._settings = job, job.config.quantize.linear.float8

    def convert(self, model: nn.Module) -> list[str]:
        layers = plan(model, self._job)
        with _quietly():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        config = Float8LinearConfig.from_recipe_name(self._settings.recipe_name)
        config = replace(config, emulate=self._settings.emulate)
        for gathered in {layer.gathered for layer in layers if not layer.left}:
            names = {layer.name for layer in layers if not layer.left and layer.gathered == gathered}
            convert_to_float8_training(
                model,
                module_filter_fn=lambda module, name, names=names: name in names,
                config=replace(config, enable_fsdp_float8_all_gather=gathered),
            )
        _gather_as_bytes_on_a_cpu()
        # A converted layer's output is a view, and torch 2.13 warns of changing one in place, as nothing here does.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        return _table(layers, self._job)

    def after_optimizer_step(self, parts: Sequence[nn.Module]) -> None:
        if self._settings.precompute_float8_dynamic_scale_for_fsdp:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            for part in parts:
                precompute_float8_dynamic_scale_for_fsdp(part)


def check_device(job: Job, device: str, capability: tuple[int, int] | None) -> None:
    """A UserError where this kind of device, a GPU of this compute capability, can't multiply float8 as asked."""
    settings = job.config.quantize.linear.float8
    if settings.emulate:
        return
    instead = f"{KEY}.emulate computes in high precision with float8's rounding"
    if capability and capability < (8, 9):
        what = "there is a GPU of compute capability {}.{}, and float8 needs 8.9".format(*capability)
        raise UserError(f"{KEY}.enable = true: {what} or newer; {instead}")
    if device == "cpu" and settings.recipe_name != "tensorwise" and not _scales_rows_on_a_cpu():
        what = f"torch {torch.__version__} has no scales of rows on a CPU (2.13 has); use tensorwise"
        raise UserError(f'{KEY}.recipe_name = "{settings.recipe_name}": {what}, or {instead}')


def _scales_rows_on_a_cpu() -> bool:
    matrix, scales = torch.zeros(MULTIPLE, MULTIPLE).to(torch.float8_e4m3fn), torch.ones(MULTIPLE, 1)
    try:
        torch._scaled_mm(matrix, matrix.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


# ---------------------------------------------------------------- which layers


@dataclass(frozen=True)
class Layer:
    """A linear layer, and what becomes of it."""

    name: str
    rows: int
    columns: int
    left: str
    """Why it is left in high precision, or nothing."""
    whole: str
    """Why FSDP gathers its weight in high precision, where float8 was asked for, or nothing."""
    gathered: bool
    """FSDP gathers its weight in float8."""


def plan(model: nn.Module, job: Job) -> list[Layer]:
    """Every linear layer's fate. A UserError where nothing would be had of what was asked for."""
    settings = job.config.quantize.linear.float8
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in settings.filter_fqns:
        if not any(pattern in name for name in linear):
            close = nearest(pattern, linear)
            hint = f"; the nearest is {close}" if close else ""
            raise UserError(f'{KEY}.filter_fqns: "{pattern}" is in no linear layer\'s name{hint}')
    table = assign(job.spec.rules(job.model), (n for n, _ in model.named_parameters()), ties=shared_names(model))
    layers = [_judge(name, module, table.get(f"{name}.weight"), job) for name, module in linear.items()]
    converted = [layer for layer in layers if not layer.left]
    if not converted:
        raise UserError(f"{KEY}.enable: no layer can be converted:{_reasons(layers, 'left')}")
    if settings.enable_fsdp_float8_all_gather and not any(layer.gathered for layer in converted):
        raise UserError(
            f"{KEY}.enable_fsdp_float8_all_gather: no weight can be gathered so:{_reasons(converted, 'whole')}"
        )
    return layers


def _reasons(layers: Sequence[Layer], which: str) -> str:
    return some_of([f"{layer.name}: {getattr(layer, which)}" for layer in layers])


def _judge(name: str, module: nn.Linear, rule: Rule | None, job: Job) -> Layer:
    """`rule` is None where the weight has its place in the table under another name."""
    settings, tp = job.config.quantize.linear.float8, job.layout.tp
    rows, columns = module.weight.shape
    left = next((f'filter_fqns has "{pattern}"' for pattern in settings.filter_fqns if pattern in name), "")
    if not left and (rule is None or rule.tied):
        left = "it shares its weight"
    elif not left and type(module) is not nn.Linear:
        left = f"{type(module).__name__} is more than a linear layer"
    elif not left and tp > 1 and rule and rule.tensor == "whole":
        left = "tensor parallel keeps it whole"
    split_rows, split_columns = _ranks(rule, tp)
    if not left and (rows % (MULTIPLE * split_rows) or columns % (MULTIPLE * split_columns)):
        left = f"{rows // split_rows} x {columns // split_columns} on a rank, and {MULTIPLE} must divide both"
    elif not left and rule and rule.tensor == "head" and (odd := _odd_chunk(job)):
        left = f"training.loss_chunks has one of {odd} tokens, and {MULTIPLE} must divide all"
    whole = ""
    if any(fnmatchcase(f"{name}.weight", pattern) for pattern in job.config.parallelism.fsdp_keep_whole):
        whole = "it is kept whole"
    elif rows // split_rows % job.layout.fsdp:
        whole = f"{rows // split_rows} rows do not split evenly over {job.layout.fsdp} ranks"
    asked = settings.enable_fsdp_float8_all_gather and not left
    return Layer(name, rows, columns, left, whole if asked else "", asked and not whole)


def _odd_chunk(job: Job) -> int:
    """Tokens of a chunk of the loss that a weight's gradient can't be summed over in float8; 0 if there is none."""
    training, float8 = job.config.training, job.config.quantize.linear.float8
    if training.loss_chunks == 1 or float8.emulate or float8.recipe_name == "rowwise_with_gw_hp":
        return 0
    shorter, longer = training.seq_len // training.loss_chunks, -(-training.seq_len // training.loss_chunks)
    sizes = (training.local_batch_size * length for length in (longer, shorter))
    return next((size for size in sizes if size % MULTIPLE), 0)


def _ranks(rule: Rule | None, tp: int) -> tuple[int, int]:
    """Over how many ranks tensor parallel splits the rows and the columns of a weight."""
    by_rows = rule is None or rule.tensor in ("column", "head", "embedding")
    return (tp, 1) if by_rows else (1, tp)


def _table(layers: Sequence[Layer], job: Job) -> list[str]:
    """Lines for the log: a row for each layer, one for those of all blocks that are alike."""
    settings, high = job.config.quantize.linear.float8, job.config.training.mixed_precision_param
    rows: Counter[tuple[str, str, str]] = Counter()
    for layer in layers:
        pattern = re.sub(rf"^({re.escape(job.spec.blocks)})\.\d+\.", r"\1.*.", layer.name)
        fate = f"{high}: {layer.left}" if layer.left else "float8"
        fate += ", gathered in float8" * layer.gathered
        fate += f", gathered in {high}: {layer.whole}" * bool(layer.whole)
        rows[pattern, f"{layer.rows} x {layer.columns}", fate] += 1
    converted = sum(not layer.left for layer in layers)
    how = [settings.recipe_name] + ["emulated"] * settings.emulate
    how += ["scales precomputed"] * settings.precompute_float8_dynamic_scale_for_fsdp
    lines = [f"float8     {converted} of {len(layers)} linear layers multiply in float8 ({', '.join(how)})"]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, count in rows.items():
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(" " * 11 + (f"{cells}  x {count}" if count > 1 else cells.rstrip()))
    return lines


# ---------------------------------------------------------------- tensor parallel


def scaled_as_a_whole(module: Any) -> bool:
    """A converted layer with one scale a tensor: rows' scales could not travel with a slice of the sequence."""
    # Private in torchao 0.18. No module is of a class that nobody imported, and importing it costs seconds.
    torchao = sys.modules.get("torchao.float8.float8_linear")
    if torchao is None or not isinstance(module, torchao.Float8Linear):
        return False
    return module.config.cast_config_input.scaling_granularity.name == "TENSORWISE"


def shared_cast(layers: Sequence[Any]) -> Cast | None:
    """What turns an input that these layers share into float8, scaled by its largest value on any rank; None where
    one of them needs it as it is."""
    if not all(scaled_as_a_whole(layer) for layer in layers):
        return None
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    dtype, products = layers[0].config.cast_config_input.target_dtype, layers[0].linear_mm_config
    return lambda sequence: hp_tensor_to_float8_dynamic(sequence, dtype, products)  # type: ignore[return-value]


def row_style(**layouts: Any) -> ParallelStyle:
    """How tensor parallel splits a row layer scaled as a whole: its output's gradient is gathered in float8."""
    from torchao.float8.float8_tensor_parallel import Float8RowwiseParallel

    return Float8RowwiseParallel(**layouts)


def _gather_as_bytes_on_a_cpu() -> None:
    """Let torchao's all-gather of activations view float8 as bytes for gloo, which can't carry it."""
    # Private in torchao 0.18; there is no other way to a collective inside of DTensor's redistribution.
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    FLOAT8_OPS_TABLE[torch.ops._c10d_functional.all_gather_into_tensor.default] = _all_gather


def _all_gather(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    from torchao.float8 import Float8TrainingTensor

    here = args[0]
    data = here._data.contiguous()
    if data.device.type == "cpu":
        gathered = operation(data.view(torch.uint8), *args[1:], **(kwargs or {}))
        gathered = torch.ops._c10d_functional.wait_tensor(gathered).view(data.dtype)
    else:
        gathered = operation(data, *args[1:], **(kwargs or {}))
    return Float8TrainingTensor(
        gathered, here._scale, here._orig_dtype, here._linear_mm_config, here._gemm_input_role
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Importing torchao warns of kernels for other machines, which float8 training does not use, and of its own use
    of torch; the variable it has against the former warns as well."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
