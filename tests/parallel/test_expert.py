"""Expert parallel: numbers equal one process, what is exchanged and when, checkpoints, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import FLOAT64, QUIET, forward_backward, full, job, micro_batches, relative_error, trainer
from tests.lanes import sample
from tests.parallel.test_exact import SAMPLES, SGD, ragged_batch
from titanlite.train.loss import count_valid
from titanlite.train.report import loss_over_ranks
from titanlite.verify.pool import Pool

LAYERS, EXPERTS, TOP_K, DIM, TOKENS = 2, 4, 2, 16, 16
_FIELDS = (
    f"dim={DIM} n_layers={LAYERS} n_heads=2 n_kv_heads=2 head_dim=8 expert_dim=8 experts={EXPERTS} top_k={TOP_K}"
)
MOE = [
    *QUIET,
    "--model.name=qwen3",
    "--model.flavor=debugmodel_moe",
    *(f"--model.overrides.{field}" for field in _FIELDS.split()),
]


def mesh(**values: int) -> list[str]:
    """Return the keys of degrees such as ep=2."""
    names = {"ep": "expert", "tp": "tensor", "cp": "context", "pp": "pipeline"}
    keys = {short: f"{name}_parallel" for short, name in names.items()} | {"replicate": "data_parallel_replicate"}
    return [f"--parallelism.{keys[short]}_degree={value}" for short, value in values.items()]


def one_step(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the numbers of one optimizer step; gradients and weights of this rank's stages."""
    run = trainer([*argv, *FLOAT64, *SGD], folder)
    run.step = 1
    mine = [batch.to(run.device, run.own_places(TOKENS)) for batch in micro_batches(*ragged_batch(), run.rank_slice)]
    named = {name: p for part in run.parts for name, p in part.named_parameters()}
    before = {name: full(p) for name, p in named.items()}
    loss = forward_backward(run, mine)
    valid = count_valid(torch.stack([batch.labels for batch in mine])) * run.runner.has_loss
    found = {
        "loss": loss_over_ranks(loss, valid, run.mesh.loss)[0],
        "gradients": {name: full(p.grad) for name, p in named.items() if p.grad is not None},
    }
    found["norm"] = run.runner.clip_gradients(0.5).item()
    run.runner.update(1)
    return {**found, "before": before, "after": {name: full(p) for name, p in named.items()}}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Return the numbers of one process, by the options of its model."""
    folder = str(tmp_path_factory.mktemp("alone"))
    whole = [*MOE, f"--training.local_batch_size={SAMPLES}"]
    return cache(lambda *options: pool.run(one_step, [*whole, *options], folder, world=1)[0])


MESHES = {
    "ep2": (2, mesh(ep=2)),
    "ep4": (4, mesh(ep=4)),
    "ep2 of dp4": (4, mesh(ep=2)),
    "replicate2 x ep2": (4, mesh(replicate=2, ep=2)),
    "tp2": (2, mesh(tp=2)),
    "ep2 over tp2": (2, mesh(ep=2, tp=2)),
    "dp2 x tp2": (4, mesh(tp=2)),
    "ep2 over dp2 x tp2": (4, mesh(ep=2, tp=2)),
    "ep4 over dp2 x tp2": (4, mesh(ep=4, tp=2)),
    "ep4 over dp2 x cp2": (4, mesh(ep=4, cp=2)),
    "ep4 over cp2 x tp2": (4, mesh(ep=4, cp=2, tp=2)),
    "pp2 x ep2": (4, mesh(pp=2, ep=2)),
    "pp2 x tp2": (4, mesh(pp=2, tp=2)),
}


@pytest.mark.parametrize("name", sample(MESHES, "ep2"))
def test_a_step_equals_that_of_one_process(pool, alone, tmp_path, name):
    """In float64: loss, gradients, norm and weights; initial weights bit for bit. The first ranks have no label."""
    world, options = MESHES[name]
    same_as_alone(step_of(pool, [*MOE, *options], tmp_path, world), alone())


COMPILED, OFFLOADED = "--compile.enable --compile.backend=aot_eager", "--training.enable_cpu_offload"
RECOMPUTED = "--activation_checkpoint.mode=full"
BY_OPERATION, SECOND = (
    f"--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option={how}" for how in ("op", 2)
)
PREFETCHING = "--parallelism.fsdp_forward_prefetch=1 --parallelism.fsdp_backward_prefetch=2"
THREE = ["--model.overrides.experts=6"]
FREEZE = ["--model.freeze=['layers.0.moe.experts.*','layers.1.moe.experts.w2']"]
TECHNIQUES = {  # ranks, options of the mesh, of the run, of the model
    "dim 1": (4, mesh(ep=2), "", THREE),
    "dim 1, replicas": (4, mesh(ep=1, replicate=2, tp=2), "", ["--model.overrides.experts=3"]),
    "dim 1, block's group": (4, [], "", ["--model.overrides.experts=3"]),
    "uneven in block's group": (3, [], "", []),
    "compiled": (2, mesh(ep=2), COMPILED, []),
    "compiled, tp": (4, mesh(ep=2, tp=2), COMPILED, []),
    "compiled, ep1": (2, [], COMPILED, []),
    "recomputed": (4, mesh(ep=2), RECOMPUTED, []),
    "recomputed, compiled": (2, mesh(ep=2), f"{RECOMPUTED} {COMPILED}", []),
    "recomputed, compiled, tp": (2, mesh(ep=2, tp=2), f"{RECOMPUTED} {COMPILED}", []),
    "by operation": (2, mesh(ep=2), BY_OPERATION, []),
    "by operation, ep1": (2, [], BY_OPERATION, []),
    "by operation, compiled": (2, mesh(ep=2), f"{BY_OPERATION} {COMPILED}", []),
    "by operation, compiled, tp": (4, mesh(ep=2, tp=2), f"{BY_OPERATION} {COMPILED}", []),
    "every second": (2, mesh(ep=2), SECOND, []),
    "every second, compiled": (2, mesh(ep=2), f"{SECOND} {COMPILED}", []),
    "prefetching": (4, mesh(ep=2), PREFETCHING, []),
    "prefetching, recomputed, blocks in one group": (
        4,
        mesh(ep=2),
        f"{PREFETCHING} {RECOMPUTED} --parallelism.fsdp_blocks_per_group=2",
        [],
    ),
    "always resharded": (4, mesh(ep=2), "--parallelism.fsdp_reshard_after_forward=always", []),
    "never resharded": (4, mesh(ep=2), "--parallelism.fsdp_reshard_after_forward=never", []),
    "offloaded": (4, mesh(ep=2), OFFLOADED, []),
    "offloaded, tp": (2, mesh(tp=2), OFFLOADED, []),
    "offloaded, replicas, tp": (4, mesh(tp=2, replicate=2, ep=2), OFFLOADED, []),
    "kept whole": (4, mesh(ep=2), "--parallelism.fsdp_keep_whole=['*norm.weight','*router*']", []),
    "kept whole, experts in block's group": (2, [], "--parallelism.fsdp_keep_whole=['layers.0.moe.*']", []),
    "frozen experts": (4, mesh(ep=2), "", FREEZE),
    "frozen experts, tp": (2, mesh(ep=2, tp=2), "", FREEZE),
    "loss in chunks": (2, mesh(ep=2), "--training.loss_chunks=2", []),
    "interleaved stages": (
        4,
        mesh(pp=2, ep=2),
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        ["--model.overrides.n_layers=6"],
    ),
    "split backward pass": (
        4,
        mesh(pp=2, ep=2),
        "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        ["--model.overrides.n_layers=6"],
    ),
    "split backward pass, tp": (
        4,
        mesh(pp=2, tp=2),
        "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
        ["--model.overrides.n_layers=6"],
    ),
    "stages, recomputed, compiled": (4, mesh(pp=2, ep=2), f"{RECOMPUTED} {COMPILED}", []),
    "stages, by operation": (4, mesh(pp=2, tp=2, ep=2), BY_OPERATION, []),
    "ulysses": (4, mesh(ep=4, cp=2), "--parallelism.context_parallel_rotate_method=ulysses", []),
    "no balance": (4, mesh(ep=2), "", ["--model.overrides.balance=none"]),
    "bias": (4, mesh(ep=2), "", ["--model.overrides.balance=bias"]),
}


@pytest.mark.parametrize("name", sample(TECHNIQUES))
def test_techniques_beside_experts_change_no_number(pool, alone, tmp_path, name):
    world, options, words, model = TECHNIQUES[name]
    argv = [*MOE, *model, *options, *words.split()]
    same_as_alone(step_of(pool, argv, tmp_path, world), alone(*model))


@pytest.mark.parametrize("deferred", ["false", "true", "replicas"])
@pytest.mark.long
def test_accumulated_gradients_are_those_of_one_batch(pool, alone, tmp_path, deferred):
    options = [*mesh(ep=2, replicate=2), f"--parallelism.defer_gradient_sync={deferred}"]
    argv = [*MOE, *options, f"--training.global_batch_size={SAMPLES}", "--training.local_batch_size=1"]
    same_as_alone(pool.run(one_step, argv, str(tmp_path), world=4)[0], alone())


def step_of(pool: Pool, argv: list[str], folder: Path, world: int) -> dict[str, Any]:
    """Return the numbers of a step on a mesh, with the tensors of all stages; all ranks have the same."""
    layout = job(argv, world).layout
    ranks = pool.run(
        one_step, [*argv, f"--training.local_batch_size={SAMPLES // layout.batch}"], str(folder), world=world
    )
    for number in ("loss", "norm"):
        assert {found[number] for found in ranks} == {ranks[0][number]}
    for part in ("gradients", "before", "after"):
        for name, tensor in ((name, tensor) for found in ranks for name, tensor in found[part].items()):
            assert torch.equal(ranks[0][part].setdefault(name, tensor), tensor), name
    return ranks[0]


def same_as_alone(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert relative_error(found["gradients"][name], gradient) <= 1e-12, name
        assert torch.equal(found["before"][name], expected["before"][name]), name
        assert relative_error(found["after"][name], expected["after"][name]) <= 1e-12, name
    for number in ("loss", "norm"):
        assert found[number] == pytest.approx(expected[number], rel=1e-12), number
