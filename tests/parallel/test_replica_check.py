"""Ranks that should hold the same values do, or the run stops before its first step."""

from unittest.mock import patch

import pytest
import torch

import titanlite.train.trainer
from tests.jobs import QUIET, TINY, trainer
from tests.runs import train
from titanlite.checkpoint import source
from titanlite.errors import RunFailed
from titanlite.parallel.replica_check import check_replicas, content_hash
from titanlite.verify.pool import RankFailed

REPLICATED = "--parallelism.data_parallel_replicate_degree="


def with_another_seed(argv: list[str], folder: str, odd: int) -> None:
    """Build a trainer where one rank has another seed."""
    agree_on_seed = titanlite.train.trainer.agree_on_seed
    rank = torch.distributed.get_rank()
    titanlite.train.trainer.agree_on_seed = lambda configured: (
        agree_on_seed(configured) + (rank == odd)
    )
    try:
        trainer(argv, folder)
    finally:
        titanlite.train.trainer.agree_on_seed = agree_on_seed


@pytest.mark.parametrize(
    ("world", "words", "says"),
    [
        (2, REPLICATED + "2", "tok_embeddings.weight on rank 1 differs from rank 0"),
        (4, REPLICATED + "4", "tok_embeddings.weight on rank 1 differs from rank 0, 2, 3"),
        (4, REPLICATED + "2", "tok_embeddings.weight on rank 3 differs from rank 1"),
        (
            2,
            "--parallelism.fsdp_keep_whole=['layers.1.attention.wq.*']",
            "layers.1.attention.wq.weight on rank 1 differs from rank 0",
        ),
    ],
    ids=["two replicas", "four replicas", "hsdp", "replicated"],
)
def test_rank_with_another_seed_is_named_with_the_parameter(pool, tmp_path, world, words, says):
    odd = 3 if "rank 3 differs" in says else 1
    with pytest.raises(RankFailed, match=f"replicas out of sync after initialization: {says}"):
        pool.run(with_another_seed, [*TINY, words], str(tmp_path), odd, world=world)


def test_a_tied_weight_that_differs_between_stages_is_named(pool, tmp_path):
    argv = [*TINY, "--model.overrides.tied", "--parallelism.pipeline_parallel_degree=2"]
    pool.run(with_another_seed, argv, str(tmp_path), -1, world=2)
    says = "tok_embeddings.weight on rank 1 differs from rank 0"
    with pytest.raises(RankFailed, match=f"replicas out of sync after initialization: {says}"):
        pool.run(with_another_seed, argv, str(tmp_path), 1, world=2)


def bytes_compared(argv: list[str], folder: str) -> int:
    """Return the bytes that a check sends along the dimensions of the mesh."""
    run = trainer(argv, folder)
    sent, reduce = [], torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args) -> None:
        sent.append(tensor.nbytes)
        reduce(tensor, *args)

    with patch.object(torch.distributed, "all_reduce", counted):
        check_replicas(run.parts, "", run.report.context, run.runner.optimizer)
    return sum(sent)


def test_what_is_compared_does_not_grow_with_the_ranks_and_sharded_weights_are_left_out(
    pool, tmp_path
):
    """32 bytes for each tensor that ranks have in common, and 8 for the verdict."""
    one_buffer = 32 + 8  # the turns of RoPE
    for world in (2, 4):
        assert pool.run(bytes_compared, TINY, str(tmp_path), world=world) == [one_buffer] * world
    weights = 32 * 21
    for replicas, world in ((2, 2), (2, 4), (4, 4)):
        argv = [*TINY, f"{REPLICATED}{replicas}"]
        found = pool.run(bytes_compared, argv, str(tmp_path), world=world)
        dimensions = 1 + (world > replicas)
        assert found == [dimensions * (weights + 32) + 8] * world


def test_unreplicated_shards_are_not_compared(pool, tmp_path):
    pool.run(with_another_seed, TINY, str(tmp_path), 1, world=2)


def spoiled(argv: list[str], folder: str, name: str) -> str:
    """Return the message about one element of a tensor that differs on rank 1; before, there must
    be no error.
    """
    run = trainer(argv, folder)
    model = run.parts[0]
    before = [content_hash(tensor) for tensor in model.buffers()]
    check_replicas([model], "before", run.report.context)
    assert before == [content_hash(tensor) for tensor in model.buffers()]
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            tensor.view(-1)[-1].mul_(1 + 1e-6)
    try:
        check_replicas([model], "after loading", run.report.context)
    except RunFailed as error:
        return str(error)
    return ""


def test_one_differing_bit_in_a_buffer_is_found(pool, tmp_path):
    for message in pool.run(spoiled, TINY, str(tmp_path), "rope.turns", world=3):
        assert message.startswith(
            "replicas out of sync after loading: rope.turns on rank 1 differs from rank 0, 2"
        )


def test_replicas_over_tensor_parallel_ranks_are_compared(pool, tmp_path):
    argv = [*TINY, "--model.overrides.n_kv_heads=2", "--parallelism.tensor_parallel_degree=2"]
    pool.run(with_another_seed, argv, str(tmp_path), -1, world=4)
    with pytest.raises(RankFailed, match="replicas out of sync"):
        pool.run(with_another_seed, [*argv, REPLICATED + "2"], str(tmp_path), 1, world=4)


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
    code, out = train(argv, tmp_path, NGPU="2")
    assert code == 1
    assert "replicas out of sync after initialization: table on rank 1 differs from rank 0" in out
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
                args[2].tensors()[name].to_local().view(-1)[0] += 1

    with patch.object(source, "restore", restore_differently):
        trainer([*argv, "--checkpoint.enable"], folder)


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("model.norm.weight", "norm.weight"),
        ("optimizer.norm.weight.exp_avg", "exp_avg of norm.weight"),
    ],
)
def test_differing_load_on_one_rank_ends_the_run(pool, tmp_path, name, reported):
    with pytest.raises(
        RankFailed, match=f"after loading: {reported} on rank 1 differs from rank 0"
    ):
        pool.run(load_differently, [*TINY, REPLICATED + "2"], str(tmp_path), name, world=2)
