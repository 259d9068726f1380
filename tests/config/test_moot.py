"""A key that has nothing to do in a run is reported as having no effect, or refused: every key,
every need.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.jobs import MOE, TINY, job
from tests.messages import refused
from titanlite.config.job import job_from
from titanlite.config.legal import legal_words
from titanlite.config.load import ConfigError, parse_command_line
from titanlite.config.schema import KEYS, NEEDS, MixtureEntry
from titanlite.config.section import value_of
from titanlite.config.toml import toml_value
from titanlite.launch.preflight import check_machine

MODE = "activation_checkpoint.mode"
SPLIT = "--model.overrides.n_kv_heads=2 --parallelism.tensor_parallel_degree=2"
STAGES = "--parallelism.pipeline_parallel_degree=2"
LOOPED = f"{STAGES} --parallelism.pipeline_parallel_schedule=LoopedBFS"
SAVING = "--checkpoint.enable --checkpoint.async_mode=disabled"
WHOLE = "in a schedule that gathers whole stages"
FLOAT8 = "--quantize.linear.float8.enable"
GATHERED = "quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTED = "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
NAMED = (
    "--parallelism.module_fqns_per_model_part="
    "[['tok_embeddings','layers.0'],['layers.1','norm','output']]"
)
ULYSSES = (
    "--parallelism.context_parallel_degree=2 --parallelism.context_parallel_rotate_method=ulysses"
)
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
ACCUMULATED = "--training.global_batch_size=32"
BY_DEFAULT = {  # what a run on one rank lacks: a key that needs it, and a value
    "without pipeline parallel": "parallelism.pipeline_parallel_microbatch_size=2",
    "without context parallel": "parallelism.context_parallel_rotate_method=ulysses",
    "without recomputation of blocks": "activation_checkpoint.early_stop=true",
    "without compile.enable": "compile.backend=eager",
    "without quantize.linear.float8.enable": "quantize.linear.float8.recipe_name=rowwise",
    "without training.dataloader.num_workers": "training.dataloader.prefetch_factor=3",
    "without checkpoint.enable": "checkpoint.interval=7",
    "without checkpoint.enable or initial_load_path": "checkpoint.exclude_from_loading=['data']",
    "without lora.rank": "lora.alpha=1.0",
    "without validation.enable": "validation.freq=7",
    "without generate.at_end": "generate.temperature=0.0",
    "without metrics.enable_tensorboard": "metrics.save_tb_folder=events",
    "without profiling.enable_profiling": "profiling.profiler_active=2",
    "without traces or snapshots": "profiling.profile_freq=7",
    "without profiling.enable_memory_snapshot": "profiling.save_memory_snapshot_folder=memory",
    "on a CPU": "comm.trace_buf_size=7",
    "without fault.spike_sigma": "fault.on_spike=skip",
    "without experts": "debug.moe_force_load_balance=true",
}
BYTES = [*TINY, "--training.dataset=python-stdlib", "--training.dataset_path="]
NO_EFFECT = [  # the same, further options of the run, and ranks
    *((need, option, "", 1) for need, option in BY_DEFAULT.items()),
    ("without data parallel", "training.mixed_precision_reduce=bfloat16", SPLIT, 2),
    ("without sharding", "parallelism.fsdp_forward_prefetch=2", REPLICAS, 2),
    ("without tensor parallel", "parallelism.disable_loss_parallel=true", "", 2),
    ("without sharding", "parallelism.fsdp_blocks_per_group=2", REPLICAS, 2),
    (
        "without sharding",
        "parallelism.defer_gradient_sync=true",
        f"{REPLICAS} {ACCUMULATED}",
        2,
    ),
    ("with pipeline parallel", "parallelism.defer_gradient_sync=true", STAGES, 4),
    ("without gradient accumulation", "parallelism.defer_gradient_sync=true", "", 2),
    (
        "without replicas",
        "parallelism.defer_gradient_sync=replicas",
        "--training.global_batch_size=8",
        2,
    ),
    (
        "with parallelism.module_fqns_per_model_part",
        "parallelism.pipeline_parallel_layers_per_stage=3",
        f"{STAGES} {NAMED}",
        2,
    ),
    (
        "with ulysses",
        "parallelism.context_parallel_load_balancer=none",
        f"--model.overrides.n_kv_heads=2 {ULYSSES}",
        2,
    ),
    (
        f'without {MODE} "selective"',
        "activation_checkpoint.selective_ac_option=99",
        f"--{MODE}=full",
        1,
    ),
    (
        f'without {MODE} "memory_budget"',
        "activation_checkpoint.memory_budget=0.25",
        f"--{MODE}=full",
        1,
    ),
    ("without compile.components", "compile.enable=true", "--compile.components=[]", 1),
    ("without optimizer.weight_decay", "optimizer.no_decay=[]", "--optimizer.weight_decay=0.0", 1),
    (
        "without steps of decay",
        "lr_scheduler.decay_type=cosine",
        "--lr_scheduler.decay_ratio=0.0",
        1,
    ),
    (
        "without steps of decay",
        "lr_scheduler.min_lr_factor=0.5",
        "--lr_scheduler.warmup_steps=3",
        1,
    ),
    ('without checkpoint.interval "auto"', "fault.mtbf_hours=7.0", "--checkpoint.enable", 1),
    (
        "without checkpoint.keep_latest_k",
        "checkpoint.keep_every=7",
        "--checkpoint.enable --checkpoint.keep_latest_k=0",
        1,
    ),
    ("without checkpoints on s3, gs or az", "checkpoint.part_mib=7", "--checkpoint.enable", 1),
    (
        "without checkpoint.initial_load_path",
        "checkpoint.initial_load_model_only=false",
        "--checkpoint.enable",
        1,
    ),
    (
        "without a checkpoint to verify",
        "checkpoint.verify_on_load=sizes",
        "--checkpoint.initial_load_path=a --checkpoint.initial_load_in_hf",
        1,
    ),
    (
        "without comm.trace_buf_size",
        "comm.save_traces_folder=nccl",
        "--comm.trace_buf_size=0 --job.device=auto",
        1,
    ),
    ("without steps to skip", "fault.skip_budget=7", "--fault.spike_sigma=6.0", 1),
    (
        'without fault.on_spike "rollback"',
        "fault.rollback_budget=7",
        "--fault.on_nonfinite=skip",
        1,
    ),
    ("on a CPU", "training.dataloader.pin_memory=true", "", 1),
    ("with pinned memory on a CPU", "checkpoint.async_mode=async_with_pinned_mem", SAVING, 1),
    ('without optimizer.state_on "disk"', "optimizer.state_folder=/a", "", 1),
    (
        "with training.enable_cpu_offload, whose state is on the host",
        "optimizer.state_on=host",
        "--training.enable_cpu_offload",
        1,
    ),
    (
        "without torch.compile of the model by inductor",
        "parallelism.enable_async_tensor_parallel=true",
        SPLIT,
        2,
    ),
    (WHOLE, "parallelism.fsdp_reshard_after_forward=always", LOOPED, 4),
    (
        'for "auto" under pipeline parallel, where "default" is "never"',
        "parallelism.fsdp_reshard_after_forward=auto",
        STAGES,
        4,
    ),
    (WHOLE, "parallelism.fsdp_forward_prefetch=1", LOOPED, 4),
    (
        'under pipeline parallel without fsdp_reshard_after_forward "always"',
        "parallelism.fsdp_backward_prefetch=1",
        STAGES,
        4,
    ),
    (f"without {GATHERED}", f"{PRECOMPUTED}=true", FLOAT8, 2),
    (
        "with training.enable_cpu_offload",
        f"{PRECOMPUTED}=true",
        f"{FLOAT8} --{GATHERED} --training.enable_cpu_offload",
        2,
    ),
    ("in a run of no more than fault.spike_window steps", "fault.spike_sigma=6.0", "", 1),
]
MIXTURE = '--training.mixture=[{dataset="python-stdlib",weight=1.0}]'
SGD = "--optimizer.name=SGD"
REFUSED = {  # key: a value, what the message names beside it, further options of the run
    "training.dataset": ("c4", "training.mixture", MIXTURE),
    "training.dataset_path": ("/a", "training.mixture", MIXTURE),
    "training.repeat": ("false", "training.mixture", MIXTURE),
    "optimizer.beta1": ("0.5", "SGD", SGD),
    "optimizer.beta2": ("0.5", "SGD", SGD),
    "optimizer.eps": ("0.5", "SGD", SGD),
    "optimizer.state_dtype": ("bfloat16", "SGD", SGD),
    "optimizer.state_on": ("host", "SGD", SGD),
    "activation_checkpoint.selective_ac_option": ("99", "at most 2", f"--{MODE}=selective"),
    "profiling.enable_memory_snapshot": ("true", "on a CPU", ""),
    "checkpoint.load_step": ("7", "checkpoint.enable", ""),
    "fault.stop_after_minutes": ("7.0", "checkpoint.enable", ""),
    "checkpoint.last_save_in_hf": ("true", "checkpoint.enable", ""),
    "checkpoint.initial_load_in_hf": ("true", "checkpoint.initial_load_path", ""),
    "fault.on_spike": ("rollback", "checkpoint.enable", "--fault.spike_sigma=6.0"),
}
NEVER_MOOT = """
job.dump_folder job.description job.print_config job.device
model.name model.flavor model.hf_assets_path model.converters model.package model.freeze
model.overrides lora.rank
training.local_batch_size training.global_batch_size training.seq_len training.max_norm
training.steps training.dtype training.mixed_precision_param training.enable_cpu_offload
training.gc_freq training.text_key training.packing training.document_mask training.loss_chunks
training.mixture
training.dataloader.num_workers
optimizer.name optimizer.lr optimizer.weight_decay optimizer.implementation
lr_scheduler.warmup_steps lr_scheduler.total_steps lr_scheduler.decay_ratio
parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
parallelism.tensor_parallel_degree parallelism.context_parallel_degree
parallelism.pipeline_parallel_degree parallelism.expert_parallel_degree
activation_checkpoint.mode quantize.linear.float8.enable
checkpoint.enable checkpoint.initial_load_path validation.enable generate.at_end
metrics.log_freq metrics.enable_tensorboard metrics.enable_wandb metrics.sinks
metrics.disable_color_printing
profiling.enable_profiling comm.init_timeout_seconds comm.train_timeout_seconds
fault.stall_seconds fault.preflight fault.rejoin_seconds
debug.seed debug.deterministic
fault.on_nonfinite
""".split()
"""Keys that change every run, or whose pattern that matches nothing is an error."""


NEEDY = {
    key: {need.lack for need in needs.conditions if need.key != key}
    for key, declared in NEEDS.items()
    for needs in declared
    if not needs.why
}
NEEDY = {key: lacks for key, lacks in NEEDY.items() if lacks}
"""The keys that have no effect where they lack what they need."""


def test_every_key_declares_what_it_needs_or_is_refused_or_is_never_moot():
    assert KEYS.keys() - NEEDY.keys() - REFUSED.keys() == set(NEVER_MOOT)


def test_every_need_has_a_run_that_lacks_it():
    assert set().union(*NEEDY.values()) == {lack for lack, *_ in NO_EFFECT}
    strict = {key for key, declared in NEEDS.items() if any(needs.why for needs in declared)}
    assert strict <= REFUSED.keys()


@pytest.mark.parametrize(("lack", "option", "others", "world"), NO_EFFECT)
def test_a_key_without_effect_is_named_with_the_reason_and_does_nothing(
    lack, option, others, world
):
    """The run is given the same config as without the key; only what is written to files has its
    value.
    """
    key, _, value = option.partition("=")
    plain = job([*TINY, *others.split()], world)
    flipped = job([*TINY, *others.split(), f"--{option}"], world)
    reasons = dict(
        part.split(": ") for part in flipped.no_effect.removeprefix("no effect ").split("; ")
    )
    assert key in reasons[lack].split(", ")
    assert flipped.config == plain.config
    assert toml_value(value_of(flipped.given, key)).strip('"').replace('"', "'") == value


OTHERS = {
    "parallelism.fsdp_reshard_after_forward": "always",
    "parallelism.module_fqns_per_model_part": [["norm"]],
    "activation_checkpoint.selective_ac_option": "2",
    "validation.steps": 3,
}


def other_value(key: str) -> Any:
    """Return a legal value of a key that is not its default."""
    default, words = KEYS[key].default, legal_words(KEYS[key].annotation)
    if key in OTHERS:
        return OTHERS[key]
    if words:
        return next(word for word in words if word != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2 or 0.5
    if isinstance(default, list):
        return [] if default else ["loss"]
    return 2 if default is None else key


def test_all_keys_without_effect_at_once_are_named_and_do_nothing():
    """On one rank, with all that they need switched off."""
    options = [*TINY, "--optimizer.weight_decay=0.0", "--lr_scheduler.decay_ratio=0.0"]
    line = parse_command_line(["--config", "debug.toml", *options], {})
    plain = job_from(line, world=1, training=True)
    # Others need the first; the second lacks something only where parameters are offloaded.
    keys = NEEDY.keys() - {"fault.spike_sigma", "optimizer.state_on"}
    flipped = replace(line, overrides=line.overrides | {key: other_value(key) for key in keys})
    everything = job_from(flipped, world=1, training=True)
    assert everything.idle.keys() == keys
    assert everything.idle["parallelism.fsdp_forward_prefetch"] == "on 1 rank"
    assert everything.config == plain.config


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_that_contradicts_another_is_refused(key):
    value, beside, others = REFUSED[key]
    with refused(f"{key} = ", value, beside, kind=ConfigError):
        job([*BYTES, *filter(None, [others]), f"--{key}={value}"], world=1)


def test_a_path_in_a_mixture_that_does_nothing_is_refused():
    assert MixtureEntry.model_fields.keys() == {"dataset", "dataset_path", "weight"}
    part = '{dataset="python-stdlib",dataset_path="/a",weight=1.0}'
    with refused("training.mixture", "entry 1", 'dataset_path = "/a"', kind=ConfigError):
        job([*BYTES, f"--training.mixture=[{part}]"], world=1)


def test_an_unknown_compiler_backend_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(
        torch.compiler, "list_backends", lambda exclude_tags=(): ["inductor", "tvm"]
    )
    options = [*TINY, f"--job.dump_folder={tmp_path}", "--compile.enable"]
    with refused('compile.backend = "foo"', "aot_eager, eager, inductor, tvm"):
        check_machine(job([*options, "--compile.backend=foo"], world=1), "cpu", 1)
    check_machine(job([*options, "--compile.backend=tvm"], world=1), "cpu", 1)


@pytest.mark.long
def test_torch_knows_the_backends_that_need_no_question():
    backends = torch.compiler.list_backends(exclude_tags=())
    assert "foo" not in backends and {"inductor", "aot_eager", "eager"} <= set(backends)


def test_a_key_is_not_named_in_a_run_where_it_has_an_effect():
    prefetch, deferred = "parallelism.fsdp_forward_prefetch", "parallelism.defer_gradient_sync"
    # Under tensor parallel alone, each rank has a shard of the experts, or some of them.
    assert prefetch not in job([*MOE, *SPLIT.split(), f"--{prefetch}=2"], 2).no_effect
    replicas = [REPLICAS, ACCUMULATED, f"--{deferred}=replicas"]
    assert deferred not in job([*TINY, *replicas], 4).no_effect
