"""The conditions that keys need, by name: `Annotated[Natural, Needs(SHARDING)]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titanlite.config.section import Condition, MeshCondition, value_of
from titanlite.config.stages import SINGLE
from titanlite.config.urls import is_url

if TYPE_CHECKING:
    from titanlite.config.schema import JobConfig

STREAMS = ("c4", "c4_test", "c4_validation")
"""Data sets that are streamed under a short name."""


def is_streamed(dataset: str) -> bool:
    """Return whether a data set is streamed from the Hugging Face hub."""
    return dataset in STREAMS or "/" in dataset


def _off(key: str) -> Condition:
    return Condition(f"with {key}", lambda config: not value_of(config, key))


def _set_to(key: str, value: str) -> Condition:
    return Condition(f'without {key} "{value}"', lambda config: value_of(config, key) == value)


def _reads_tokens(config: JobConfig) -> bool:
    names = [source.dataset for source in config.training.sources]
    if config.validation.enable:
        names.append(config.validation.dataset)
    return "tokens" in names


def _decays(config: JobConfig) -> bool:
    schedule = config.lr_scheduler
    if schedule.decay_ratio is None:
        return schedule.warmup_steps < (schedule.total_steps or config.training.steps)
    return schedule.decay_ratio > 0


def _on_spike(config: JobConfig) -> str:
    if config.fault.spike_sigma:
        return config.fault.on_spike
    return "warn"


def _verifies(config: JobConfig) -> bool:
    saving = config.checkpoint
    return saving.enable or bool(saving.initial_load_path and not saving.initial_load_in_hf)


def _is_compiled_by_inductor(config: JobConfig) -> bool:
    compiler = config.compile
    return compiler.enable and "model" in compiler.components and compiler.backend == "inductor"


def _gathers_by_group(config: JobConfig) -> bool:
    settings = config.parallelism
    if settings.pipeline_parallel_degree == 1:
        return True
    return settings.pipeline_parallel_schedule in SINGLE


def _reshards(config: JobConfig) -> bool:
    settings = config.parallelism
    return settings.fsdp_reshard_after_forward == "never" or _gathers_by_group(config)


def _gathers_again(config: JobConfig) -> bool:
    settings = config.parallelism
    stays = settings.fsdp_reshard_after_forward in ("default", "never")
    return settings.pipeline_parallel_degree == 1 or not stays


DECAY = Condition("without steps of decay", _decays)
NO_MIXTURE = _off("training.mixture")
TOKENS = Condition("without token shards", _reads_tokens)
SELECTIVE = _set_to("activation_checkpoint.mode", "selective")
BUDGET = _set_to("activation_checkpoint.mode", "memory_budget")
RECOMPUTED = Condition(
    "without recomputation of blocks",
    lambda config: config.activation_checkpoint.mode in ("full", "selective"),
)
INDUCTOR = Condition("without torch.compile of the model by inductor", _is_compiled_by_inductor)
GPU = Condition("on a CPU", lambda config: config.job.device != "cpu")
PINNED = Condition(
    "with pinned memory on a CPU",
    lambda config: GPU.holds(config) or config.checkpoint.async_mode != "async_with_pinned_mem",
)
NO_OFFLOAD = _off("training.enable_cpu_offload")
PIPELINE = Condition(
    "without pipeline parallel", lambda config: config.parallelism.pipeline_parallel_degree > 1
)
EVEN_STAGES = _off("parallelism.module_fqns_per_model_part")
GATHERS_BY_GROUP = Condition("in a schedule that gathers whole stages", _gathers_by_group)
RESHARDS = Condition("in a schedule that gathers whole stages", _reshards)
GATHERS_AGAIN = Condition(
    'under pipeline parallel without fsdp_reshard_after_forward "always"', _gathers_again
)
CONTEXT = Condition(
    "without context parallel", lambda config: config.parallelism.context_parallel_degree > 1
)
NO_ULYSSES = Condition(
    "with ulysses",
    lambda config: config.parallelism.context_parallel_rotate_method != "ulysses",
)
LOADING = Condition(
    "without checkpoint.enable or initial_load_path",
    lambda config: bool(config.checkpoint.enable or config.checkpoint.initial_load_path),
)
IN_BUCKET = Condition(
    "without checkpoints on s3, gs or az",
    lambda config: is_url(config.checkpoint.folder),
)
VERIFIABLE = Condition("without a checkpoint to verify", _verifies)
AUTO_INTERVAL = _set_to("checkpoint.interval", "auto")
TRACES = Condition(
    "without traces or snapshots",
    lambda config: config.profiling.enable_profiling or config.profiling.enable_memory_snapshot,
)
JUDGED = Condition(
    "in a run of no more than fault.spike_window steps",
    lambda config: config.training.steps > config.fault.spike_window,
)
SKIPS = Condition(
    "without steps to skip",
    lambda config: "skip" in (config.fault.on_nonfinite, _on_spike(config)),
)
ROLLBACKS = Condition(
    'without fault.on_spike "rollback"', lambda config: _on_spike(config) == "rollback"
)
GOES_BACK = Condition(
    'for "rollback" without checkpoint.enable',
    lambda config: config.checkpoint.enable or _on_spike(config) != "rollback",
    "checkpoint.enable",
)

SHARDING = MeshCondition("without sharding", lambda _, layout, __: layout.max_shard_degree > 1)
DATA_PARALLEL = MeshCondition(
    "without data parallel",
    lambda _, layout, __: layout.max_shard_degree * layout.dp_replicate > 1,
)
# Offloaded float32 gradients are rounded when they are copied to the host.
GRADIENT_SUMS = MeshCondition(
    "without data parallel",
    lambda config, layout, batch: (
        DATA_PARALLEL.holds(config, layout, batch)
        or config.training.enable_cpu_offload
        or config.training.mixed_precision_reduce != "bfloat16"
    ),
)
REPLICAS = MeshCondition(
    "without replicas",
    lambda config, layout, _: (
        layout.dp_replicate > 1 or config.parallelism.defer_gradient_sync != "replicas"
    ),
)
ACCUMULATION = MeshCondition(
    "without gradient accumulation", lambda _, __, batch: batch.accumulation > 1
)
NO_PIPELINE = MeshCondition("with pipeline parallel", lambda _, layout, __: layout.pp == 1)
TENSOR = MeshCondition("without tensor parallel", lambda _, layout, __: layout.tp > 1)
EXPERTS = MeshCondition("without experts", lambda _, layout, __: layout.experts, by_ranks=False)
