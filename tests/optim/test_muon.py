"""Muon: torch's algorithm, but one owner orthogonalizes each matrix, with two collectives per batch
of matrices.

`titanlite verify` proves that it equals one process on every mesh.
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.checkpoint.layouts import load_all
from tests.checkpoint.saved import run_until
from tests.jobs import FLOAT64, TINY, full, relative_error, trainer, weights
from tests.lanes import sample
from titanlite.optim import muon, optimizer_bytes
from titanlite.optim.bf16_state import chunk_by_numel
from titanlite.optim.muon import Muon, Spread, _plan, owners_of
from titanlite.parallel.dtensor import local_part
from titanlite.registry import Box
from titanlite.verify.pool import RankFailed

MUON = [*TINY, "--optimizer.name=Muon", "--model.overrides.n_kv_heads=2"]
KEPT = "--parallelism.fsdp_keep_whole=['layers.0.attention.*','tok_embeddings.*']"


def test_updates_equal_those_of_torch_s_muon_and_adamw():
    """A weight of three dimensions is a matrix for each expert."""
    torch.manual_seed(0)
    shapes = {
        "wide": (8, 24),
        "tall": (24, 8),
        "square": (16, 16),
        "experts": (9, 4, 8),
        "other": (8, 8),
        "norm": (8,),
    }
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    torch_parameters = {
        name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()
    }
    torch_experts = [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(9)]
    matrices, rest = ["wide", "tall", "square", "experts"], ["other", "norm"]
    adamw = {"betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = Muon(
        [
            {
                "params": [(n, parameters[n]) for n in matrices],
                "weight_decay": 0.1,
                "matrices": True,
            },
            {"params": [(n, parameters[n]) for n in rest], "weight_decay": 0.2, "matrices": False},
        ],
        torch.bfloat16,
        lr=0.02,
        **adamw,
    )
    stock = [
        torch.optim.Muon(
            [*(torch_parameters[n] for n in matrices[:-1]), *torch_experts],
            lr=0.02,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
            momentum=0.95,
        ),
        torch.optim.AdamW([torch_parameters[n] for n in rest], lr=0.02, weight_decay=0.2, **adamw),
    ]
    for _ in range(4):
        for name, parameter in parameters.items():
            gradient = torch.randn(shapes[name])
            parameter.grad, torch_parameters[name].grad = gradient, gradient.clone()
            if name == "experts":
                for expert, its_gradient in zip(torch_experts, gradient, strict=True):
                    expert.grad = its_gradient.clone()
        for one in (optimizer, *stock):
            one.step()
    torch_parameters["experts"] = torch.nn.Parameter(
        torch.stack([e.detach() for e in torch_experts])
    )
    for name, parameter in parameters.items():
        assert relative_error(parameter, torch_parameters[name]) < 1e-6, name


def steps_of_experts(dims: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Take two steps of weights of 5 experts and of a matrix, split 2 x 2 along `dims`; return the
    experts' ends.
    """
    torch.manual_seed(0)
    full_weights = {"w1": torch.randn(5, 6, 8), "w2": torch.randn(5, 8, 6), "wq": torch.randn(8, 8)}
    split: dict[str, torch.Tensor] = full_weights
    if dims is not None:
        meshes = [
            init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            for names in (("efsdp", "ep"), ("dp", "tp"))
        ]
        places = {"w1": (meshes[0], dims), "w2": (meshes[0], dims), "wq": (meshes[1], [0, 1])}
        split = {
            n: distribute_tensor(w, places[n][0], [Shard(d) for d in places[n][1]])
            for n, w in split.items()
        }
    weights = {name: torch.nn.Parameter(weight.double()) for name, weight in split.items()}
    groups = [{"params": [*weights.items()], "weight_decay": 0.1, "matrices": True}]
    optimizer = Muon(groups, torch.float64, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(2):
        for name, full_weight in full_weights.items():
            gradient = torch.randn(full_weight.shape, dtype=torch.float64)
            placed = weights[name]
            if isinstance(placed, DTensor):
                gradient = distribute_tensor(gradient, placed.device_mesh, placed.placements)
            placed.grad = gradient
        optimizer.step()
    return full(weights["w1"]), full(weights["w2"])


@pytest.mark.parametrize("dims", [[0, 0], [1, 0]], ids=["dim 0 twice", "dim 1 and dim 0"])
def test_experts_on_a_mesh_of_their_own_equal_one_process(pool, dims):
    """5 experts on 4 ranks: some ranks hold less, or nothing."""
    expected = pool.run(steps_of_experts, None, world=1)[0]
    for result in pool.run(steps_of_experts, dims, world=4):
        for found, weight in zip(result, expected, strict=True):
            assert relative_error(found, weight) < 1e-12


def count_step(argv: list[str], folder: str) -> dict:
    """Count one step's collectives, the matrices that this rank orthogonalizes, and the elements it
    sends.
    """
    run = trainer(argv, folder)
    calls: Counter[str] = Counter()
    original, orthogonalize = dist.all_to_all_single, muon.orthogonalize

    def counted(received, sent, *splits, **how):
        calls["all-to-all"] += 1
        calls["sent"] += sent.numel()
        return original(received, sent, *splits, **how)

    def owned(matrix):
        calls["orthogonalized"] += 1
        return orthogonalize(matrix)

    for parameter in run.runner.parameters:
        parameter.grad = torch.ones_like(parameter)
    muon.dist.all_to_all_single, muon.orthogonalize = counted, owned
    try:
        run.runner.optimizer.step()
    finally:
        muon.dist.all_to_all_single, muon.orthogonalize = original, orthogonalize
    size = sum(
        local_part(value).nbytes
        for name, value in run.state.tensors().items()
        if "optimizer" in name
    )
    assert size == optimizer_bytes(run.trained, run.job.config)
    return {
        **calls,
        "elements": sum(item.parameter.numel() for item in run.trained if item.is_hidden_matrix),
    }


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, []),
        (4, ["--parallelism.data_parallel_replicate_degree=2"]),
        (4, ["--parallelism.tensor_parallel_degree=2"]),
        (2, ["--parallelism.data_parallel_replicate_degree=2"]),
    ],
    ids=["fsdp", "hsdp", "fsdp x tp", "replicas"],
)
def test_each_matrix_is_gathered_once_and_orthogonalized_by_one_owner(
    pool, tmp_path, world, options
):
    """Each matrix is sent to its owner once, and the result to every replica."""
    ranks = pool.run(count_step, [*MUON, *options], str(tmp_path), world=world)
    assert [result["all-to-all"] for result in ranks] == [2] * world
    counts = [result.get("orthogonalized", 0) for result in ranks]
    assert sum(counts) == 2 * 7 and max(counts) - min(counts) <= 2
    copies = 2 if "replicate" in str(options) else 1
    assert sum(result["sent"] for result in ranks) == (1 + copies) * ranks[0]["elements"]


def test_owners_have_about_equal_work():
    shapes = [torch.Size(s) for s in [(4096, 14336)] * 6 + [(4096, 4096)] * 4 + [(1024, 4096)] * 4]
    for ranks in (1, 3, 8, 100):
        owners = owners_of(shapes, ranks)
        work = [0] * ranks
        for shape, owner in zip(shapes, owners, strict=True):
            work[owner] += min(shape) ** 2 * max(shape)
        largest = 4096**2 * 14336
        assert max(work) <= sum(work) / ranks + largest and owners == owners_of(shapes, ranks)


def test_a_batch_has_a_matrix_for_every_rank_however_large_they_are():
    large = [torch.empty(4, 4)] * 10
    assert [*chunk_by_numel(large, max_numel=16)] == [slice(n, n + 1) for n in range(10)]
    assert [*chunk_by_numel(large, max_numel=16, min_count=4)] == [
        slice(0, 4),
        slice(4, 8),
        slice(8, 10),
    ]
    assert [*chunk_by_numel(large, max_numel=96, min_count=4)] == [slice(0, 6), slice(6, 10)]
    experts = [torch.empty(4, 4, 4)] * 3
    assert [*chunk_by_numel(experts, max_numel=16, min_count=4)] == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
    ]


def test_the_owner_s_own_replica_sends():
    """Two replicas of two shards: no transfer to an owner crosses replicas."""
    upper, lower = (slice(0, 4), slice(0, 8)), (slice(4, 8), slice(0, 8))
    holders: dict[tuple[int, ...], list[int]] = {(0,): [0, 2], (1,): [1, 3]}
    for rank in range(4):
        spread = Spread(torch.empty(8, 8), 0, holders, (rank % 2,))
        with patch.object(Spread, "box", lambda _, at: (upper, lower)[at[0]]):
            route = _plan([spread] * 8, rank, 4).gather
        assert len(route.recv) == 4 and all(
            t.source // 2 == t.target // 2 for t in (*route.send, *route.recv)
        )


def regions(argv: list[str], folder: str) -> dict[str, list[Box]]:
    """Return each rank's region of each matrix, as this rank knows it without the others."""
    run, found = trainer([*MUON, *argv], folder), {}
    optimizer = run.runner.optimizer
    for name, weight, _ in optimizer._weights():
        coordinates = optimizer._coordinates[muon._mesh_of(weight)]
        (spread,) = muon._spreads(weight, coordinates, dist.get_rank())
        boxes = {rank: spread.box(at) for at, ranks in spread.holders.items() for rank in ranks}
        found[name] = [boxes[rank] for rank in range(dist.get_world_size())]
        own = boxes[dist.get_rank()]
        assert own == spread.box(spread.own)
        assert torch.equal(full(weight)[own], local_part(weight)), name
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ["--parallelism.tensor_parallel_degree=2"],
        ["--parallelism.data_parallel_replicate_degree=2", KEPT],
    ],
    ids=["fsdp x tp", "hsdp"],
)
def test_each_rank_s_part_of_a_matrix_follows_from_mesh_and_placement(pool, tmp_path, argv):
    first, *others = pool.run(regions, argv, str(tmp_path), world=4)
    assert len(first) == 14 and all(other == first for other in others)


def three_steps(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    run = trainer([*argv, *FLOAT64, "--lr_scheduler.warmup_steps=0"], folder)
    run.train()
    return weights(run)


@pytest.mark.parametrize(
    "options",
    sample(
        [KEPT, f"{KEPT} --parallelism.tensor_parallel_degree=2", "--training.enable_cpu_offload"],
        KEPT,
    ),
)
def test_several_steps_equal_one_process_in_float64(pool, tmp_path, options):
    """Cases that the table of `titanlite verify` does not have."""
    world = 4 if "tensor" in options else 2
    argv = [*MUON, "--training.global_batch_size=4", "--optimizer.eps=1e-3"]
    expected = pool.run(
        three_steps, [*argv, "--training.local_batch_size=4"], str(tmp_path), world=1
    )[0]
    argv += ["--training.local_batch_size=2", *options.split()]
    for result in pool.run(three_steps, argv, str(tmp_path), world=world):
        for name, weight in expected.items():
            assert relative_error(result[name], weight) <= 1e-10, name


def test_many_batches_of_matrices_equal_one_batch(pool, tmp_path):
    argv = [*MUON, "--training.local_batch_size=2"]
    expected = pool.run(three_steps, argv, str(tmp_path), world=2)[0]
    for result in pool.run(in_small_batches, argv, str(tmp_path), world=2):
        assert all(torch.equal(result[name], weight) for name, weight in expected.items())


def in_small_batches(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            muon, "chunk_by_numel", lambda matrices, min_count: chunk_by_numel(matrices, 200)
        )
        return three_steps(argv, folder)


@pytest.mark.long
def test_state_loads_on_another_mesh(pool, tmp_path):
    layouts = {"dp2": (2, []), "dp2tp2": (4, ["--parallelism.tensor_parallel_degree=2"])}
    saved, sources = {}, {}
    for name, (world, layout) in layouts.items():
        argv = [*MUON, *layout, "--checkpoint.enable", "--training.steps=2"]
        saved[name] = pool.run(run_until, argv, str(tmp_path / name), world=world)[0]["state"]
        sources[name] = str(tmp_path / name / "checkpoint")
    assert "optimizer.layers.0.attention.wq.weight.momentum_buffer" in saved["dp2"]
    assert "optimizer.output.weight.exp_avg" in saved["dp2"]
    assert pool.run(load_all, MUON, str(tmp_path / "to"), sources, world=1) == [saved]
    assert (
        pool.run(load_all, [*MUON, *layouts["dp2tp2"][1]], str(tmp_path / "to"), sources, world=4)
        == [saved] * 4
    )


def test_a_model_without_matrices_to_train_is_refused(pool, tmp_path):
    argv = [*MUON, '--model.freeze=["layers.*"]']
    with pytest.raises(RankFailed, match="Muon finds no trained matrix"):
        pool.run(three_steps, argv, str(tmp_path), world=1)
