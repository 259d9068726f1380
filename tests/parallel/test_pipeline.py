"""Pipeline parallel: any order changes no number, and ranks do, send and hold what the schedule
declares.

test_exact.py proves that its numbers equal those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.jobs import FLOAT64, forward_backward, job, relative_error, trainer
from tests.lanes import sample
from tests.messages import refused
from tests.parallel.float8.jobs import EMULATED, FLOAT8, WIDE
from tests.parallel.rows import (
    CP,
    FOUR,
    INTERLEAVED,
    IS_OLD,
    MICRO_BATCH,
    MODELS,
    PP,
    RECOMPUTED,
    SCHEDULE,
    SGD,
    ZBV,
    one_step,
    own_batches,
    watching,
)
from titanlite.config.pipeline_order import most_kept
from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.errors import UserError
from titanlite.parallel.build import build_model
from titanlite.parallel.pipeline_parallel import Pipeline, cut, orders
from titanlite.parallel.stage import Stage
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.summary import describe_start
from titanlite.verify.pool import RankFailed

WHOLE = "--training.local_batch_size=12"
HALF = ["--training.local_batch_size=6", "--training.global_batch_size=12"]


def with_dropout(words: str, folder: str) -> dict[str, Any]:
    """Return the losses of a step that is computed twice, the seeds and phases that blocks of this
    rank meet, and the numbers of a step without a valid token.
    """
    dropout = "--model.overrides.dropout=0.2"
    run = trainer([*MODELS["gpt2"], *FLOAT64, dropout, PP, *HALF, *words.split()], folder)
    seeds, phases = set[int](), set[str]()

    def note(*_: object) -> None:
        seeds.add(torch.initial_seed())
        phases.add(OWN_PAGE.phase)

    for part in run.parts:
        for block in part.get_submodule("layers").children():
            block.register_forward_pre_hook(note)
            block.register_full_backward_hook(note)
    own = own_batches(run)
    losses = {forward_backward(run, own).item() for _ in range(2)}
    run.runner.optimizer.zero_grad()
    run.step += 1
    ignored = [torch.stack([b.tokens, torch.full_like(b.tokens, IGNORED)], dim=1) for b in own]
    none = forward_backward(run, [MicroBatch(rows) for rows in ignored]).item()
    norm = run.runner.gradient_norm().item()
    return {"losses": losses, "seeds": seeds, "phases": phases, "none": (none, norm)}


def test_dropout_is_that_of_the_step_stage_and_micro_batch_in_any_order(pool, tmp_path):
    """Not of what ran before; recomputation draws the same masks again. A step without a valid
    token has no gradient.
    """
    losses = set[float]()
    for way in ("1F1B", f"GPipe {RECOMPUTED}full"):
        ranks = pool.run(with_dropout, f"{SCHEDULE}{way}", str(tmp_path), world=2)
        losses |= ranks[1]["losses"]
        seeds = [seed for found in ranks for seed in found["seeds"]]
        assert len(set(seeds)) == len(seeds) == 2 * 2 * 12, "steps x stages x micro-batches"
        for found in ranks:
            assert found["phases"] == {"forward", "backward"} and found["none"] == (0.0, 0.0)
    assert len(losses) == 1


def failing(argv: list[str], folder: str) -> None:
    run = trainer(argv, folder)

    def fail(*_: object) -> None:
        raise UserError("no table")

    run.parts[0].forward = fail
    forward_backward(run, own_batches(run))


@pytest.mark.long
def test_an_error_in_a_stage_is_itself(pool, tmp_path):
    """torch wraps it in a RuntimeError that shows all arguments."""
    with pytest.raises(RankFailed) as caught:
        pool.run(failing, [*FOUR, PP, *HALF], str(tmp_path), world=2)
    assert str(caught.value).rstrip().endswith("UserError: no table")


SENDS, RECEIVES = ([f"get_{way}_{what}_ops" for way in ("fwd", "bwd")] for what in ("send", "recv"))


def counted_sends(argv: list[str], folder: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the ways and shapes of what this rank sends in a step."""
    run = trainer(argv, folder)
    own, sent = own_batches(run), list[tuple[str, tuple[int, ...]]]()

    def see(name: str, _: Any, operations: Any) -> None:
        sent.extend((name, tuple(operation.tensor.shape)) for operation in operations)

    with watching(Stage, SENDS, see):
        forward_backward(run, own)
    return sent


@pytest.mark.parametrize(
    ("words", "world", "boundaries"),
    sample([(f"{INTERLEAVED} {CP}", 4, 3), (ZBV, 2, 2)], (ZBV, 2, 2)),
)
def test_hidden_states_cross_each_boundary_between_ranks_once_each_way(
    pool, tmp_path, words, world, boundaries
):
    """Of a micro-batch's own tokens; the two neighbors in the middle of a V are on one rank."""
    ranks = pool.run(counted_sends, [*FOUR, PP, *HALF, *words.split()], str(tmp_path), world=world)
    shape = (1, 8 if CP in words else 16, 16)
    sent = sorted(each for found in ranks for each in found)
    assert sent == [(way, shape) for way in sorted(SENDS) for _ in range(6 * world * boundaries)]


def received_and_held(argv: list[str], folder: str) -> tuple[int, int, int]:
    """Return how many tensors this rank receives in a step, how many it holds at once, and how many
    after it.
    """
    run = trainer(argv, folder)
    own, received, most = own_batches(run), list[StorageWeakRef](), 0

    def held() -> int:
        return sum(not storage.expired() for storage in received)

    def count(*_: Any) -> None:
        nonlocal most
        most = max(most, held())

    def see(_: str, __: Any, operations: Any) -> None:
        storages = [operation.tensor.untyped_storage() for operation in operations]
        received.extend(map(StorageWeakRef, storages))

    with watching(Stage, RECEIVES, see), watching(Pipeline, ["begin"], count):
        forward_backward(run, own)
    kept = most_kept(orders(run.job.stages)[run.runner.context.mesh.world["pp"].get_local_rank()])
    return len(received), most - kept, held()


@pytest.mark.parametrize("schedule", sample(["1F1B", "ZBVZeroBubble"], "1F1B"))
def test_what_a_stage_receives_is_held_no_longer_than_its_activations(pool, tmp_path, schedule):
    """Schedules of several stages a rank begin to receive up to three ahead of it."""
    argv = [*FOUR, PP, f"{SCHEDULE}{schedule}", WHOLE]
    for received, more_than_kept, after in pool.run(
        received_and_held, argv, str(tmp_path), world=2
    ):
        assert received >= 12 and more_than_kept <= 3 and after == 0


def held_in_bfloat16(argv: list[str], folder: str) -> tuple[int, int]:
    """Return how often W began, and how many gradients were in bfloat16 then."""
    run = trainer(argv, folder)
    own, held = own_batches(run), list[int]()

    def see(_: str, args: tuple[Any, ...], __: Any) -> None:
        if args[2] == "W":
            parameters = (p for part in run.parts for p in part.parameters())
            held.append(
                sum(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in parameters)
            )

    with watching(Pipeline, ["begin"], see):
        forward_backward(run, own)
    return len(held), sum(held)


@pytest.mark.long
def test_gradients_are_summed_in_the_type_of_reductions_when_weights_follow_inputs(pool, tmp_path):
    argv = [*FOUR, PP, ZBV, "--training.local_batch_size=3", "--training.global_batch_size=12"]
    argv.append("--training.mixed_precision_param=bfloat16")
    for begun, held in pool.run(held_in_bfloat16, argv, str(tmp_path), world=4):
        assert begun and not held


def test_stages_have_the_model_between_them_and_a_parameter_in_none_is_named():
    found = job([*FOUR, PP], 2)
    model, _ = build_model(found)
    first, last = (
        {name for name, _ in part.named_parameters()}
        for part in cut(model, found.spec, found.stages.names)
    )
    assert first | last == {name for name, _ in model.named_parameters()} and not first & last
    model.scale = torch.nn.Parameter(torch.empty(1, device="meta"))
    with refused("scale", "tok_embeddings"):
        cut(model, found.spec, found.stages.names)


def lines_at_start(argv: list[str], folder: str) -> dict[str, str]:
    return dict(
        line.split(maxsplit=1) for line in describe_start(trainer(argv, folder)) if " " in line
    )


def test_a_run_starts_with_the_numbers_of_the_whole_model(pool, tmp_path):
    """And with the memory of the rank that needs most, which all ranks agree on."""
    alone = pool.run(lines_at_start, FOUR, str(tmp_path), world=1)[0]
    ranks = pool.run(lines_at_start, [*FOUR, PP], str(tmp_path), world=2)
    for name in ("model", "compute", "optimizer"):
        assert {found[name] for found in ranks} == {alone[name]}
    assert ranks[0]["memory"] == ranks[1]["memory"] != alone["memory"]
    assert ranks[0]["batch"].endswith("would take 4)") and "would take" not in alone["batch"]


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1F1B", *["ZBVZeroBubble"] * (not IS_OLD)])
def test_float8_scales_by_the_same_micro_batches(pool, tmp_path, schedule):
    argv = [*WIDE, *SGD, FLOAT8, EMULATED, "--model.overrides.n_layers=4"]
    (alone,) = pool.run(one_step, [*argv, "--training.local_batch_size=2"], str(tmp_path), world=1)
    cut = [*argv, PP, f"{SCHEDULE}{schedule}", f"{MICRO_BATCH}2", WHOLE]
    for found in pool.run(one_step, cut, str(tmp_path), world=2):
        for name, value in found["gradients"].items():
            assert relative_error(value, alone["gradients"][name]) < 1e-5, name
