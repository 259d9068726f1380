"""A part of a model, as a pipeline stage will hold it: every technique works on the modules that it
has.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.jobs import FLOAT64, QUIET, TINY, full, job, relative_error
from titanlite.errors import UserError
from titanlite.parallel import float8, replicated, tensor_parallel
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.fsdp_schedule import schedule
from titanlite.parallel.init import materialize
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.replica_check import check_replicas
from titanlite.parallel.replicated import replicated_parameters

FOUR_LAYERS = [*TINY, *FLOAT64, "--model.overrides.n_layers=4", "--model.overrides.n_kv_heads=2"]
SEED, BATCH, TOKENS, DIM = 3, 4, 16, 16
CPU = torch.device("cpu")


def middle_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model with blocks 2 and 3 of 4 only, without the embedding, the norm and
    the head.
    """
    part = copy.deepcopy(model)
    for name in ("tok_embeddings", "norm", "output"):
        setattr(part, name, None)
    del part.layers["0"], part.layers["1"]
    return part


def run_part(argv: list[str]) -> dict:
    """Apply the order to blocks 2 and 3, run them on this rank's hidden states, and return the
    part's numbers.
    """
    torch.compiler.reset()
    found = job([*FOUR_LAYERS, *argv], dist.get_world_size())
    model, table = build_model(found)
    context = Context(found, build_mesh(found.layout, "cpu"), table, CPU, build_converters(found))
    part = middle_of(model)
    _, notes = parallelize(part, context)
    materialize(part, table, SEED, CPU)
    check_replicas([part], "after initialization", context)
    initial = {name: full(parameter) for name, parameter in part.named_parameters()}
    hidden = torch.randn(
        BATCH, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    coordinates = found.layout.coordinates(dist.get_rank())
    mine = hidden.chunk(found.layout.batch)[found.layout.batch_coordinate(dist.get_rank())]
    positions = torch.arange(TOKENS).expand(len(mine), -1)
    mine = mine.chunk(found.layout.tp, dim=1)[coordinates["tp"]].contiguous().requires_grad_()
    loss = part(mine, positions).sin().sum()
    loss.backward()
    tensor_parallel.sum_gradients(part.parameters())
    replicated.sum_gradients(replicated_parameters(part, context), context.mesh.data, torch.float64)
    dist.all_reduce(loss.detach())
    gradients = {name: full(p.grad) for name, p in part.named_parameters() if p.grad is not None}
    return {"notes": notes, "initial": initial, "loss": loss.item(), "gradients": gradients}


WAYS = {
    "fsdp": (2, "--parallelism.fsdp_forward_prefetch=1 --parallelism.fsdp_backward_prefetch=2"),
    "hsdp, blocks in one group": (
        4,
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.fsdp_blocks_per_group=2",
    ),
    "patterns that also match other parts": (
        2,
        "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.2.*norm.weight'] "
        "--model.freeze=['output.*','layers.3.attention.*'] --training.loss_chunks=2",
    ),
    "recomputed and compiled": (
        2,
        "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2 "
        "--compile.enable --compile.backend=aot_eager",
    ),
    "fsdp x tp": (4, "--parallelism.tensor_parallel_degree=2"),
    "tp, recomputed": (
        2,
        "--parallelism.tensor_parallel_degree=2 --activation_checkpoint.mode=full",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_part_equals_its_blocks_in_one_process(pool, way):
    world, words = WAYS[way]
    argv = words.split()
    frozen = [word for word in argv if word.startswith("--model.freeze")]
    expected = pool.run(run_part, frozen, world=1)[0]
    assert (
        set(expected["initial"]) > set(expected["gradients"]) if frozen else expected["gradients"]
    )
    for found in pool.run(run_part, argv, world=world):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, value in expected["initial"].items():
            assert name.startswith(("layers.2.", "layers.3."))
            assert torch.equal(found["initial"][name], value), name
        for name, gradient in expected["gradients"].items():
            assert relative_error(found["gradients"][name], gradient) <= 1e-12, name


def test_part_has_the_initial_values_of_the_whole_model(pool):
    found = pool.run(run_part, [], world=2)[0]["initial"]
    model, table = build_model(job(FOUR_LAYERS, 1))
    materialize(model, table, SEED, CPU)
    assert (
        all(torch.equal(value, model.get_parameter(name)) for name, value in found.items())
        and len(found) == 18
    )


def test_notes_name_what_was_applied(pool):
    """Once each, in the order of application; a technique that has nothing to do is not
    mentioned.
    """
    assert pool.run(run_part, [], world=1)[0]["notes"] == []
    words = (
        "--parallelism.tensor_parallel_degree=2 --activation_checkpoint.mode=full --compile.enable"
    )
    notes = pool.run(run_part, [*words.split(), "--compile.backend=aot_eager"], world=4)[0]["notes"]
    assert [note.split(",")[0] for note in notes] == [
        "Applied tensor parallel on 2 ranks",
        "Applied torch.compile to every block",
        "Applied activation checkpointing: recompute every block",
        "Applied FSDP on 2 ranks",
    ]


def test_schedule_has_the_groups_of_the_part():
    argv = [*FOUR_LAYERS, "--parallelism.fsdp_forward_prefetch=1", "--training.loss_chunks=2"]
    middle = {"layers", "layers.2", "layers.3"}
    plan = schedule(job(argv, 2), tied=False, modules=middle)
    assert plan.labels == ("layers.2", "layers.3") and plan.forward == ((1,), ())
    assert plan.last == 1 and not plan.last_is_root
    last = schedule(job(argv, 2), tied=False, modules={*middle, "norm", "output"})
    assert (
        last.labels == ("norm+output", "layers.2", "layers.3")
        and last.last == 0
        and last.last_is_root
    )


def test_float8_accepts_a_part_with_nothing_to_convert():
    """Other parts have it; the whole model must have some."""
    argv = [*QUIET, "--model.overrides.n_layers=4", "--quantize.linear.float8.enable"]
    found = job(
        [*argv, "--quantize.linear.float8.filter_fqns=['layers.2.', 'layers.3.', 'output']"], 1
    )
    model, table = build_model(found)
    assert all(layer.skip_reason for layer in float8.plan(middle_of(model), found, table))
    assert not all(layer.skip_reason for layer in float8.plan(model, found, table))
    nothing = job([*argv, "--quantize.linear.float8.filter_fqns=['layers.', 'output']"], 1)
    with pytest.raises(UserError, match="no layer can be converted"):
        float8.plan(model, nothing, table)
