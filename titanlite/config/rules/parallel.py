"""The rules that several fields make together, and what is not built yet. No torch.

A rule runs when every field that it reads is valid, so that one bad key never hides another. Degrees are judged
through a Layout, and every message lists the legal values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from titanlite.config.load import Loaded
from titanlite.config.rules import float8
from titanlite.config.rules.context import Faults, RuleContext
from titanlite.config.schema import keys
from titanlite.config.torchtitan import FLOAT8_CONVERTERS
from titanlite.errors import UserError
from titanlite.layout import Layout, divisors
from titanlite.registry import find_converter, get_model, get_optimizer

BYTE_VOCABULARY = 256
STREAMS = ("c4", "c4_test", "c4_validation")
RETRIES = 5
"""More tries after a stream failed, after 1, 2, 4, 8 and 16 seconds."""


def sharding_does_something(layout: Layout, training: Any) -> bool:
    """FSDP2 over one rank is worth its cost only where it casts parameters, or fetches them from host memory."""
    casts = training.mixed_precision_param != training.dtype
    return layout.fsdp * layout.dp_replicate > 1 or casts or training.enable_cpu_offload


def is_streamed(dataset: str) -> bool:
    """Whether a data set is streamed from the Hugging Face hub."""
    return dataset in STREAMS or "/" in dataset


BUDGETING_BACKENDS = ("inductor", "aot_eager")
"""Compiler backends that honor an activation memory budget."""

RULES: list[Callable[[RuleContext], Faults]] = []


def _rule(rule: Callable[[RuleContext], Faults]) -> Callable[[RuleContext], Faults]:
    RULES.append(rule)
    return rule


@_rule
def _model_exists(judge: RuleContext) -> Faults:
    model = judge.config.model
    try:
        judge.found_spec = get_model(model.name, model.package)
    except UserError as error:
        yield ("model.name" if "registered as" in str(error) else "model.package"), str(error)
        return
    try:
        judge.found_model = judge.found_spec.configure(model.flavor, model.overrides)
    except UserError as error:
        yield ("model.flavor" if "no flavor" in str(error) else "model.overrides"), str(error)


_GATHERED_AHEAD = ("fsdp_forward_prefetch", "fsdp_backward_prefetch")
_COMMUNICATED = ("fsdp_blocks_per_group", "defer_gradient_sync")


def _set(parallelism: Any, names: tuple[str, ...]) -> list[str]:
    """Those of these keys of [parallelism] that are not at their defaults."""
    return [key for key in names if getattr(parallelism, key) != keys()[f"parallelism.{key}"].default]


_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}


@_rule
def _degrees_fill_the_world(judge: RuleContext) -> Faults:
    parallelism = judge.config.parallelism
    degree = {name: getattr(parallelism, key) for name, key in _DEGREES.items()}
    shard, fixed = parallelism.data_parallel_shard_degree, math.prod(degree.values())
    asked = judge.loaded.config.parallelism
    float8 = judge.loaded.config.quantize.linear.float8
    gathers_float8 = float8.enable and float8.enable_fsdp_float8_all_gather
    fewest = 2 if _set(asked, _GATHERED_AHEAD + _COMMUNICATED) or asked.fsdp_keep_whole or gathers_float8 else 1
    world = judge.world or fixed * (fewest if shard == -1 else shard)
    if world % fixed == 0 and shard in (-1, world // fixed):
        judge.found_layout = Layout(dp_shard=world // fixed, ep=parallelism.expert_parallel_degree, **degree)
        return
    ranks = f"{world} rank" + "s" * (world > 1)
    for name, key in _DEGREES.items():
        others = fixed // degree[name] * max(shard, 1)
        fits = [d for d in divisors(world) if world % (d * others) == 0]
        if degree[name] > 1 and degree[name] not in fits:
            yield f"parallelism.{key}", _does_not_divide(degree[name], ranks, fits or [1])
    if shard != -1 and (world % shard or world % fixed == 0):
        fits = [world // fixed] if world % fixed == 0 else divisors(world)
        yield (
            "parallelism.data_parallel_shard_degree",
            f"{shard} does not fill {ranks} with the other degrees' {fixed}; legal: -1, {_listed(fits)}",
        )


def _does_not_divide(degree: int, what: str, fits: list[int]) -> str:
    return f"{degree} does not divide {what}; legal: {_listed(fits)}"


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))


@_rule
def _tensor_parallel_divides_the_model(judge: RuleContext) -> Faults:
    tp, shape = judge.config.parallelism.tensor_parallel_degree, judge.shape
    parts = {"attention heads": shape.heads, "key and value heads": shape.kv_heads}
    parts["tokens in a sequence"] = judge.config.training.seq_len
    if judge.config.validation.enable and judge.config.validation.seq_len:
        parts["tokens in a validation sequence"] = judge.config.validation.seq_len
    fits = divisors(math.gcd(*parts.values(), judge.world or 0))
    for what, size in parts.items():
        if size % tp:
            yield "parallelism.tensor_parallel_degree", _does_not_divide(tp, f"{size} {what}", fits)


@_rule
def _async_tensor_parallel_has_what_it_needs(judge: RuleContext) -> Faults:
    if not judge.config.parallelism.enable_async_tensor_parallel:
        return
    key, compiled = "parallelism.enable_async_tensor_parallel", judge.config.compile
    if judge.config.parallelism.tensor_parallel_degree == 1:
        yield key, "there is nothing to overlap; set parallelism.tensor_parallel_degree"
    if not (compiled.enable and "model" in compiled.components and compiled.backend == "inductor"):
        yield key, 'is done by the compiler; set compile.enable, with "model" in compile.components and inductor'
    if judge.config.job.device == "cpu":
        yield key, "needs GPUs that reach each other's memory, and job.device is cpu"


@_rule
def _context_and_pipeline_divide(judge: RuleContext) -> Faults:
    parallelism, seq_len, layers = judge.config.parallelism, judge.config.training.seq_len, judge.shape.layers
    cp, pp = parallelism.context_parallel_degree, parallelism.pipeline_parallel_degree
    if cp > 1 and seq_len % (2 * cp):
        fits = divisors(seq_len // 2) if seq_len % 2 == 0 else [1]
        yield "parallelism.context_parallel_degree", _does_not_divide(cp, f"half of {seq_len} tokens", fits)
    if pp > layers:
        yield "parallelism.pipeline_parallel_degree", f"{pp} stages for {layers} layers; at most {layers}"


@_rule
def _batch_sizes_divide(judge: RuleContext) -> Faults:
    local, total = judge.config.training.local_batch_size, judge.config.training.global_batch_size
    unit = local * judge.layout.batch
    if total != -1 and total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        yield (
            "training.global_batch_size",
            f"must be a multiple of local_batch_size {local} x data-parallel degree {judge.layout.batch} = {unit}; "
            f"nearest: {f'{below} or ' if below else ''}{above}",
        )


@_rule
def _sequences_fit_the_model(judge: RuleContext) -> Faults:
    longest = judge.shape.max_seq_len
    for key, length in (
        ("training.seq_len", judge.config.training.seq_len),
        ("validation.seq_len", judge.config.validation.seq_len or 0),
    ):
        if length > longest:
            yield key, f"the model has positions for {longest} tokens at most"


@_rule
def _chunks_have_tokens(judge: RuleContext) -> Faults:
    chunks, training, validation = judge.config.training.loss_chunks, judge.config.training, judge.config.validation
    shortest = min(training.seq_len, (validation.enable and validation.seq_len) or training.seq_len)
    if chunks > shortest:
        yield "training.loss_chunks", f"there are {shortest} tokens in a sequence; at most {shortest}"


@_rule
def _byte_tokenizer_fits_the_vocabulary(judge: RuleContext) -> Faults:
    if judge.config.training.dataset == "tokens":
        return  # shards bring a tokenizer, or do without
    if not judge.config.model.hf_assets_path and judge.shape.vocab_size != BYTE_VOCABULARY:
        yield (
            "model.hf_assets_path",
            f"names no folder with a tokenizer.json, and the byte tokenizer's {BYTE_VOCABULARY} tokens do not fit "
            f"{judge.config.model.name} {judge.config.model.flavor} with its vocabulary of {judge.shape.vocab_size}",
        )


@_rule
def _schedule_fits_the_steps(judge: RuleContext) -> Faults:
    schedule, steps = judge.config.lr_scheduler, judge.config.training.steps
    total = schedule.total_steps or steps
    if schedule.decay_ratio is not None and schedule.warmup_steps + round(total * schedule.decay_ratio) > total:
        yield (
            "lr_scheduler.decay_ratio",
            f"{schedule.warmup_steps} steps of warm-up and {round(total * schedule.decay_ratio)} of decay exceed "
            f"{total}; at most {max(0, total - schedule.warmup_steps) / total:.3g}",
        )


@_rule
def _optimizer_has_the_keys(judge: RuleContext) -> Faults:
    optimizer = judge.config.optimizer
    if judge.found_spec is None:
        return  # the package may be what registers it
    try:
        spec = get_optimizer(optimizer.name, judge.config.model.package)
    except UserError as error:
        yield "optimizer.name", str(error)
        return
    for key in spec.unused:
        if getattr(optimizer, key) != keys()[f"optimizer.{key}"].default:
            yield f"optimizer.{key}", f"{spec.name} has no such value; leave it out, or use AdamW"


@_rule
def _precisions_agree(judge: RuleContext) -> Faults:
    training = judge.config.training
    for key in ("mixed_precision_param", "mixed_precision_reduce"):
        if (training.dtype == "float64") != (getattr(training, key) == "float64"):
            yield (
                f"training.{key}",
                f'with training.dtype "{training.dtype}": all three are "float64", or none is',
            )


@_rule
def _data_sets_have_paths(judge: RuleContext) -> Faults:
    for section in ("training", "validation") if judge.config.validation.enable else ("training",):
        view = getattr(judge.config, section)
        if view.dataset.startswith("python-stdlib") and view.dataset_path:
            yield f"{section}.dataset_path", f'the data set "{view.dataset}" has no path; leave it out'
        if view.dataset in ("text", "tokens") and not view.dataset_path:
            yield f"{section}.dataset_path", f'the data set "{view.dataset}" needs a folder or file'


@_rule
def _streams_have_limits(judge: RuleContext) -> Faults:
    training, validation = judge.config.training, judge.config.validation
    for part in training.mixture:
        if is_streamed(part.dataset):
            why = f'"{part.dataset}" is streamed, and a mixture reads its sources at any place'
            yield "training.mixture", f"{why}; download it and use text, or tokens"
    asked = [("training", training.dataset)] * (not training.mixture)
    asked += [("validation", validation.dataset)] * validation.enable
    streamed = [(section, name) for section, name in asked if is_streamed(name)]
    if streamed and training.packing == "first-fit":
        section, name = streamed[0]
        why = (
            f'first-fit looks at all documents before the first window, and {section}.dataset = "{name}" is streamed'
        )
        yield "training.packing", f'{why}; use "concatenate", with document_mask if documents must not see each other'
    patience = (RETRIES + 1) * training.dataloader.stall_timeout_seconds + 2**RETRIES - 1
    limit = judge.config.comm.train_timeout_seconds
    if streamed and judge.layout.world > 1 and patience >= limit:
        yield (
            "training.dataloader.stall_timeout_seconds",
            f"a dead stream would be given up after {patience:g} s, when the other ranks have stopped waiting: "
            f"comm.train_timeout_seconds is {limit}; raise that, or lower this",
        )


@_rule
def _mixtures_add_up(judge: RuleContext) -> Faults:
    training = judge.config.training
    parts = training.mixture
    if not parts:
        return
    weights = [part.weight for part in parts]
    if any(round(weight, 4) != weight for weight in weights):
        yield "training.mixture", "weights go in steps of 0.0001"
    elif round(sum(weights), 9) != 1:
        summed = f"{' + '.join(map(str, weights))} = {sum(weights):g}"
        yield "training.mixture", f"the weights must add up to 1, and {summed}"
    if not training.repeat:
        yield "training.repeat", "a mixture never ends: every source repeats; leave training.repeat at true"
    if training.dataset_path:
        yield "training.dataset_path", "with training.mixture every source has its own; leave it out"
    for part in parts:
        if part.dataset in ("text", "tokens") and not part.dataset_path:
            yield "training.mixture", f'the data set "{part.dataset}" needs a folder or file in dataset_path'


_FOLDERS = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)


@_rule
def _folders_lie_inside_the_dump_folder(judge: RuleContext) -> Faults:
    for key in _FOLDERS:
        section, _, name = key.partition(".")
        if key in judge.loaded.invalid:
            continue
        folder = PurePosixPath(getattr(getattr(judge.config, section), name))
        if not folder.name or folder.is_absolute() or ".." in folder.parts:
            yield key, "must be the name of a folder inside job.dump_folder"


@_rule
def _device_has_what_is_asked(judge: RuleContext) -> Faults:
    if judge.config.job.device == "cpu" and judge.config.training.dataloader.pin_memory:
        yield "training.dataloader.pin_memory", "pinned memory is for copies to a GPU, and job.device is cpu"


@_rule
def _checkpoints_are_on_where_they_are_asked_for(judge: RuleContext) -> Faults:
    settings = judge.config.checkpoint
    if settings.load_step != -1 and not settings.enable:
        yield "checkpoint.load_step", "nothing is resumed with checkpoint.enable = false; set that to true"
    if settings.async_mode == "async_with_pinned_mem" and judge.config.job.device == "cpu":
        yield "checkpoint.async_mode", 'pinned memory is for copies from a GPU, and job.device is cpu; use "async"'


@_rule
def _hugging_face_knows_the_model(judge: RuleContext) -> Faults:
    settings, spec = judge.config.checkpoint, judge.spec
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(settings, key) and spec.hf is None:
            yield (
                f"checkpoint.{key}",
                f"{spec.name} has no Hugging Face names; `titanlite checkpoint export --format safetensors` writes "
                "plain files of any model's checkpoint",
            )
    if settings.last_save_in_hf and not settings.enable:
        yield "checkpoint.last_save_in_hf", "nothing is saved with checkpoint.enable = false; set that to true"
    if settings.initial_load_in_hf and not settings.initial_load_path:
        yield "checkpoint.initial_load_in_hf", "checkpoint.initial_load_path names no folder"
    if settings.initial_load_in_hf and not settings.initial_load_model_only:
        yield "checkpoint.initial_load_model_only", "a Hugging Face folder has the weights alone; leave it out"


@_rule
def _device_has_what_is_observed(judge: RuleContext) -> Faults:
    if judge.config.job.device == "cpu" and judge.config.profiling.enable_memory_snapshot:
        yield (
            "profiling.enable_memory_snapshot",
            "the snapshot is of a GPU's allocator, and job.device is cpu; profiling.enable_profiling works there",
        )


@_rule
def _traces_fit_between_their_steps(judge: RuleContext) -> Faults:
    profiling = judge.config.profiling
    needed = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < needed:
        yield (
            "profiling.profile_freq",
            f"{profiling.profiler_warmup} steps of warm-up and {profiling.profiler_active} in the trace do not fit "
            f"into {profiling.profile_freq}; at least {needed}",
        )


@_rule
def _groups_of_blocks_exist(judge: RuleContext) -> Faults:
    size, layers = judge.config.parallelism.fsdp_blocks_per_group, judge.shape.layers
    if size > layers:
        yield "parallelism.fsdp_blocks_per_group", f"there are {layers} blocks"


@_rule
def _what_only_fsdp_does_is_asked_with_it(judge: RuleContext) -> Faults:
    parallelism, layout = judge.config.parallelism, judge.layout
    if layout.fsdp == 1:
        for key in _set(parallelism, _GATHERED_AHEAD):
            yield (
                f"parallelism.{key}",
                "every parameter is whole on every rank, and nothing is gathered; leave it out",
            )
    if layout.fsdp * layout.dp_replicate == 1:
        for key in _set(parallelism, _COMMUNICATED):
            yield f"parallelism.{key}", "there is nothing to gather or reduce on one rank; leave it out"


@_rule
def _kept_whole_beside_sharded_ones(judge: RuleContext) -> Faults:
    if not judge.config.parallelism.fsdp_keep_whole:
        return
    if judge.layout.fsdp == 1:
        yield "parallelism.fsdp_keep_whole", "every parameter is whole on every rank already; leave it out"
    if judge.config.training.enable_cpu_offload:
        yield "parallelism.fsdp_keep_whole", "training.enable_cpu_offload moves what is sharded; use one or the other"


@_rule
def _memory_budget_is_kept_by_the_compiler(judge: RuleContext) -> Faults:
    compile = judge.config.compile
    if judge.config.activation_checkpoint.mode != "memory_budget":
        return
    why = "the compiler chooses what to keep within the budget"
    if not (compile.enable and "model" in compile.components):
        yield "activation_checkpoint.mode", f'{why}; set compile.enable, with "model" in compile.components'
    elif compile.backend not in BUDGETING_BACKENDS:
        listed = " or ".join(f'"{name}"' for name in BUDGETING_BACKENDS)
        yield "compile.backend", f"{why}, and this one makes no such choice; use {listed}"


@_rule
def _keep_sharded_over_a_divisor(judge: RuleContext) -> Faults:
    reshard = judge.config.parallelism.fsdp_reshard_after_forward
    fits = [d for d in divisors(judge.layout.fsdp) if 1 < d < judge.layout.fsdp]
    if isinstance(reshard, int) and reshard not in fits:
        legal = f"legal: {_listed(fits)}" if fits else 'use "always" or "never"'
        yield (
            "parallelism.fsdp_reshard_after_forward",
            f"must split {judge.layout.fsdp} sharding ranks; {legal}",
        )
    elif isinstance(reshard, int) and judge.layout.tp > 1:
        why = "FSDP2 keeps what tensor parallel splits on all ranks or on one"
        yield "parallelism.fsdp_reshard_after_forward", f'{why}; use "always" or "never"'


@_rule
def _converters_exist(judge: RuleContext) -> Faults:
    assert judge.spec  # so whatever model.package registers is known
    for name in judge.config.model.converters:
        try:
            find_converter("float8" if name in FLOAT8_CONVERTERS else name)
        except UserError as error:
            yield "model.converters", str(error)


RULES.extend(float8.RULES)

NOT_BUILT = {
    "parallelism.context_parallel_degree": "context parallel",
    "parallelism.pipeline_parallel_degree": "pipeline parallel",
    "parallelism.expert_parallel_degree": "expert parallel",
}
"""Keys that switch on a technique which is still to be built; everything behind them only tunes it."""


def not_built(loaded: Loaded) -> Faults:
    """Techniques that were asked for and are still to be built."""
    for key, value in _values(loaded):
        default = keys()[key].default
        if value != default:
            yield key, f"{NOT_BUILT[key]} is not built yet; leave it out"


def _values(loaded: Loaded) -> Iterator[tuple[str, Any]]:
    for key in NOT_BUILT:
        value: Any = loaded.config
        for part in key.split("."):
            value = getattr(value, part)
        yield key, value
