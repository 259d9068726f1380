"""Named conditions that keys need, as in `Annotated[Natural, Needs(SHARDING)]`."""

from titanlite.config.section import Condition, MeshCondition, Section, value_of
from titanlite.config.stages import SINGLE
from titanlite.config.urls import is_url

STREAMS = ("c4", "c4_test", "c4_validation")
"""Data sets that are streamed under a short name."""


def is_streamed(dataset: str) -> bool:
    """Return whether a data set is streamed from the Hugging Face hub."""
    return dataset in STREAMS or "/" in dataset


def _off(key: str) -> Condition:
    return Condition(f"with {key}", lambda config: not value_of(config, key))


def _set_to(key: str, value: str) -> Condition:
    return Condition(f'without {key} "{value}"', lambda config: value_of(config, key) == value)


def _decays(config: Section) -> bool:
    schedule = value_of(config, "lr_scheduler")
    if schedule.decay_ratio is None:
        stop = schedule.total_steps or value_of(config, "training.steps")
        return schedule.warmup_steps < stop
    return schedule.decay_ratio > 0


def _on_spike(config: Section) -> str:
    fault = value_of(config, "fault")
    if fault.spike_sigma:
        return fault.on_spike
    return "warn"


def _verifies(config: Section) -> bool:
    saving = value_of(config, "checkpoint")
    return saving.enable or bool(saving.initial_load_path and not saving.initial_load_in_hf)


def _is_compiled_by_inductor(config: Section) -> bool:
    compiler = value_of(config, "compile")
    return compiler.enable and "model" in compiler.components and compiler.backend == "inductor"


def _gathers_by_group(config: Section) -> bool:
    settings = value_of(config, "parallelism")
    if settings.pipeline_parallel_degree == 1:
        return True
    return settings.pipeline_parallel_schedule in SINGLE


def _reshards(config: Section) -> bool:
    policy = value_of(config, "parallelism.fsdp_reshard_after_forward")
    return policy == "never" or _gathers_by_group(config)


def _gathers_again(config: Section) -> bool:
    settings = value_of(config, "parallelism")
    stays = settings.fsdp_reshard_after_forward in ("default", "never", "auto")
    return settings.pipeline_parallel_degree == 1 or not stays


DECAY = Condition("without steps of decay", _decays)
NO_MIXTURE = _off("training.mixture")
SELECTIVE = _set_to("activation_checkpoint.mode", "selective")
BUDGET = _set_to("activation_checkpoint.mode", "memory_budget")
RECOMPUTED = Condition(
    "without recomputation of blocks",
    lambda config: value_of(config, "activation_checkpoint.mode") in ("full", "selective"),
)
INDUCTOR = Condition("without torch.compile of the model by inductor", _is_compiled_by_inductor)
GPU = Condition("on a CPU", lambda config: value_of(config, "job.device") != "cpu")
PINNED = Condition(
    "with pinned memory on a CPU",
    lambda config: (
        GPU.holds(config) or value_of(config, "checkpoint.async_mode") != "async_with_pinned_mem"
    ),
)
NO_OFFLOAD = _off("training.enable_cpu_offload")
STATE_ELSEWHERE = Condition(
    "with training.enable_cpu_offload, whose state is on the host",
    lambda config: NO_OFFLOAD.holds(config) or value_of(config, "optimizer.state_on") != "host",
)
STATE_ON_DISK = _set_to("optimizer.state_on", "disk")
PIPELINE = Condition(
    "without pipeline parallel",
    lambda config: value_of(config, "parallelism.pipeline_parallel_degree") > 1,
)
EVEN_STAGES = _off("parallelism.module_fqns_per_model_part")
GATHERS_BY_GROUP = Condition("in a schedule that gathers whole stages", _gathers_by_group)
AUTO_CHOOSES = Condition(
    'for "auto" under pipeline parallel, where "default" is "never"',
    lambda config: (
        value_of(config, "parallelism.pipeline_parallel_degree") == 1
        or value_of(config, "parallelism.fsdp_reshard_after_forward") != "auto"
    ),
)
RESHARDS = Condition("in a schedule that gathers whole stages", _reshards)
GATHERS_AGAIN = Condition(
    'under pipeline parallel without fsdp_reshard_after_forward "always"', _gathers_again
)
CONTEXT = Condition(
    "without context parallel",
    lambda config: value_of(config, "parallelism.context_parallel_degree") > 1,
)
NO_ULYSSES = Condition(
    "with ulysses",
    lambda config: value_of(config, "parallelism.context_parallel_rotate_method") != "ulysses",
)
LOADING = Condition(
    "without checkpoint.enable or initial_load_path",
    lambda config: bool(
        value_of(config, "checkpoint.enable") or value_of(config, "checkpoint.initial_load_path")
    ),
)
IN_BUCKET = Condition(
    "without checkpoints on s3, gs or az",
    lambda config: is_url(value_of(config, "checkpoint.folder")),
)
VERIFIABLE = Condition("without a checkpoint to verify", _verifies)
AUTO_INTERVAL = _set_to("checkpoint.interval", "auto")
TRACES = Condition(
    "without traces or snapshots",
    lambda config: (
        value_of(config, "profiling.enable_profiling")
        or value_of(config, "profiling.enable_memory_snapshot")
    ),
)
JUDGED = Condition(
    "in a run of no more than fault.spike_window steps",
    lambda config: value_of(config, "training.steps") > value_of(config, "fault.spike_window"),
)
SKIPS = Condition(
    "without steps to skip",
    lambda config: "skip" in (value_of(config, "fault.on_nonfinite"), _on_spike(config)),
)
ROLLBACKS = Condition(
    'without fault.on_spike "rollback"', lambda config: _on_spike(config) == "rollback"
)
GOES_BACK = Condition(
    'for "rollback" without checkpoint.enable',
    lambda config: value_of(config, "checkpoint.enable") or _on_spike(config) != "rollback",
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
        or value_of(config, "training.enable_cpu_offload")
        or value_of(config, "training.mixed_precision_reduce") != "bfloat16"
    ),
)
REPLICAS = MeshCondition(
    "without replicas",
    lambda config, layout, _: (
        layout.dp_replicate > 1 or value_of(config, "parallelism.defer_gradient_sync") != "replicas"
    ),
)
ACCUMULATION = MeshCondition(
    "without gradient accumulation", lambda _, __, batch: batch.accumulation > 1
)
NO_PIPELINE = MeshCondition("with pipeline parallel", lambda _, layout, __: layout.pp == 1)
TENSOR = MeshCondition("without tensor parallel", lambda _, layout, __: layout.tp > 1)
EXPERTS = MeshCondition("without experts", lambda _, layout, __: layout.experts, by_ranks=False)
