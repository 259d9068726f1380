"""Hugging Face folders: bit-equal export and import, the published function, the same bytes from
any mesh.
"""

import json
import os
import shlex
import shutil
import warnings
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.saved import start
from tests.data.assets import make_assets
from tests.jobs import MOE, PARROT, QUIET, TINY, job, run_to_end
from tests.lanes import sample
from tests.messages import refused, says
from tests.parallel.rows import EVEN, GPT2
from titanlite import cli
from titanlite.checkpoint.hf import export as export_module
from titanlite.checkpoint.hf import files
from titanlite.checkpoint.hf.export import write_folder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.hf.names import Translation, documents
from titanlite.config.config_json import complete, config_faults
from titanlite.config.load import ConfigError
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import RunFailed
from titanlite.models import gpt2, llama3, qwen3
from titanlite.models.common import RopeScaling
from titanlite.parallel.build import build_meta_model
from titanlite.parallel.init import fill, materialize
from titanlite.registry import normal
from titanlite.runtime.store import LocalPath
from titanlite.tools.generate import load_model

SPECS: dict[str, Any] = {"llama3": llama3.SPEC, "gpt2": gpt2.SPEC, "qwen3": qwen3.SPEC}
SMALL = llama3.LlamaConfig(32, 2, 4, 2, 48, vocab_size=99, max_seq_len=256, norm_eps=1e-5)
SCALED = replace(SMALL, max_seq_len=131072, rope_scaling=RopeScaling())
GPT2_SMALL = gpt2.GPT2Config(32, 2, 4, vocab_size=99, max_seq_len=256)
QWEN_SMALL = replace(
    qwen3.FLAVORS["0.6B"],
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=48,
    head_dim=16,
    vocab_size=99,
)
QWEN_MOE = replace(QWEN_SMALL, tied=False, expert_dim=24, experts=8, top_k=3)


def spec_of(flavor: Any) -> Any:
    return next(s for s in SPECS.values() if type(flavor) is type(s.flavors["debugmodel"]))


def build(flavor: Any) -> torch.nn.Module:
    """Build a model with values far from the initial ones, so that norms and biases count."""
    model, table = build_meta_model(spec_of(flavor), flavor, 200)
    materialize(model, table, 0, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, normal(0.05), seed=1)
            if name.endswith("norm.weight"):
                parameter += 1
    return model.eval()


def written(
    flavor: Any, folder: LocalPath, dtype: torch.dtype = torch.float32, file_bytes: int = 9999
) -> dict[str, torch.Tensor]:
    """Export random weights and return them."""
    live = {name: p.detach() for name, p in build(flavor).named_parameters()}
    translation = Translation(spec_of(flavor), flavor)
    texts = documents(translation.config, dtype, ByteTokenizer())
    tensors = translation.hf_tensors(dtype)
    write_folder(folder, tensors, texts, lambda name: live[name], file_bytes=file_bytes)
    return live


def opened(folder: LocalPath, flavor: Any) -> HuggingFaceFolder:
    return HuggingFaceFolder(folder, spec_of(flavor), flavor)


def holds(folder: LocalPath, flavor: Any, expected: dict[str, torch.Tensor]) -> bool:
    read = opened(folder, flavor).read
    return all(torch.equal(read(name), tensor) for name, tensor in expected.items())


def contents(folder: LocalPath) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(folder: LocalPath, tensors: dict[str, torch.Tensor]) -> None:
    """Put other tensors into a folder, in a single file."""
    for path in (*folder.glob("*.safetensors"), folder / files.INDEX):
        path.unlink()
    save_file(tensors, folder / files.ONE_FILE)


def from_transformers(folder: LocalPath) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def difference(ours: Any, theirs: Any, tokens: torch.Tensor) -> float:
    """Return how far the logits of two models are apart, of the largest."""
    expected = theirs(tokens).logits
    return ((ours(tokens) - expected).abs().max() / expected.abs().max()).item()


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 8192}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
EXPERTS |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.1}
FOREIGN = {
    "scaled": (
        "LlamaConfig",
        SIZES | {"rope_scaling": ROPE | {"original_max_position_embeddings": 64}},
    ),
    "tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.2}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3MoeConfig", SIZES | {"head_dim": 16} | EXPERTS),
}


def made_by_transformers(case: str, folder: LocalPath, **change: Any) -> Any:
    """Save a model with random weights, and return it."""
    import transformers

    kind, sizes = FOREIGN[case]
    config = getattr(transformers, kind)(vocab_size=256, initializer_range=0.2, **sizes | change)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):  # ones do not show a turn
                parameter.normal_(1.0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def all_tensors(folder: LocalPath) -> dict[str, torch.Tensor]:
    parts = map(load_file, folder.glob("*.safetensors"))
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("case", sample(FOREIGN, "gpt2", "qwen3 moe"))
def test_a_folder_of_transformers_needs_no_more_than_its_path(case, tmp_path, capsys):
    hf, out = tmp_path / "hf", tmp_path / "out"
    theirs = made_by_transformers(case, hf)
    assert cli.main(["checkpoint", "import", str(hf), str(out)]) == 0
    options = ["--config", f"{out}/step-0/config.toml", "--checkpoint.initial_load_path", f"{out}"]
    says(capsys.readouterr().out, shlex.join(options))
    imported = job([*QUIET, f"--config={out}/step-0/config.toml"], 1)
    trained = job([*QUIET, "--model.flavor=hf", f"--checkpoint.initial_load_path={hf}"], 1)
    assert (trained.spec, trained.model_config) == (imported.spec, imported.model_config)
    in_hf = [each.config.checkpoint.initial_load_in_hf for each in (trained, imported)]
    assert in_hf == [True, False]
    assert getattr(imported.model_config, "dropout", 0.2) == 0.2
    tensors = all_tensors(hf)
    shutil.rmtree(hf)  # the config of the import has all that it needs
    model = load_model(imported, out / "step-0", torch.device("cpu")).eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert difference(model, theirs, tokens) <= 1e-5
    assert cli.main(["checkpoint", "export", str(out), str(hf)]) == 0
    assert difference(model, from_transformers(hf), tokens) <= 1e-5
    back = all_tensors(hf)  # transformers stacks experts in memory, and writes a tensor for each
    assert ("model.layers.1.mlp.experts.7.down_proj.weight" in back) == (case == "qwen3 moe")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in back)


def config_of(flavor: Any, **change: Any) -> dict[str, Any]:
    return json.loads(json.dumps(spec_of(flavor).hf.config(flavor) | change))


def test_flavor_hf_takes_fields_and_tokenizer_of_a_folder_unless_others_are_given(tmp_path):
    config = config_of(SCALED, vocab_size=999)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make_assets(tmp_path, ["the cat sat on the mat"], 300)
    argv = [*QUIET, "--model.flavor=hf", "--model.overrides.rope_scaling.factor=2"]
    with refused("config.json", "checkpoint.initial_load_path", "model.hf_assets_path"):
        job(argv, 1)
    argv.append(f"--checkpoint.initial_load_path={tmp_path}")
    expected = replace(SCALED, vocab_size=999, rope_scaling=RopeScaling(factor=2.0))
    assert job(argv, 1).model_config == expected
    assert job(argv, 1).config.model.hf_assets_path == str(tmp_path)
    assert job([*argv, "--model.hf_assets_path="], 1).config.model.hf_assets_path == ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "32"}, ["dim", "hidden_size"]),
        ({"attention_bias": True}, ["attention_bias true", "false"]),
        ({"model_type": "gpt2"}, ['"llama3"', "--model.name gpt2"]),
        ({"model_type": "mistral"}, ['model_type "mistral"', "legal: gpt2, llama"]),
    ],
)
def test_a_config_json_of_another_model_is_no_flavor(tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps(config_of(SMALL, **change)))
    argv = [*QUIET, "--model.name=llama3", "--model.flavor=hf"]
    with refused(f"{tmp_path}/config.json", *named):
        job([*argv, f"--model.hf_assets_path={tmp_path}"], 1)


def test_an_export_holds_one_file_at_a_time(tmp_path):
    live = dict(build(GPT2_SMALL).named_parameters())
    fetched: list[weakref.ref] = []
    held: list[int] = []

    def fetch(name: str) -> torch.Tensor:
        tensor = live[name].detach().clone()
        fetched.append(weakref.ref(tensor))
        held.append(sum(t.nbytes for ref in fetched if (t := ref()) is not None))
        return tensor

    tensors = Translation(gpt2.SPEC, GPT2_SMALL).hf_tensors(torch.float32)
    sizes = [tensor.nbytes for tensor in tensors]
    write_folder(tmp_path / "out", tensors, {}, fetch, file_bytes=9999)
    assert max(held) <= max(9999, *sizes) + max(sizes) < sum(sizes) / 2


TP2 = ["--parallelism.tensor_parallel_degree=2"]
MODELS = {  # options, and those of a mesh of 4
    "llama3": (EVEN, TP2),
    "gpt2": (GPT2, TP2),
    "qwen3": (MOE, [*TP2, "--parallelism.expert_parallel_degree=2"]),
}


def start_counting(argv: list[str], folder: str) -> dict[str, Any]:
    """Start a run; return also how many numbers this rank read from files."""
    read, elements = files.SafetensorsReader.read, [0]

    def counting(self: Any, name: str, box: Any) -> torch.Tensor:
        found = read(self, name, box)
        elements.append(found.numel())
        return found

    with patch.object(files.SafetensorsReader, "read", counting):
        return start(argv, folder) | {"elements": sum(elements)}


@pytest.mark.parametrize("model", sample(MODELS))
def test_each_rank_reads_what_its_shards_need(pool, tmp_path, model):
    argv, mesh = MODELS[model]
    live = written(job(argv, 1).model_config, tmp_path / "hf")
    argv = [*argv, *mesh, "--checkpoint.initial_load_in_hf"]
    argv.append(f"--checkpoint.initial_load_path={tmp_path}/hf")
    total = sum(tensor.numel() for tensor in live.values())
    for found in pool.run(start_counting, argv, str(tmp_path / "run"), world=4):
        assert all(torch.equal(found["weights"][name], live[name]) for name in live)
        says(found["log"], f"{tmp_path}/hf")
        assert found["step"] == 0
        assert found["elements"] < 0.4 * total, "a quarter, and what every rank holds"


@pytest.fixture
def from_hf(tmp_path) -> str:
    """The option that starts from a folder of Hugging Face, which `hf` is."""
    written(job(TINY, 1).model_config, tmp_path / "hf")
    return f"--checkpoint.initial_load_path={tmp_path}/hf"


def test_what_is_excluded_may_be_missing(begun, tmp_path, from_hf):
    tensors = all_tensors(tmp_path / "hf")
    del tensors["lm_head.weight"]
    rewrite(tmp_path / "hf", tensors)
    argv = [*TINY, "--checkpoint.initial_load_in_hf", from_hf]
    says(begun(argv, tmp_path / "a")["error"], "lm_head.weight: missing")
    argv += ["--checkpoint.exclude_from_loading=['model.output.weight']"]
    found = begun(argv, tmp_path / "b")
    assert torch.equal(found["weights"]["norm.weight"], tensors["model.norm.weight"])


def test_a_folder_that_is_not_named_as_one_of_hugging_face_is_told_from_a_damaged_checkpoint(
    begun, tmp_path, from_hf
):
    says(begun([*TINY, from_hf], tmp_path)["error"], "manifest.json", "--model.flavor hf")


def edit(path: LocalPath, **change: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def put(file: LocalPath, name: str, tensor: torch.Tensor) -> None:
    save_file(load_file(file) | {name: tensor}, file)


def place(hf: LocalPath, file: str) -> None:
    edit(hf / files.INDEX, weight_map={"model.norm.weight": file})


HEAD = "lm_head.weight"  # the last tensor of the last file
DAMAGED = [
    (lambda hf, last: last.unlink(), ["lm_head.weight: missing"]),
    (lambda hf, last: os.truncate(last, last.stat().st_size - 10), ["safetensors: "]),
    (lambda hf, last: place(hf, last.name), ["model.norm.weight", "not in", "of-"]),
    (lambda hf, last: place(hf, "../x.safetensors"), [files.INDEX, "../x.safetensors"]),
    (lambda hf, last: (hf / files.INDEX).unlink(), [files.INDEX, files.ONE_FILE]),
    (lambda hf, last: (hf / "config.json").unlink(), ["config.json"]),
    (lambda hf, last: edit(hf / "config.json", num_attention_heads=8), ["_heads 8", "has 4"]),
    (lambda hf, last: put(last, HEAD, torch.ones(99, 32).to(torch.int8)), [HEAD, "I8", "BF16"]),
    (lambda hf, last: put(last, HEAD, torch.ones(3, 3)), [HEAD, "[3, 3]", "[99, 32]"]),
    (lambda hf, last: put(last, "model.x", torch.ones(3)), ["model.x: unexpected"]),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGED)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, damage, named):
    written(SMALL, tmp_path)
    damage(tmp_path, max(tmp_path.glob("*.safetensors")))
    with refused(tmp_path, *named):
        opened(tmp_path, SMALL)


def faults_of(flavor: Any, **change: Any) -> list[str]:
    """Return what is wrong with the config.json of a flavor with some keys changed, or null, which
    is as good as absent.
    """
    return config_faults(config_of(flavor, **change), spec_of(flavor).hf, config_of(flavor))


@pytest.mark.parametrize("name", [*SPECS, "qwen3_moe"])
def test_every_key_of_transformers_is_compared_or_known_to_change_no_value(name):
    hf = SPECS[name.removesuffix("_moe")].hf
    from transformers import CONFIG_MAPPING

    oracle = CONFIG_MAPPING[name.replace("llama3", "llama")]
    ours = complete({"model_type": oracle.model_type}, hf)
    theirs = complete(oracle().to_dict(), hf)
    assert ours == {key: theirs[key] for key in ours}
    # A whole file of another version, with what it does not say left at the default, is read
    # without a word.
    assert config_faults(oracle().to_dict(), hf, ours) == []


LINEAR = {"type": "linear", "factor": 2.0}
CONTRADICTIONS = [  # what it says, and the model
    (SMALL, {"rope_theta": None}, ["rope_theta 10000.0", "absent", "500000.0"]),
    (SMALL, {"rope_parameters": {"rope_theta": 1e4}}, ["rope_theta 10000.0", "500000.0"]),
    (SMALL, {"rope_scaling": LINEAR}, ['rope_scaling {"rope_type": "linear"', "null"]),
    (SMALL, {"rope_scaling": {"factor": 2.0}}, ['rope_scaling {"rope_type": null', "null"]),
    (
        SCALED,
        {"rope_scaling": ROPE | {"factor": 4.0}},
        ['"factor": 4.0', '"factor": 8.0', "--model.overrides.rope_scaling.factor 4.0"],
    ),
    (SMALL, {"rms_norm_eps": 1e-6}, ["rms_norm_eps", "1e-05", "--model.overrides.norm_eps 1e-06"]),
    (SMALL, {"num_attention_heads": "4"}, ['num_attention_heads "4"', "has 4"]),
    (SMALL, {"num_attention_heads": 0}, ["num_attention_heads 0", "has 4"]),
    (SMALL, {"num_key_value_heads": None}, ["num_key_value_heads 4", "absent", "has 2"]),
    (SMALL, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5", "1.0"]),
    (SMALL, {"sliding_window": 16}, ["sliding_window 16", "remove it"]),
    (QWEN_SMALL, {"head_dim": None}, ["head_dim 128", "absent", "has 16"]),
    (QWEN_MOE, {"head_dim": None}, ["head_dim 8", "absent", "has 16"]),
    (GPT2_SMALL, {"n_inner": 32}, ["n_inner 32", "has 128"]),
    (
        QWEN_MOE,
        {"num_experts": None, "num_local_experts": 4},
        ["num_experts 4", "absent", "has 8", "--model.overrides.experts 4"],
    ),
]


@pytest.mark.parametrize(("flavor", "change", "named"), CONTRADICTIONS)
def test_a_config_json_that_changes_a_value_is_refused_with_both(flavor, change, named):
    (fault,) = faults_of(flavor, **change)
    says(fault, "config.json", *named)


HUB = json.loads("""{
    "_name_or_path": "x", "bos_token_id": 128000, "eos_token_id": [128001, 128008],
    "initializer_range": 0.02, "pad_token_id": 0, "pretraining_tp": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0", "use_cache": true, "attention_dropout": 0.0,
    "unsloth_fixed": true, "rope_interleaved": false, "n_ctx": 1024, "is_llama_config": true,
    "predict_special_tokens": true, "transformers.js_config": {"kv_cache_dtype": {}},
    "summary_type": "cls_index", "summary_first_dropout": 0.1, "rope_scaling": null,
    "sliding_window": null,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
    "resid_pdrop": 0.1
}""")
PLAIN = {"rope_theta": 500000.0, "rope_type": "default"}


@pytest.mark.parametrize(
    ("flavor", "change"),
    [
        (SMALL, HUB),
        (GPT2_SMALL, HUB),
        (SMALL, {"rope_theta": None, "rope_parameters": PLAIN}),  # as of transformers 5
        (SMALL, {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}),
        (SMALL, {"rope_theta": None, "rope_scaling": PLAIN}),
        (SCALED, {"rope_scaling": ROPE | {"type": "llama3"}}),
        (SCALED, {"rope_theta": None, "rope_scaling": None, "rope_parameters": PLAIN | ROPE}),
    ],
)
def test_keys_that_change_no_value_are_accepted(flavor, change):
    assert faults_of(flavor, **change) == []


def test_a_folder_without_the_head_class_is_read(tmp_path):
    """The hub's GPT-2 has names without "transformer.", and masks among the tensors."""
    live = written(GPT2_SMALL, tmp_path)
    bare = {name.removeprefix("transformer."): t for name, t in all_tensors(tmp_path).items()}
    rewrite(tmp_path, {**bare, "h.0.attn.bias": torch.ones(1, 1, 8, 8)})
    assert holds(tmp_path, GPT2_SMALL, live)


IN_HF_TOO = [*TINY, "--checkpoint.enable", "--checkpoint.last_save_in_hf"]


def fails_at_the_end(folder: str) -> str:
    """Return what a run says on this rank whose last export fails."""
    full_disk = patch.object(export_module, "write", side_effect=OSError(28, "full"))
    with full_disk, pytest.raises(RunFailed) as error:
        run_to_end(IN_HF_TOO, folder)
    return str(error.value)


def test_a_last_export_that_fails_is_known_to_all_ranks_and_leaves_the_saved_step(pool, tmp_path):
    for message in pool.run(fails_at_the_end, str(tmp_path), world=2):
        says(message, f"{tmp_path}/checkpoint/hf-step-3", "rank 0", "OSError", "full")
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert "step-3" in names and not [name for name in names if "hf" in name]


def test_an_export_replaces_an_older_one_only_once_it_is_whole(tmp_path):
    def fail(name: str) -> torch.Tensor:
        raise OSError(28, "full")

    older = tmp_path / "out/older"
    older.parent.mkdir()
    older.touch()
    given = job(TINY, 1)
    translation = Translation(given.spec, given.model_config)
    tensors = translation.hf_tensors(torch.float32)
    with pytest.raises(OSError, match="full"):
        export_module.write_folder(tmp_path / "out", tensors, {}, fail)
    assert older.exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
    weights = {name: torch.zeros(shape) for name, shape in translation.shapes.items()}
    export_module.write_folder(tmp_path / "out", tensors, {}, weights.__getitem__)
    assert not older.exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def prepared_shards(root: LocalPath) -> tuple[LocalPath, int]:
    """Return a folder of shards with their own tokenizer, and the number of its ids; the last one
    ends documents.
    """
    from tokenizers import Tokenizer

    for name in ("assets", "text"):
        (root / name).mkdir()
    (root / "text/a.txt").write_text("the cat sat on the mat. " * 40)
    file = make_assets(root / "assets", ["the cat sat on the mat"], 300) / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    backend.add_special_tokens(["<end>"])
    backend.save(str(file))
    (root / "assets/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (root / "assets/chat_template.jinja").write_text("{{ messages }}")
    texts = {"text": text_files("text", str(root / "text"))}
    prepare(texts, str(root / "assets"), root / "shards", 1)
    shutil.rmtree(root / "assets")
    return root / "shards", backend.get_vocab_size()


def test_the_last_weights_are_exported_with_the_tokenizer_of_the_shards(pool, tmp_path, capsys):
    def ends_documents(file: str) -> object:
        return json.loads((tmp_path / file).read_text())["eos_token_id"]

    shards, ids = prepared_shards(tmp_path)
    argv = [*TINY, "--training.dataset=tokens", f"--training.dataset_path={shards}"]
    argv += [f"--model.overrides.vocab_size={ids}", "--checkpoint.enable"]
    argv += ["--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16"]
    found = pool.run(run_to_end, argv, str(tmp_path), world=2)[0]
    target = tmp_path / "checkpoint/hf-step-3"
    says(found["log"], target)
    live = {name: tensor.bfloat16() for name, tensor in found["weights"].items()}
    assert holds(target, job(argv, 1).model_config, live)
    assert ends_documents("checkpoint/hf-step-3/generation_config.json") == ids - 1

    def export_to(name: str, *options: str) -> None:
        command = ["checkpoint", "export", str(tmp_path), str(tmp_path / name), *options]
        assert cli.main(command) == 0

    export_to("by-command")
    assert contents(tmp_path / "by-command") == contents(target)
    of_tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert contents(target).keys() >= of_tokenizer
    assert from_transformers(target).dtype == torch.bfloat16

    shutil.move(shards, tmp_path / "elsewhere")
    export_to("alone")
    says(capsys.readouterr().err, shards, "tokenizer.json")
    assert ends_documents("alone/config.json") is None
    export_to("named", "--tokenizer", str(tmp_path / "elsewhere"))
    assert contents(tmp_path / "named")["config.json"] == contents(target)["config.json"]


IN_HF = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=x"]
BIASED = [*MOE, "--model.overrides.balance=bias", *IN_HF_TOO[len(TINY) :]]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([*PARROT, "--checkpoint.enable", "--checkpoint.last_save_in_hf"], ["parrot", "Hugging"]),
        ([*PARROT, *IN_HF], ["--format safetensors"]),
        (BIASED, ["checkpoint.last_save_in_hf", 'balance = "bias"']),
        ([*TINY, *IN_HF, "--checkpoint.no_initial_load_model_only"], ["weights only"]),
    ],
)
def test_contradicting_keys_are_refused(words, named):
    with refused(*named, kind=ConfigError):
        job(words, world=1)
