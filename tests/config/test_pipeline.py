"""The keys of pipeline parallel lead to stages, split as in TorchTitan; what a schedule cannot do is refused."""

import pytest

from titanlite.config.job import Job, job_from
from titanlite.config.load import parse_command_line

PP = "--parallelism.pipeline_parallel"


def job(*options: str, world: int = 2) -> Job:
    """Return the job of two pipeline ranks, with the debug model's four layers."""
    line = ["--config=debug.toml", f"{PP}_degree=2", *options]
    return job_from(parse_command_line(line, {}), world=world, training=True)


def test_without_pipeline_parallel_one_stage_has_everything():
    stages = job(f"{PP}_degree=1", "--training.global_batch_size=32").stages
    layers = [f"layers.{i}" for i in range(4)]
    assert stages.names == (("tok_embeddings", *layers, "norm", "output"),)
    assert (stages.ranks, stages.schedule, stages.micro_batches, stages.size) == (((0,),), "", 2, 8)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("gpipe", ((0,), (1,))), ("INTERLEAVED1F1B", ((0, 2), (1, 3))), ("zbvzerobubble", ((0, 3), (1, 2)))],
)
def test_a_schedule_in_any_case_gives_each_rank_its_stages(schedule, ranks):
    assert job(f"{PP}_schedule={schedule}").stages.ranks == ranks


def test_each_key_changes_the_stages():
    plain = job().stages
    assert plain.names == (("tok_embeddings", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "output"))
    assert (plain.schedule, plain.micro_batches, plain.size) == ("1F1B", 8, 1)
    flipped = job(f"{PP}_schedule=GPipe", f"{PP}_microbatch_size=2", "--training.global_batch_size=16").stages
    assert (flipped.schedule, flipped.micro_batches, flipped.size) == ("GPipe", 8, 2)
    assert job(f"{PP}_first_stage_less_layers=3").stages.names[0] == ("tok_embeddings", "layers.0")
    assert job(f"{PP}_last_stage_less_layers=3").stages.names[1] == ("layers.3", "norm", "output")
