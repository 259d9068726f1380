"""Keys without effect in a job, by the conditions that they declare: `Annotated[Positive,
Only("sharding")]`.

Such a key is not an error: the run says so in one line at its start, and goes on as if the key had
its default.
--help and docs/config.md name the conditions.
"""

from typing import Any

from titanlite.config.schema import NEEDS, JobConfig, is_set, value_of
from titanlite.config.urls import is_url
from titanlite.layout import Batch, Layout

STREAMS = ("c4", "c4_test", "c4_validation")
"""Data sets that are streamed under a short name."""


def is_streamed(dataset: str) -> bool:
    """Return whether a data set is streamed from the Hugging Face hub."""
    return dataset in STREAMS or "/" in dataset


def streamed(config: Any) -> list[tuple[str, str]]:
    """Return the sections that read a streamed data set, with its name."""
    training, validation = config.training, config.validation
    datasets = {} if training.mixture else {"training": training.dataset}
    if validation.enable:
        datasets["validation"] = validation.dataset
    return [(section, name) for section, name in datasets.items() if is_streamed(name)]


def without(need: str) -> str:
    """Return the absence of a condition in words, such as "without sharding"."""
    words = {"a GPU": "on a CPU", "data parallel or offload": "without data parallel"}
    return words.get(need) or (f"with {need[3:]}" if need.startswith("no ") else f"without {need}")


def keys_without_effect(
    config: JobConfig, layout: Layout, batch: Batch
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the keys that do nothing on this mesh, and those that do nothing on any, each with the
    reason.
    """
    of_mesh = _mesh_conditions(config, layout, batch)
    conditions = of_mesh | _conditions(config) | {"experts": layout.experts}
    on_this, on_any = dict[str, str](), dict[str, str]()
    for key in (key for key in NEEDS if is_set(config, key)):
        for need in NEEDS[key]:
            if conditions[need] if need in conditions else value_of(config, need):
                continue
            if need in of_mesh:
                on_this[key] = "on 1 rank" if layout.world == 1 else without(need)
            else:
                on_any[key] = without(need)
            break
    return on_this, on_any


def asks_for_sharding(config: JobConfig) -> bool:
    """Return whether a key is set that lacks nothing but ranks with other data."""
    return any(
        is_set(config, key) and all(value_of(config, need) for need in needs if "." in need)
        for key, needs in NEEDS.items()
        if "sharding" in needs or "data parallel" in needs
    )


def _conditions(config: JobConfig) -> dict[str, bool]:
    training, parallelism = config.training, config.parallelism
    schedule = config.lr_scheduler
    mode = config.activation_checkpoint.mode
    saving = config.checkpoint
    decays = bool(schedule.decay_ratio)
    if schedule.decay_ratio is None:
        decays = schedule.warmup_steps < (schedule.total_steps or training.steps)
    fault, profiling = config.fault, config.profiling
    on_spike = fault.on_spike if fault.spike_sigma else "warn"
    return {
        "steps of decay": decays,
        "a streamed data set": bool(streamed(config)),
        "token shards": any(name == "tokens" for name, _ in _sources(config)),
        'activation_checkpoint.mode "selective"': mode == "selective",
        'activation_checkpoint.mode "memory_budget"': mode == "memory_budget",
        "recomputation of blocks": mode in ("full", "selective"),
        "pipeline parallel": parallelism.pipeline_parallel_degree > 1,
        "no module_fqns_per_model_part": not parallelism.module_fqns_per_model_part,
        "context parallel": parallelism.context_parallel_degree > 1,
        "checkpoint.enable or initial_load_path": bool(saving.enable or saving.initial_load_path),
        "checkpoints on s3, gs or az": is_url(saving.folder),
        "a checkpoint to verify": saving.enable
        or bool(saving.initial_load_path and not saving.initial_load_in_hf),
        "traces or snapshots": profiling.enable_profiling or profiling.enable_memory_snapshot,
        "steps to skip": "skip" in (fault.on_nonfinite, on_spike),
        'fault.on_spike "rollback"': on_spike == "rollback",
        'checkpoint.interval "auto"': saving.interval == "auto",
        "a GPU": config.job.device != "cpu",
    }


def _sources(config: JobConfig) -> list[tuple[str, str]]:
    """Return the names and paths of the data sets."""
    given = [*config.training.sources, *[config.validation] * config.validation.enable]
    return [(source.dataset, source.dataset_path) for source in given]


def _mesh_conditions(config: JobConfig, layout: Layout, batch: Batch) -> dict[str, bool]:
    training, parallelism = config.training, config.parallelism
    sums = layout.max_shard_degree * layout.dp_replicate > 1
    return {
        "sharding": layout.max_shard_degree > 1,
        "data parallel": sums,
        # Offloaded float32 gradients are rounded on their way to the host.
        "data parallel or offload": sums
        or training.enable_cpu_offload
        or training.mixed_precision_reduce != "bfloat16",
        "replicas": layout.dp_replicate > 1 or parallelism.defer_gradient_sync != "replicas",
        "gradient accumulation": batch.accumulation > 1,
        "no pipeline parallel": layout.pp == 1,
        "tensor parallel": layout.tp > 1,
        "no ulysses": parallelism.context_parallel_rotate_method != "ulysses",
    }
