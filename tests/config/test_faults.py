"""All errors of a config are named at once, each with its origin and the legal values."""

import inspect
import os

import pytest

import titanlite.config.job
from titanlite.config.docs import markdown
from titanlite.config.job import job_from
from titanlite.config.load import ConfigError, load, parse_command_line
from titanlite.config.rules import data, parallel, pipeline, run
from titanlite.config.rules.facts import Facts
from titanlite.config.schema import value_of
from titanlite.config.toml import to_toml, toml_differences
from titanlite.launch.launcher import EPILOG
from titanlite.models.common import RopeScaling

MOE = ["--model.name=qwen3", "--model.flavor=debugmodel_moe"]


def job(
    *argv: str,
    world: int | None = None,
    training: bool = False,
    files: tuple[str, ...] = ("debug.toml",),
):
    return job_from(
        parse_command_line(["--config", *files, *argv], {}), world=world, training=training
    )


def faults(*argv: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        job(*argv, **options)
    return str(caught.value)


def test_three_errors_of_one_command_line_are_all_named():
    text = faults(
        "--training.stepz",
        "5",
        "--optimizer.lr",
        "x",
        "--parallelism.tensor_parallel_degree",
        "3",
        world=2,
    )
    assert text.startswith("3 configuration errors; nothing was started")
    assert "training.stepz = 5" in text and "unknown key; did you mean training.steps?" in text
    assert 'optimizer.lr = "x"' in text and "a number > 0" in text
    assert "3 does not divide 2 ranks (NGPU=3 starts 3); legal: 1, 2" in text


def test_a_model_that_is_not_registered_hides_no_fault_but_those_of_its_fields():
    own = ["--model.name=llama5", "--model.overrides.dim=x"]
    text = faults(*own, "--optimizer.lr=x", "--parallelism.tensor_parallel_degree=3", world=2)
    assert text.startswith("3 configuration errors;") and "dim" not in text, text
    assert 'no model is registered as "llama5"' in text and "must be a number > 0" in text
    assert "3 does not divide 2 ranks" in text


def test_an_invalid_field_does_not_hide_a_rule_on_others():
    text = faults("--training.steps", "none", "--training.global_batch_size", "17", world=2)
    assert (
        "training.steps" in text
        and "training.global_batch_size = 17" in text
        and "16 or 32" in text
    )


def test_a_rule_that_reads_an_invalid_field_does_not_stop_other_rules():
    text = faults("--training.seq_len", "x", "--training.global_batch_size", "17", world=2)
    assert "training.seq_len" in text and "training.global_batch_size = 17" in text


def test_a_rule_on_an_invalid_field_reports_nothing():
    assert "1 configuration error;" in faults(
        "--training.local_batch_size", "0", "--training.global_batch_size", "17", world=2
    )


def test_every_rule_takes_facts_that_a_valid_config_has(monkeypatch):
    made = []

    class Recorded(Facts):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(titanlite.config.job, "Facts", Recorded)
    job(world=1)
    for module in (run, data, parallel, pipeline):
        rules = [one for _, one in inspect.getmembers(module, inspect.isgeneratorfunction)]
        own = [rule for rule in rules if rule.__module__ == module.__name__]
        assert own, f"{module.__name__} has no rules"
        for rule in own:
            assert not inspect.signature(rule).parameters.keys() - set(dir(made[0])), (
                f"{rule.__name__} never runs"
            )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--training.seq_len", "9000"], "positions for 8192 tokens at most"),
        (["--model.flavor", "8b"], "debugmodel, 1B, 3B, 8B, 70B, 405B"),
        (["--model.name", "lama3"], "did you mean llama3?"),
        (
            ["--model.package", "no_such_package"],
            f"there is no package no_such_package in {os.getcwd()}",
        ),
        (["--model.package", "./parrot"], '"./parrot" is not a name that Python can import'),
        (["--model.overrides.n_layer", "4"], "nearest: n_layers"),
        (["--model.overrides.n_layers", "many"], "n_layers: must be a valid integer"),
        (["--model.overrides.dim", "100"], "      dim 100 must be a multiple of 2 x n_heads 8"),
        (["--model.overrides.n_heads", "0"], "n_heads: must be greater than or equal to 1"),
        (["--model.overrides.n_layers", "0"], "n_layers: must be greater than or equal to 1"),
        (["--model.overrides.norm_eps", "0"], "norm_eps: must be greater than or equal to 1e-30"),
        (["--model.overrides.vocab_size", "128"], "byte tokenizer's 256 tokens do not fit"),
        (
            ["--lr_scheduler.decay_ratio", "0.95", "--lr_scheduler.warmup_steps", "100"],
            "at most 0.667",
        ),
        (["--optimizer.name", "SGD", "--optimizer.beta1", "0.5"], "SGD does not use this key"),
        (["--training.dataset", "text"], "needs a folder or file"),
        (["--training.dataset_path", "/data"], "has no path"),
        (["--training.dtype", "float64"], 'use "float64" for all three types'),
        (
            ["--parallelism.data_parallel_shard_degree", "3"],
            "3 is not the number of ranks, 4; use -1 or 4",
        ),
        (["--parallelism.pipeline_parallel_degree", "8"], "8 does not divide 4 ranks"),
        (
            ["--parallelism.expert_parallel_degree", "2"],
            "llama3 debugmodel has no experts; legal: 1",
        ),
        (
            [*MOE, "--parallelism.expert_parallel_degree", "3"],
            "3 does not divide 8 experts; legal: 1, 2, 4",
        ),
        (
            [*MOE, "--parallelism.expert_parallel_degree", "8"],
            "8 does not divide 4 ranks of data_parallel_shard",
        ),
        (
            [
                *MOE,
                "--parallelism.expert_parallel_degree=2",
                "--parallelism.fsdp_reshard_after_forward=2",
            ],
            "FSDP2 keeps experts that expert parallel splits on all sharding ranks or on one",
        ),
        (["--parallelism.fsdp_reshard_after_forward", "3"], "legal: 2"),
        (
            ["--parallelism.fsdp_reshard_after_forward", "sometimes"],
            '"default", "always", "never" or a whole number',
        ),
        (["--activation_checkpoint.selective_ac_option", "0"], "matching"),
        (["--job.device", "cpu", "--training.dataloader.pin_memory"], "for copies to a GPU"),
        (["--job", "x"], "--job"),
        (["--metrics.save_tb_folder="], "must be the name of a folder inside job.dump_folder"),
        (["--checkpoint.folder=../x"], "must be the name of a folder inside job.dump_folder"),
        (["--checkpoint.folder=logs"], "must differ from logs of a run"),
        (["--metrics.save_tb_folder=./previous/tb/"], "must differ from previous of a run"),
        (
            ["--checkpoint.folder=tb/states"],
            'metrics.save_tb_folder = "tb"   (default)\n      must differ from '
            "checkpoint.folder, and neither may contain the other",
        ),
        (
            ["--comm.save_traces_folder=profile_traces"],
            "must differ from profiling.save_traces_folder",
        ),
        (["--job.dump_folder="], 'must be the name of a folder; "." is the current one'),
        (
            ["--job.dump_folder", "out/" + "x" * 256],
            "a name of 256 bytes; files and folders have at most 255",
        ),
        (["--training.dataset=text", "--training.dataset_path", "é" * 128], "a name of 256 bytes"),
        (
            ["--job.dump_folder=/tmp/\udcff"],
            "--job.dump_folder=/tmp/?\n      is not UTF-8, as TOML must be",
        ),
        (["--debug", "1"], "is not an option"),
        (["--lr", "1"], "did you mean --optimizer.lr?"),
        (["--learning-rate", "1"], "did you mean --optimizer.lr?"),
        (["--optimizer.learning_rate", "1"], "did you mean optimizer.lr?"),
        (["--training.lr", "1"], "unknown key; did you mean optimizer.lr?"),
        (["--optimizer.steps", "1"], "unknown key; did you mean training.steps?"),
        (["--training.Steps", "1"], "unknown key; did you mean training.steps?"),
        (
            ["-training.steps", "10"],
            "1 configuration error; nothing was started\n  -training.steps\n      is not an op",
        ),
        (["-training.steps", "-x.y", "1"], "  -x.y\n      is not an option; did you mean --x.y?"),
        (["-training.steps", "10"], "is not an option; did you mean --training.steps?"),
        (
            ["--parallelism.context_parallel_sequence=ulysses"],
            "did you mean parallelism.context_parallel_rotate_meth",
        ),
        (
            ["--inference.a=1", "--encoder.b=2", "--inference.c=3"],
            "1 configuration error; nothing was started\n"
            "  [inference], [encoder]   (command line)\n"
            "      unknown sections; known are: job, model",
        ),
        (
            ["--config", "debug.toml", "-training.steps", "10"],
            "is not an option; did you mean --training.steps?",
        ),
        (["--model.flavor", "8b"], 'did you mean "8B"?'),
        (["--parallelism.pipeline_parallel_schedule", "1f1b2"], 'did you mean "1F1B"?'),
        (
            ["--inference.a=1", "--inference.b=2"],
            "[inference]   (command line)\n      unknown section; known",
        ),
        (["--training.img_size", "1"], "unknown key; [training] has: dataset"),
        (["--optimizer.name", "Lion"], "; known: Adam, "),
        (["--optimizer.lr"], "needs a value: a number > 0"),
        (["--training.steps", "--compile.enable"], "needs a value: a whole number >= 1"),
        (["--config="], "needs the name of a TOML file"),
        (["--config", "/"], "is a folder; name a TOML file in it"),
        (["--training.steps=3", "my.toml"], "did you mean --config my.toml?"),
        (["--model.freeze", "norm.weight"], """must be a list of text: '["norm.weight"]'"""),
        (["--training.steps", "[3]"], "must be a whole number >= 1"),
        (["--model.freeze", '["a", 3]'], "must be a list of text; entry 2 must be a valid string"),
        (["--training.mixture", '[{dataset = "a"}]'], "entry 1: weight is missing"),
        (
            [
                "--training.mixture",
                '[{dataset = "a", weight = 0.7}, {dataset = "b", wieght = 0.3}]',
            ],
            "; entry 2: weight is missing; entry 2: wieght is unknown",
        ),
        (
            ["--training.mixture", '[{dataset="c4", weight=0.7}, {dataset="a/b", weight=0.3}]'],
            'entry 2: "a/b" is streamed',
        ),
        (
            ["--training.mixture", '[{dataset="text", weight=1.0}]'],
            'entry 1: the data set "text" needs a folder',
        ),
        (
            ["--training.mixture", '[{dataset = "a", weight = 2}]'],
            "weights must add up to 1, not 2.0 = 2",
        ),
        (["--model.overrides.n_layer", "4"], "model.overrides   (command line)"),
        (
            ["--model.overrides", "4"],
            "is a table: write [model.overrides] or --model.overrides.NAME VALUE",
        ),
        (
            ["--model.overrides=4", "--model.overrides.n_layers=2"],
            "model.overrides = 4   (command line)",
        ),
        (["--model.overrides.n_layers.x=2"], "n_layers: must be a valid integer"),
        (
            ["--model.overrides.rope_scaling.factr=4"],
            "llama3 has no field rope_scaling.factr (nearest: factor; known:",
        ),
        (
            ["--model.overrides.rope_scaling", "{foo = 1}"],
            "rope_scaling.foo (nearest: none; known: factor, low_freq",
        ),
        (
            ["--model.overrides={rope_scaling = {foo = 1}, n_layer = 2}"],
            "rope_scaling.foo (nearest: none; known: fact",
        ),
        (
            ["--model.overrides={rope_scaling = {foo = 1}, n_layer = 2}"],
            "n_layer (nearest: n_layers; known: dim, n_la",
        ),
        (["--model.overrides.rope_scaling=4"], "rope_scaling: must be an object"),
        (
            ["--model.overrides.rope_scaling.factor=4", "--model.overrides.rope_scaling=4"],
            "must be an object",
        ),
        (
            ["--model.overrides.rope_scaling.factor=much"],
            "rope_scaling.factor: must be a valid number",
        ),
        (["--training.mixture", '[{dataset = "a"}, {datset = "b"}]'], "training.mixture"),
        (["--training.steps=3", "stray"], "stray\n      is not an option"),
    ],
)
def test_a_message_names_the_legal_values(argv, says):
    assert says in faults(*argv, world=4)


@pytest.mark.parametrize(
    ("shard", "tp", "says"),
    [
        (
            "2",
            "1",
            "2 × data_parallel_shard_degree 2 = 4 ranks are needed, "
            "and this run has 2; start 4 (NGPU=4",
        ),
        (
            "-1",
            "2",
            "2 × tensor_parallel_degree 2 = 4 does not divide 2 ranks; "
            "start 4 (NGPU=4 on one node)",
        ),
    ],
)
def test_degrees_that_need_more_ranks_say_together_how_many(shard, tp, says):
    argv = [
        "--parallelism.data_parallel_replicate_degree=2",
        f"--parallelism.data_parallel_shard_degree={shard}",
    ]
    text = faults(*argv, f"--parallelism.tensor_parallel_degree={tp}", world=2)
    assert says in text and text.startswith("1 configuration error;")


@pytest.mark.parametrize(
    ("tp", "world", "legal"), [("2", 3, "1"), ("16", 8, "1, 2, 4"), ("16", 24, "1, 2, 4")]
)
def test_the_legal_values_of_a_degree_are_those_that_every_rule_allows(tp, world, legal):
    text = faults("--parallelism.tensor_parallel_degree", tp, world=world)
    assert {line.partition("legal: ")[2] for line in text.splitlines() if "legal" in line} == {
        legal
    }


def test_a_degree_is_judged_beside_an_invalid_model():
    text = faults("--parallelism.tensor_parallel_degree=2", "--model.flavor=8b", world=3)
    assert "2 does not divide 3 ranks; legal: 1, 3" in text and "unknown flavor" in text


def test_help_and_docs_show_how_a_list_and_a_switch_are_typed():
    for text in (EPILOG, " ".join(markdown().split())):
        assert (
            """--model.freeze '["norm.weight"]'""" in text and ".no_" in text and "=false" in text
        )


def test_missing_and_broken_files_are_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[training\nsteps = 3")
    text = faults("--training.stepz=3", files=("absent.toml", str(broken), "x" * 256))
    assert "File name too long" in text
    assert (
        "absent.toml" in text
        and "debug.toml" in text
        and "broken.toml" in text
        and "training.stepz" in text
    )


def test_later_files_and_the_command_line_win(tmp_path):
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("[training]\nsteps = 1\nseq_len = 64\nlocal_batch_size = 2\n")
    two.write_text("[training]\nsteps = 2\nseq_len = 32\n")
    training = job("--training.steps=3", files=("debug.toml", str(one), str(two))).config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (3, 32, 2)


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        (["--validation.enable"], "validation.enable", True),
        (["--validation.no_enable"], "validation.enable", False),
        (["--validation.enable=false"], "validation.enable", False),
        (["--validation.enable", "false"], "validation.enable", False),
        (["--training.local-batch-size", "4"], "training.local_batch_size", 4),
        (["--optimizer.no_decay", "[]"], "optimizer.no_decay", []),
        (["--optimizer.no_decay=['biases']"], "optimizer.no_decay", ["biases"]),
        (["--job.description", "5"], "job.description", "5"),
        (["--job.description=a = b"], "job.description", "a = b"),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--training.max_norm", "inf"], "training.max_norm", float("inf")),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.dataloader", "{num_workers = 3}"], "training.dataloader.num_workers", 3),
    ],
)
def test_every_way_to_write_an_override(argv, key, value):
    parsed = value_of(job(*argv).config, key)
    assert parsed == value and type(parsed) is type(value)


def test_a_nested_field_of_a_flavor_is_overridden_alone_wherever_it_is_written(tmp_path):
    path = tmp_path / "scaled.toml"
    path.write_text(
        '[model]\nflavor = "1B"\n[model.overrides.rope_scaling]\nfactor = 2\nlow_freq_factor = 3\n'
    )
    files = ("debug.toml", str(path))
    options = ["--training.dataset=tokens", "--training.dataset_path=x"]
    for argv in (
        ["--model.overrides.rope_scaling.factor=4"],
        ["--model.overrides.rope_scaling", "{factor = 4}"],
    ):
        of_file = job(*options, *argv, files=files)
        assert of_file.model.rope_scaling == RopeScaling(4.0, 3.0), (
            "the later value, and the file's other one"
        )
        of_flavor = job(
            *options, "--model.flavor=1B", "--model.overrides.rope_scaling.low_freq_factor=2"
        )
        assert of_flavor.model.rope_scaling == RopeScaling(32.0, 2.0), "the flavor's other values"
        assert job(*argv).model.rope_scaling == RopeScaling(4.0), (
            "the defaults, where the flavor has none"
        )
    assert job("--model.overrides.rope_scaling={}").model.rope_scaling == RopeScaling()


def test_the_old_flag_and_the_variable_name_a_config_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[training]\nsteps = 7\n")
    assert parse_command_line(["--job.config_file", str(path)], {}).files == [str(path)]
    assert parse_command_line([], {"CONFIG_FILE": str(path)}).files == [str(path)]
    assert parse_command_line(["--config", "debug.toml"], {"CONFIG_FILE": str(path)}).files == [
        "debug.toml"
    ]


def test_the_resolved_config_is_read_back_unchanged(tmp_path):
    controls = "".join(f"\\u{number:04x}" for number in (*range(32), 127, 128))
    description = f'--job.description="say \\"hi\\"{controls}"'
    original = job("--model.overrides.n_layers=2", description, "--lr_scheduler.decay_ratio=0.5")
    assert original.config.job.description.endswith("\x1f\x7f\x80")
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(original.config))
    assert job(files=(str(path),)).config == original.config


def test_the_device_that_was_found_is_used_but_not_saved():
    found = job_from(parse_command_line([], {}), world=1, training=True, device="cpu")
    assert found.config.job.device == "cpu" and found.given.job.device == "auto"
    with pytest.raises(ConfigError, match="for copies to a GPU"):
        job_from(
            parse_command_line(["--training.dataloader.pin_memory"], {}),
            world=1,
            training=True,
            device="cpu",
        )


def test_the_last_of_two_equal_flags_wins():
    assert job("--training.steps=3", "--training.steps=4").config.training.steps == 4


def test_invalid_fields_have_their_defaults_while_others_are_read():
    loaded = load(
        parse_command_line(
            ["--config", "debug.toml", "--training.steps=x", "--training.seq_len=64"], {}
        )
    )
    assert loaded.invalid == {"training.steps"} and loaded.config.training.seq_len == 64


def test_a_key_that_only_one_config_has_is_called_not_set():
    assert toml_differences("[a]\nb = 1", '[a]\nc = "none"') == {
        "a.b": "1 -> not set",
        "a.c": 'not set -> "none"',
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[optimizer]\nlr = 1\nname = 'SGD'\nlr = 2\n", "line 4: lr is given twice"),
        ("[model]\nfreeze = []\nfreeze = [\n  'a',\n]  # c", "line 3: freeze is given twice"),
        (
            "[optimizer]\nlr = 1\n[job]\n[optimizer]\neps = 1\n",
            "line 4: [optimizer] is given twice",
        ),
    ],
)
def test_a_key_given_twice_is_named_with_its_file_and_line(text, says, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    found = load(parse_command_line(["--config", str(file)], {})).faults
    assert [(fault.key, fault.why) for fault in found] == [(str(file), f"{says}; remove one")]


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (b'{"training": {"steps": 3}}', "a.toml", "is JSON; titanlite reads TOML in UTF-8"),
        (b"training:\n  steps: 3\n", "a.toml", "is YAML; titanlite reads TOML in UTF-8"),
        (b"steps: 3\n", "a.yaml", "is YAML"),
        ("[training]\nsteps = 3".encode("utf-16"), "a.toml", "is text in UTF-16"),
        (
            b"[job]\n# caf\xe9\n",
            "a.toml",
            "line 2 is not UTF-8 (byte 0xe9); save the file as UTF-8",
        ),
        (b"\xef\xbb\xbf[job]\r\n\r\n# caf\xe9\r\n", "a.toml", "line 3 is not UTF-8 (byte 0xe9)"),
    ],
)
def test_a_file_in_another_format_is_named_as_such(tmp_path, content, name, says):
    file = tmp_path / name
    file.write_bytes(content)
    loaded = load(parse_command_line(["--config", str(file)], {}))
    assert [fault.key for fault in loaded.faults] == [str(file)] and says in loaded.faults[0].why


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "a.toml").write_bytes("[training]\nsteps = 3\n".encode("utf-8-sig"))
    loaded = load(parse_command_line(["--config", str(tmp_path / "a.toml")], {}))
    assert not loaded.faults and loaded.config.training.steps == 3
