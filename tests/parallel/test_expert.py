"""Expert parallel: numbers equal one process, what is exchanged and when, checkpoints, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.layouts import save_and_load_everywhere
from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import (
    FLOAT64,
    MOE,
    TINY,
    fake_world,
    forward_backward,
    full,
    gradients,
    job,
    micro_batches,
    relative_error,
    trainer,
)
from tests.lanes import sample
from tests.parallel.test_context import losses, validation_and_sample
from tests.parallel.test_exact import SAMPLES, SGD, ragged_batch
from tests.runs import records, train
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.expert_parallel import routers
from titanlite.parallel.init import allocate
from titanlite.parallel.parallelize import parallelize
from titanlite.runtime.torch_private import compiled_graphs
from titanlite.train.loss import count_valid, model_loss
from titanlite.train.report import loss_over_ranks
from titanlite.train.trainer import Trainer
from titanlite.verify.pool import Pool
from titanlite.verify.step_record import Group, declared_gathers, recorded

LAYERS, EXPERTS, TOP_K, DIM, TOKENS = 2, 4, 2, 16, 16  # of MOE


def mesh(**values: int) -> list[str]:
    """Return the keys of degrees such as ep=2."""
    names = {"ep": "expert", "tp": "tensor", "cp": "context", "pp": "pipeline"}
    keys = {short: f"{name}_parallel" for short, name in names.items()} | {
        "replicate": "data_parallel_replicate"
    }
    return [f"--parallelism.{keys[short]}_degree={value}" for short, value in values.items()]


def one_step(argv: list[str], folder: str, preferred: Collection[int] = ()) -> dict[str, Any]:
    """Return the numbers of one optimizer step; gradients and weights of this rank's stages."""
    torch.compiler.reset()  # or it mixes up graphs of different meshes in one process
    run = trainer([*argv, *FLOAT64, *SGD], folder)
    run.step = 1
    if preferred:
        prefer(run, preferred)
    mine = [
        run.runner.forward.take(batch) for batch in micro_batches(*ragged_batch(), run.rank_slice)
    ]
    named = {name: p for part in run.parts for name, p in part.named_parameters()}
    before = {name: full(p) for name, p in named.items()}
    loss = forward_backward(run, mine)
    valid = count_valid(torch.stack([batch.labels for batch in mine])) * run.runner.has_loss
    found = {
        "loss": loss_over_ranks(loss, valid, run.mesh.loss)[0],
        "gradients": {name: full(p.grad) for name, p in named.items() if p.grad is not None},
    }
    norm = run.runner.clip_gradients(0.5)
    found["norm"] = norm.item()
    run.runner.update(1, norm)
    return {**found, "before": before, "after": {name: full(p) for name, p in named.items()}}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Return the numbers of one process, by the options of its model."""
    folder = str(tmp_path_factory.mktemp("alone"))
    whole = [*MOE, f"--training.local_batch_size={SAMPLES}"]
    return cache(
        lambda *options, preferred=(): pool.run(
            one_step, [*whole, *options], folder, preferred, world=1
        )[0]
    )


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


MESHES_IN_CI = (
    "replicate2 x ep2", "ep2 over tp2", "dp2 x tp2", "ep4 over dp2 x tp2", "ep4 over dp2 x cp2",
    "pp2 x ep2",
)  # fmt: skip


@pytest.mark.parametrize("name", sample(MESHES, "ep2", long=MESHES_IN_CI))
def test_a_step_equals_that_of_one_process(pool, alone, tmp_path, name):
    """In float64: loss, gradients, norm and weights; initial weights bit for bit. The first ranks
    have no label.
    """
    world, options = MESHES[name]
    same_as_alone(step_of(pool, [*MOE, *options], tmp_path, world), alone())


COMPILED, OFFLOADED = (
    "--compile.enable --compile.backend=aot_eager",
    "--training.enable_cpu_offload",
)
RECOMPUTED = "--activation_checkpoint.mode=full"
BY_OPERATION, SECOND = (
    f"--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option={how}"
    for how in ("op", 2)
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
    "kept whole, experts in block's group": (
        2,
        [],
        "--parallelism.fsdp_keep_whole=['layers.0.moe.*']",
        [],
    ),
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


TECHNIQUES_IN_CI = (
    "dim 1", "uneven in block's group", "prefetching, recomputed, blocks in one group",
    "kept whole, experts in block's group", "frozen experts, tp", "interleaved stages",
    "stages, recomputed, compiled", "ulysses", "bias",
)  # fmt: skip


@pytest.mark.parametrize("name", sample(TECHNIQUES, long=TECHNIQUES_IN_CI))
def test_techniques_beside_experts_change_no_number(pool, alone, tmp_path, name):
    world, options, words, model = TECHNIQUES[name]
    argv = [*MOE, *model, *options, *words.split()]
    same_as_alone(step_of(pool, argv, tmp_path, world), alone(*model))


@pytest.mark.parametrize("words", sample(["", RECOMPUTED, BY_OPERATION], long=["", BY_OPERATION]))
@pytest.mark.parametrize("deferred", ["false", "true", "replicas"])
@pytest.mark.long
def test_accumulated_gradients_are_those_of_one_batch(pool, alone, tmp_path, deferred, words):
    options = [
        *mesh(ep=2, replicate=2),
        f"--parallelism.defer_gradient_sync={deferred}",
        *words.split(),
    ]
    argv = [
        *MOE,
        *options,
        f"--training.global_batch_size={SAMPLES}",
        "--training.local_batch_size=1",
    ]
    same_as_alone(pool.run(one_step, argv, str(tmp_path), world=4)[0], alone())


def step_of(
    pool: Pool, argv: list[str], folder: Path, world: int, preferred: Collection[int] = ()
) -> dict[str, Any]:
    """Return the numbers of a step on a mesh, with the tensors of all stages; all ranks have the
    same.
    """
    argv = [*argv, f"--training.local_batch_size={SAMPLES // job(argv, world).layout.batch}"]
    ranks = pool.run(one_step, argv, str(folder), preferred, world=world)
    for number in ("loss", "norm"):
        assert {found[number] for found in ranks} == {ranks[0][number]}
    for part in ("gradients", "before", "after"):
        for name, tensor in (
            (name, tensor) for found in ranks for name, tensor in found[part].items()
        ):
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


def prefer(run: Trainer, experts: Collection[int]) -> None:
    """Let all tokens choose these experts, of a model with balance "bias"."""
    for router in routers(*run.parts).values():
        router.bias.zero_()
        router.bias[[*experts]] = 10.0


@pytest.mark.parametrize(
    "preferred", [(0, 1), (1, 3)], ids=["a rank without a token", "experts without one"]
)
@pytest.mark.parametrize(
    "options", sample([mesh(ep=2), mesh(ep=2, tp=2)], mesh(ep=2)), ids=["ep2", "ep2 over tp2"]
)
def test_experts_without_a_token_have_zero_gradients(pool, alone, tmp_path, options, preferred):
    model = ["--model.overrides.balance=bias"]
    expected = alone(*model, preferred=preferred)
    found = step_of(pool, [*MOE, *model, *options], tmp_path, 2, preferred)
    same_as_alone(found, expected)
    idle = [expert for expert in range(EXPERTS) if expert not in preferred]
    for name in (f"layers.{layer}.moe.experts.w{n}" for layer in range(LAYERS) for n in (1, 2, 3)):
        norms = found["gradients"][name].flatten(1).norm(dim=1)
        assert (norms[idle] == 0).all() and (norms[[*preferred]] > 0).all(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grouped_products_take_ranks_without_a_token(pool, tmp_path, dtype):
    """Gradients in the types of training are those of one process but for rounding, with the fast
    product.
    """
    argv = [*MOE, "--model.overrides.balance=bias", f"--training.mixed_precision_param={dtype}"]
    whole, half = (f"--training.local_batch_size={SAMPLES // ranks}" for ranks in (1, 2))
    ((expected, _),) = pool.run(
        choices_and_exchanges, [*argv, whole], str(tmp_path), (0, 1), world=1
    )
    split = [*argv, half, *mesh(ep=2)]
    for found, _ in pool.run(choices_and_exchanges, split, str(tmp_path), (0, 1), world=2):
        for name, gradient in expected["gradients"].items():
            error = relative_error(found["gradients"][name].double(), gradient.double())
            assert error < (1e-5 if dtype == "float32" else 5e-2), name


def choices_and_exchanges(
    argv: list[str], folder: str, preferred: Collection[int] = ()
) -> tuple[dict[str, Any], list[Any]]:
    """Return the choices of each layer with the gradients of a micro-batch, and its all-to-alls."""
    run = trainer(argv, folder)
    if preferred:
        prefer(run, preferred)
    chosen: list[list[int]] = []
    for router in routers(*run.parts).values():
        router.register_forward_hook(
            lambda module, args, outputs: chosen.append(outputs[2].tolist())
        )
    sent, send_all = [], dist.all_to_all_single

    def recorded(
        arrived: torch.Tensor, rows: torch.Tensor, receive: Any, send: Any, **options: Any
    ) -> Any:
        sent.append(
            ([tensor.numel() * tensor.element_size() for tensor in (rows, arrived)], send, receive)
        )
        return send_all(arrived, rows, receive, send, **options)

    mine = micro_batches(*ragged_batch(), run.rank_slice)[:1]
    with patch.object(dist, "all_to_all_single", recorded):
        forward_backward(run, [run.runner.forward.take(batch) for batch in mine])
    return {"choices": chosen[:LAYERS], "gradients": gradients(run)}, sent


EXCHANGES = {
    "plain": (2, mesh(ep=2), ""),
    "sequence parallel": (2, mesh(ep=2, tp=2), ""),
    "of 4": (4, mesh(ep=4, cp=2), ""),
    "a rank without a token": (2, [*mesh(ep=2), "--model.overrides.balance=bias"], ""),
    "recomputed": (2, mesh(ep=2), RECOMPUTED),
    "by operation": (2, mesh(ep=2), BY_OPERATION),
    "by operation, compiled": (2, mesh(ep=2), f"{BY_OPERATION} {COMPILED}"),
}


@pytest.mark.parametrize("name", sample(EXCHANGES, "plain", every=2))
def test_each_token_is_sent_to_the_rank_of_its_expert_and_back(pool, tmp_path, name):
    """Three all-to-alls a layer: counts, tokens, outputs; and two in the backward pass, gradients
    of the latter.

    Recomputing a block repeats the three; recomputing by operation repeats none.
    """
    world, options, words = EXCHANGES[name]
    preferred = (0, 1) if name == "a rank without a token" else ()
    ranks = pool.run(
        choices_and_exchanges,
        [*MOE, *options, *words.split()],
        str(tmp_path),
        preferred,
        world=world,
    )
    own, itemsize = EXPERTS // world, 4
    to = [
        [[sum(c[i : i + own]) for i in range(0, EXPERTS, own)] for c in found["choices"]]
        for found, _ in ranks
    ]
    for rank, (_, sent) in enumerate(ranks):
        expected, back = [], []
        for layer in range(LAYERS):
            send, receive = to[rank][layer], [sender[layer][rank] for sender in to]
            there = [DIM * itemsize * sum(rows) for rows in (send, receive)]
            forward = [
                ([EXPERTS * 8] * 2, None, None),
                (there, send, receive),
                (there[::-1], receive, send),
            ]
            expected += forward
            back = forward * (words == RECOMPUTED) + forward[1:] + back
        assert sent == expected + back


def test_forced_balance_sends_as_many_tokens_to_all_experts(pool, tmp_path):
    argv = [*MOE, *mesh(ep=2), "--debug.moe_force_load_balance"]
    for found, _ in pool.run(choices_and_exchanges, argv, str(tmp_path), world=2):
        assert found["choices"] == [[2 * TOKENS * TOP_K // EXPERTS] * EXPERTS] * LAYERS


def test_without_a_number_of_ranks_the_config_takes_the_fewest_that_fit():
    for degrees, world in (({"ep": 4}, 4), ({"ep": 4, "tp": 2}, 4), ({"ep": 2, "tp": 2}, 2)):
        line = parse_command_line(["--config", "debug.toml", *MOE, *mesh(**degrees)], {})
        assert job_from(line, world=None, training=True).layout.world == world


CHECKPOINTS = {
    "one": (1, []),
    "ep4": (4, mesh(ep=4)),
    "ep2 of dp4": (4, mesh(ep=2)),
    "ep2 over dp2 x tp2": (4, mesh(ep=2, tp=2)),
    "dp2 x tp2": (4, mesh(tp=2)),
    "replicate2 x tp2": (4, mesh(tp=2, replicate=2)),
    "pp2 x ep2": (4, mesh(pp=2, ep=2)),
    "pp2": (2, mesh(pp=2)),
    "dp3": (3, []),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("experts", [4, 12, 6], ids=["dim 0", "strided", "dim 1"])
def test_state_saved_on_any_mesh_loads_on_any_other(pool, tmp_path, experts):
    """Expert weights and their state, split on dimension 0 by ep, and by FSDP2 on dimension 0 or
    1.
    """
    model = [*MOE, f"--model.overrides.experts={experts}"]
    fitting = {
        name: found for name, found in CHECKPOINTS.items() if experts % 4 == 0 or name != "ep4"
    }
    wrong = save_and_load_everywhere(pool, tmp_path, fitting, model)
    assert len(fitting) > 7 and wrong == []


def placements(argv: list[str], folder: str) -> set[str]:
    run = trainer(argv, folder)
    return {repr(p.placements) for name, p in run.parts[0].named_parameters() if "experts" in name}


@pytest.mark.parametrize(
    ("experts", "ways"),
    [(8, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"), (6, "(Shard(dim=1), Shard(dim=0))")],
)
def test_experts_are_sharded_whole_where_their_number_divides(pool, tmp_path, experts, ways):
    argv = [*MOE, *mesh(ep=2), f"--model.overrides.experts={experts}"]
    assert pool.run(placements, argv, str(tmp_path), world=4) == [{ways}] * 4


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (
            4,
            [*mesh(ep=2), "--model.overrides.experts=2", "--model.overrides.expert_dim=7"],
            "neither the 1 experts",
        ),
        (
            2,
            [*mesh(ep=2), "--parallelism.fsdp_keep_whole=['*.experts.*']"],
            "matches layers.0.moe.experts.w1",
        ),
    ],
)
def test_what_cannot_be_sharded_is_refused(world, options, message):
    found = job([*MOE, *options], world)
    model, table = build_model(found)
    with fake_world(found.layout) as meshes, pytest.raises(UserError, match=message):
        parallelize(model, Context(found, meshes, table, torch.device("cpu")))


@pytest.mark.long
def test_a_run_that_ends_early_resumes_without_expert_parallel(pool, tmp_path):
    """Two steps on ep2 of four ranks, two on ep2 over tensor parallel, the rest on one rank."""
    argv = [*MOE, *SAVING[len(TINY) :], "--training.global_batch_size=4"]
    argv += ["--training.steps=6", "--training.local_batch_size=1"]
    pool.run(run_until, argv, str(tmp_path / "one"), world=1)
    begun = []
    for world, stop, options in ((4, 2, mesh(ep=2)), (2, 4, mesh(ep=2, tp=2)), (1, None, [])):
        begun.append(
            pool.run(run_until, [*argv, *options], str(tmp_path / "many"), stop, world=world)[0][
                "begun"
            ]
        )
    assert begun == [0, 2, 4]
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert len(one) == 6 and many == [pytest.approx(pair, rel=1e-4) for pair in one]


@pytest.mark.parametrize(
    ("world", "options"),
    sample(
        [(2, mesh(ep=2)), (4, mesh(ep=4, tp=2)), (4, mesh(ep=4, cp=2)), (4, mesh(ep=2, pp=2))],
        (2, mesh(ep=2)),
    ),
)
def test_validation_and_generation_equal_one_process(pool, tmp_path, world, options):
    """Of three windows for validation, the last rank has none."""
    (loss, text), *_ = pool.run(validation_and_sample, MOE, str(tmp_path), world=1)
    split = pool.run(validation_and_sample, [*MOE, *options], str(tmp_path), world=world)
    assert [found[1] for found in split] == [text] * world
    assert all(found[0] == pytest.approx(loss, rel=1e-12) for found in split)


def gathers(argv: list[str], folder: str) -> tuple[list[Group], list[Group]]:
    """Return the groups in the order in which FSDP2 gathers them in a step, and as the job declares
    it.
    """
    torch.compiler.reset()
    run = trainer([*argv, f"--training.local_batch_size={SAMPLES // 4}"], folder)
    mine, gathered = micro_batches(*ragged_batch(), run.rank_slice), list[Group]()
    batches = [run.runner.forward.take(batch) for batch in mine]
    forward_backward(run, batches)
    with recorded(gathered, []):
        forward_backward(run, batches)
    return gathered, declared_gathers(run.job, run.parts[0], "FB")


GATHERING = [
    "",
    PREFETCHING,
    "--parallelism.fsdp_blocks_per_group=2",
    COMPILED,
    BY_OPERATION,
    RECOMPUTED,
    SECOND,
]


@pytest.mark.parametrize(
    "words",
    sample(
        [*GATHERING, f"{PREFETCHING} {RECOMPUTED}"],
        f"{PREFETCHING} {RECOMPUTED}",
        long=["", COMPILED, SECOND],
    ),
)
@pytest.mark.parametrize(
    "options", sample([mesh(ep=2), mesh(tp=2)], mesh(ep=2)), ids=["ep2", "tp2"]
)
def test_experts_are_gathered_after_their_block_in_both_passes(pool, tmp_path, words, options):
    for found, declared in pool.run(
        gathers, [*MOE, *options, *words.split()], str(tmp_path), world=4
    ):
        assert found == declared and frozenset({"layers.0.moe.experts"}) in found


def test_what_is_around_experts_is_compiled_and_all_blocks_share_its_graphs():
    """Norms, attention, a router's choice and its loss, the order by expert, the gates, and the sum
    by weight; a graph for each block would end the run at the ninth.
    """
    found = job(
        [*MOE, *COMPILED.split(), "--compile.components=['model']", "--model.overrides.n_layers=9"],
        2,
    )
    model, table = build_model(found)
    device, before = torch.device("cpu"), compiled_graphs()
    with fake_world(found.layout) as meshes:
        parallelize(model, Context(found, meshes, table, device))
        allocate(model, device)
        batch = MicroBatch(torch.zeros(1, 2, TOKENS, dtype=torch.int64))
        model_loss(model, batch, batch.tokens, chunks=1).backward()
    assert compiled_graphs() - before == 8


@pytest.mark.long
def test_no_later_step_compiles_for_other_numbers_of_tokens(tmp_path):
    """With one layer on each rank's experts the first step meets one number only."""
    options = [*MOE, *mesh(ep=2), *COMPILED.split(), "--model.overrides.n_layers=1"]
    options += ["--training.steps=5", "--metrics.log_freq=1"]
    code, out = train(options, tmp_path, NGPU="2")
    assert code == 0, out
    assert [each["recompiles"] for each in records(tmp_path) if "recompiles" in each] == [0] * 5


@pytest.mark.exhaustive
def test_the_command_trains_on_four_ranks_what_one_process_trains(tmp_path):
    """From the launcher, with the equal losses and norms that the tables of a run show, and float8
    around experts.
    """
    options = [*MOE, "--training.global_batch_size=8", "--training.steps=5", "--metrics.log_freq=1"]
    for ranks, degrees in ((1, []), (4, mesh(ep=4))):
        code, out = train([*options, *degrees], tmp_path / f"{ranks}", NGPU=str(ranks))
        assert code == 0, out
    one, four = losses(tmp_path / "1"), losses(tmp_path / "4")
    assert len(one) == 5 and four == [pytest.approx(pair, rel=1e-5) for pair in one]
