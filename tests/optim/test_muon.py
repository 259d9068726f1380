"""Muon: torch's algorithm, but one owner orthogonalizes each matrix, with two collectives per batch
of matrices.

`titanlite verify` proves that it equals one process on every mesh.
"""

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.saved import run_until
from tests.jobs import FLOAT64, TINY, require_close, run_to_end, trainer, weights
from tests.lanes import sample
from tests.messages import refused
from titanlite.optim import muon, optimizer_bytes
from titanlite.optim.bf16_state import chunk_by_numel
from titanlite.optim.muon import Muon, Spread, _plan, owners_of
from titanlite.parallel.dtensor import local_part
from titanlite.verify.pool import RankFailed

MUON = [*TINY, "--optimizer.name=Muon", "--model.overrides.n_kv_heads=2"]
KEPT = "--parallelism.fsdp_keep_whole=['layers.0.attention.*','tok_embeddings.*']"
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"
TP = "--parallelism.tensor_parallel_degree=2"


def test_updates_equal_those_of_torch_s_muon_and_adamw():
    """A weight of three dimensions is a matrix for each expert."""
    torch.manual_seed(0)
    matrices = {"wide": (8, 24), "tall": (24, 8), "square": (16, 16), "experts": (9, 4, 8)}
    rest = {"other": (8, 8), "norm": (8,)}

    def parameters(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.nn.Parameter]:
        return {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}

    own, theirs = parameters(matrices | rest), parameters(matrices | rest)
    experts = [torch.nn.Parameter(torch.ones(4, 8)) for _ in range(9)]
    adamw = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8}
    groups = [
        {"params": [(n, own[n]) for n in matrices], "weight_decay": 0.1, "matrices": True},
        {"params": [(n, own[n]) for n in rest], "weight_decay": 0.2, "matrices": False},
    ]
    optimizers = [
        Muon(groups, torch.bfloat16, **adamw),
        torch.optim.Muon(
            [*(theirs[name] for name in matrices if name != "experts"), *experts],
            lr=0.02,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
            momentum=0.95,
        ),
        torch.optim.AdamW([theirs[name] for name in rest], weight_decay=0.2, **adamw),
    ]
    for _ in range(4):
        for name, parameter in own.items():
            parameter.grad = torch.randn_like(parameter)
            theirs[name].grad = parameter.grad.clone()
        for expert, gradient in zip(experts, own["experts"].grad, strict=True):
            expert.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    expected = {name: parameter.detach() for name, parameter in theirs.items()}
    expected["experts"] = torch.stack([expert.detach() for expert in experts])
    require_close(own, expected, 1e-6)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon.dist, "all_to_all_single", counted)
        patch.setattr(muon, "orthogonalize", owned)
        run.runner.optimizer.step()
    state = run.state.tensors().items()
    size = sum(local_part(tensor).nbytes for name, tensor in state if "optimizer" in name)
    assert size == optimizer_bytes(run.trained, run.job.config)
    elements = sum(item.parameter.numel() for item in run.trained if item.is_hidden_matrix)
    return {**calls, "elements": elements}


@pytest.mark.parametrize(
    ("world", "option", "copies"),
    sample([(4, TP, 1), (4, REPLICAS, 2), (2, REPLICAS, 2)], (4, TP, 1), (4, REPLICAS, 2)),
)
def test_each_matrix_is_gathered_once_and_orthogonalized_by_one_owner(
    pool, tmp_path, world, option, copies
):
    """Each matrix is sent to its owner once, and the result to every replica."""
    ranks = pool.run(count_step, [*MUON, option], str(tmp_path), world=world)
    assert [result["all-to-all"] for result in ranks] == [2] * world
    counts = [result.get("orthogonalized", 0) for result in ranks]
    assert sum(counts) == 2 * 7 and max(counts) - min(counts) <= 2
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
    def ends(count: int, shape: tuple[int, ...], **limits: int) -> list[int]:
        matrices = [torch.empty(shape)] * count
        return [batch.stop for batch in chunk_by_numel(matrices, **limits)]

    assert ends(0, (4, 4)) == []
    assert ends(10, (4, 4), max_numel=39) == [2, 4, 6, 8, 10]
    assert ends(10, (4, 4), max_numel=5) == [*range(1, 11)]
    assert ends(10, (4, 4), max_numel=16, min_count=4) == [4, 8, 10]
    assert ends(10, (4, 4), max_numel=96, min_count=4) == [6, 10]
    assert ends(3, (4, 4, 4), max_numel=16, min_count=4) == [1, 2, 3], "of experts"


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


STEPS = {"FSDP": (2, KEPT), "tensor": (4, f"{KEPT} {TP}"), "HSDP": (4, f"{KEPT} {REPLICAS}")}
STEPS["offload"] = (2, "--training.enable_cpu_offload")


@pytest.mark.parametrize("case", sample(STEPS, "FSDP"))
def test_several_steps_equal_one_process_in_float64(pool, tmp_path, case):
    """Cases that the table of `titanlite verify` does not have."""
    world, options = STEPS[case]
    argv = [*MUON, *FLOAT64, "--training.global_batch_size=4", "--optimizer.eps=1e-3"]
    argv.append("--lr_scheduler.warmup_steps=0")
    one = [*argv, "--training.local_batch_size=4"]
    expected = pool.run(run_to_end, one, str(tmp_path), world=1)[0]
    for rank in pool.run(run_to_end, [*argv, *options.split()], str(tmp_path), world=world):
        require_close(rank["weights"], expected["weights"], 1e-10)


def three_steps(folder: str, most: int) -> dict[str, torch.Tensor]:
    """Train with batches of so many elements."""

    def batches(matrices: list[torch.Tensor], min_count: int) -> list[slice]:
        return [*chunk_by_numel(matrices, most)]

    run = trainer([*MUON, *FLOAT64], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "chunk_by_numel", batches)
        run.train()
    return weights(run)


def test_many_batches_of_matrices_equal_one_batch(pool, tmp_path):
    one, many = (pool.run(three_steps, str(tmp_path), most, world=2) for most in (1 << 20, 200))
    for found, expected in zip(many, one, strict=True):
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.long
def test_state_loads_on_another_mesh(pool, tmp_path):
    argv = [*MUON, "--checkpoint.enable", "--training.steps=2", "--training.global_batch_size=4"]
    saved = pool.run(run_until, argv, str(tmp_path), world=2)[0]["state"]
    kinds = "layers.0.attention.wq.weight.momentum_buffer", "output.weight.exp_avg"
    assert {f"optimizer.{name}" for name in kinds} < saved.keys()
    for rank in pool.run(run_until, [*argv, TP], str(tmp_path), world=4):
        assert rank["begun"] == 2 and rank["state"] == saved


def test_a_model_without_matrices_to_train_is_refused(pool, tmp_path):
    argv = [*MUON, '--model.freeze=["layers.*"]']
    with refused("optimizer.name", "Muon", "AdamW", kind=RankFailed):
        pool.run(run_to_end, argv, str(tmp_path), world=1)
