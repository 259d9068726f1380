"""The keys of pipeline parallel lead to stages, split as in TorchTitan; what a schedule cannot do
is refused.
"""

import pytest

from tests import jobs
from tests.messages import refused
from titanlite.config.job import Job
from titanlite.config.load import ConfigError
from titanlite.config.stages import split_layers

PP, NAMES = "--parallelism.pipeline_parallel", "--parallelism.module_fqns_per_model_part"
FIRST, REST = "'tok_embeddings'", "'layers.3','norm','output'"


def job(*options: str, world: int = 2) -> Job:
    """Return the job of two pipeline ranks, with the debug model's four layers."""
    return jobs.job([f"{PP}_degree=2", *options], world)


def test_without_pipeline_parallel_one_stage_has_everything():
    stages = job(f"{PP}_degree=1", "--training.global_batch_size=32").stages
    layers = [f"layers.{i}" for i in range(4)]
    assert stages.names == (("tok_embeddings", *layers, "norm", "output"),)
    assert (stages.ranks, stages.schedule, stages.micro_batches, stages.size) == (((0,),), "", 2, 8)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("gpipe", ((0,), (1,))),
        ("INTERLEAVED1F1B", ((0, 2), (1, 3))),
        ("zbvzerobubble", ((0, 3), (1, 2))),
    ],
)
def test_a_schedule_in_any_case_gives_each_rank_its_stages(schedule, ranks):
    assert job(f"{PP}_schedule={schedule}").stages.ranks == ranks


def test_each_key_changes_the_stages():
    plain = job().stages
    assert plain.names == (
        ("tok_embeddings", "layers.0", "layers.1"),
        ("layers.2", "layers.3", "norm", "output"),
    )
    assert (plain.schedule, plain.micro_batches, plain.size) == ("1F1B", 8, 1)
    flipped = job(
        f"{PP}_schedule=GPipe", f"{PP}_microbatch_size=2", "--training.global_batch_size=16"
    ).stages
    assert (flipped.schedule, flipped.micro_batches, flipped.size) == ("GPipe", 8, 2)
    assert job(f"{PP}_first_stage_less_layers=3").stages.names[0] == ("tok_embeddings", "layers.0")
    assert job(f"{PP}_last_stage_less_layers=3").stages.names[1] == ("layers.3", "norm", "output")


def test_layers_per_stage_and_names_set_the_number_of_stages():
    assert len(job(f"{PP}_schedule=LoopedBFS", f"{PP}_layers_per_stage=1").stages.names) == 6
    named = (
        ("tok_embeddings",),
        ("layers.0", "layers.1", "layers.2", "layers.3", "norm", "output"),
    )
    assert job(f"{NAMES}={[list(names) for names in named]}").stages.names == named


@pytest.mark.parametrize(
    # by TorchTitan v0.2.2's generate_llm_fqn_per_model_part
    ("layers", "stages", "first", "last", "expected"),
    [
        (126, 16, 1, 1, [7, *[8] * 14, 7]),
        (32, 8, 1, 1, [4, 5, 4, 4, 4, 4, 4, 3]),
        (4, 4, 1, 1, [1, 2, 1, 0]),
        (28, 4, 2, 2, [6, 8, 8, 6]),
        (7, 3, 0, 0, [3, 2, 2]),
        (4, 3, 3, 0, []),
    ],
)
def test_layers_and_weights_are_split_as_torchtitan_splits_them(
    layers, stages, first, last, expected
):
    split = split_layers(layers, stages, first, last)
    assert [len(part) for part in split] == expected
    assert [layer for part in split for layer in part] == (list(range(layers)) if expected else [])


SPLIT = f"{PP}_schedule=ZBVZeroBubble"
GPT2 = "--model.name=gpt2 --model.overrides.dropout=0.0"
FSDP = "--parallelism.fsdp"
BATCH = "--training.local_batch_size"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (f"{PP}_schedule=PipelineScheduleMulti", '"GPipe", "1F1B"'),
        (f"{PP}_microbatch_size=3", "training.local_batch_size 8; legal: 1, 2, 4, 8"),
        (f"{PP}_degree=8", "legal: 1, 2, 4"),
        (f"{PP}_first_stage_less_layers=9", "legal: 0, 1, 2, 3, 4"),
        (f"{PP}_last_stage_less_layers=9", "legal: 0, 1, 2, 3, 4"),
        (f"{PP}_layers_per_stage=2", "legal: 3, 4, 5"),
        (f"{SPLIT} {PP}_layers_per_stage=1", "legal: none"),
        (f"{PP}_schedule=LoopedBFS {PP}_layers_per_stage=3", "legal: 1"),
        (f"{NAMES}=[['tok_embeddings']]", "1 stages"),
        (
            f"{NAMES}=[['tok_embeddings','x'],['layers.0']]",
            "unknown: x; missing: layers.1, layers.2, layers.3, norm",
        ),
        (f"{NAMES}=[[{FIRST},'layers.1','layers.0'],['layers.2',{REST}]]", "order: layers.1"),
        (f"{NAMES}=[[{FIRST},'layers.0','layers.1'],['layers.1',{REST}]]", "twice: layers.1"),
        (f"{NAMES}=[[{FIRST},'layers.0','layers.1',{REST}],[]]", "modules: stage 1"),
        (f"{GPT2} {NAMES}=[[{FIRST}],['pos_embeddings']]", "first stage: pos_embeddings"),
        (f"{BATCH}=1", "training.global_batch_size could be 8"),
        (f"{PP}_schedule=DualPipeV {BATCH}=2", "stages (4)"),
        (f"{PP}_schedule=Interleaved1F1B {BATCH}=7", "3 with 2 ranks"),
        (f"{SPLIT} --compile.enable", "Interleaved1F1B or LoopedBFS"),
        (f"{SPLIT} --activation_checkpoint.mode=full", "Interleaved1F1B or LoopedBFS"),
        (f"{SPLIT} --activation_checkpoint.mode=selective", "Interleaved1F1B or LoopedBFS"),
        (f"{SPLIT} {GPT2}", "tok_embeddings.weight"),
        (f"{FSDP}_blocks_per_group=3", "at most 2"),
        ("--parallelism.pipeline_parallel_split_points=['layers.2']", "of each stage"),
        (f"{PP}_schedule_csv=order.csv", "one of torch's schedules"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_what_it_can(options, part):
    with refused(part, kind=ConfigError):
        job(*options.split(), world=8)


def test_all_faults_of_a_pipeline_are_named_at_once():
    both = f"{SPLIT} {GPT2} --compile.enable --activation_checkpoint.mode=full"
    with refused("3 configuration errors", kind=ConfigError):
        job(*both.split(), f"{PP}_microbatch_size=3", world=4)


def test_what_gathers_block_by_block_may_reshard_and_prefetch():
    options = [f"{FSDP}_reshard_after_forward=always", f"{FSDP}_backward_prefetch=1"]
    assert job(*options, world=4).config.parallelism.fsdp_backward_prefetch == 1


def test_overlapping_experts_communication_is_accepted():
    assert job(f"{PP}_expert_parallel_overlap=false").no_effect == ""
