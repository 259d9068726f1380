"""Keys of TorchTitan (its TOML era, up to v0.2.2) that titanlite does not have, and where it differs.

A foreign key is accepted at a value that asks for nothing, and refused by name otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RENAMED = {"experimental.custom_import": "model.package"}
"""Old spellings that still work."""

FLOAT8_CONVERTERS = ("float8", "quantize.linear.float8")
"""Entries of model.converters that switch [quantize.linear.float8] on."""


@dataclass(frozen=True)
class Foreign:
    """Values that ask for nothing (None: every value), and what to use instead of the others."""

    off: tuple[Any, ...] | None
    instead: str


def _off(*values: Any, instead: str) -> Foreign:
    return Foreign(values, instead)


def _spelled(new: str) -> Foreign:
    return Foreign((), f"it is spelled {new} here")


_TUNES = Foreign(None, "")

FOREIGN: dict[str, Foreign] = {
    "job.use_for_integration_test": _TUNES,
    "job.print_args": _spelled("job.print_config"),
    "job.custom_config_module": _off("", instead="a model's own settings are fields of its flavor"),
    "model.tokenizer_path": _spelled("model.hf_assets_path"),
    "model.print_after_conversion": _off(False, instead="there is no such print"),
    "optimizer.early_step_in_backward": _off(False, instead="it cannot be combined with gradient clipping"),
    "lr_scheduler.lr_min": _spelled("lr_scheduler.min_lr_factor"),
    "training.batch_size": _spelled("training.local_batch_size"),
    "training.compile": _spelled("compile.enable"),
    "training.seed": _spelled("debug.seed"),
    "training.deterministic": _spelled("debug.deterministic"),
    "training.gc_debug": _off(False, instead="there is no such mode"),
    "training.dataloader.shuffle": _off(True, instead="samples are always shuffled, the same on every mesh"),
    "parallelism.enable_compiled_autograd": _off(False, instead="compile works per block: [compile]"),
    "parallelism.module_fqns_per_model_part": _off(None, [], "none", instead="pipeline parallel is not built yet"),
    "parallelism.pipeline_parallel_split_points": _off([], "", instead="pipeline parallel is not built yet"),
    "parallelism.pipeline_parallel_layers_per_stage": _TUNES,
    "parallelism.pipeline_parallel_first_stage_less_layers": _TUNES,
    "parallelism.pipeline_parallel_last_stage_less_layers": _TUNES,
    "parallelism.pipeline_parallel_schedule_csv": _off("", instead="pipeline parallel is not built yet"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": _TUNES,
    "parallelism.context_parallel_rotate_method": _TUNES,
    "parallelism.expert_tensor_parallel_degree": _off(1, instead="expert parallel is not built yet"),
    "parallelism.expert_parallel_comm_backend": _TUNES,
    "checkpoint.enable_checkpoint": _spelled("checkpoint.enable"),
    "checkpoint.model_weights_only": _spelled("checkpoint.last_save_model_only"),
    "checkpoint.last_save_model_weights_only": _spelled("checkpoint.last_save_model_only"),
    "checkpoint.create_seed_checkpoint": _off(
        False, instead="initial weights are the same on every mesh: set debug.seed"
    ),
    "checkpoint.initial_load_in_hf_quantized": _off(False, instead="quantized folders are not read"),
    "checkpoint.load_only": _off(False, instead="there is no such mode"),
    "checkpoint.enable_ft_dataloader_checkpoints": _TUNES,
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": _TUNES,
    "activation_checkpoint.visualize_memory_budget_pareto": _off(False, instead="there is no such plot"),
    "activation_checkpoint.determinism_check": _TUNES,
    "activation_checkpoint.debug": _off(False, instead="there is no such mode"),
    "quantize.linear.float8.force_recompute_fp8_weight_in_bwd": _off(False, instead="it is not offered"),
    "quantize.linear.float8.pad_inner_dim": _off(False, instead="it is not offered"),
    "metrics.save_for_all_ranks": _off(False, instead="rank 0 logs for the job; every rank has its log file"),
    "validation.enabled": _spelled("validation.enable"),
    "memory_estimation.enable": _off(False, instead="the start prints memory per rank"),
    "memory_estimation.enabled": _off(False, instead="the start prints memory per rank"),
    "memory_estimation.disable_fake_mode": _TUNES,
    "fault_tolerance.enable": _off(False, instead="TorchFT is not supported"),
    "experimental.custom_args_module": _off("", instead="a model's own settings are fields of its flavor"),
    "experimental.custom_model_path": _off("", instead="use model.package"),
    "comm.save_traces_file_prefix": _TUNES,
    "comm.mode": _off("default", instead="there are no simulated modes"),
    "debug.deterministic_warn_only": _off(False, instead="an operation without a deterministic form is an error"),
    "debug.moe_force_load_balance": _TUNES,
}

FOREIGN_SECTIONS: dict[str, Foreign] = {
    "fault_tolerance": _TUNES,  # behind fault_tolerance.enable
    "quantize.linear.mx": _TUNES,  # behind model.converters
    "quantize.grouped_mm": _TUNES,  # behind model.converters
    "mx": _TUNES,
    "float8": Foreign((), "the section is spelled [quantize.linear.float8] here"),
}


def foreign(key: str) -> Foreign | None:
    """What is known of a TorchTitan key, or None."""
    if key in FOREIGN:
        return FOREIGN[key]
    return next((known for section, known in FOREIGN_SECTIONS.items() if key.startswith(section + ".")), None)


DIFFERENT = {
    "training.dataset": 'TorchTitan: "c4_test"',
    "optimizer.no_decay": "TorchTitan decays all parameters",
    "activation_checkpoint.mode": 'TorchTitan: "selective"',
    "checkpoint.last_save_model_only": "TorchTitan: true",
}
"""Keys whose default or meaning is another than TorchTitan's."""

NEW = {
    "job.device", "model.package", "model.freeze", "model.overrides",
    "training.packing", "training.document_mask", "training.repeat", "training.loss_chunks", "training.mixture",
    "training.dataloader.stall_timeout_seconds",
    "optimizer.no_decay", "optimizer.state_dtype",
    "parallelism.fsdp_forward_prefetch", "parallelism.fsdp_backward_prefetch", "parallelism.fsdp_keep_whole",
    "parallelism.fsdp_blocks_per_group", "parallelism.defer_gradient_sync",
    "quantize.linear.float8.enable",
    "checkpoint.interval_minutes", "checkpoint.keep_every", "checkpoint.on_failure", "checkpoint.verify_on_load",
    "generate.prompt", "generate.tokens", "generate.temperature", "generate.at_end",
    "comm.checkpoint_timeout_seconds",
}  # fmt: skip
"""Keys that TorchTitan does not have."""
