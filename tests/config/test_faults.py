"""All errors of a config are named at once, each with its origin and the legal values."""

import os

import pytest

from tests.messages import says
from titanlite.config.docs import markdown
from titanlite.config.job import job_from
from titanlite.config.load import ConfigError, load_config, parse_command_line
from titanlite.config.section import value_of
from titanlite.config.toml import to_toml, toml_differences
from titanlite.launch.launcher import EPILOG
from titanlite.models.common import RopeScaling


def job(*argv: str, world: int | None = None, files: tuple[str, ...] = ("debug.toml",)):
    line = parse_command_line(["--config", *files, *argv], {})
    return job_from(line, world=world, training=False)


def faults(*argv: str, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        job(*argv, **options)
    return caught.value


TP = "--parallelism.tensor_parallel_degree"
UNEVEN = "--training.global_batch_size=17"


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (
            f"--training.stepz=5 --optimizer.lr=x {TP}=3",
            "training.stepz optimizer.lr parallelism.tensor_parallel_degree",
        ),
        (
            f"--model.name=llama5 --model.overrides.dim=x --optimizer.lr=x {TP}=3",
            "model.name optimizer.lr parallelism.tensor_parallel_degree",
        ),
        (f"--model.flavor=8b {TP}=3", "model.flavor parallelism.tensor_parallel_degree"),
        (f"--training.steps=none {UNEVEN}", "training.steps training.global_batch_size"),
        (f"--training.seq_len=x {UNEVEN}", "training.seq_len training.global_batch_size"),
        (f"--training.local_batch_size=0 {UNEVEN}", "training.local_batch_size"),
    ],
)
def test_all_errors_of_a_command_line_are_named_but_those_that_follow_from_another(argv, keys):
    found = faults(*argv.split(), world=2)
    assert {fault.key for fault in found.faults} == {*keys.split()}
    says(found, f"{len(keys.split())} configuration error", *keys.split())


MOE = "--model.name=qwen3 --model.flavor=debugmodel_moe --parallelism.expert_parallel_degree"
ROPE = "--model.overrides.rope_scaling"
ONE = '{dataset="a",weight=0.7}'
LEGAL = {  # arguments on 4 ranks: a part of the message
    "--training.seq_len=9000": "8192 tokens",
    "--training.global_batch_size=17": "32",
    "--model.flavor=8b": 'did you mean "8B"?',
    "--model.flavor=other": "debugmodel, 1B, 3B, 8B, 70B, 405B",
    "--model.name=lama3": "llama3?",
    "--model.name=llama": "did you mean llama3?",
    "--model.name=llama4": "--model.name transformers --model.overrides.model_type llama4",
    "--model.package=no_such_package": os.getcwd(),
    "--model.package=./parrot": '"./parrot" is',
    "--model.overrides.n_layer=4": "nearest: n_layers",
    "--model.overrides={n_layer=4}": "model.overrides   (command line)",
    "--model.overrides=4": "--model.overrides.NAME VALUE",
    "--model.overrides=4 --model.overrides.n_layers=2": "model.overrides = 4   (command line)",
    "--model.overrides.n_layers.x=2": "n_layers: must",
    "--model.overrides.dim=100": "2 x n_heads 8",
    "--model.overrides.vocab_size=128": "256 tokens",
    f"{ROPE}.factr=4": "rope_scaling.factr (nearest: factor; known:",
    f"{ROPE}={{foo=1}}": "rope_scaling.foo (nearest: none; known: factor, low_freq",
    "--model.overrides={rope_scaling={foo=1},n_layer=2}": "n_layer (nearest: n_layers; known: ",
    f"{ROPE}.factor=4 {ROPE}=4": "rope_scaling: must",
    f"{ROPE}.factor=much": "rope_scaling.factor: must",
    "--lr_scheduler.decay_ratio=0.95 --lr_scheduler.warmup_steps=100": "0.667",
    "--optimizer.name=Lion": "known: Adam, ",
    "--training.dataset=text": "dataset_path",
    "--training.dtype=float64": '"float64" for',
    "--parallelism.data_parallel_shard_degree=3": "-1 or 4",
    "--parallelism.pipeline_parallel_degree=8": "4 ranks",
    "--parallelism.pipeline_parallel_schedule=1f1b2": '"1F1B"?',
    "--parallelism.context_parallel_sequence=ulysses": "parallelism.context_parallel_rotate_meth",
    "--parallelism.expert_parallel_degree=2": "llama3 debugmodel",
    f"{MOE}=3": "legal: 1, 2, 4",
    f"{MOE}=8": "4 ranks of data_parallel_shard",
    f"{MOE}=2 --parallelism.fsdp_reshard_after_forward=2": "FSDP2 keeps",
    "--parallelism.fsdp_reshard_after_forward=sometimes": '"default", "always", "never"',
    "--activation_checkpoint.selective_ac_option=0": "matching",
    "--checkpoint.folder=../x": "inside job.dump_folder",
    "--checkpoint.folder=logs": "from logs",
    "--metrics.save_tb_folder=./previous/tb/": "from previous",
    "--checkpoint.folder=tb/states": 'metrics.save_tb_folder = "tb"   (default)',
    "--comm.save_traces_folder=profile_traces": "profiling.save_traces_folder",
    "--job.dump_folder=": '"." is',
    f"--job.dump_folder=out/{'x' * 256}": "256 bytes",
    f"--training.dataset=text --training.dataset_path={'é' * 128}": "256 bytes",
    "--job.dump_folder=/tmp/\udcff": "--job.dump_folder=/tmp/?\n      is not UTF-8",
    "--debug 1": "1 error in the command line; nothing",
    "--lr 1": "--optimizer.lr?",
    "--optimizer.learning_rate 1": " optimizer.lr?",
    "--training.Steps 1": " training.steps?",
    "--training.img_size 1": "[training] has: dataset",
    "-training.steps 10": "-training.steps\n      is not an option; did you mean --training.steps?",
    "--training.steps=3 stray": "stray\n",
    "--training.steps=3 my.toml": "did you mean --config my.toml?",
    "--training.steps=3 stray my.toml": "2 errors in the command line;",
    "--training.steps=x my.toml": "2 configuration errors;",
    "--inference.a=1 --inference.b=2": "[inference]   (command line)",
    "--optimizer.lr": "a number > 0",
    "--training.steps --compile.enable": "a whole number >= 1",
    "--config=": "TOML file",
    "--config=/": "a folder;",
    "--model.freeze=[norm.weight,a]": "a list of text: norm.weight,a",
    "--checkpoint.exclude_from_loading data_loader,optimizer": '"data_loader" is called "data"',
    "--checkpoint.exclude_from_loading=lr_scheduler": "no state here",
    "--model.freeze=['a',3]": "entry 2",
    '--training.mixture=[{dataset="a"}]': "entry 1: weight",
    f'--training.mixture=[{ONE},{{dataset="b",wieght=0.3}}]': "entry 2: weight",
    f'--training.mixture=[{ONE},{{dataset="b",weight=0.3,wieght=1}}]': "entry 2: wieght",
    f'--training.mixture=[{ONE},{{dataset="a/b",weight=0.3}}]': 'entry 2: "a/b"',
    '--training.mixture=[{dataset="text",weight=1.0}]': 'entry 1: the data set "text"',
    '--training.mixture=[{dataset="a",weight=2}]': "2.0 = 2",
    '--training.mixture=[{dataset="a",weight=0.00001}]': "0.0001",
    '--metrics.sinks=["wandbb"]': '"wandbb"; did you mean wandb?',
}


@pytest.mark.parametrize("argv", LEGAL)
def test_a_message_names_the_legal_values(argv):
    says(faults(*argv.split(), world=4), LEGAL[argv])


@pytest.mark.parametrize("degrees", ["data_parallel_shard_degree=2", "tensor_parallel_degree=2"])
def test_degrees_that_need_more_ranks_say_together_how_many(degrees):
    argv = ["--parallelism.data_parallel_replicate_degree=2", f"--parallelism.{degrees}"]
    says(faults(*argv, world=2), "1 configuration error;", degrees.replace("=", " "), "NGPU=4")


@pytest.mark.parametrize(
    ("tp", "world", "legal"), [(2, 3, "1"), (16, 8, "1, 2, 4"), (16, 24, "1, 2, 4")]
)
def test_the_legal_values_of_a_degree_are_those_that_every_rule_allows(tp, world, legal):
    lines = str(faults(f"{TP}={tp}", world=world)).splitlines()
    assert {line.partition("legal: ")[2] for line in lines if "legal" in line} == {legal}


def test_help_and_docs_show_how_a_list_and_a_switch_are_typed():
    for text in (EPILOG, " ".join(markdown().split())):
        says(text, "--model.freeze norm.weight,output.weight", ".no_", "=false")


def test_a_file_that_has_words_for_a_list_is_told_the_list(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[model]\nfreeze = "norm.weight, a"\n')
    says(faults(files=(str(path),)), str(path), 'a list of text: ["norm.weight", "a"]')


def test_missing_and_broken_files_are_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[training\nsteps = 3")
    files = ("absent.toml", str(broken), "x" * 256)
    says(faults("--training.stepz=3", files=files), *files, "debug.toml", "training.stepz")


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
        (["--validation.enable", "false"], "validation.enable", False),
        (["--training.local-batch-size", "4"], "training.local_batch_size", 4),
        (["--optimizer.no_decay", "[]"], "optimizer.no_decay", []),
        (["--model.freeze", "norm.weight"], "model.freeze", ["norm.weight"]),
        (["--model.freeze=a.*, layers.[01].*"], "model.freeze", ["a.*", "layers.[01].*"]),
        (["--compile.components", "model"], "compile.components", ["model"]),
        (["--optimizer.no_decay="], "optimizer.no_decay", []),
        (["--job.description", "5"], "job.description", "5"),
        (["--job.description=a = b"], "job.description", "a = b"),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--debug.seed", "none"], "debug.seed", None),
        (["--training.max_norm", "inf"], "training.max_norm", float("inf")),
        (["--optimizer.lr=1", "--optimizer.lr=2"], "optimizer.lr", 2.0),
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
    options = ["--training.dataset=tokens", "--training.dataset_path=x"]
    for argv in ([f"{ROPE}.factor=4"], [ROPE, "{factor = 4}"]):
        of_file = job(*options, *argv, files=("debug.toml", str(path))).model_config
        assert of_file.rope_scaling == RopeScaling(4.0, 3.0), "the file's other value"
        assert job(*argv).model_config.rope_scaling == RopeScaling(4.0), "the defaults"
    of_flavor = job(*options, "--model.flavor=1B", f"{ROPE}.low_freq_factor=2").model_config
    assert of_flavor.rope_scaling == RopeScaling(32.0, 2.0), "the flavor's other values"
    assert job(f"{ROPE}={{}}").model_config.rope_scaling == RopeScaling()


def test_the_old_flag_and_the_variable_name_a_config_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[training]\nsteps = 7\n")
    for argv, environ, file in (
        (["--job.config_file", str(path)], {}, str(path)),
        ([], {"CONFIG_FILE": str(path)}, str(path)),
        (["--config", "debug.toml"], {"CONFIG_FILE": str(path)}, "debug.toml"),
    ):
        assert parse_command_line(argv, environ).files == [file]


def test_the_resolved_config_is_read_back_unchanged(tmp_path):
    controls = "".join(f"\\u{number:04x}" for number in (*range(32), 127, 128))
    description = f'--job.description="say \\"hi\\"{controls}"'
    original = job("--model.overrides.n_layers=2", description, "--lr_scheduler.decay_ratio=0.5")
    assert original.config.job.description.endswith("\x1f\x7f\x80")
    path = tmp_path / "resolved.toml"
    path.write_text(to_toml(original.config))
    assert job(files=(str(path),)).config == original.config


def test_the_device_that_was_found_is_used_but_not_saved():
    def found(*argv: str):
        return job_from(parse_command_line([*argv], {}), world=1, training=True, device="cpu")

    assert found().config.job.device == "cpu" and found().given.job.device == "auto"
    assert "training.dataloader.pin_memory" in found("--training.dataloader.pin_memory").idle


def test_invalid_fields_have_their_defaults_while_others_are_read():
    argv = ["--config", "debug.toml", "--training.steps=x", "--training.seq_len=64"]
    loaded = load_config(parse_command_line(argv, {}))
    assert loaded.invalid == {"training.steps"} and loaded.config.training.seq_len == 64


def test_a_key_that_only_one_config_has_is_called_not_set():
    assert toml_differences("[a]\nb = 1", '[a]\nc = "none"') == {
        "a.b": "1 -> not set",
        "a.c": 'not set -> "none"',
    }


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[optimizer]\nlr = 1\nname = 'SGD'\nlr = 2\n", "line 4: lr"),
        ("[model]\nfreeze = []\nfreeze = [\n  'a',\n]  # c", "line 3: freeze"),
        ("[optimizer]\nlr = 1\n[job]\n[optimizer]\neps = 1\n", "line 4: [optimizer]"),
        ('{"training": {"steps": 3}}', "JSON"),
        ("training:\n  steps: 3\n", "YAML"),
        ("[training]\nsteps = 3".encode("utf-16"), "UTF-16"),
        (b"[job]\n# caf\xe9\n", "line 2 is not UTF-8 (byte 0xe9)"),
        (b"\xef\xbb\xbf[job]\r\n\r\n# caf\xe9\r\n", "line 3 is not UTF-8 (byte 0xe9)"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_it_and_its_line(tmp_path, text, where):
    file = tmp_path / "mine.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (fault,) = load_config(parse_command_line(["--config", str(file)], {})).faults
    assert fault.key == str(file) and where in fault.why


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "a.toml").write_bytes("[training]\nsteps = 3\n".encode("utf-8-sig"))
    loaded = load_config(parse_command_line(["--config", str(tmp_path / "a.toml")], {}))
    assert not loaded.faults and loaded.config.training.steps == 3
