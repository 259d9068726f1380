"""Ranks that should hold the same values do, or the run stops before its first step."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

import titanlite.train.trainer
from tests.jobs import QUIET, TINY, trainer
from tests.lanes import sample
from tests.messages import refused, says
from tests.parallel.rows import EVEN, HSDP, PP, TP, watching
from tests.runs import run
from titanlite.checkpoint import source
from titanlite.errors import RunFailed
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.replica_check import check_replicas, content_hash
from titanlite.verify.pool import RankFailed

KEPT = "--parallelism.fsdp_keep_whole=['layers.1.attention.wq.*']"
TIED = f"--model.overrides.tied {PP}"
EMBEDDING = "tok_embeddings.weight on rank"
START = "after initialization"


def with_another_seed(argv: list[str], folder: str, odd: int) -> None:
    """Build a trainer where one rank has another seed."""
    agree_on_seed = titanlite.train.trainer.agree_on_seed
    rank = torch.distributed.get_rank()

    def agree(configured: Any) -> int:
        return agree_on_seed(configured) + (rank == odd)

    with patch.object(titanlite.train.trainer, "agree_on_seed", agree):
        trainer(argv, folder)


REPLICAS = [
    (2, HSDP, 1, f"{EMBEDDING} 1 differs from rank 0"),
    (2, KEPT, 1, "layers.1.attention.wq.weight on rank 1 differs from rank 0"),
    (2, TIED, 1, f"{EMBEDDING} 1 differs from rank 0"),
    (2, "", 1, ""),
    (4, HSDP, 3, f"{EMBEDDING} 3 differs from rank 1"),
    (4, f"{TP} {HSDP}", 1, f"{EMBEDDING} 3 differs from rank 1"),
]


@pytest.mark.parametrize(("world", "words", "odd", "said"), sample(REPLICAS, *REPLICAS[:4]))
def test_a_replica_with_another_seed_is_named_with_the_parameter(
    pool, tmp_path, world, words, odd, said
):
    """Shards that no rank has too are not compared."""
    argv = [*EVEN, *words.split()]
    if not said:
        pool.run(with_another_seed, argv, str(tmp_path), odd, world=world)
        return
    with refused(START, said, kind=RankFailed):
        pool.run(with_another_seed, argv, str(tmp_path), odd, world=world)


def bytes_compared(argv: list[str], folder: str) -> int:
    """Return the bytes that a check sends along the dimensions of the mesh."""
    run = trainer(argv, folder)
    sent = list[int]()

    all_reduce = watching(
        torch.distributed, ["all_reduce"], lambda _, args, __: sent.append(args[0].nbytes)
    )
    with all_reduce:
        check_replicas(run.parts, "", run.report.context, run.runner.optimizer)
    return sum(sent)


COMPARED = [
    (2, "", 1, 1),
    (2, HSDP, 22, 1),
    (4, HSDP, 22, 2),
    (4, HSDP.replace("=2", "=4"), 22, 1),
]


@pytest.mark.parametrize(
    ("world", "words", "tensors", "dimensions"), sample(COMPARED, *COMPARED[:2])
)
def test_what_is_compared_does_not_grow_with_the_ranks_and_sharded_weights_are_left_out(
    pool, tmp_path, world, words, tensors, dimensions
):
    """32 bytes for each tensor that ranks have in common, and 8 for the verdict; a buffer, the
    rotations of RoPE, is one that all have.
    """
    found = pool.run(bytes_compared, [*TINY, *words.split()], str(tmp_path), world=world)
    assert found == [32 * tensors * dimensions + 8] * world


def spoiled(argv: list[str], folder: str, name: str) -> str:
    """Return the message about one element of a tensor that differs on rank 1; before, there must
    be no error.
    """
    run = trainer(argv, folder)
    model = run.parts[0]
    check_replicas([model], "before", run.report.context)
    tensor = dict(model.named_buffers())[name]
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            tensor.view(-1)[-1].mul_(1 + 1e-6)
    with pytest.raises(RunFailed) as error:
        check_replicas([model], "after loading", run.report.context)
    return str(error.value)


def test_one_differing_bit_in_a_buffer_is_found(pool, tmp_path):
    for message in pool.run(spoiled, TINY, str(tmp_path), "rope.rotations", world=3):
        says(message, "after loading", "rope.rotations on rank 1 differs from rank 0, 2")


def test_hash_depends_on_values_and_order():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.arange(200_001).to(dtype)
        kept = values.clone()
        hashed = content_hash(values)
        assert torch.equal(values, kept) and content_hash(kept) == hashed
        swapped = values.clone()
        swapped[[5, 150_007]] = swapped[[150_007, 5]]
        assert content_hash(swapped) != hashed
        values[-1] = 0
        assert content_hash(values) != hashed


@pytest.mark.long
def test_run_with_a_differing_rank_ends_before_its_first_step(tmp_path):
    argv = [*QUIET, "--model.package=odd", "--model.name=odd", "--model.flavor=small"]
    out = run(argv, tmp_path, ranks=2, code=1).out
    says(out, START, "table on rank 1 differs from rank 0")
    assert "step:" not in out and "Traceback" not in out


def load_differently(argv: list[str], folder: str, name: str) -> None:
    """Save; then build a trainer from the checkpoint whose rank 1 loads another value."""
    saving = [*argv, "--checkpoint.enable", "--checkpoint.interval=1", "--training.steps=1"]
    trainer(saving, folder).train()
    restore = source.restore

    def restore_differently(*args) -> None:
        restore(*args)
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                local_part(args[2].tensors()[name]).view(-1)[0] += 1

    with patch.object(source, "restore", restore_differently):
        trainer([*argv, "--checkpoint.enable"], folder)


LOADED = [
    ("model.norm.weight", "norm.weight"),
    ("optimizer.norm.weight.exp_avg", "exp_avg of norm.weight"),
]


@pytest.mark.parametrize(("name", "reported"), sample(LOADED, LOADED[1]))
def test_differing_load_on_one_rank_ends_the_run(pool, tmp_path, name, reported):
    with refused("after loading", f"{reported} on rank 1 differs", kind=RankFailed):
        pool.run(load_differently, [*TINY, HSDP], str(tmp_path), name, world=2)
