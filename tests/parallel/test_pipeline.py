"""Pipeline parallel: its numbers are those of one process, its actions those that the schedule
declares.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion

from tests.jobs import (
    FLOAT64,
    QUIET,
    TINY,
    forward_backward,
    full,
    job,
    micro_batches,
    relative_error,
    trainer,
)
from tests.lanes import sample
from tests.parallel.test_exact import MODELS as MODELS_OF_TWO
from tests.parallel.test_exact import SGD, ragged_batch
from titanlite.config.pipeline_order import faults_of, most_kept, parse
from titanlite.config.stages import SPLIT_BACKWARD
from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.errors import UserError
from titanlite.parallel.build import build_model, named_parameters
from titanlite.parallel.pipeline_parallel import Pipeline, orders, split
from titanlite.parallel.stage import Stage
from titanlite.registry import Role
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.guard import NonFinite
from titanlite.train.loss import count_valid
from titanlite.train.report import loss_over_ranks
from titanlite.train.summary import describe_start
from titanlite.train.trainer import Trainer
from titanlite.verify.harness import with_role
from titanlite.verify.pool import RankFailed

PP2 = "--parallelism.pipeline_parallel_degree=2"
IS_OLD = TorchVersion(torch.__version__) < "2.13"
"""torch 2.11 runs no autograd.Function in a split backward pass, and receives early under
Interleaved1F1B.
"""
FOUR = [*TINY, "--model.overrides.n_layers=4", "--model.overrides.n_kv_heads=2"]
MODELS = {
    "llama3": FOUR,
    "llama3 tied": [*FOUR, "--model.overrides.tied"],
    "gpt2": [*MODELS_OF_TWO["gpt2"], "--model.overrides.n_layers=4"],
    "llama3 with a frozen tie": [
        *FOUR,
        "--model.overrides.tied",
        "--model.freeze=['tok_embeddings.*']",
    ],
    "llama3 frozen": [*FOUR, "--model.freeze=['tok_embeddings.*','layers.2.*','norm.*']"],
    "llama3 without a trained stage": [
        *FOUR,
        "--model.freeze=['tok_embeddings.*','layers.0.*','layers.1.*']",
    ],
}


def own_micro_batches(run: Trainer) -> list[MicroBatch]:
    """Return this rank's part of a global batch."""
    return [
        run.runner.forward.take(batch) for batch in micro_batches(*ragged_batch(), run.rank_slice)
    ]


def one_step(argv: list[str], folder: str, optimizer: Sequence[str] = SGD) -> dict[str, Any]:
    """Return the numbers of one step, of what this rank has of the model, and what it did."""
    run = trainer([*argv, *FLOAT64, *optimizer], folder)
    run.step = 1
    parts, table = run.parts, run.runner.context.table
    parameters = {name: p for part in parts for name, p in named_parameters(part, table)}
    before = {name: full(p) for name, p in parameters.items()}
    own = own_micro_batches(run)
    loss = forward_backward(run, own)
    labels = count_valid(torch.stack([batch.labels for batch in own])) * run.runner.has_loss
    found = {
        "loss": loss_over_ranks(loss, labels, run.mesh.loss)[0],
        "gradients": {name: full(p.grad) for name, p in parameters.items() if p.grad is not None},
        "inf norm": run.runner.clip_gradients(float("inf"), float("inf")).item(),
        "norm": run.runner.clip_gradients(0.5).item(),
        "before": before,
    }
    run.runner.update(1, torch.zeros(()))
    if pipeline := run.runner.pipeline:
        row = orders(run.job.stages)[run.mesh.world["pp"].get_local_rank()]
        declared = ["".join(map(str, action)) for cell in row for action in parse(cell)]
        found |= {"actions": pipeline.actions, "declared": declared}
    return {**found, "after": {name: full(p) for name, p in parameters.items()}}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    whole = "--training.local_batch_size=12"
    return {
        name: pool.run(one_step, [*argv, whole], folder, world=1)[0]
        for name, argv in MODELS.items()
    }


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


DP2, TP2, CP2 = (
    f"--parallelism.{word}_parallel_degree=2"
    for word in ("data_parallel_shard", "tensor", "context")
)
DP2 = ""  # the rest of the world
REPLICATE2 = "--parallelism.data_parallel_replicate_degree=2"
SCHEDULES = (
    "1F1B",
    "GPipe",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
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
    ("llama3 with a frozen tie", 2, "1F1B", ""),
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
    (
        "llama3",
        4,
        "1F1B",
        "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.0.*','*norm.weight']",
    ),
    (
        "llama3",
        4,
        "ZBVZeroBubble",
        "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.0.*','*norm.weight']",
    ),
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
        every=8,
    ),
)
def test_pp_changes_no_number(pool, alone, tmp_path, model, world, schedule, words):
    """As one process computes them, with two accumulated batches that are cut into micro-batches.

    What each rank did is what the schedule declares, also where torch's own list is another (1F1B).
    """
    if IS_OLD and "loss_chunks" in words and schedule in SPLIT_BACKWARD:
        pytest.skip("needs torch 2.13")
    degrees = [PP2] if "pipeline_parallel_degree" not in words else []
    data = 1 if world == 2 or "tensor_" in words or "context_" in words or not degrees else 2
    sizes = [f"--training.local_batch_size={6 // data}", "--training.global_batch_size=12"]
    order = f"--parallelism.pipeline_parallel_schedule={schedule}"
    argv = [*MODELS[model], *degrees, order, *words.split(), *sizes]
    ranks = pool.run(one_step, argv, str(tmp_path), world=world)
    same_as_alone(ranks, alone[model])
    assert all(found["actions"] == found["declared"] for found in ranks)


CSV = """0F0,1F0,0F1,1F1,1B0,0B0,,1B1,0B1
2F0,3F0,2F1,3F1,3B0,2B0,3I1,2I1,3W1,2W1
"""


def one_step_in_one_lane(argv: list[str], folder: str) -> dict[str, Any]:
    with patch("titanlite.parallel.stage.build_lanes", lambda *_: {}):
        return one_step(argv, folder)


@pytest.mark.parametrize("degree", sample((2, 4), 4))
@pytest.mark.parametrize("schedule", sample(SCHEDULES[2:], "Interleaved1F1B", every=2))
def test_a_group_for_each_edge_changes_no_bit(pool, tmp_path, degree, schedule):
    argv = [
        *FOUR,
        f"--parallelism.pipeline_parallel_degree={degree}",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--model.overrides.n_layers=8",
        "--training.local_batch_size=12",
    ]
    in_lanes = pool.run(one_step, argv, str(tmp_path), world=degree)
    in_one = pool.run(one_step_in_one_lane, argv, str(tmp_path), world=degree)
    for found, expected in zip(in_lanes, in_one, strict=True):
        assert found["loss"] == expected["loss"]
        for kind in ("gradients", "after"):
            assert found[kind].keys() == expected[kind].keys()
            for name, value in found[kind].items():
                assert torch.equal(value, expected[kind][name]), f"{kind} of {name}"


def test_a_csv_places_stages_and_orders_them(pool, alone, tmp_path):
    """Neighbors on one rank, and one micro-batch whose backward pass is split."""
    file = tmp_path / "order.csv"
    file.write_text(CSV)
    words = (
        f"--parallelism.pipeline_parallel_schedule_csv={file} "
        "--parallelism.pipeline_parallel_microbatch_size=6"
    )
    argv = [*FOUR, PP2, *words.split(), "--training.local_batch_size=12"]
    ranks = pool.run(one_step, argv, str(tmp_path), world=2)
    same_as_alone(ranks, alone["llama3"])
    for found, row in zip(ranks, CSV.splitlines(), strict=True):
        assert found["actions"] == found["declared"] == [cell for cell in row.split(",") if cell]


def random_order(seed: int) -> str:
    """Return a CSV of four stages anywhere on two ranks, and six micro-batches in any order that
    can be executed.
    """
    draw, stages, numbers = random.Random(seed), range(4), range(6)
    rank_of = draw.sample([0, 0, 1, 1], 4)
    splits = {(stage, number): draw.random() < 0.5 for stage in stages for number in numbers}
    rows, done = [list[str](), list[str]()], set[tuple[int, str, int]]()
    waiting = {(stage, "F", number) for stage in stages for number in numbers}
    while waiting:
        ready = [
            (stage, kind, number)
            for stage, kind, number in sorted(waiting)
            if kind == "W"
            or (kind == "F" and (not stage or (stage - 1, "F", number) in done))
            or (
                kind in "BI"
                and (stage == 3 or {(stage + 1, "B", number), (stage + 1, "I", number)} & done)
            )
        ]
        stage, kind, number = action = draw.choice(ready)
        rows[rank_of[stage]].append(f"{stage}{kind}{number}")
        done.add(action)
        waiting.remove(action)
        if kind == "F":
            waiting.add((stage, "I" if splits[stage, number] else "B", number))
        elif kind == "I":
            waiting.add((stage, "W", number))
    return "\n".join(map(",".join, rows))


def overlapped(order: str) -> str:
    """Return the order with each forward pass and a backward pass behind it in one cell, where
    torch can run it.
    """
    for pair in re.findall(r"\d+F\d+,\d+B\d+", order):
        cell = f"({pair.replace(',', ';')})OVERLAP_F_B"
        changed = order.replace(pair, cell)
        order = (
            order
            if [*faults_of([row.split(",") for row in changed.splitlines()], 2, 6)]
            else changed
        )
    return order


DESCENDING = "0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0"
ORDERS = {"last stage descends": (DESCENDING, 6)} | {
    f"{seed}": (random_order(seed), 2) for seed in range(30)
}
ORDERS |= {f"{seed} overlapped": (overlapped(random_order(seed)), 2) for seed in range(10)}


@pytest.mark.parametrize(
    "name", sample(ORDERS, "last stage descends", "0", "3 overlapped", every=3)
)
def test_an_order_of_any_sequence_changes_no_number(pool, alone, tmp_path, name):
    order, size = ORDERS[name]
    if IS_OLD and "I" in order:
        pytest.skip("needs torch 2.13: a split backward pass")
    file = tmp_path / "order.csv"
    file.write_text(order)
    csv = f"--parallelism.pipeline_parallel_schedule_csv={file}"
    micro_batch = f"--parallelism.pipeline_parallel_microbatch_size={size}"
    argv = [*FOUR, PP2, csv, micro_batch, "--training.local_batch_size=12"]
    ranks = pool.run(one_step, argv, str(tmp_path), world=2)
    same_as_alone(ranks, alone["llama3"])
    for found, row in zip(ranks, order.splitlines(), strict=True):
        assert (
            found["actions"]
            == found["declared"]
            == [f"{action}" for cell in row.split(",") for action in parse(cell)]
        )


MUON = ["--optimizer.name=Muon", "--optimizer.lr=0.1", "--optimizer.implementation=for-loop"]
HALF = ["--training.local_batch_size=6", "--training.global_batch_size=12"]
BLOCKS = '"layers.0", "layers.1", "layers.2", "layers.3"'
LAST_HAS_NO_MATRIX = (
    f'--parallelism.module_fqns_per_model_part=[["tok_embeddings", {BLOCKS}], ["norm", "output"]]'
)


@pytest.mark.parametrize(
    "words", [[], [LAST_HAS_NO_MATRIX]], ids=["matrices on each stage", "and on one"]
)
def test_muon_exchanges_matrices_within_a_stage(pool, tmp_path, words):
    alone = pool.run(
        one_step, [*FOUR, "--training.local_batch_size=12"], str(tmp_path / "1"), MUON, world=1
    )[0]
    size = ["--training.local_batch_size=6", "--training.global_batch_size=12"]
    same_as_alone(
        pool.run(one_step, [*FOUR, PP2, *size, *words], str(tmp_path / "4"), MUON, world=4), alone
    )


def with_dropout(argv: list[str], folder: str) -> list[float]:
    """Return the losses of two runs of one step."""
    run = trainer([*argv, *FLOAT64, *SGD, "--model.overrides.dropout=0.2"], folder)
    own = own_micro_batches(run)
    return [
        loss_over_ranks(forward_backward(run, own), torch.tensor(1), run.mesh.loss)[0]
        for _ in range(2)
    ]


def test_dropout_is_that_of_the_stage_and_micro_batch_in_any_order(pool, tmp_path):
    """Not of what ran before; recomputation draws the same masks again."""
    argv = [*MODELS["gpt2"], PP2, *HALF]
    losses = set[float]()
    for way in ("1F1B", "GPipe --activation_checkpoint.mode=full"):
        words = f"--parallelism.pipeline_parallel_schedule={way}".split()
        for found in pool.run(with_dropout, [*argv, *words], str(tmp_path), world=2):
            losses |= set(found)
    assert len(losses) == 1


def seeds_and_phases(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the seeds that blocks of this rank meet in two steps, the phases, and the numbers of
    the second step, without a valid token."""
    run = trainer([*argv, *FLOAT64, *SGD, "--model.overrides.dropout=0.2"], folder)
    seeds, phases = set[int](), set[str]()

    def note(*_: object) -> None:
        seeds.add(torch.initial_seed())
        phases.add(OWN_PAGE.phase)

    for part in run.parts:
        for block in part.get_submodule("layers").children():
            block.register_forward_pre_hook(note)
            block.register_full_backward_hook(note)
    own = own_micro_batches(run)
    forward_backward(run, own)
    ignored = [
        MicroBatch(torch.stack([b.tokens, torch.full_like(b.tokens, IGNORED)], dim=1)) for b in own
    ]
    run.runner.optimizer.zero_grad()
    run.step += 1
    loss = forward_backward(run, ignored).item()
    return {
        "seeds": seeds,
        "phases": phases,
        "loss": loss,
        "norm": run.runner.clip_gradients().item(),
    }


def test_each_step_stage_and_micro_batch_has_its_own_dropout_and_no_valid_token_gives_no_gradient(
    pool, tmp_path
):
    ranks = pool.run(seeds_and_phases, [*MODELS["gpt2"], PP2, *HALF], str(tmp_path), world=2)
    seeds = [seed for found in ranks for seed in found["seeds"]]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 12, "steps x stages x micro-batches"
    assert all(found["phases"] == {"forward", "backward"} for found in ranks)
    assert all((found["loss"], found["norm"]) == (0.0, 0.0) for found in ranks)


def failing(argv: list[str], folder: str) -> None:
    run = trainer(argv, folder)

    def fail(*_: object) -> None:
        raise UserError("this stage has no table")

    run.parts[0].forward = fail
    forward_backward(run, own_micro_batches(run))


@pytest.mark.long
def test_an_error_in_a_stage_is_itself(pool, tmp_path):
    """torch wraps it in a RuntimeError that shows all arguments."""
    with pytest.raises(RankFailed) as caught:
        pool.run(failing, [*FOUR, PP2, *HALF], str(tmp_path), world=2)
    assert str(caught.value).rstrip().endswith("UserError: this stage has no table")


def counted_sends(argv: list[str], folder: str) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of what this rank sends in a step: to ranks of later stages, and of earlier
    ones.
    """
    run = trainer(argv, folder)
    own = own_micro_batches(run)
    sent: dict[str, list[tuple[int, ...]]] = {"get_fwd_send_ops": [], "get_bwd_send_ops": []}
    originals = {name: getattr(Stage, name) for name in sent}

    def recording(name: str) -> Callable[..., Any]:
        def record(self: Stage, number: int) -> Any:
            operations = originals[name](self, number)
            sent[name] += [tuple(operation.tensor.shape) for operation in operations]
            return operations

        return record

    with ExitStack() as patches:
        for name in sent:
            patches.enter_context(patch.object(Stage, name, recording(name)))
        forward_backward(run, own)
    return sent


@pytest.mark.parametrize(
    ("schedule", "boundaries", "words"),
    sample(
        [
            ("1F1B", 1, ""),
            ("Interleaved1F1B", 3, ""),
            ("ZBVZeroBubble", 2, ""),
            ("1F1B", 1, TP2),
            ("Interleaved1F1B", 3, CP2),
        ],
        ("Interleaved1F1B", 3, CP2),
    ),
)
def test_hidden_states_cross_each_boundary_between_ranks_once_each_way(
    pool, tmp_path, schedule, boundaries, words
):
    """Of a micro-batch's own tokens; the two neighbors in the middle of a V are on one rank."""
    argv = [
        *FOUR,
        PP2,
        *HALF,
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        *words.split(),
    ]
    ranks = pool.run(counted_sends, argv, str(tmp_path), world=4 if words else 2)
    shape = (1, 8 if words else 16, 16)
    for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
        shapes = [each for found in ranks for each in found[name]]
        assert shapes == [shape] * (12 * boundaries * (2 if words else 1))


def received_and_held(argv: list[str], folder: str) -> tuple[int, int, int]:
    """Return how many tensors this rank receives in a step, how many it holds at once, and how many
    after it.
    """
    run = trainer(argv, folder)
    own, received, most = own_micro_batches(run), list[StorageWeakRef](), 0
    receive, begin = (
        {name: getattr(Stage, name) for name in ("get_fwd_recv_ops", "get_bwd_recv_ops")},
        Pipeline.begin,
    )

    def held() -> int:
        return sum(not storage.expired() for storage in received)

    def recording(name: str) -> Callable[..., Any]:
        def record(self: Stage, number: int) -> Any:
            operations = receive[name](self, number)
            received.extend(
                StorageWeakRef(operation.tensor.untyped_storage()) for operation in operations
            )
            return operations

        return record

    def counting(self: Pipeline, *action: Any) -> None:
        nonlocal most
        most = max(most, held())
        begin(self, *action)

    with ExitStack() as patches:
        for name in receive:
            patches.enter_context(patch.object(Stage, name, recording(name)))
        patches.enter_context(patch.object(Pipeline, "begin", counting))
        forward_backward(run, own)
    return (
        len(received),
        most - most_kept(orders(run.job.stages)[run.mesh.world["pp"].get_local_rank()]),
        held(),
    )


@pytest.mark.parametrize(
    "schedule",
    sample([name for name in SCHEDULES if name != "Interleaved1F1B" or not IS_OLD], "1F1B"),
)
def test_what_a_stage_receives_is_held_no_longer_than_its_activations(pool, tmp_path, schedule):
    """Schedules of several stages a rank begin to receive up to three ahead of it."""
    argv = [
        *FOUR,
        PP2,
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        "--training.local_batch_size=12",
    ]
    for received, more_than_kept, after in pool.run(
        received_and_held, argv, str(tmp_path), world=2
    ):
        assert received >= 12 and more_than_kept <= 3 and after == 0


def held_in_bfloat16(argv: list[str], folder: str) -> tuple[int, int]:
    """Return how often W began, and how many gradients were in bfloat16 then."""
    run = trainer(argv, folder)
    own, held = own_micro_batches(run), list[int]()
    original = Pipeline.begin

    def begin(self: Pipeline, stage: int, kind: str, number: int) -> Any:
        if kind == "W":
            gradients = [
                p.grad for part in run.parts for p in part.parameters() if p.grad is not None
            ]
            held.append(sum(gradient.dtype == torch.bfloat16 for gradient in gradients))
        return original(self, stage, kind, number)

    with patch.object(Pipeline, "begin", begin):
        forward_backward(run, own)
    return len(held), sum(held)


def test_gradients_are_summed_in_the_type_of_reductions_when_weights_follow_inputs(pool, tmp_path):
    argv = [*FOUR, PP2, *HALF, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]
    argv += ["--training.local_batch_size=3", "--training.mixed_precision_param=bfloat16"]
    for begun, held in pool.run(held_in_bfloat16, argv, str(tmp_path), world=4):
        assert begun and not held


def not_finite_on_one_rank(argv: list[str], folder: str, odd: int) -> tuple[str, int]:
    """Train with a loss on one rank that is not finite in step 2; return the error, and the last
    step.
    """
    run = trainer([*argv, "--training.steps=6"], folder)
    original = run.runner.forward_backward

    def forward_backward(step: int, batches: Any, valid_tokens: torch.Tensor) -> torch.Tensor:
        return original(step, batches, valid_tokens) * (
            torch.nan if step == 2 and dist.get_rank() == odd else 1
        )

    run.runner.forward_backward = forward_backward  # type: ignore[method-assign]
    with pytest.raises(NonFinite) as error:
        run.train()
    return str(error.value), run.step


@pytest.mark.parametrize("odd", sample([0, 3], 3))
def test_what_is_not_finite_on_one_stage_ends_all_at_one_step(pool, tmp_path, odd):
    for message, step in pool.run(
        not_finite_on_one_rank, [*FOUR, PP2], str(tmp_path), odd, world=4
    ):
        assert message.startswith(f"at step 2 the loss of rank {odd} was not finite") and step == 3


def with_an_order_of_its_own(argv: list[str], folder: str) -> str:
    """Return why a run is refused whose CSV, on this rank's machine, has another order than on the
    other's.
    """
    (own := Path(folder, f"{dist.get_rank()}")).mkdir()
    (own / "order.csv").write_text(
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")[dist.get_rank()]
    )
    with pytest.MonkeyPatch.context() as patches, pytest.raises(UserError) as error:
        patches.chdir(own)
        trainer([*argv, "--parallelism.pipeline_parallel_schedule_csv=order.csv"], folder)
    return str(error.value)


def test_ranks_that_read_different_orders_are_refused(pool, tmp_path):
    for message in pool.run(with_an_order_of_its_own, [*FOUR, PP2], str(tmp_path), world=2):
        assert message.startswith(
            "the order of the pipeline differs between ranks: rank 0 has Stages(names="
        )


def test_stages_have_the_model_between_them_and_a_parameter_in_none_is_named():
    found = job([*FOUR, PP2], 2)
    model, _ = build_model(found)
    names = [
        {name for name, _ in part.named_parameters()}
        for part in split(model, found.spec, found.stages.names)
    ]
    assert {*names[0], *names[1]} == {name for name, _ in model.named_parameters()} and not names[
        0
    ] & names[1]
    model.scale = torch.nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(
        UserError, match="scale is in none of the modules that a stage can have: tok_emb"
    ):
        split(model, found.spec, found.stages.names)


def loss_by_role(argv: list[str], folder: str, role: Role) -> float:
    """Return this rank's part of the loss if the embedding has a role in the table."""
    found = with_role(job([*argv, f"--job.dump_folder={folder}"], 2), "tok_embeddings.weight", role)
    rank_info = RankInfo(dist.get_rank(), 2, dist.get_rank(), "host")
    run = Trainer(found, rank_info, torch.device("cpu"), logging.Logger("quiet"))
    return forward_backward(run, own_micro_batches(run)).item()


@pytest.mark.long
def test_stages_need_no_embedding_in_the_table_to_know_what_they_receive(pool, tmp_path):
    losses = {
        role: pool.run(loss_by_role, [*FOUR, PP2, *HALF], str(tmp_path), role, world=2)
        for role in ("embedding", "replicated")
    }
    assert losses["embedding"] == losses["replicated"] and losses["embedding"][1]


def lines_at_start(argv: list[str], folder: str) -> dict[str, str]:
    return dict(
        line.split(maxsplit=1) for line in describe_start(trainer(argv, folder)) if " " in line
    )


def test_a_run_starts_with_the_numbers_of_the_whole_model(pool, tmp_path):
    """And with the memory of the rank that needs most, which all ranks agree on."""
    alone = pool.run(lines_at_start, FOUR, str(tmp_path), world=1)[0]
    ranks = pool.run(lines_at_start, [*FOUR, PP2], str(tmp_path), world=2)
    for name in ("model", "compute", "optimizer"):
        assert {found[name] for found in ranks} == {alone[name]}
    assert ranks[0]["memory"] == ranks[1]["memory"] != alone["memory"]
    assert ranks[0]["batch"].endswith("; as data parallel, these ranks would take 4")
    assert "as data parallel" not in alone["batch"]


def float8_step(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's parameters."""
    run = trainer(argv, folder)
    forward_backward(run, own_micro_batches(run))
    named = (
        item for part in run.parts for item in named_parameters(part, run.runner.context.table)
    )
    return {name: full(p.grad) for name, p in named if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1F1B", *["ZBVZeroBubble"] * (not IS_OLD)])
def test_float8_scales_by_the_same_micro_batches(pool, tmp_path, schedule):
    wide = "dim=64 n_layers=4 n_heads=2 n_kv_heads=2 hidden_dim=128".split()
    argv = [
        *QUIET,
        *(f"--model.overrides.{field}" for field in wide),
        "--training.global_batch_size=12",
    ]
    argv += ["--quantize.linear.float8.enable", "--quantize.linear.float8.emulate"]
    alone = pool.run(float8_step, [*argv, "--training.local_batch_size=2"], str(tmp_path), world=1)[
        0
    ]
    words = (
        f"--parallelism.pipeline_parallel_schedule={schedule} "
        "--parallelism.pipeline_parallel_microbatch_size=2"
    )
    cut = [*argv, PP2, *words.split(), "--training.local_batch_size=12"]
    for found in pool.run(float8_step, cut, str(tmp_path), world=2):
        assert (
            all(relative_error(value, alone[name]) < 1e-5 for name, value in found.items())
            and found
        )
