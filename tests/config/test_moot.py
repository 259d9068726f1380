"""Every key against a run in which it has nothing to do: it is named as without effect, or refused."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.jobs import TINY, job
from titanlite.config.job import Job
from titanlite.config.load import ConfigError
from titanlite.config.schema import KEYS, Mixture, value_of
from titanlite.config.toml import toml_value
from titanlite.errors import UserError
from titanlite.launch.preflight import check_machine

FLOAT8, MODE = "quantize.linear.float8", "activation_checkpoint.mode"
ON, SELECTIVE = f"--{FLOAT8}.enable", f"--{MODE}=selective"
LOADS, ALONE = "without checkpoint.enable or initial_load_path", "on 1 rank"
NO_EFFECT = {  # key: (a value, why it has no effect, further options of the run)
    "training.mixed_precision_reduce": ("bfloat16", ALONE, ""),
    "training.dataloader.persistent_workers": ("true", "without training.dataloader.num_workers", ""),
    "training.dataloader.prefetch_factor": ("3", "without training.dataloader.num_workers", ""),
    "training.dataloader.stall_timeout_seconds": ("5.0", "without a streamed data set", ""),
    "optimizer.no_decay": ("[]", "without optimizer.weight_decay", "--optimizer.weight_decay=0.0"),
    "lr_scheduler.decay_type": ("cosine", "without steps of decay", "--lr_scheduler.decay_ratio=0.0"),
    "lr_scheduler.min_lr_factor": ("0.5", "without steps of decay", "--lr_scheduler.warmup_steps=3"),
    "parallelism.fsdp_reshard_after_forward": ("2", ALONE, ""),
    "parallelism.fsdp_forward_prefetch": ("2", ALONE, ""),
    "parallelism.fsdp_backward_prefetch": ("2", ALONE, ""),
    "parallelism.fsdp_keep_whole": ("['norm.weight']", ALONE, ""),
    "parallelism.fsdp_blocks_per_group": ("2", ALONE, ""),
    "parallelism.defer_gradient_sync": ("true", ALONE, "--training.global_batch_size=4"),
    "parallelism.disable_loss_parallel": ("true", ALONE, ""),
    "parallelism.enable_async_tensor_parallel": ("true", ALONE, "--compile.enable"),
    "parallelism.pipeline_parallel_schedule": ("Interleaved1F1B", "without pipeline parallel", ""),
    "parallelism.pipeline_parallel_schedule_csv": ("a.csv", "without pipeline parallel", ""),
    "parallelism.pipeline_parallel_microbatch_size": ("2", "without pipeline parallel", ""),
    "parallelism.module_fqns_per_model_part": ("[['norm']]", "without pipeline parallel", ""),
    "parallelism.pipeline_parallel_layers_per_stage": ("2", "without pipeline parallel", ""),
    "parallelism.pipeline_parallel_first_stage_less_layers": ("2", "without pipeline parallel", ""),
    "parallelism.pipeline_parallel_last_stage_less_layers": ("2", "without pipeline parallel", ""),
    "parallelism.context_parallel_load_balancer": ("none", "without context parallel", ""),
    "parallelism.context_parallel_rotate_method": ("ulysses", "without context parallel", ""),
    "activation_checkpoint.selective_ac_option": ("99", f'without {MODE} "selective"', f"--{MODE}=full"),
    "activation_checkpoint.memory_budget": ("0.25", f'without {MODE} "memory_budget"', f"--{MODE}=full"),
    "activation_checkpoint.preserve_rng_state": ("false", "without recomputation of blocks", ""),
    "activation_checkpoint.early_stop": ("true", "without recomputation of blocks", ""),
    "compile.enable": ("true", "without compile.components", "--compile.components=[]"),
    "compile.components": ("['loss']", "without compile.enable", ""),
    "compile.backend": ("eager", "without compile.enable", ""),
    f"{FLOAT8}.recipe_name": ("rowwise", f"without {FLOAT8}.enable", ""),
    f"{FLOAT8}.enable_fsdp_float8_all_gather": ("true", ALONE, ON),
    f"{FLOAT8}.precompute_float8_dynamic_scale_for_fsdp": (
        "true",
        ALONE,
        f"{ON} --{FLOAT8}.enable_fsdp_float8_all_gather",
    ),
    f"{FLOAT8}.filter_fqns": ("['wq']", f"without {FLOAT8}.enable", ""),
    f"{FLOAT8}.emulate": ("true", f"without {FLOAT8}.enable", ""),
    "checkpoint.folder": ("saved", "without checkpoint.enable", ""),
    "checkpoint.interval": ("7", "without checkpoint.enable", ""),
    "checkpoint.interval_minutes": ("7.0", "without checkpoint.enable", ""),
    "checkpoint.async_mode": ("async", "without checkpoint.enable", ""),
    "checkpoint.keep_latest_k": ("7", "without checkpoint.enable", ""),
    "checkpoint.keep_every": (
        "7",
        "without checkpoint.keep_latest_k",
        "--checkpoint.enable --checkpoint.keep_latest_k=0",
    ),
    "checkpoint.initial_load_model_only": ("false", "without checkpoint.initial_load_path", "--checkpoint.enable"),
    "checkpoint.exclude_from_loading": ("['data']", LOADS, ""),
    "checkpoint.last_save_model_only": ("true", "without checkpoint.enable", ""),
    "checkpoint.export_dtype": ("bfloat16", "without checkpoint.enable", ""),
    "checkpoint.enable_first_step_checkpoint": ("true", "without checkpoint.enable", ""),
    "checkpoint.on_failure": ("warn", "without checkpoint.enable", ""),
    "fault.grace_seconds": ("7", "without checkpoint.enable", ""),
    "checkpoint.verify_on_load": (
        "sizes",
        "without a checkpoint to verify",
        "--checkpoint.initial_load_path=a --checkpoint.initial_load_in_hf",
    ),
    "validation.dataset": ("python-stdlib", "without validation.enable", ""),
    "validation.dataset_path": ("/data", "without validation.enable", ""),
    "validation.local_batch_size": ("7", "without validation.enable", ""),
    "validation.seq_len": ("7", "without validation.enable", ""),
    "validation.freq": ("7", "without validation.enable", ""),
    "validation.steps": ("7", "without validation.enable", ""),
    "generate.prompt": ("import", "without generate.at_end", ""),
    "generate.tokens": ("7", "without generate.at_end", ""),
    "generate.temperature": ("0.0", "without generate.at_end", ""),
    "metrics.save_tb_folder": ("events", "without metrics.enable_tensorboard", ""),
    "profiling.save_traces_folder": ("traces", "without profiling.enable_profiling", ""),
    "profiling.profile_freq": ("7", "without traces or snapshots", ""),
    "profiling.profiler_active": ("2", "without profiling.enable_profiling", ""),
    "profiling.profiler_warmup": ("2", "without profiling.enable_profiling", ""),
    "profiling.save_memory_snapshot_folder": ("memory", "without profiling.enable_memory_snapshot", ""),
    "comm.checkpoint_timeout_seconds": ("7", LOADS, ""),
    "comm.trace_buf_size": ("7", "on a CPU", ""),
    "fault.skip_budget": ("7", "without steps to skip", "--fault.spike_sigma=6.0"),
    "fault.spike_window": ("7", "without fault.spike_sigma", ""),
    "fault.on_spike": ("skip", "without fault.spike_sigma", ""),
    "fault.rollback_budget": ("7", 'without fault.on_spike "rollback"', "--fault.on_nonfinite=skip"),
    "debug.moe_force_load_balance": ("true", "without experts", ""),
    "fault.max_restarts": ("0", "without checkpoint.enable", ""),
    "fault.min_nodes": ("1", "without checkpoint.enable", ""),
    "comm.save_traces_folder": ("nccl", "without comm.trace_buf_size", "--comm.trace_buf_size=0 --job.device=auto"),
}
MIXTURE = '--training.mixture=[{dataset="python-stdlib",weight=1.0}]'
REFUSED = {  # key: (a value, part of the message, further options of the run)
    "training.dataset": ("c4", "every source of training.mixture has its own dataset; remove the key", MIXTURE),
    "training.dataset_path": ("/a", "every source of training.mixture has its own dataset_path", MIXTURE),
    "training.repeat": ("false", "every source of a mixture repeats", MIXTURE),
    "training.dataloader.pin_memory": ("true", "pinned memory is for copies to a GPU", ""),
    "optimizer.beta1": ("0.5", "SGD does not use this key", "--optimizer.name=SGD"),
    "optimizer.beta2": ("0.5", "SGD does not use this key", "--optimizer.name=SGD"),
    "optimizer.eps": ("0.5", "SGD does not use this key", "--optimizer.name=SGD"),
    "optimizer.state_dtype": ("bfloat16", "SGD does not use this key", "--optimizer.name=SGD"),
    "activation_checkpoint.selective_ac_option": ("99", "the model has 2 blocks; at most 2", SELECTIVE),
    "profiling.enable_memory_snapshot": ("true", "records a GPU's allocator", ""),
    "checkpoint.load_step": ("7", "nothing is resumed with checkpoint.enable = false", ""),
    "fault.stop_after_minutes": ("7.0", "nothing is saved with checkpoint.enable = false", ""),
    "checkpoint.last_save_in_hf": ("true", "nothing is saved with checkpoint.enable = false", ""),
    "checkpoint.initial_load_in_hf": ("true", "needs a folder in checkpoint.initial_load_path", ""),
}
NEVER_MOOT = """
job.dump_folder job.description job.print_config job.device job.plan
model.name model.flavor model.hf_assets_path model.converters model.package model.freeze model.overrides
training.local_batch_size training.global_batch_size training.seq_len training.max_norm training.steps
training.dtype training.mixed_precision_param training.enable_cpu_offload training.gc_freq training.packing
training.document_mask training.loss_chunks training.mixture training.dataloader.num_workers
optimizer.name optimizer.lr optimizer.weight_decay optimizer.implementation
lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
parallelism.tensor_parallel_degree parallelism.context_parallel_degree parallelism.pipeline_parallel_degree
parallelism.expert_parallel_degree activation_checkpoint.mode quantize.linear.float8.enable
checkpoint.enable checkpoint.initial_load_path validation.enable generate.at_end
metrics.log_freq metrics.enable_tensorboard metrics.enable_wandb metrics.disable_color_printing
profiling.enable_profiling comm.init_timeout_seconds comm.train_timeout_seconds fault.stall_seconds fault.preflight
fault.rejoin_seconds
debug.seed debug.deterministic
fault.on_nonfinite fault.spike_sigma
""".split()
"""Keys that change every run, or whose pattern that matches nothing is an error."""


def test_every_key_has_a_run_in_which_it_is_moot_or_never_is():
    assert KEYS.keys() - NO_EFFECT.keys() - REFUSED.keys() == set(NEVER_MOOT)


@cache
def job_with(options: str) -> Job:
    return job([*TINY, *options.split()], world=1)


@pytest.mark.parametrize("key", NO_EFFECT)
def test_a_key_without_effect_is_named_with_the_reason_and_does_nothing(key):
    """The run is given the same config as without the key; only what is written to files has its value."""
    value, why, others = NO_EFFECT[key]
    plain = job_with(others)
    flipped = job([*TINY, *others.split(), f"--{key}={value}"], world=1)
    reasons = dict(part.split(": ") for part in flipped.no_effect.removeprefix("no effect ").split("; "))
    assert key in reasons[why].split(", ")
    assert flipped.config == plain.config
    assert toml_value(value_of(flipped.given, key)).strip('"').replace('"', "'") == value


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_contradicts_another_is_refused(key):
    value, says, others = REFUSED[key]
    with pytest.raises(ConfigError) as caught:
        job([*TINY, *filter(None, [others]), f"--{key}={value}"], world=1)
    assert f"{key} = " in str(caught.value) and value in str(caught.value) and says in str(caught.value)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ('dataset="python-stdlib",dataset_path="/a"', 'has no path; remove dataset_path = "/a"'),
        ('dataset="text"', "needs a folder or file in dataset_path"),
        ('dataset="c4"', '"c4" is streamed'),
    ],
)
def test_a_key_of_a_mixture_that_does_nothing_is_refused(part, says):
    assert set(Mixture.model_fields) == {"dataset", "dataset_path", "weight"}  # weights always count
    with pytest.raises(ConfigError, match=says):
        job([*TINY, f"--training.mixture=[{{{part},weight=1.0}}]"], world=1)


def test_an_unknown_compiler_backend_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.compiler, "list_backends", lambda exclude_tags=("debug",): ["inductor", "tvm"])
    options = [*TINY, f"--job.dump_folder={tmp_path}", "--compile.enable"]
    with pytest.raises(UserError) as caught:
        check_machine(job([*options, "--compile.backend=foo"], world=1), "cpu", 1)
    assert 'compile.backend = "foo" is not a backend of the compiler; legal: aot_eager, eager, inductor, tvm' in str(
        caught.value
    )
    check_machine(job([*options, "--compile.backend=tvm"], world=1), "cpu", 1)


@pytest.mark.long
def test_torch_knows_the_backends_that_need_no_question(tmp_path):
    backends = torch.compiler.list_backends(exclude_tags=())
    assert "foo" not in backends and {"inductor", "aot_eager", "eager"} <= set(backends)
