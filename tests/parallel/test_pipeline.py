"""Pipeline parallel: its numbers are those of one process, its actions those that the schedule declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jobs import FLOAT64, TINY, forward_backward, full, micro_batches, relative_error, trainer
from tests.lanes import sample
from tests.parallel.test_exact import MODELS as MODELS_OF_TWO
from tests.parallel.test_exact import SGD, ragged_batch
from titanlite.data.loader import MicroBatch
from titanlite.parallel.build import named_parameters
from titanlite.train.loss import count_valid
from titanlite.train.report import loss_over_ranks

PP2 = "--parallelism.pipeline_parallel_degree=2"
FOUR = [*TINY, "--model.overrides.n_layers=4", "--model.overrides.n_kv_heads=2"]
MODELS = {
    "llama3": FOUR,
    "llama3 tied": [*FOUR, "--model.overrides.tied"],
    "gpt2": [*MODELS_OF_TWO["gpt2"], "--model.overrides.n_layers=4"],
    "llama3 frozen": [*FOUR, "--model.freeze=['tok_embeddings.*','layers.2.*','norm.*']"],
    "llama3 without a trained stage": [*FOUR, "--model.freeze=['tok_embeddings.*','layers.0.*','layers.1.*']"],
}


def one_step(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the numbers of one step of SGD, of what this rank has of the model, and what it did."""
    run = trainer([*argv, *FLOAT64, *SGD], folder)
    run.step = 1
    parts, table = run.parts, run.runner.context.table
    parameters = {name: p for part in parts for name, p in named_parameters(part, table)}
    before = {name: full(p) for name, p in parameters.items()}
    own = micro_batches(*ragged_batch(), run.rank_slice)
    own = [MicroBatch(batch.rows, run.own_places(16)) for batch in own]
    loss = forward_backward(run, own)
    labels = count_valid(torch.stack([batch.labels for batch in own])) * run.runner.has_loss
    found = {
        "loss": loss_over_ranks(loss, labels, run.mesh.loss)[0],
        "gradients": {name: full(p.grad) for name, p in parameters.items() if p.grad is not None},
        "inf norm": run.runner.clip_gradients(float("inf"), float("inf")).item(),
        "norm": run.runner.clip_gradients(0.5).item(),
        "before": before,
    }
    run.runner.update(1)
    actions = run.runner.pipeline.actions if run.runner.pipeline else []
    return {**found, "after": {name: full(p) for name, p in parameters.items()}, "actions": actions}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    whole = "--training.local_batch_size=12"
    return {name: pool.run(one_step, [*argv, whole], folder, world=1)[0] for name, argv in MODELS.items()}


def same_as_alone(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Each rank's numbers are those of one process, and together the ranks have all parameters."""
    for found in ranks:
        for kind in ("before", "gradients", "after"):
            for name, value in found[kind].items():
                assert relative_error(value, expected[kind][name]) <= 1e-10, f"{kind} of {name}"
        for number in ("loss", "norm", "inf norm"):
            assert found[number] == pytest.approx(expected[number], rel=1e-10), number
    for kind in ("before", "gradients"):
        assert {name for found in ranks for name in found[kind]} == expected[kind].keys()


DP2, TP2, CP2 = (f"--parallelism.{word}_parallel_degree=2" for word in ("data_parallel_shard", "tensor", "context"))
DP2 = ""  # the rest of the world
REPLICATE2 = "--parallelism.data_parallel_replicate_degree=2"
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
OP = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
COMPILED = "--compile.enable --compile.backend=aot_eager"
ROWS = [
    *[("llama3", 2, schedule, "") for schedule in SCHEDULES],
    *[("llama3", 4, schedule, "") for schedule in SCHEDULES],
    *[("llama3", 4, schedule, TP2) for schedule in SCHEDULES],
    ("llama3", 4, "1F1B", CP2),
    ("llama3", 4, "ZBVZeroBubble", CP2),
    ("llama3", 4, "1F1B", f"{CP2} --parallelism.context_parallel_rotate_method=ulysses"),
    ("llama3", 4, "1F1B", "--parallelism.pipeline_parallel_degree=4"),
    ("llama3", 4, "GPipe", "--parallelism.pipeline_parallel_degree=4"),
    ("llama3", 4, "1F1B", REPLICATE2),
    ("llama3", 4, "DualPipeV", REPLICATE2),
    ("llama3 tied", 2, "1F1B", ""),
    ("llama3 tied", 4, "InterleavedZeroBubble", ""),
    ("llama3 tied", 4, "1F1B", TP2),
    ("gpt2", 2, "1F1B", ""),
    ("gpt2", 4, "GPipe", REPLICATE2),
    *[("llama3 frozen", 4, schedule, "") for schedule in SCHEDULES],
    ("llama3 without a trained stage", 2, "1F1B", ""),
    ("llama3 without a trained stage", 4, "1F1B", ""),
    ("llama3 without a trained stage", 4, "LoopedBFS", ""),
    ("llama3", 4, "1F1B", "--training.loss_chunks=2"),
    ("llama3", 4, "ZBVZeroBubble", "--training.loss_chunks=2"),
    ("llama3", 4, "1F1B", f"--training.loss_chunks=2 {TP2}"),
    ("llama3", 4, "1F1B", "--activation_checkpoint.mode=full"),
    ("llama3", 4, "ZBVZeroBubble", "--activation_checkpoint.mode=full"),
    ("llama3", 4, "1F1B", OP),
    ("llama3", 4, "1F1B", COMPILED),
    ("llama3", 4, "1F1B", f"{COMPILED} {TP2} --activation_checkpoint.mode=full"),
    ("llama3", 4, "ZBVZeroBubble", f"{COMPILED} --compile.components=['loss']"),
    ("llama3", 4, "Interleaved1F1B", COMPILED),
    ("llama3", 2, "InterleavedZeroBubble", "--training.loss_chunks=3"),
    ("llama3", 2, "DualPipeV", "--training.loss_chunks=3"),
    (
        "llama3",
        4,
        "1F1B",
        "--parallelism.fsdp_reshard_after_forward=always --parallelism.fsdp_forward_prefetch=1 "
        "--parallelism.fsdp_backward_prefetch=1",
    ),
    ("llama3", 4, "GPipe", "--parallelism.fsdp_reshard_after_forward=always"),
    ("llama3", 4, "Interleaved1F1B", "--parallelism.fsdp_forward_prefetch=1"),
    ("llama3", 4, "1F1B", "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.0.*','*norm.weight']"),
    ("llama3", 4, "ZBVZeroBubble", "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.0.*','*norm.weight']"),
    ("llama3", 4, "1F1B", "--training.enable_cpu_offload"),
    ("llama3", 4, "ZBVZeroBubble", "--training.enable_cpu_offload"),
    ("llama3", 2, "1F1B", "--parallelism.pipeline_parallel_microbatch_size=3"),
]


@pytest.mark.parametrize(
    ("model", "world", "schedule", "words"),
    sample(
        ROWS,
        ("llama3", 2, "1F1B", ""),
        ("gpt2", 2, "1F1B", ""),
        ("llama3", 4, "ZBVZeroBubble", ""),
        ("llama3", 4, "1F1B", TP2),
    ),
)
def test_pp_changes_no_number(pool, alone, tmp_path, model, world, schedule, words):
    """As one process computes them, with two accumulated batches that are cut into micro-batches."""
    degrees = [PP2] if "pipeline_parallel_degree" not in words else []
    data = 1 if world == 2 or "tensor_" in words or "context_" in words or not degrees else 2
    sizes = [f"--training.local_batch_size={6 // data}", "--training.global_batch_size=12"]
    order = f"--parallelism.pipeline_parallel_schedule={schedule}"
    argv = [*MODELS[model], *degrees, order, *words.split(), *sizes]
    same_as_alone(pool.run(one_step, argv, str(tmp_path), world=world), alone[model])
