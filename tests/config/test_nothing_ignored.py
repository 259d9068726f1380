"""Every key is read by code; a key that is set changes the run, is named as without effect, or is
refused.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.conftest import PRELOAD
from tests.jobs import MOE, TINY, job, trainer, weights
from titanlite.config.load import ConfigError
from titanlite.config.rules.parallel import DEGREES
from titanlite.config.schema import KEYS, SECTIONS, Mixture
from titanlite.train.summary import describe_start
from titanlite.verify.pool import Pool

SAVE_TIMES = ("blocked", "staging", "write")
SOURCE, ROOT = Path(titanlite.__file__).parent, Path(__file__).parents[2]
PIPELINE = [
    key
    for key in KEYS
    if "pipeline_parallel_" in key or key.endswith(".module_fqns_per_model_part")
]


def keys_read(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (section, pattern of a name) of the keys that a file reads, through local names of
    sections as well.
    """
    classes = {cls.__name__: key.rpartition(".")[2] for key, cls in SECTIONS.items()} | {
        "MixturePart": "mixture"
    }
    sections = {
        section: {section} for section in classes.values()
    }  # by the name that the file gives them
    sections |= dict.fromkeys(
        ("section", "part", "dataset"), {"training", "validation", "mixture"}
    )  # a data set's

    def name_of(node: ast.AST) -> str:
        return getattr(node, "attr", "") or getattr(node, "id", "")

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            if isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for target, value in pairs:
                if name_of(value) in classes.values():
                    sections.setdefault(name_of(target), set()).add(name_of(value))
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            name = node.arg if isinstance(node, ast.arg) else name_of(node.target)
            kinds = {classes.get(name_of(part)) for part in ast.walk(node.annotation)}
            sections.setdefault(name, set()).update(kind for kind in kinds if kind)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {(section, node.attr) for section in sections.get(name_of(node.value), ())}
        elif isinstance(node, ast.Call) and name_of(node.func) == "getattr":
            parts = getattr(node.args[1], "values", ())  # of f"…"
            pattern = "".join(
                str(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts
            )
            found |= {(section, pattern) for section in sections.get(name_of(node.args[0]), ())}
    return found


def test_every_key_is_read_by_code_or_belongs_to_a_technique_that_is_refused():
    files = [
        path
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "rules" and path.name != "needs.py"
    ]  # only judge
    read = {key for path in files for key in keys_read(ast.parse(path.read_text()))}
    unread = []
    for key in [*KEYS, *(f"training.mixture.{name}" for name in Mixture.model_fields)]:
        section, name = key.split(".")[-2:]
        is_read = any(section == s and re.fullmatch(pattern, name) for s, pattern in read)
        if not is_read and name not in DEGREES.values():
            unread.append(key)
    # With a GPU batches are always pinned; a rule refuses the key on a CPU. The rules make the
    # layout of the degrees, and the stages; a search tries the config's schedule.
    pinning = "training.dataloader.pin_memory"
    degrees = ["parallelism.data_parallel_shard_degree", "parallelism.expert_parallel_degree"]
    planned = ["parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule"]
    assert unread == [pinning, *degrees, *(key for key in PIPELINE if key not in planned)]


def test_a_key_of_the_same_name_in_another_section_does_not_count_as_read():
    code = (
        "def f(config):\n    settings = config.metrics\n"
        "    return settings.enable, settings.log_freq"
    )
    assert keys_read(ast.parse(code)) == {("metrics", "enable"), ("metrics", "log_freq")}


def observe(argv: list[str], folder: str) -> dict[str, Any]:
    """Train, and return what a run shows except for times."""
    lines: list[str] = []
    collections: list[int] = []
    log = logging.Logger("observe")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    callback = lambda phase, info: (  # noqa: E731
        collections.append(info["generation"]) if phase == "stop" else None
    )
    gc.callbacks.append(callback)
    run = trainer(argv, folder, log)
    timeouts = [run_timeout()]
    try:
        gc.collect()
        collections.clear()
        run.train()
        outcome = "reached"
    except Exception as error:
        outcome = repr(error)
    finally:
        gc.callbacks.remove(callback)
    timeouts.append(run_timeout())
    loader = run.batches.loader
    records = [
        json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
    ]
    timed = {"tps", "tflops", "mfu", "step_seconds", "data_seconds", "memory_gib"}
    timed |= {"step_seconds_p50", "step_seconds_p95"} | {
        f"checkpoint_{what}_seconds" for what in SAVE_TIMES
    }
    return {
        "outcome": outcome,
        "metrics": [{k: v for k, v in record.items() if k not in timed} for record in records],
        "weights": {
            n: hashlib.sha256(w.numpy().tobytes()).hexdigest() for n, w in weights(run).items()
        },
        "types": [str(w.dtype) for w in weights(run).values()],
        "log": [line for line in lines if not line.startswith(("step:", "a sample, at", "saved "))],
        "start": describe_start(run),
        "files": sorted(
            re.sub(r"events\..*", "events", p.relative_to(folder).as_posix())
            for p in Path(folder).rglob("*")
        ),
        "traced steps": [
            p.read_text().count('"ProfilerStep#') for p in sorted(Path(folder).rglob("rank-*.json"))
        ],
        "collections": collections.count(2),  # full ones; Python starts small ones by itself
        "timeouts": timeouts,
        "groups": [group["weight_decay"] for group in run.runner.optimizer.param_groups],
        "optimizer": {k: str(run.runner.optimizer.defaults.get(k)) for k in ("fused", "foreach")},
        "loader": [loader.num_workers, loader.prefetch_factor, loader.persistent_workers],
    }


def run_timeout() -> str:
    """Return the timeout of collectives over all ranks."""
    return str(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout)


VALIDATING = "--validation.enable --validation.steps=2 --validation.freq=2"
SAMPLING = "--generate.at_end --generate.tokens=5"
PROFILED = "--profiling.enable_profiling --profiling.profile_freq=3 --profiling.profiler_warmup=1"
CHECKPOINTS = "--checkpoint.enable"
RAISED = "--training.steps=6 --lr_scheduler.warmup_steps=0"

# key: (flipped value, other options of both runs)
FLIPS: dict[str, tuple[str, str]] = {
    "job.description": ("other", ""),
    "model.freeze": ("['tok_embeddings.*']", ""),
    "training.dataset": ("python-stdlib-validation", ""),
    "training.local_batch_size": ("4", ""),
    "training.global_batch_size": ("4", ""),
    "training.seq_len": ("8", ""),
    "training.max_norm": ("0.01", "--optimizer.name=SGD"),
    "training.steps": ("4", ""),
    "training.gc_freq": ("1", ""),
    "training.repeat": ("false", "--training.dataset=text --training.dataset_path={text}"),
    "training.mixture": (
        '[{{dataset="python-stdlib",weight=0.5}},{{dataset="python-stdlib-validation",weight=0.5}}]',
        "",
    ),
    "training.text_key": (
        "other",
        "--training.dataset=text --training.dataset_path={lines}",
    ),
    "training.packing": ("first-fit", "--training.dataset=text --training.dataset_path={text}"),
    "training.document_mask": ("true", "--training.dataset=text --training.dataset_path={text}"),
    "training.mixed_precision_param": ("bfloat16", ""),
    "training.mixed_precision_reduce": ("bfloat16", "--training.mixed_precision_param=bfloat16"),
    "training.dataloader.num_workers": ("1", ""),
    "training.dataloader.prefetch_factor": ("3", "--training.dataloader.num_workers=1"),
    "training.dataloader.persistent_workers": (
        "true",
        f"--training.dataloader.num_workers=1 {VALIDATING}",
    ),
    "lora.rank": ("2", ""),
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
    "optimizer.state_dtype": ("bfloat16", ""),
    "lr_scheduler.warmup_steps": ("2", ""),
    "lr_scheduler.total_steps": ("9", RAISED),
    "lr_scheduler.decay_ratio": ("0.5", RAISED),
    "lr_scheduler.decay_type": ("cosine", RAISED),
    "lr_scheduler.min_lr_factor": ("0.5", RAISED),
    "validation.enable": ("true", "--validation.steps=1"),
    "validation.dataset": ("python-stdlib", VALIDATING),
    "validation.local_batch_size": ("3", VALIDATING),
    "validation.seq_len": ("8", VALIDATING),
    "validation.freq": ("1", VALIDATING),
    "validation.steps": ("1", VALIDATING),
    "generate.at_end": ("true", "--generate.tokens=5"),
    "generate.prompt": ("import", SAMPLING),
    "generate.tokens": ("9", SAMPLING),
    "generate.temperature": ("0.0", SAMPLING),
    "metrics.log_freq": ("4", "--training.steps=6"),
    "metrics.enable_tensorboard": ("true", ""),
    "metrics.save_tb_folder": ("events", "--metrics.enable_tensorboard"),
    "profiling.enable_profiling": (
        "true",
        "--profiling.profile_freq=3 --profiling.profiler_warmup=1",
    ),
    "profiling.save_traces_folder": ("elsewhere", PROFILED),
    "profiling.profile_freq": ("2", PROFILED),
    "profiling.profiler_active": ("2", PROFILED),
    "comm.train_timeout_seconds": ("50", ""),
    "debug.seed": ("1", ""),
    "checkpoint.enable": ("true", ""),
    "checkpoint.folder": ("saved", CHECKPOINTS),
    "checkpoint.interval": ("2", CHECKPOINTS),
    "checkpoint.keep_latest_k": ("1", f"{CHECKPOINTS} --checkpoint.interval=1"),
    "checkpoint.keep_every": (
        "2",
        f"{CHECKPOINTS} --checkpoint.interval=1 --checkpoint.keep_latest_k=1",
    ),
    "checkpoint.enable_first_step_checkpoint": ("true", CHECKPOINTS),
}
REFUSED = {  # key: (value, part of the message)
    "model.name": ("other", "llama3"),
    "model.flavor": ("other", 'unknown flavor "other"'),
    "training.dataset_path": ("/nowhere", "has no path"),
    "training.dtype": ("float64", "all three"),
    "training.dataloader.pin_memory": ("true", "for copies to a GPU"),
    "parallelism.data_parallel_shard_degree": ("2", "2 is not the number of ranks, 1; use -1 or 1"),
    "profiling.enable_memory_snapshot": ("true", "a GPU's allocator"),
}
ACTIVE = "tests/parallel/test_active.py::"
HUGGING_FACE = "tests/checkpoint/test_huggingface.py::"
MIRROR = "tests/stores/test_mirror.py::"
UPLOADS = "tests/stores/test_bucket.py::test_an_upload_keeps_to_the_bounds_of_the_config"
SHARDS = "tests/stores/test_shards.py::"
LOAD, SAVE = "tests/checkpoint/test_load.py::", "tests/checkpoint/test_save.py::"
TENSOR, CONTEXT = "tests/parallel/test_tensor.py::", "tests/parallel/test_context.py::"
DECIDE = "tests/faults/test_decide.py::"
RESTART = "tests/faults/test_restart.py::"
BAD_STEP = "tests/optim/test_skip.py::"
EXPERT = "tests/parallel/test_expert.py::"
CONVERTERS, FLOAT8 = (
    "tests/parallel/float8/test_converters.py::",
    "tests/parallel/float8/test_float8.py::",
)
SHOWN_BY = {  # key: the test that shows its effect, or why no test can
    **dict.fromkeys(PIPELINE, "tests/config/test_pipeline.py::test_each_key_changes_the_stages"),
    "quantize.linear.float8.enable": FLOAT8 + "test_gradients_are_within_the_bound_of_their_recipe",
    "quantize.linear.float8.recipe_name": FLOAT8
    + "test_gradients_are_within_the_bound_of_their_recipe",
    "quantize.linear.float8.emulate": FLOAT8 + "test_emulation_rounds_like_real_products",
    "quantize.linear.float8.filter_fqns": CONVERTERS + "test_every_unconverted_layer_has_a_reason",
    "quantize.linear.float8.enable_fsdp_float8_all_gather": FLOAT8
    + "test_fsdp_gathers_one_byte_per_element",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": FLOAT8
    + "test_scales_follow_the_weights",
    "parallelism.tensor_parallel_degree": TENSOR + "test_sequence_is_gathered_once_per_module",
    "parallelism.disable_loss_parallel": TENSOR + "test_sequence_is_gathered_once_per_module",
    "parallelism.enable_async_tensor_parallel": TENSOR
    + "test_async_tensor_parallel_names_missing_requirements",
    "parallelism.context_parallel_degree": CONTEXT
    + "test_keys_and_values_are_gathered_once_per_block_and_pass",
    "parallelism.context_parallel_load_balancer": CONTEXT
    + "test_each_rank_reads_the_places_that_the_config_says",
    "parallelism.context_parallel_rotate_method": CONTEXT
    + "test_ulysses_exchanges_four_tensors_per_block_and_pass",
    "parallelism.expert_parallel_degree": EXPERT
    + "test_each_token_is_sent_to_the_rank_of_its_expert_and_back",
    "debug.moe_force_load_balance": EXPERT
    + "test_forced_balance_sends_as_many_tokens_to_all_experts",
    "parallelism.data_parallel_replicate_degree": ACTIVE + "test_hsdp_all_reduces_over_replicas",
    "parallelism.fsdp_forward_prefetch": ACTIVE + "test_forward_prefetch_follows_the_schedule",
    "parallelism.fsdp_backward_prefetch": ACTIVE + "test_backward_prefetch_follows_the_schedule",
    "parallelism.fsdp_reshard_after_forward": ACTIVE
    + "test_never_resharding_keeps_blocks_gathered",
    "parallelism.fsdp_blocks_per_group": ACTIVE + "test_grouped_blocks_share_a_gather",
    "parallelism.fsdp_keep_whole": ACTIVE + "test_replicated_parameters_are_reduced_once_per_step",
    "training.loss_chunks": "tests/train/test_chunked_loss.py::test_peak_memory_falls_as_computed",
    "training.enable_cpu_offload": ACTIVE + "test_cpu_offload_is_active",
    "training.offload_folder": "tests/optim/test_nvme.py::"
    "test_training_has_the_bits_of_state_in_memory",
    "activation_checkpoint.memory_budget": ACTIVE
    + "test_memory_budget_is_kept_and_ends_with_its_run",
    "parallelism.defer_gradient_sync": ACTIVE + "test_deferred_sync_reduces_once_per_step",
    "activation_checkpoint.mode": ACTIVE + "test_recompute_modes_repeat_the_expected_operations",
    "activation_checkpoint.selective_ac_option": ACTIVE
    + "test_recompute_modes_repeat_the_expected_operations",
    "activation_checkpoint.early_stop": ACTIVE
    + "test_recompute_modes_repeat_the_expected_operations",
    "activation_checkpoint.preserve_rng_state": ACTIVE
    + "test_recompute_repeats_dropout_masks_unless_disabled",
    "compile.enable": ACTIVE + "test_compile_components_are_compiled_once",
    "compile.components": ACTIVE + "test_compile_components_are_compiled_once",
    "compile.backend": ACTIVE + "test_compile_components_are_compiled_once",
    "job.dump_folder": "every run in this file",
    "job.print_config": "tests/launch/test_launch.py::test_a_run_leaves_its_files_and_says_where",
    "job.device": "tests/launch/test_launch.py::test_a_missing_gpu_is_refused",
    "job.plan": (
        "tests/launch/test_background.py::"
        "test_a_run_prints_two_lines_of_its_plan_unless_switched_off"
    ),
    "model.converters": CONVERTERS + "test_custom_converter_hooks_are_called",
    "model.package": "tests/models/test_outside.py::test_package_registers_its_model_and_trains",
    "model.hf_assets_path": (
        "tests/data/test_sources.py::test_a_missing_broken_or_too_large_tokenizer_is_named"
    ),
    "model.overrides": "every run in this file",
    "training.dataloader.cache_folder": SHARDS
    + "test_windows_and_fingerprint_are_those_of_a_folder_cold_and_while_and_when_cached",
    "training.dataloader.cache_gib": SHARDS
    + "test_the_cache_keeps_its_limit_and_lets_only_old_shards_of_other_data_go",
    "training.dataloader.token_dtype": (
        "tests/data/test_olmo.py::test_ids_of_a_file_that_does_not_say_their_type_have_the_named_one"
    ),
    "training.dataloader.stall_timeout_seconds": (
        "tests/data/test_stream.py::test_the_config_sets_the_stall_timeout"
    ),
    "validation.dataset_path": (
        "tests/train/test_validate.py::test_steps_of_a_ragged_set_give_one_value_on_any_ranks"
    ),
    "metrics.disable_color_printing": (
        "tests/launch/test_terminal.py::test_disable_color_printing_shows_plain_lines"
    ),
    "metrics.sinks": "tests/observe/test_trackers.py::test_a_package_registers_its_own_tracker",
    "metrics.enable_wandb": "tests/observe/test_sinks.py::test_all_sinks_record_the_same_steps",
    "profiling.profiler_warmup": (
        "tests/observe/test_profiler.py::test_the_profiler_warms_up_before_the_traced_steps"
    ),
    "profiling.save_memory_snapshot_folder": "needs a GPU",
    "comm.init_timeout_seconds": (
        "tests/launch/test_nodes.py::test_one_of_two_nodes_names_the_missing_one"
    ),
    "comm.trace_buf_size": "needs a GPU, for NCCL",
    "comm.save_traces_folder": "needs a GPU, for NCCL",
    "comm.checkpoint_timeout_seconds": (
        "tests/checkpoint/test_save.py::test_saving_has_its_own_timeout"
    ),
    "checkpoint.interval_minutes": (
        "tests/checkpoint/test_save.py::test_all_ranks_follow_the_clock_of_rank_0"
    ),
    "checkpoint.mirror": MIRROR
    + "test_a_run_that_lost_its_folder_goes_on_from_the_mirror_in_the_same_bits",
    "checkpoint.mirror_keep_latest_k": MIRROR + "test_the_mirror_keeps_as_many_steps_as_it_is_told",
    "checkpoint.upload_parallel": UPLOADS,
    "checkpoint.part_mib": UPLOADS,
    "checkpoint.stall_timeout_seconds": UPLOADS,
    "checkpoint.load_step": LOAD + "test_load_step_archives_later_checkpoints",
    "checkpoint.initial_load_path": LOAD + "test_initial_load_path_loads_weights_or_everything",
    "checkpoint.initial_load_model_only": LOAD
    + "test_initial_load_path_loads_weights_or_everything",
    "checkpoint.initial_load_in_hf": HUGGING_FACE + "test_each_rank_reads_what_its_shards_need",
    "checkpoint.last_save_in_hf": HUGGING_FACE
    + "test_the_last_weights_are_exported_with_the_tokenizer_of_the_shards",
    "checkpoint.export_dtype": HUGGING_FACE
    + "test_the_last_weights_are_exported_with_the_tokenizer_of_the_shards",
    "checkpoint.exclude_from_loading": LOAD + "test_exclude_from_loading_lists_what_may_differ",
    "checkpoint.verify_on_load": LOAD + "test_verify_on_load_sizes_reads_only_small_files",
    "checkpoint.on_failure": (
        "tests/checkpoint/test_save.py::test_on_failure_warn_continues_and_saves_again"
    ),
    "checkpoint.last_save_model_only": SAVE + "test_the_last_checkpoint_may_hold_only_weights",
    "checkpoint.async_mode": SAVE + "test_a_checkpoint_records_its_tensors_and_costs",
    "fault.grace_seconds": (
        "tests/faults/test_stop.py::test_without_data_ranks_end_at_half_of_the_grace"
    ),
    "fault.stop_after_minutes": "tests/faults/test_stop.py::test_the_time_limit_stops_a_run",
    "fault.stall_seconds": "tests/faults/test_beat.py::test_each_phase_has_its_limit",
    "fault.preflight": (
        "tests/train/test_rank_facts.py::test_the_network_is_timed_unless_switched_off_or_a_launcher_did_before"
    ),
    "fault.max_restarts": RESTART + "test_a_spent_budget_of_restarts_ends_the_run",
    "fault.on_nonfinite": BAD_STEP
    + "test_a_step_that_is_not_finite_changes_no_bit_of_parameters_and_state",
    "fault.skip_budget": BAD_STEP
    + "test_a_used_up_budget_ends_the_run_with_its_own_exit_code_on_all_ranks",
    "fault.spike_sigma": BAD_STEP + "test_a_spike_is_warned_of_and_kept",
    "fault.spike_window": BAD_STEP + "test_a_spike_is_warned_of_and_kept",
    "fault.on_spike": BAD_STEP
    + "test_a_run_that_skips_a_step_equals_one_that_never_made_its_update",
    "fault.rollback_budget": BAD_STEP
    + "test_a_used_up_budget_ends_the_run_with_its_own_exit_code_on_all_ranks",
    "fault.mtbf_hours": (
        "tests/checkpoint/test_save.py::"
        "test_the_interval_follows_from_the_cost_of_a_save_and_the_time_between_failures"
    ),
    "fault.rejoin_seconds": DECIDE
    + "test_a_later_attempt_goes_on_with_fewer_nodes_if_that_is_allowed_and_fits",
    "fault.min_nodes": RESTART + "test_a_lost_node_is_left_behind_where_fewer_are_enough",
    "fault.spare_nodes": RESTART + "test_a_spare_node_takes_the_place_of_a_lost_one",
    "debug.deterministic": (
        "tests/train/test_trainer.py::test_deterministic_refuses_nondeterministic_operations"
    ),
}


def test_every_key_is_in_a_table():
    assert KEYS.keys() - FLIPS.keys() - REFUSED.keys() - SHOWN_BY.keys() == set()


def test_the_tests_that_the_table_names_exist():
    missing = []
    for where in SHOWN_BY.values():
        path, _, name = where.partition("::")
        if path.startswith("tests/") and not (name and f"def {name}(" in (ROOT / path).read_text()):
            missing.append(where)
    assert missing == []


def runs_of(key: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return options and number of ranks of a run with a key flipped, and of one without."""
    value, others = FLIPS[key]
    world = 2 if key == "training.mixed_precision_reduce" else 1  # one rank has nothing to reduce
    return (f"{others} --{key}={value}", world), (others, world)


@pytest.fixture(scope="module")
def observed(pool, tmp_path_factory):
    """What each run shows, as futures: two run at a time, since most have one rank."""
    text = tmp_path_factory.mktemp("text")
    (text / "short.txt").write_text("abcdefg " * 5)
    (text / "second.txt").write_text("hij" * 10)
    lines = tmp_path_factory.mktemp("lines") / "two.jsonl"
    lines.write_text(json.dumps({"text": "abc " * 30, "other": "hij " * 30}))
    pools: Queue[Pool] = Queue()

    def run(options: str, world: int, folder: Path) -> Any:
        options = options.format(text=text, lines=lines)
        argv = [*TINY, "--lr_scheduler.warmup_steps=0", *options.split()]
        free_pool = pools.get()
        try:
            return free_pool.run(observe, argv, str(folder), world=world)[0]
        finally:
            pools.put(free_pool)

    with closing(Pool(2, PRELOAD)) as second, ThreadPoolExecutor(2) as threads:
        pools.put(pool)
        pools.put(second)
        runs = dict.fromkeys(
            [one for key in FLIPS for one in runs_of(key)] + [("--training.seq_len=16", 1)]
        )
        yield {one: threads.submit(run, *one, tmp_path_factory.mktemp("run")) for one in runs}


@pytest.mark.parametrize("key", FLIPS)
def test_a_flipped_key_changes_the_run(observed, key):
    changed, plain = (dict(observed[one].result()) for one in runs_of(key))
    if key != "job.description":  # what the start prints only repeats the config
        del changed["start"], plain["start"]
    assert changed != plain


def test_two_runs_of_one_config_show_the_same(observed):
    assert observed["", 1].result() == observed["--training.seq_len=16", 1].result()


def test_keys_without_effect_are_named_in_one_line():
    flags = "fsdp_forward_prefetch=2 defer_gradient_sync=true disable_loss_parallel=true"
    options = [
        *TINY,
        "--model.overrides.n_kv_heads=2",
        *(f"--parallelism.{flag}" for flag in flags.split()),
    ]
    replicated = [*options, "--parallelism.data_parallel_replicate_degree=2"]
    split = [*options, "--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=4"]

    def of_mesh(options: list[str], world: int) -> str:
        return job(options, world).no_effect.partition("; without checkpoint.enable")[0]

    assert of_mesh(options, world=1) == (
        "no effect on 1 rank: parallelism.fsdp_forward_prefetch, "
        "parallelism.disable_loss_parallel, parallelism.defer_gradient_sync"
    )
    assert of_mesh(replicated, world=2) == (
        "no effect without sharding: parallelism.fsdp_forward_prefetch; without tensor parallel: "
        "parallelism.disable_loss_parallel; without gradient accumulation: "
        "parallelism.defer_gradient_sync"
    )
    assert of_mesh(split, world=2) == (
        "no effect without sharding: parallelism.fsdp_forward_prefetch; without data parallel: "
        "parallelism.defer_gradient_sync"
    )
    experts = [
        *MOE,
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.fsdp_forward_prefetch=2",
    ]
    assert "fsdp_forward_prefetch" not in job(experts, 2).no_effect, (
        "experts are sharded over both ranks"
    )
    assert job(options, world=1).no_effect.partition("; ")[2] == (
        "without checkpoint.enable: checkpoint.interval, checkpoint.async_mode, "
        "checkpoint.keep_latest_k; without validation.enable: validation.freq, validation.steps; "
        "without generate.at_end: generate.prompt, generate.temperature"
    )
    of_replicas = [
        *TINY,
        "--parallelism.defer_gradient_sync=replicas",
        "--training.global_batch_size=8",
    ]
    assert job(of_replicas, 2).no_effect.startswith(
        "no effect without replicas: parallelism.defer_gradient_sync"
    )
    with_two = job([*of_replicas, "--parallelism.data_parallel_replicate_degree=2"], 2)
    assert "defer_gradient_sync" not in with_two.no_effect


@pytest.mark.parametrize("key", REFUSED)
def test_a_flipped_key_that_cannot_be_honored_is_refused(key):
    value, says = REFUSED[key]
    with pytest.raises(ConfigError) as caught:
        job([*TINY, f"--{key}={value}"], world=1)
    assert key in str(caught.value) and says in str(caught.value)
