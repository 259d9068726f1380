"""Show how a layout places a model, without starting processes: groups of ranks, nodes, and every
parameter's placement.

The real mesh and the real techniques are applied to the model on the meta device in a fake world,
so the output is what a run would print."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from titanlite.checkpoint.layouts import layout_of
from titanlite.config.job import Job
from titanlite.config.layout import DIMENSIONS, EXPERT_DIMENSIONS
from titanlite.config.pipeline_order import stage_table
from titanlite.errors import counted_rows, few_of, format_table
from titanlite.parallel.build import Context, build_model, layer_pattern
from titanlite.parallel.convert import build_converters
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.parallelize import parallelize
from titanlite.planner.fake_world import FakeWorld


def describe(job: Job, per_node: int) -> str:
    """Return a job's mesh and stages, the techniques applied, and the placement of rank 0's
    parameters.
    """
    with FakeWorld() as world:
        model, table = build_model(job)
        context = Context(
            job, world.mesh(job.layout), table, torch.device("cpu"), build_converters(job)
        )
        parts, notes = parallelize(model, context)
        stages = []
        if job.layout.pp > 1:
            stages = ["", stage_table(job.stages), ""]
        return "\n".join([*_groups(job, per_node), *stages, *notes, "", _parameters(parts, job)])


def _groups(job: Job, per_node: int) -> list[str]:
    """Describe the nodes, and for each dimension the group of rank 0 and whether such groups cross
    nodes.
    """
    world = job.layout.world
    nodes = -(-world // per_node)
    mesh = f"mesh: {job.layout}"
    if world > 1:
        mesh += f", {world} ranks"
    ranks_each = "1 rank"
    if per_node > 1:
        ranks_each = f"{per_node} ranks"
    lines = [mesh, f"nodes: {nodes}, of {ranks_each} each (NGPU sets another number)"]
    lines += [f"  node {node}: {_span(node, per_node, world)}" for node in range(min(nodes, 3))]
    if nodes > 3:
        lines.append(f"  … node {nodes - 1}: {_span(nodes - 1, per_node, world)}")
    sides = []
    for dimension, name in enumerate(DIMENSIONS):
        sides.append((job.layout.degrees, dimension, name))
    if job.layout.ep > 1:
        for dimension, name in enumerate(EXPERT_DIMENSIONS):
            if dimension > 1:
                sides.append((job.layout.expert_degrees, dimension, name))
    for degrees, dimension, name in sides:
        if degrees[dimension] > 1:
            groups = (
                torch.arange(world).view(degrees).movedim(dimension, -1).flatten(0, -2).tolist()
            )
            crossed = max(len({rank // per_node for rank in ranks}) for ranks in groups)
            crossing = "inside a node"
            if crossed != 1:
                crossing = f"across {crossed} nodes"
            lines.append(f"{name} {degrees[dimension]}: {crossing}, e.g. ranks {few_of(groups[0])}")
    return lines


def _span(node: int, per_node: int, world: int) -> str:
    first = node * per_node
    last = min(world, (node + 1) * per_node) - 1
    if first == last:
        return f"rank {first}"
    return f"ranks {first}-{last}"


def _parameters(parts: Sequence[nn.Module], job: Job) -> str:
    """Return a table with a row for each parameter; layers that are placed alike share one."""
    rows: Counter[tuple[str, ...]] = Counter()
    for part in parts:
        for name, parameter in part.named_parameters():
            pattern = layer_pattern(name, job.spec.blocks)
            shape = str([*parameter.shape])
            local_shape = str([*local_part(parameter).shape])
            rows[pattern, shape, layout_of(parameter).placement, local_shape] += 1
    header = ("parameter", "shape", "placement", "on rank 0", "layers")
    return format_table(counted_rows(rows), header)
