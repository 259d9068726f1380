"""Keys that are set although they only tune a feature that is off: accepted, and named in one line at the start."""

from fnmatch import fnmatchcase

from titanlite.config.rules.data import is_streamed
from titanlite.config.schema import KEYS, JobConfig, value_of

_CHECKPOINT = "folder interval* async_mode keep_* last_save_model_only export_dtype enable_first* on_failure"
_TUNED_BY = {  # a key that may be off (false, 0 or empty): patterns of the keys that do nothing without it
    "validation.enable": "validation.* training.dataloader.persistent_workers",
    "training.dataloader.num_workers": "training.dataloader.prefetch_factor training.dataloader.persistent_workers",
    "optimizer.weight_decay": "optimizer.no_decay",
    "compile.components": "compile.*",
    "compile.enable": "compile.*",
    "quantize.linear.float8.enable": "quantize.linear.float8.*",
    "checkpoint.initial_load_path": "checkpoint.initial_load_model_only",
    "checkpoint.keep_latest_k": "checkpoint.keep_every",  # all are kept
    "checkpoint.enable": " ".join(
        ["fault.m* fault.grace_seconds", *(f"checkpoint.{name}" for name in _CHECKPOINT.split())]
    ),
    "generate.at_end": "generate.*",
    "metrics.enable_tensorboard": "metrics.save_tb_folder",
    "profiling.enable_profiling": "profiling.save_traces_folder profiling.profiler_*",
    "profiling.enable_memory_snapshot": "profiling.save_memory_snapshot_folder",
    "fault.spike_sigma": "fault.spike_window fault.on_spike",
    "comm.trace_buf_size": "comm.save_traces_folder",
}


def keys_of_what_is_off(config: JobConfig) -> dict[str, str]:
    """Return the keys that are set but only tune a feature that is off, each with the reason."""
    reasons = [(f"without {key}", tuned) for key, tuned in _TUNED_BY.items() if not value_of(config, key)]
    reasons += _other_reasons(config)
    is_set = [key for key in KEYS if value_of(config, key) != KEYS[key].default]
    return {k: why for why, tuned in reasons for k in is_set if any(fnmatchcase(k, p) for p in tuned.split())}


def _other_reasons(config: JobConfig) -> list[tuple[str, str]]:
    """Return features that are off by several keys or by a value, and patterns of the keys that do nothing then."""
    training, validation, parallelism = config.training, config.validation, config.parallelism
    schedule, mode, saving = config.lr_scheduler, config.activation_checkpoint.mode, config.checkpoint
    all_warmup = schedule.warmup_steps >= (schedule.total_steps or training.steps)
    datasets = [training.dataset] * (not training.mixture) + [validation.dataset] * validation.enable
    fault, on_spike = config.fault, config.fault.on_spike if config.fault.spike_sigma else "warn"
    verifies = saving.enable or (saving.initial_load_path and not saving.initial_load_in_hf)
    is_off = {
        'without activation_checkpoint.mode "selective"': (mode != "selective", "*.selective_ac_option"),
        'without activation_checkpoint.mode "memory_budget"': (mode != "memory_budget", "*.memory_budget"),
        "without recomputation of blocks": (mode not in ("full", "selective"), "*.preserve_rng_state *.early_stop"),
        "without steps of decay": (
            all_warmup if schedule.decay_ratio is None else not schedule.decay_ratio,
            "*.decay_type *.min_lr_factor",
        ),
        "without a streamed data set": (not any(map(is_streamed, datasets)), "*.stall_timeout_seconds"),
        "without pipeline parallel": (
            parallelism.pipeline_parallel_degree == 1,
            "*.pipeline_parallel_* *.module_fqns_per_model_part",
        ),
        "with module_fqns_per_model_part": (
            bool(parallelism.module_fqns_per_model_part and parallelism.pipeline_parallel_degree > 1),
            "*_layers_per_stage *_stage_less_layers",
        ),
        "without context parallel": (parallelism.context_parallel_degree == 1, "*.context_parallel_*"),
        "without checkpoint.enable or initial_load_path": (
            not (saving.enable or saving.initial_load_path),
            "*.exclude_from_loading comm.checkpoint_timeout_seconds",
        ),
        "without a checkpoint to verify": (not verifies, "*.verify_on_load"),
        "without traces or snapshots": (
            not (config.profiling.enable_profiling or config.profiling.enable_memory_snapshot),
            "*.profile_freq",
        ),
        "without steps to skip": (not (fault.on_nonfinite == "skip" or on_spike == "skip"), "fault.skip_budget"),
        'without fault.on_spike "rollback"': (on_spike != "rollback", "fault.rollback_budget"),
        "on a CPU": (config.job.device == "cpu", "comm.trace_buf_size comm.save_traces_folder"),
    }
    return [(why, tuned) for why, (off, tuned) in is_off.items() if off]
