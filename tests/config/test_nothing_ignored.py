"""A key that is set changes the run, is reported as having no effect, or is refused."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import TEXT, TINY, keeping_log, trainer, weights
from tests.lanes import sample
from tests.runs import ROOT, records
from titanlite.config.schema import KEYS
from titanlite.train.summary import describe_start

TIMES = {"tps", "tflops", "mfu", "step_seconds", "data_seconds", "memory_gib"}
TIMES |= {"step_seconds_p50", "step_seconds_p95", "eta_seconds", "time"}
TIMES |= {f"checkpoint_{what}_seconds" for what in ("blocked", "staging", "write")}


def observe(argv: list[str], folder: str) -> dict[str, Any]:
    """Train, and return what a run shows except for times."""
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    try:
        run.train()
        outcome = "reached"
    except Exception as error:
        outcome = repr(error)
    loader, optimizer = run.batches.loader, run.runner.optimizer
    files = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
    return {
        "outcome": outcome,
        "metrics": [
            {key: value for key, value in record.items() if key not in TIMES}
            for record in records(Path(folder))
        ],
        "weights": {
            name: (str(weight.dtype), hashlib.sha256(weight.numpy().tobytes()).hexdigest())
            for name, weight in weights(run).items()
        },
        "log": [line for line in lines if not line.startswith(("step:", "a sample, at", "saved "))],
        "start": describe_start(run),
        "files": sorted(re.sub(r"events\..*", "events", file) for file in files),
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "optimizer": [str(optimizer.defaults.get(key)) for key in ("fused", "foreach")],
        "loader": [loader.num_workers, loader.prefetch_factor, loader.persistent_workers],
    }


VALIDATING = "--validation.enable --validation.steps=2 --validation.freq=2"
SAMPLING = "--generate.at_end --generate.tokens=5"
PROFILED = "--profiling.enable_profiling --profiling.profile_freq=3 --profiling.profiler_warmup=1"
RAISED = "--training.steps=6 --lr_scheduler.warmup_steps=0"

# key: (flipped value, other options of both runs)
FLIPS: dict[str, tuple[str, str]] = {
    "job.description": ("other", ""),
    "model.freeze": ("['tok_embeddings.*']", ""),
    "training.dataset": ("python-stdlib --training.dataset_path=", ""),
    "training.dataset_path": (f"{TEXT / 'held_out'}", ""),
    "training.local_batch_size": ("4", ""),
    "training.global_batch_size": ("4", ""),
    "training.seq_len": ("8", ""),
    "training.max_norm": ("0.01", "--optimizer.name=SGD"),
    "training.steps": ("4", ""),
    "training.text_key": ("other", "--training.dataset_path={lines}"),
    "training.mixed_precision_param": ("bfloat16", ""),
    "training.mixed_precision_reduce": ("bfloat16", "--training.mixed_precision_param=bfloat16"),
    "training.dataloader.num_workers": ("1", ""),
    "training.dataloader.prefetch_factor": ("3", "--training.dataloader.num_workers=1"),
    "training.dataloader.persistent_workers": (
        "true",
        f"--training.dataloader.num_workers=1 {VALIDATING}",
    ),
    "lora.alpha": ("1.0", "--lora.rank=2"),
    "lora.patterns": ('["*.wq"]', "--lora.rank=2"),
    "lora.dropout": ("0.5", "--lora.rank=2"),
    "optimizer.name": ("SGD", ""),
    "optimizer.lr": ("0.1", ""),
    "optimizer.beta1": ("0.5", ""),
    "optimizer.beta2": ("0.5", ""),
    "optimizer.eps": ("0.1", ""),
    "optimizer.weight_decay": ("0.5", ""),
    "optimizer.implementation": ("foreach", ""),
    "optimizer.no_decay": ("[]", ""),
    "lr_scheduler.warmup_steps": ("2", ""),
    "lr_scheduler.total_steps": ("9", RAISED),
    "lr_scheduler.decay_ratio": ("0.5", RAISED),
    "lr_scheduler.decay_type": ("cosine", RAISED),
    "lr_scheduler.min_lr_factor": ("0.5", RAISED),
    "validation.enable": ("true", "--validation.steps=1"),
    "validation.dataset": ("python-stdlib --validation.dataset_path=", VALIDATING),
    "validation.dataset_path": (f"{TEXT / 'train'}", VALIDATING),
    "validation.local_batch_size": ("3", VALIDATING),
    "validation.seq_len": ("8", VALIDATING),
    "validation.freq": ("1", VALIDATING),
    "validation.steps": ("1", VALIDATING),
    "generate.at_end": ("true", "--generate.tokens=5"),
    "generate.prompt": ("import", SAMPLING),
    "generate.tokens": ("9", SAMPLING),
    "generate.temperature": ("0.0", SAMPLING),
    "metrics.log_freq": ("4", "--training.steps=6"),
    "metrics.save_tb_folder": ("events", "--metrics.enable_tensorboard"),
    "profiling.save_traces_folder": ("elsewhere", PROFILED),
    "debug.seed": ("1", ""),
    "checkpoint.folder": ("saved", "--checkpoint.enable"),
}
SHOWN_BY = {  # a file of tests: the keys whose effect it shows
    "checkpoint/test_huggingface.py": "checkpoint.initial_load_in_hf checkpoint.last_save_in_hf "
    "checkpoint.export_dtype",
    "checkpoint/test_load.py": "checkpoint.load_step checkpoint.initial_load_path "
    "checkpoint.initial_load_model_only checkpoint.exclude_from_loading checkpoint.verify_on_load",
    "checkpoint/test_save.py": "checkpoint.enable checkpoint.interval checkpoint.keep_latest_k "
    "checkpoint.keep_every checkpoint.enable_first_step_checkpoint checkpoint.interval_minutes "
    "checkpoint.on_failure checkpoint.last_save_model_only checkpoint.async_mode fault.mtbf_hours",
    "config/test_faults.py": "model.name model.flavor training.dtype "
    "parallelism.data_parallel_shard_degree",
    "config/test_moot.py": "training.dataloader.pin_memory profiling.enable_memory_snapshot "
    "profiling.save_memory_snapshot_folder",
    "config/test_pipeline.py": "parallelism.pipeline_parallel_degree "
    "parallelism.pipeline_parallel_schedule "
    "parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_layers_per_stage "
    "parallelism.pipeline_parallel_first_stage_less_layers "
    "parallelism.pipeline_parallel_last_stage_less_layers "
    "parallelism.module_fqns_per_model_part",
    "data/test_sources.py": "model.hf_assets_path",
    "data/test_windows.py": "training.packing training.document_mask training.mixture",
    "faults/test_beat.py": "fault.stall_seconds",
    "faults/test_decide.py": "fault.rejoin_seconds",
    "faults/test_restart.py": "fault.max_restarts fault.min_nodes fault.spare_nodes",
    "faults/test_stop.py": "fault.grace_seconds fault.stop_after_minutes",
    "gpu/test_steps.py": "parallelism.fsdp_separate_reduce_scatter_group",
    "jobs.py": "job.dump_folder model.overrides",
    "launch/test_after_save.py": "checkpoint.after_save",
    "launch/test_launch.py": "job.print_config job.device training.repeat",
    "launch/test_nodes.py": "comm.init_timeout_seconds",
    "launch/test_terminal.py": "metrics.disable_color_printing",
    "models/test_outside.py": "model.package",
    "observe/test_profiler.py": "profiling.enable_profiling profiling.profile_freq "
    "profiling.profiler_active profiling.profiler_warmup",
    "observe/test_sinks.py": "metrics.enable_tensorboard metrics.enable_wandb",
    "observe/test_trackers.py": "metrics.sinks",
    "optim/test_bf16_state.py": "optimizer.state_dtype",
    "optim/test_streamed.py": "optimizer.state_on optimizer.state_folder",
    "optim/test_update.py": "fault.on_nonfinite fault.skip_budget fault.spike_sigma "
    "fault.spike_window fault.on_spike fault.rollback_budget",
    "parallel/float8/test_converters.py": "model.converters quantize.linear.float8.filter_fqns",
    "parallel/float8/test_float8.py": "quantize.linear.float8.enable "
    "quantize.linear.float8.recipe_name "
    "quantize.linear.float8.enable_fsdp_float8_all_gather "
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "parallel/float8/jobs.py": "quantize.linear.float8.emulate",
    "parallel/rows.py": "parallelism.data_parallel_replicate_degree "
    "parallelism.context_parallel_rotate_method parallelism.tensor_parallel_degree "
    "parallelism.expert_parallel_degree parallelism.defer_gradient_sync",
    "parallel/test_active.py": "parallelism.fsdp_forward_prefetch "
    "parallelism.fsdp_backward_prefetch "
    "parallelism.fsdp_reshard_after_forward parallelism.fsdp_blocks_per_group "
    "parallelism.fsdp_keep_whole parallelism.enable_fsdp_symm_mem training.enable_cpu_offload "
    "activation_checkpoint.mode activation_checkpoint.selective_ac_option "
    "activation_checkpoint.early_stop activation_checkpoint.preserve_rng_state "
    "activation_checkpoint.memory_budget compile.enable compile.components compile.backend "
    "compile.mode compile.cache_folder",
    "parallel/test_context.py": "parallelism.context_parallel_degree "
    "parallelism.context_parallel_load_balancer",
    "parallel/test_expert.py": "debug.moe_force_load_balance",
    "parallel/test_lora.py": "lora.rank",
    "parallel/test_tensor.py": "parallelism.disable_loss_parallel "
    "parallelism.enable_async_tensor_parallel",
    "runtime/test_distributed.py": "comm.trace_buf_size comm.save_traces_folder "
    "comm.checkpoint_timeout_seconds",
    "stores/test_bucket.py": "checkpoint.upload_parallel checkpoint.part_mib "
    "checkpoint.stall_timeout_seconds",
    "train/test_chunked_loss.py": "training.loss_chunks",
    "train/test_rank_facts.py": "fault.preflight",
    "train/test_trainer.py": "debug.deterministic training.gc_freq comm.train_timeout_seconds",
}


def test_every_key_is_flipped_here_or_shown_by_a_file_that_has_at_least_its_last_word():
    shown = {key: file for file, keys in SHOWN_BY.items() for key in keys.split()}
    assert KEYS.keys() == FLIPS.keys() | shown.keys()
    texts = {file: (ROOT / "tests" / file).read_text() for file in SHOWN_BY}
    words = {file: {*re.split(r"[\W_]+", text)} for file, text in texts.items()}
    assert not [key for key, file in shown.items() if re.split(r"[._]", key)[-1] not in words[file]]


@pytest.fixture(scope="module")
def observed(pool, tmp_path_factory):
    """Return a function that trains with some options, once, and returns what the run shows."""
    lines = tmp_path_factory.mktemp("lines") / "two.jsonl"
    lines.write_text(json.dumps({"text": "abc " * 30, "other": "hij " * 30}))

    @cache
    def run(options: str, world: int = 1) -> dict[str, Any]:
        options = options.format(lines=lines)
        argv = [*TINY, "--lr_scheduler.warmup_steps=0", *options.split()]
        return pool.run(observe, argv, str(tmp_path_factory.mktemp("run")), world=world)[0]

    return run


SAMPLED = (
    "job.description model.freeze training.steps training.dataloader.num_workers "
    "optimizer.implementation optimizer.no_decay lr_scheduler.warmup_steps validation.enable "
    "generate.prompt metrics.save_tb_folder"
).split()
"""One for each way in which a run shows an effect."""


@pytest.mark.parametrize("key", sample(FLIPS, *SAMPLED))
def test_a_flipped_key_changes_the_run(observed, key):
    value, others = FLIPS[key]
    world = 2 if key == "training.mixed_precision_reduce" else 1  # one rank has nothing to reduce
    changed, plain = observed(f"{others} --{key}={value}", world), observed(others, world)
    # What the start prints of other keys only repeats the config.
    assert any(changed[what] != plain[what] for what in plain if what != "start") or (
        key == "job.description" and changed["start"] != plain["start"]
    )


def test_two_runs_of_one_config_show_the_same(observed):
    assert observed("") == observed("--training.seq_len=16")
