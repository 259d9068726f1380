"""The keys of pipeline parallel lead to stages, split as in TorchTitan; what a schedule cannot do
is refused.
"""

import pytest

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, parse_command_line
from titanlite.config.stages import split_layers

PP, NAMES = "--parallelism.pipeline_parallel", "--parallelism.module_fqns_per_model_part"
FIRST, REST = "'tok_embeddings'", "'layers.3','norm','output'"


def job(*options: str, world: int = 2) -> Job:
    """Return the job of two pipeline ranks, with the debug model's four layers."""
    line = ["--config=debug.toml", f"{PP}_degree=2", *options]
    return job_from(parse_command_line(line, {}), world=world, training=True)


def faults(*options: str, world: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        job(*options, world=world)
    return str(caught.value)


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
    (
        "layers",
        "stages",
        "first",
        "last",
        "expected",
    ),  # by TorchTitan v0.2.2's generate_llm_fqn_per_model_part
    [
        (126, 16, 1, 1, [7, *[8] * 14, 7]),
        (32, 8, 1, 1, [4, 5, 4, 4, 4, 4, 4, 3]),
        (4, 4, 1, 1, [1, 2, 1, 0]),
        (28, 4, 2, 2, [6, 8, 8, 6]),
        (3, 2, 2, 2, [2, 1]),
        (7, 3, 0, 0, [3, 2, 2]),
        (4, 3, 3, 0, []),
        (2, 5, 1, 1, []),
    ],
)
def test_layers_and_weights_are_split_as_torchtitan_splits_them(
    layers, stages, first, last, expected
):
    split = split_layers(layers, stages, first, last)
    assert [len(part) for part in split] == expected
    assert [layer for part in split for layer in part] == (list(range(layers)) if expected else [])


ORDER = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1I1,1W1\n"
OVERLAPPED = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1"


@pytest.fixture
def of_csv(tmp_path):
    """Return a function that gives the options of a CSV."""

    def options(text: str = ORDER, batch: int = 2) -> list[str]:
        (tmp_path / "order.csv").write_text(text)
        return [
            f"{PP}_schedule_csv={tmp_path / 'order.csv'}",
            f"--training.local_batch_size={batch}",
        ]

    return options


def test_a_csv_gives_the_order_and_the_number_of_stages(of_csv):
    stages = job(*of_csv()).stages
    assert (stages.schedule, stages.ranks, stages.micro_batches) == ("", ((0,), (1,)), 2)
    assert stages.csv == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1I1", "1W1"))
    looped = job(*of_csv("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0", batch=1)).stages
    assert looped.ranks == ((0, 2), (1, 3)) and len(looped.names) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ORDER + "2F0", "has 3 rows for 2 pipeline ranks"),
        (ORDER.replace("0B1", "0G1"), 'row 1: "0G1" is not an action such as 2F0'),
        (ORDER.replace("1F1", "0F1"), "stage 0 is in rows 1 and 2"),
        (
            ORDER.replace("1W1", "1B1"),
            "has F, I, B for micro-batch 1 of stage 1; needed are F and B, or F, I and W",
        ),
        (ORDER.replace("1F0,1B0", "1B0,1F0"), "row 1: 0B0 waits for 1B0; row 2: 1B0 waits for 1F0"),
        (ORDER.replace("1I1,1W1", "1W1,1I1"), "row 1: 0B1 waits for 1B1; row 2: 1W1 waits for 1I1"),
        (
            OVERLAPPED,
            "row 1: (0F1;0B0)OVERLAP_F_B waits for 1B0; row 2: (1F1;1B0)OVERLAP_F_B waits for 0F1",
        ),
        (
            ORDER.replace("1", "2"),
            "has 2 stages and 2 micro-batches; a step has 2 micro-batches, and both are",
        ),
        ("0F0,0B0\n1F0,1B0", "has 2 stages and 1 micro-batches; a step has 2 micro-batches"),
        ("0F0,0F1,0B0,0B1\n\n", "row 2 has no action"),
    ],
)
def test_a_csv_that_is_no_order_is_refused(of_csv, text, says):
    assert says in faults(*of_csv(text))


def test_a_missing_csv_is_refused():
    assert "cannot be read: [Errno 2] No such file" in faults(f"{PP}_schedule_csv=nowhere.csv")


SPLIT = f"{PP}_schedule=ZBVZeroBubble"
GPT2 = ["--model.name=gpt2", "--model.overrides.dropout=0.0"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([f"{PP}_schedule=PipelineScheduleMulti"], 'one of "GPipe", "1F1B"'),
        (
            [f"{PP}_microbatch_size=3"],
            "does not divide training.local_batch_size 8; legal: 1, 2, 4, 8",
        ),
        (
            [f"{PP}_degree=8"],
            "(the embedding counts as 1, the head as 1) leave some of them empty; legal: 1, 2, 4",
        ),
        ([f"{PP}_first_stage_less_layers=9"], "give 2 stages 7 or 8; legal: 0, 1, 2, 3, 4"),
        ([f"{PP}_last_stage_less_layers=9"], "give 2 stages 7 or 8; legal: 0, 1, 2, 3, 4"),
        (
            [f"{PP}_layers_per_stage=2"],
            "make 3 stages, and 1F1B runs one stage on each of 2 ranks; legal: 3, 4, 5",
        ),
        (
            [SPLIT, f"{PP}_layers_per_stage=1"],
            "ZBVZeroBubble runs two stages on each of 2 ranks; legal: none",
        ),
        (
            [f"{PP}_schedule=LoopedBFS", f"{PP}_layers_per_stage=3"],
            "runs two or more stages on each of 2 ranks; legal: 1",
        ),
        (
            [f"{NAMES}=[['tok_embeddings']]"],
            "names 1 stages, and 1F1B runs one stage on each of 2 ranks",
        ),
        (
            [f"{NAMES}=[['tok_embeddings','x'],['layers.0']]"],
            "unknown: x; missing: layers.1, layers.2, layers.3, norm",
        ),
        (
            [f"{NAMES}=[[{FIRST},'layers.1','layers.0'],['layers.2',{REST}]]"],
            "not in the model's order: layers.1",
        ),
        (
            [f"{NAMES}=[[{FIRST},'layers.0','layers.1'],['layers.1',{REST}]]"],
            "named twice: layers.1",
        ),
        ([f"{NAMES}=[[{FIRST},'layers.0','layers.1',{REST}],[]]"], "without modules: stage 1"),
        (
            [*GPT2, f"{NAMES}=[[{FIRST}],['pos_embeddings']]"],
            "not in the first stage: pos_embeddings",
        ),
        (
            ["--training.local_batch_size=1"],
            "as stages (2) or more, and a step has 1; training.global_batch_size could be 8",
        ),
        (
            [f"{PP}_schedule=DualPipeV", "--training.local_batch_size=2"],
            "needs as many micro-batches as stages (4)",
        ),
        (
            [f"{PP}_schedule=Interleaved1F1B", "--training.local_batch_size=7"],
            "in equal rounds, 3 with 2 ranks",
        ),
        (
            [SPLIT, "--parallelism.fsdp_reshard_after_forward=always"],
            'gathers whole stages and keeps them; use "never"',
        ),
        ([SPLIT, "--parallelism.fsdp_forward_prefetch=1"], "remove the key, or use GPipe or 1F1B"),
        ([SPLIT, "--parallelism.fsdp_backward_prefetch=1"], "remove the key, or use GPipe or 1F1B"),
        (["--parallelism.fsdp_backward_prefetch=1"], 'use fsdp_reshard_after_forward "always"'),
        (["--parallelism.defer_gradient_sync=replicas"], "summed once; remove the key"),
        ([SPLIT, "--compile.enable"], 'remove "model", or use Interleaved1F1B or LoopedBFS'),
        *(
            (
                [SPLIT, f"--activation_checkpoint.mode={mode}"],
                'use "none", or use Interleaved1F1B or LoopedBFS',
            )
            for mode in ("full", "selective")
        ),
        ([SPLIT, *GPT2], "tok_embeddings.weight would be there twice"),
        (["--parallelism.fsdp_blocks_per_group=3"], "the largest stage has 2 blocks; at most 2"),
        (
            ["--parallelism.pipeline_parallel_split_points=['layers.2']"],
            "name the modules of each stage in",
        ),
    ],
)
def test_what_a_schedule_cannot_do_is_refused_with_what_it_can(options, says):
    assert says in faults(*options, world=8)


def test_all_faults_of_a_pipeline_are_named_at_once():
    split = [
        SPLIT,
        "--compile.enable",
        "--parallelism.fsdp_reshard_after_forward=always",
        f"{PP}_microbatch_size=3",
    ]
    assert faults(*split, *GPT2, world=4).startswith("3 configuration errors")


def test_what_gathers_block_by_block_may_reshard_and_prefetch():
    options = [
        "--parallelism.fsdp_reshard_after_forward=always",
        "--parallelism.fsdp_backward_prefetch=1",
    ]
    assert job(*options, world=4).config.parallelism.fsdp_backward_prefetch == 1


def test_keys_that_the_stages_make_idle_are_named():
    named = f"{NAMES}=[[{FIRST},'layers.0','layers.1'],['layers.2',{REST}]]"
    idle = job(
        named, f"{PP}_last_stage_less_layers=2", "--parallelism.defer_gradient_sync", world=4
    ).no_effect
    assert "with pipeline parallel: parallelism.defer_gradient_sync" in idle
    assert (
        "with module_fqns_per_model_part: parallelism.pipeline_parallel_last_stage_less_layers"
        in idle
    )


def test_overlapping_experts_communication_is_accepted():
    assert job(f"{PP}_expert_parallel_overlap=false").no_effect == ""
