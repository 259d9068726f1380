"""Hugging Face folders: bit-equal export and import, the published function, the same bytes from
any mesh.
"""

import dataclasses
import json
import os
import shlex
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import titanlite
from tests.checkpoint.saved import SAVING, everyone, keeping_log, run_until
from tests.data.assets import make_assets
from tests.jobs import PARROT, QUIET, TINY, job, trainer, weights
from tests.lanes import sample
from tests.runs import records, train
from titanlite import cli
from titanlite.checkpoint.hf import export as export_module
from titanlite.checkpoint.hf import files
from titanlite.checkpoint.hf.export import export, export_live
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.hf.names import Translation, documents
from titanlite.config.config_json import complete, config_faults
from titanlite.config.load import ConfigError
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import ByteTokenizer
from titanlite.errors import RunFailed, UserError
from titanlite.models import gpt2, llama3, qwen3
from titanlite.models.common import RopeScaling
from titanlite.parallel.build import build_meta_model
from titanlite.parallel.init import fill, materialize
from titanlite.registry import normal
from titanlite.tools.generate import load_model

SPECS = {"llama3": llama3.SPEC, "gpt2": gpt2.SPEC, "qwen3": qwen3.SPEC}
SMALL = llama3.LlamaConfig(32, 2, 4, 2, 48, vocab_size=99, max_seq_len=256, norm_eps=1e-5)


def narrow(flavor: Any) -> Any:
    """Return a flavor with its heads, ties and scaling, at a width that a test can afford."""
    sizes: dict[str, Any] = {
        "dim": 4 * flavor.n_heads,
        "n_layers": 2,
        "vocab_size": 99,
        "max_seq_len": 256,
    }
    if isinstance(flavor, llama3.LlamaConfig):
        scaling = flavor.rope_scaling and dataclasses.replace(
            flavor.rope_scaling, original_positions=64
        )
        sizes |= {"hidden_dim": 48, "rope_scaling": scaling}
    if isinstance(flavor, qwen3.QwenConfig):
        sizes |= {"hidden_dim": 48, "head_dim": 16}
        sizes |= {"expert_dim": 24, "experts": 8, "top_k": 3} if flavor.experts else {}
    return dataclasses.replace(flavor, **sizes)


CASES = {
    f"{name} {flavor}": (spec, narrow(c))
    for name, spec in SPECS.items()
    for flavor, c in spec.flavors.items()
}
for name in "1.7B 4B 8B 14B 32B 235B-A22B debugmodel_moe".split():  # sizes of the same kinds
    del CASES[f"qwen3 {name}"]
LONG_CASES = {"gpt2 350M", "gpt2 774M", "gpt2 1.5B"}
CASES["llama3 tied"] = llama3.SPEC, dataclasses.replace(SMALL, tied=True)


def build(spec: Any, flavor: Any) -> torch.nn.Module:
    """Build a model with values far from the initial ones, so that norms and biases count."""
    model, table = build_meta_model(spec, flavor, 200)
    materialize(model, table, 0, torch.device("cpu"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(parameter, name, normal(0.05), seed=1)
            if name.endswith("norm.weight"):
                parameter += 1
    return model.eval()


def written(
    spec: Any, flavor: Any, folder: Path, dtype: torch.dtype = torch.float32, file_bytes: int = 9999
) -> dict[str, torch.Tensor]:
    """Export random weights and return them."""
    live = {name: p.detach() for name, p in build(spec, flavor).named_parameters()}
    translation = Translation(spec, flavor)
    texts = documents(translation.config, dtype, ByteTokenizer())
    export(
        folder,
        translation.hf_tensors(dtype),
        texts,
        lambda name, owner: live[name],
        file_bytes=file_bytes,
    )
    return live


def from_transformers(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("case", sample(CASES, *(CASES.keys() - LONG_CASES)))
def test_exported_weights_are_read_back_and_transformers_computes_the_same(case, tmp_path):
    spec, flavor = CASES[case]
    live = written(spec, flavor, tmp_path / "out")
    exported_folder = HuggingFaceFolder(tmp_path / "out", spec, flavor)
    assert all(torch.equal(exported_folder.read(name), live[name]) for name in live)
    hf_model = from_transformers(tmp_path / "out")
    tokens = torch.randint(99, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, logits = build(spec, flavor)(tokens), hf_model(tokens).logits
    assert ours.std() > 0.1 and (ours - logits).abs().max().item() <= 1e-5
    hf_model.save_pretrained(tmp_path / "back")  # what transformers writes is read, too
    back = HuggingFaceFolder(tmp_path / "back", spec, flavor)
    assert all(torch.equal(back.read(name), live[name]) for name in live)


SCALING = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 64,
}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
FOREIGN = {
    "grouped heads and scaling": LLAMA
    | {"num_key_value_heads": 2, "rope_scaling": SCALING | {"rope_type": "llama3"}},
    "tied": LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "resid_pdrop": 0.2},
    "qwen3": LLAMA | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 moe": LLAMA
    | {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8}
    | {"num_experts_per_tok": 3, "norm_topk_prob": True, "router_aux_loss_coef": 0.1},
}
KINDS = {"gpt2": "GPT2Config", "qwen3": "Qwen3Config", "qwen3 moe": "Qwen3MoeConfig"}


def made_by_transformers(case: str, folder: Path, **change: Any) -> Any:
    """Save a model with random weights, and return it."""
    import transformers

    kind = getattr(transformers, KINDS.get(case, "LlamaConfig"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        kind(vocab_size=256, initializer_range=0.2, **FOREIGN[case] | change)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):  # ones do not show how they are turned
                parameter.normal_(1.0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_of_transformers_needs_no_more_than_its_path(case, tmp_path, capsys):
    hf, out = tmp_path / "hf", tmp_path / "out"
    theirs = made_by_transformers(case, hf)
    assert cli.main(["checkpoint", "import", str(hf), str(out)]) == 0
    said = capsys.readouterr().out
    options = ["--config", f"{out}/step-0/config.toml", "--checkpoint.initial_load_path", f"{out}"]
    assert shlex.join(options) in said
    imported = job([*QUIET, f"--config={out}/step-0/config.toml"], 1)
    trained = job([*QUIET, "--model.flavor=hf", f"--checkpoint.initial_load_path={hf}"], 1)
    assert (trained.spec, trained.model) == (imported.spec, imported.model)
    assert (
        trained.config.checkpoint.initial_load_in_hf
        and not imported.config.checkpoint.initial_load_in_hf
    )
    assert getattr(imported.model, "dropout", 0.2) == 0.2
    tensors = all_tensors(hf)
    shutil.rmtree(hf)  # the config of the import has all that it needs
    model = load_model(imported, out / "step-0", torch.device("cpu")).eval()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, logits = model(tokens), theirs(tokens).logits
    assert ours.std() > 0.1 and (ours - logits).abs().max().item() <= 1e-5 * ours.abs().max().item()
    assert cli.main(["checkpoint", "export", str(out), str(hf)]) == 0
    back = all_tensors(hf)  # transformers stacks experts in memory, and writes a tensor for each
    assert ("model.layers.1.mlp.experts.7.down_proj.weight" in back) == (case == "qwen3 moe")
    assert back.keys() == tensors.keys() and all(
        torch.equal(back[name], tensors[name]) for name in back
    )


@pytest.mark.parametrize("case", sample(FOREIGN, every=2))
def test_a_run_from_a_folder_of_transformers_needs_no_more_than_its_path(case, tmp_path):
    theirs, pattern = (
        made_by_transformers(case, tmp_path / "hf", resid_pdrop=0.0),
        "0123456789abcdef",
    )
    (tmp_path / "text.txt").write_text(pattern * 1000)  # so that all windows are the same
    short = [
        "--training.steps=2",
        "--training.seq_len=16",
        "--training.dataset=text",
        "--validation.no_enable",
    ]
    short += [f"--training.dataset_path={tmp_path}/text.txt", "--generate.no_at_end"]
    path = ["--model.flavor=hf", f"--checkpoint.initial_load_path={tmp_path}/hf"]
    code, out = train([*path, *short], tmp_path / "run", NGPU="2")
    assert code == 0 and f"loaded Hugging Face weights from {tmp_path}/hf" in out, out
    tokens = torch.tensor([[*pattern.encode()]])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            theirs(tokens).logits[0], tokens[0].roll(-1)
        ).item()
    first, second = (record["loss"] for record in records(tmp_path / "run") if "loss" in record)
    assert first == pytest.approx(loss, rel=1e-5) and second < first

    assert cli.main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    trained, _ = titanlite.load(tmp_path / "run")
    with torch.no_grad():
        ours, logits = trained(tokens), from_transformers(tmp_path / "back")(tokens).logits
    assert (ours - logits).abs().max().item() <= 1e-5 * ours.abs().max().item()
    assert (ours - theirs(tokens).logits).abs().max().item() > 1e-3 * ours.abs().max().item()


def test_flavor_hf_takes_the_tokenizer_of_the_folder_unless_another_is_given(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(llama3.SPEC.hf.config(SCALED) | {"vocab_size": 999})
    )  # type: ignore
    make_assets(tmp_path, ["the cat sat on the mat"], 300)
    argv = [*QUIET, "--model.flavor=hf", f"--checkpoint.initial_load_path={tmp_path}"]
    assert job(argv, 1).config.model.hf_assets_path == str(tmp_path)
    assert job([*argv, "--model.hf_assets_path="], 1).config.model.hf_assets_path == ""


HF_FLAVOR_REFUSED = [
    ({"hidden_size": "32"}, "dim: must be a valid integer (dim is hidden_size there)"),
    ({"attention_bias": True}, "attention_bias true, but the model has false"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        'rope_scaling {"rope_type": "yarn", "factor": 2.0}, but',
    ),
    ({"model_type": "gpt2"}, 'is of a gpt2, and model.name is "llama3"; use --model.name gpt2'),
    (
        {"model_type": "mistral"},
        'model_type "mistral", which no registered model has; legal: gpt2, llama',
    ),
]


@pytest.mark.parametrize(("change", "says"), HF_FLAVOR_REFUSED)
def test_a_config_json_of_another_model_is_no_flavor(tmp_path, change, says):
    (tmp_path / "config.json").write_text(json.dumps({**llama3.SPEC.hf.config(SMALL), **change}))  # type: ignore
    with pytest.raises(ConfigError) as caught:
        job(
            [
                *QUIET,
                "--model.name=llama3",
                "--model.flavor=hf",
                f"--model.hf_assets_path={tmp_path}",
            ],
            1,
        )
    assert says in str(caught.value) and f"{tmp_path}/config.json" in str(caught.value)


def test_flavor_hf_takes_overrides_and_needs_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama3.SPEC.hf.config(SCALED)))  # type: ignore[union-attr]
    argv = [
        *QUIET,
        "--model.flavor=hf",
        "--model.overrides.rope_scaling.factor=2",
        "--model.overrides.vocab_size=256",
    ]
    with pytest.raises(
        ConfigError, match=r"needs a folder with config\.json in checkpoint\.initial_load_path or"
    ):
        job(argv, 1)
    scaling = RopeScaling(factor=2.0)
    expected = dataclasses.replace(SCALED, vocab_size=256, rope_scaling=scaling)
    assert job([*argv, f"--checkpoint.initial_load_path={tmp_path}"], 1).model == expected


def test_only_an_untied_output_layer_is_written(tmp_path):
    for tied in (True, False):
        written(llama3.SPEC, dataclasses.replace(SMALL, tied=tied), tmp_path / f"{tied}")
        names = json.loads((tmp_path / f"{tied}" / files.INDEX).read_text())["weight_map"]
        assert ("lm_head.weight" in names) != tied


def test_a_region_is_read_as_part_of_the_whole_tensor(tmp_path):
    for case in ("llama3 8B", "gpt2 124M"):
        spec, flavor = CASES[case]
        live = written(spec, flavor, tmp_path / case)
        translation, reader = Translation(spec, flavor), files.Reader(tmp_path / case)
        for name, tensor in live.items():
            box = tuple(
                slice(size // 3, max(size // 3 + 1, 2 * size // 3)) for size in tensor.shape
            )
            assert torch.equal(translation.read(name, box, reader.read), tensor[box]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_exported_in_the_requested_type(dtype, tmp_path):
    live = written(llama3.SPEC, SMALL, tmp_path / "out", dtype)
    exported_folder = HuggingFaceFolder(tmp_path / "out", llama3.SPEC, SMALL)
    assert all(torch.equal(exported_folder.read(name), live[name].to(dtype)) for name in live)
    assert from_transformers(tmp_path / "out").dtype == dtype


def test_an_export_holds_one_file_at_a_time(tmp_path, monkeypatch):
    flavor = narrow(gpt2.FLAVORS["124M"])
    live = dict(build(gpt2.SPEC, flavor).named_parameters())
    fetched: list[weakref.ref] = []
    written_before: list[weakref.ref] = []
    limit, most_bytes = 9999, 0

    def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        written_before.extend(map(weakref.ref, tensors.values()))
        files.write(path, tensors)

    def fetch(name: str, owner: int) -> torch.Tensor:
        nonlocal most_bytes
        assert not any(ref() is not None for ref in written_before), (
            "a tensor of an earlier file is held"
        )
        tensor = live[name].detach().clone()
        fetched.append(weakref.ref(tensor))
        most_bytes = max(most_bytes, sum(t.nbytes for ref in fetched if (t := ref()) is not None))
        return tensor

    tensors = Translation(gpt2.SPEC, flavor).hf_tensors(torch.float32)
    largest = max(tensor.nbytes for tensor in tensors)
    monkeypatch.setattr(export_module, "write", write)
    export(tmp_path / "out", tensors, {}, fetch, file_bytes=limit)
    assert (
        most_bytes <= max(limit, largest) + largest < sum(tensor.nbytes for tensor in tensors) / 2
    )


def exported(argv: list[str], folder: str, dtype: str) -> None:
    """Export a run's initial weights, which are the same on any mesh, in many small files."""
    run = trainer(argv, folder)
    translation = Translation(run.job.spec, run.job.model)
    target = Path(folder) / "out"
    export_live(
        target,
        translation,
        run.state,
        getattr(torch, dtype),
        run.tokenizer,
        everyone(),
        file_bytes=3000,
    )


def counted_gathers(*arguments: Any) -> list[str]:
    """Export, and return the names of the parameters that were gathered."""
    gathered, write_files = [], export_module._write_files

    def counting(staging: Path, files: Any, fetch: Any, *rest: Any) -> None:
        write_files(
            staging, files, lambda name, owner: gathered.append(name) or fetch(name, owner), *rest
        )

    export_module._write_files = counting  # type: ignore[bad-assignment]
    try:
        exported(*arguments)
    finally:
        export_module._write_files = write_files
    return gathered


@pytest.mark.long
def test_a_stack_of_experts_is_gathered_once(pool, tmp_path):
    for gathered in pool.run(counted_gathers, QWEN, str(tmp_path), "bfloat16", world=2):
        assert len(gathered) == len(set(gathered)) and "layers.1.moe.experts.w2" in gathered


@pytest.mark.parametrize("model", sample(["llama3", "gpt2", "qwen3"], "gpt2"))
def test_four_ranks_write_the_same_bytes_as_one(pool, tmp_path, model):
    argv = ARGV[model]
    pool.run(exported, [*argv, *MESH[model]], str(tmp_path / "four"), "bfloat16", world=4)
    pool.run(exported, argv, str(tmp_path / "one"), "bfloat16", world=1)
    names = sorted(path.name for path in (tmp_path / "one/out").iterdir())
    assert len([name for name in names if name.endswith("safetensors")]) > 4
    assert names == sorted(path.name for path in (tmp_path / "four/out").iterdir())
    for name in names:
        assert (tmp_path / "one/out" / name).read_bytes() == (
            tmp_path / "four/out" / name
        ).read_bytes(), name


GPT2 = [*TINY[: -len("dim n_layers n_heads n_kv_heads hidden_dim".split())], "--model.name=gpt2"]
GPT2 += [f"--model.overrides.{field}" for field in "dim=16 n_layers=2 n_heads=2".split()]
QWEN = [
    *TINY,
    "--model.name=qwen3",
    "--model.flavor=debugmodel_moe",
    "--model.overrides.n_kv_heads=2",
]
QWEN += [f"--model.overrides.{field}" for field in "head_dim=8 expert_dim=16 experts=4".split()]
ARGV = {"llama3": [*TINY, "--model.overrides.n_kv_heads=2"], "gpt2": GPT2, "qwen3": QWEN}
MESH = dict.fromkeys(ARGV, ["--parallelism.tensor_parallel_degree=2"])
MESH["qwen3"] = [*MESH["qwen3"], "--parallelism.expert_parallel_degree=2"]


def start(argv: list[str], folder: str) -> dict[str, Any]:
    """Return a run's weights at its start, its log, and how many numbers this rank read from
    files.
    """
    log, lines = keeping_log()
    read, elements = files.Reader.read, 0

    def counting(self: Any, name: str, box: Any) -> torch.Tensor:
        nonlocal elements
        found = read(self, name, box)
        elements += found.numel()
        return found

    files.Reader.read = counting  # type: ignore[method-assign]
    try:
        run = trainer(argv, folder, log)
    except UserError as error:
        return {"error": str(error)}
    finally:
        files.Reader.read = read  # type: ignore[method-assign]
    return {"weights": weights(run), "log": lines, "elements": elements, "step": run.step}


@pytest.mark.parametrize("model", sample(["llama3", "gpt2", "qwen3"], "llama3"))
def test_each_rank_reads_what_its_shards_need(pool, tmp_path, model):
    argv = ARGV[model]
    spec, flavor = SPECS[model], job(argv, 1).model
    live = written(spec, flavor, tmp_path / "hf")
    argv = [*argv, *MESH[model], "--checkpoint.initial_load_in_hf"]
    argv += [f"--checkpoint.initial_load_path={tmp_path}/hf"]
    total = sum(tensor.numel() for tensor in live.values())
    for found in pool.run(start, argv, str(tmp_path / "run"), world=4):
        assert all(torch.equal(found["weights"][name], live[name]) for name in live)
        assert (
            f"loaded Hugging Face weights from {tmp_path}/hf" in found["log"] and found["step"] == 0
        )
        assert found["elements"] < 0.4 * total, "a quarter, and what every rank holds"


def test_a_run_that_began_with_hugging_face_weights_goes_on_from_its_own_checkpoint(pool, tmp_path):
    written(llama3.SPEC, job(SAVING, 1).model, tmp_path / "hf")
    argv = [*SAVING, "--checkpoint.initial_load_in_hf"]
    argv.append(f"--checkpoint.initial_load_path={tmp_path}/hf")
    pool.run(run_until, argv, str(tmp_path / "run"), 2, world=1)
    (found,) = pool.run(run_until, argv, str(tmp_path / "run"), world=1)
    assert found["begun"] == 2


def test_what_is_excluded_may_be_missing(pool, tmp_path):
    flavor = job(TINY, 1).model
    written(llama3.SPEC, flavor, tmp_path / "hf", file_bytes=1 << 20)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    (tmp_path / "hf" / files.INDEX).unlink()
    save_file(tensors, tmp_path / "hf" / files.SINGLE)
    argv = [
        *TINY,
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={tmp_path}/hf",
    ]
    (found,) = pool.run(start, argv, str(tmp_path / "a"), world=1)
    assert "lm_head.weight: missing" in found["error"] and "nothing was read" in found["error"]
    argv += ["--checkpoint.exclude_from_loading=['model.output.weight']"]
    (found,) = pool.run(start, argv, str(tmp_path / "b"), world=1)
    assert torch.equal(found["weights"]["norm.weight"], tensors["model.norm.weight"])


def test_a_folder_that_is_not_named_as_one_of_hugging_face_is_told_from_a_damaged_checkpoint(
    pool, tmp_path
):
    written(llama3.SPEC, job(TINY, 1).model, tmp_path / "hf")
    (found,) = pool.run(
        start, [*TINY, f"--checkpoint.initial_load_path={tmp_path}/hf"], str(tmp_path), world=1
    )
    assert (
        "has no manifest.json; --model.flavor hf starts from a Hugging Face folder"
        in found["error"]
    )


def damage(folder: Path, how: str) -> None:
    """Damage a folder."""
    first, last = sorted(folder.glob("*.safetensors"))[0], sorted(folder.glob("*.safetensors"))[-1]
    config, index = folder / "config.json", folder / files.INDEX
    if how == "file missing":
        last.unlink()
    elif how == "file cut":
        os.truncate(last, last.stat().st_size - 10)
    elif how == "not in its file":
        table = json.loads(index.read_text())
        table["weight_map"]["model.norm.weight"] = first.name
        index.write_text(json.dumps(table))
    elif how == "outside":
        index.write_text(
            json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}})
        )
    elif how == "heads":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": 8}))
    elif how == "no heads":
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "num_attention_heads": None})
        )
    elif how == "no config":
        config.unlink()
    elif how == "no index":
        index.unlink()
    else:
        tensors = load_file(last)
        name = sorted(tensors)[0]
        if how == "integers":
            tensors[name] = tensors[name].to(torch.int8)
        if how == "misshapen":
            tensors[name] = torch.zeros(3, 3)
        if how == "unexpected":
            tensors["model.layers.7.bias"] = torch.zeros(3)
        save_file(tensors, last)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("file missing", "lm_head.weight: missing"),
        ("file cut", "safetensors: "),
        ("not in its file", "model.norm.weight: not in model-00001-of-"),
        ("outside", "is not a file name"),
        ("heads", "config.json: num_attention_heads 8, but the model has 4"),
        ("no config", "has no config.json: nothing says which heads"),
        (
            "no heads",
            "config.json: num_attention_heads 32 (absent, so transformers' default), "
            "but the model has 4",
        ),
        ("no index", "it has no model.safetensors.index.json or model.safetensors"),
        ("integers", ": I8, but weights are F64, F32, BF16, F16"),
        ("misshapen", ": of shape [3, 3], but the model has ["),
        ("unexpected", "model.layers.7.bias: unexpected"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path, how, says):
    written(llama3.SPEC, SMALL, tmp_path / "hf")
    damage(tmp_path / "hf", how)
    with pytest.raises(UserError) as caught:
        HuggingFaceFolder(tmp_path / "hf", llama3.SPEC, SMALL)
    assert says in str(caught.value) and str(tmp_path / "hf") in str(caught.value)


SCALED = dataclasses.replace(SMALL, max_seq_len=131072, rope_scaling=RopeScaling())
GPT2_SMALL = gpt2.GPT2Config(16, 2, 2, vocab_size=99, max_seq_len=8)
QWEN_SMALL = narrow(qwen3.FLAVORS["30B-A3B"])
LLAMA_DEFAULTS = dataclasses.replace(SMALL, n_kv_heads=4, rope_theta=10000.0, norm_eps=1e-6)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
GENERATED = "architectures bos_token_id eos_token_id torch_dtype dtype transformers_version".split()


def faults_of(spec: Any, flavor: Any, changes: dict[str, Any], remove: str = "") -> list[str]:
    """Return what is wrong with the config.json of a flavor with some keys changed, and one
    removed.
    """
    exported = spec.hf.config(flavor)
    config = {key: value for key, value in {**exported, **changes}.items() if key != remove}
    return config_faults(json.loads(json.dumps(config)), spec.hf, exported)


def config_class(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


@pytest.mark.parametrize(
    ("spec", "flavor"),
    [
        (llama3.SPEC, SMALL),
        (llama3.SPEC, LLAMA_DEFAULTS),
        (llama3.SPEC, dataclasses.replace(SCALED, tied=True)),
        (gpt2.SPEC, gpt2.FLAVORS["124M"]),
        (gpt2.SPEC, dataclasses.replace(GPT2_SMALL, norm_eps=1e-6)),
        (qwen3.SPEC, qwen3.FLAVORS["0.6B"]),
        (qwen3.SPEC, dataclasses.replace(qwen3.FLAVORS["30B-A3B"], head_dim=64)),
    ],
)
def test_a_key_that_config_json_lacks_counts_as_transformers_default(spec, flavor):
    exported = spec.hf.config(flavor)
    oracle = config_class(exported["model_type"])
    unchecked = {*GENERATED, *spec.hf.unchecked_config_keys}

    def read(config: dict[str, Any]) -> dict[str, Any]:
        return oracle.from_dict(json.loads(json.dumps(config))).to_dict()

    with_all = read(exported)
    for key in exported.keys() - unchecked - {"model_type"}:
        lacking = read({name: value for name, value in exported.items() if name != key})
        differs = any(lacking[name] != with_all[name] for name in lacking.keys() - unchecked)
        faults = faults_of(spec, flavor, {}, remove=key)
        assert bool(faults) == differs, (key, faults)
        assert bool(faults_of(spec, flavor, {key: None})) == differs, (
            key,
            "null is as good as absent",
        )
        assert not differs or faults[0].startswith(f"config.json: {key} "), faults


@pytest.mark.parametrize("name", [*SPECS, "qwen3_moe"])
def test_every_key_of_transformers_is_compared_or_known_to_change_no_value(name):
    spec: Any = SPECS[name.removesuffix("_moe")]
    oracle = config_class(name.replace("llama3", "llama"))
    ours = complete({"model_type": oracle.model_type}, spec.hf)
    theirs = complete(oracle().to_dict(), spec.hf)
    assert ours == {key: theirs[key] for key in ours}
    # A whole file of another version, with what it does not say left at the default, is read
    # without a word.
    assert config_faults(oracle().to_dict(), spec.hf, ours) == []


REFUSED = [
    (
        SMALL,
        {"rope_theta": None},
        "rope_theta 10000.0 (absent, so transformers' default), but the model has 500000.0",
    ),
    (
        SMALL,
        {"rms_norm_eps": 1e-6},
        "rms_norm_eps 1e-06, but the model has 1e-05; --model.overrides.norm_eps 1e-06",
    ),
    (
        SCALED,
        {"rope_scaling": ROPE | {"factor": 4.0, "original_max_position_embeddings": 8192}},
        'rope_scaling {"rope_type": "llama3", "factor": 4.0, '
        '"low_freq_factor": 1.0, "high_freq_factor": 4.0, '
        '"original_max_position_embeddings": 8192}, '
        'but the model has {"rope_type": "llama3", "factor": 8.0, '
        '"low_freq_factor": 1.0, "high_freq_factor": 4.0, '
        '"original_max_position_embeddings": 8192}; '
        "--model.overrides.rope_scaling.factor 4.0",
    ),
    (
        SMALL,
        {"rope_parameters": {"rope_theta": 1e4}},
        "rope_theta 10000.0, but the model has 500000.0",
    ),
    (
        SMALL,
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        'rope_scaling {"rope_type": "yarn", "factor": 2',
    ),
    (
        SMALL,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        'rope_scaling {"rope_type": "linear", "factor": 2.0}, b',
    ),
    (
        SMALL,
        {"rope_scaling": {"factor": 2.0}},
        'rope_scaling {"rope_type": null, "factor": 2.0}, but the model has null',
    ),
    (SMALL, {"rope_scaling": "linear"}, 'rope_scaling "linear", but the model has null'),
    (SMALL, {"num_attention_heads": "4"}, 'num_attention_heads "4", but the model has 4'),
    (SMALL, {"num_attention_heads": 0}, "num_attention_heads 0, but the model has 4"),
    (
        SCALED,
        {"rope_scaling": None},
        'rope_scaling null, but the model has {"rope_type": "llama3", "factor": 8.0',
    ),
    (SMALL, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, but the model has 1.0"),
    (
        SMALL,
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor 0.5, but",
    ),
    (SMALL, {"sliding_window": 16}, "sliding_window 16, which the model does not know; remove it"),
    (
        SMALL,
        {"attention_multiplier": 0.5},
        "attention_multiplier 0.5, which the model does not know",
    ),
    (
        SMALL,
        {"quantization_config": {"bits": 4}},
        'quantization_config {"bits": 4}, which the model does not know',
    ),
    (SMALL, {"model_type": "mistral"}, 'model_type "mistral", but the model has "llama"'),
    (SMALL, {"is_causal": False}, "is_causal false, but the model has true"),
    (SMALL, {"hidden_act": "gelu"}, 'hidden_act "gelu", but the model has "silu"'),
    (SMALL, {"attention_bias": True}, "attention_bias true, but the model has false"),
    (SMALL, {"mlp_bias": True}, "mlp_bias true, but the model has false"),
    (SMALL, {"tie_word_embeddings": True}, "tie_word_embeddings true, but the model has false"),
    (
        SMALL,
        {"num_key_value_heads": None},
        "num_key_value_heads 4 (absent, so transformers' default), but the model",
    ),
    (GPT2_SMALL, {"scale_attn_weights": False}, "scale_attn_weights false, but the model has true"),
    (
        GPT2_SMALL,
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx true, but the model has f",
    ),
    (GPT2_SMALL, {"n_inner": 32}, "n_inner 32, but the model has 64"),
    (GPT2_SMALL, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06, but the model has 1e-05"),
    (GPT2_SMALL, {"rope_theta": 1e4}, "rope_theta 10000.0, which the model does not know"),
    (QWEN_SMALL, {"use_sliding_window": True}, "use_sliding_window true, but the model has false"),
    (QWEN_SMALL, {"mlp_only_layers": [0]}, "mlp_only_layers [0], but the model has []"),
    (
        QWEN_SMALL,
        {"norm_topk_prob": None},
        "norm_topk_prob false (absent, so transformers' default), but the",
    ),
    (
        QWEN_SMALL,
        {"num_experts": 4},
        "num_experts 4, but the model has 8; --model.overrides.experts 4",
    ),
    (
        QWEN_SMALL,
        {"num_experts": None, "num_local_experts": 4},
        "num_experts 4 (absent, so transformers' default), b",
    ),
]


@pytest.mark.parametrize(("flavor", "change", "says"), REFUSED)
def test_a_config_json_that_changes_a_value_is_refused_with_both(flavor, change, says):
    spec = next(spec for spec in SPECS.values() if type(flavor) is type(spec.flavors["debugmodel"]))
    (fault,) = faults_of(spec, flavor, change)
    assert fault.startswith(f"config.json: {says}"), fault


HUB = """
    "_name_or_path": "x", "bos_token_id": 128000, "eos_token_id": [128001, 128008],
    "initializer_range": 0.02, "pad_token_id": 0, "pretraining_tp": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0", "use_cache": true, "attention_dropout": 0.0,
    "unsloth_fixed": true, "rope_interleaved": false, "n_ctx": 1024, "is_llama_config": true,
    "predict_special_tokens": true, "transformers.js_config": {"kv_cache_dtype": {}},
    "summary_type": "cls_index", "summary_first_dropout": 0.1, "rope_scaling": null,
    "sliding_window": null,
    "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
    "resid_pdrop": 0.1
"""


@pytest.mark.parametrize("flavor", [SMALL, GPT2_SMALL], ids=["llama3", "gpt2"])
def test_keys_of_the_hub_that_change_no_value_are_accepted(flavor):
    spec = llama3.SPEC if isinstance(flavor, llama3.LlamaConfig) else gpt2.SPEC
    assert faults_of(spec, flavor, json.loads(f"{{{HUB}}}")) == []


def test_rotary_tables_of_either_version_are_the_same():
    theta = {"rope_theta": 500000.0, "rope_type": "default"}
    for change in (
        {"rope_parameters": theta},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_scaling": theta},
    ):
        assert faults_of(llama3.SPEC, SMALL, {"rope_theta": None, **change}) == []
    scaling = {**ROPE, "original_max_position_embeddings": 8192}
    assert faults_of(llama3.SPEC, SCALED, {"rope_scaling": {**scaling, "type": "llama3"}}) == []
    v5 = {
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {**scaling, "rope_theta": 5e5},
    }
    assert faults_of(llama3.SPEC, SCALED, v5) == []


def test_a_folder_without_the_head_class_is_read(tmp_path):
    """The hub's GPT-2 has names without "transformer.", and masks among the tensors."""
    flavor = narrow(gpt2.FLAVORS["124M"])
    live = written(gpt2.SPEC, flavor, tmp_path / "hf", file_bytes=1 << 30)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    (tmp_path / "hf" / files.INDEX).unlink()
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, tmp_path / "hf" / files.SINGLE)
    exported_folder = HuggingFaceFolder(tmp_path / "hf", gpt2.SPEC, flavor)
    assert all(torch.equal(exported_folder.read(name), live[name]) for name in live)


def test_a_failed_export_leaves_the_older_one(tmp_path):
    written(llama3.SPEC, SMALL, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    outputs = Translation(llama3.SPEC, SMALL).hf_tensors(torch.float32)

    def fetch(name: str, owner: int) -> torch.Tensor:
        if name == "norm.weight":
            raise OSError("the disk is gone")
        return torch.zeros(Translation(llama3.SPEC, SMALL).shapes[name])

    with pytest.raises(OSError, match="the disk is gone"):
        export(tmp_path / "hf", outputs, {}, fetch)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    written(
        llama3.SPEC, dataclasses.replace(SMALL, n_layers=1), tmp_path / "hf", file_bytes=1 << 30
    )
    assert (
        len(list((tmp_path / "hf").glob("*.safetensors"))) == 1
        and len(list(tmp_path.iterdir())) == 1
    )


def fails_on_one(argv: list[str], folder: str, culprit: int) -> str:
    """Return what an export says on this rank when another's disk is full."""
    run = trainer(argv, folder)
    write = export_module.write

    def full_disk(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if dist.get_rank() == culprit and path.name.startswith("model-00002"):
            raise OSError(28, "No space left on device")
        write(path, tensors)

    export_module.write = full_disk
    try:
        translation, target = Translation(run.job.spec, run.job.model), Path(folder) / "out"
        export_live(
            target,
            translation,
            run.state,
            torch.float32,
            run.tokenizer,
            everyone(),
            file_bytes=3000,
        )
    except RunFailed as error:
        return str(error)
    finally:
        export_module.write = write
    return ""


def test_an_export_that_fails_on_one_rank_fails_on_all(pool, tmp_path):
    for message in pool.run(fails_on_one, TINY, str(tmp_path), 1, world=2):
        assert (
            f"the export to {tmp_path}/out failed on rank 1: OSError: " in message
            and "No space left" in message
        )
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def trained(argv: list[str], folder: str) -> dict[str, Any]:
    log, lines = keeping_log()
    run = trainer(argv, folder, log)
    run.train()
    return {"weights": weights(run), "log": lines}


def prepared_shards(root: Path) -> tuple[Path, int]:
    """Return a folder of shards with their own tokenizer, and the number of its ids; the last one
    ends documents.
    """
    from tokenizers import Tokenizer

    for name in ("assets", "text"):
        (root / name).mkdir()
    (root / "text/a.txt").write_text("the cat sat on the mat. " * 40)
    backend = Tokenizer.from_file(
        str(make_assets(root / "assets", ["the cat sat on the mat"], 300) / "tokenizer.json")
    )
    backend.add_special_tokens(["<end>"])
    backend.save(str(root / "assets/tokenizer.json"))
    (root / "assets/tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    prepare(
        {"text": text_files("text", str(root / "text"))}, str(root / "assets"), root / "shards", 1
    )
    shutil.rmtree(root / "assets")
    return root / "shards", backend.get_vocab_size()


def test_the_last_weights_are_exported_with_the_tokenizer_of_the_shards(pool, tmp_path, capsys):
    shards, ids = prepared_shards(tmp_path)
    argv = [*TINY, "--training.dataset=tokens", f"--training.dataset_path={shards}"]
    argv += [
        f"--model.overrides.vocab_size={ids}",
        "--checkpoint.enable",
        "--checkpoint.last_save_in_hf",
    ]
    found = pool.run(
        trained, [*argv, "--checkpoint.export_dtype=bfloat16"], str(tmp_path), world=2
    )[0]
    target, by_command = tmp_path / "checkpoint/hf-step-3", tmp_path / "by-command"
    assert f"exported step 3 for Hugging Face: {target}" in found["log"]
    exported_folder = HuggingFaceFolder(target, llama3.SPEC, job(argv, 1).model)
    for name, tensor in found["weights"].items():
        assert torch.equal(exported_folder.read(name), tensor.to(torch.bfloat16))
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == ids - 1

    assert cli.main(["checkpoint", "export", str(tmp_path), str(by_command)]) == 0
    names = {path.name for path in target.iterdir()}
    assert (
        names
        == {path.name for path in by_command.iterdir()}
        >= {"tokenizer.json", "tokenizer_config.json"}
    )
    assert all((target / name).read_bytes() == (by_command / name).read_bytes() for name in names)

    shutil.move(shards, tmp_path / "elsewhere")
    assert cli.main(["checkpoint", "export", str(tmp_path), str(tmp_path / "alone")]) == 0
    assert f"no tokenizer is exported: {shards} has no tokenizer.json" in capsys.readouterr().err
    assert json.loads((tmp_path / "alone/config.json").read_text())["eos_token_id"] is None
    named = ["--tokenizer", str(tmp_path / "elsewhere")]
    assert cli.main(["checkpoint", "export", str(tmp_path), str(tmp_path / "named"), *named]) == 0
    assert (tmp_path / "named/config.json").read_bytes() == (target / "config.json").read_bytes()


def test_tokenizer_files_are_exported(tmp_path):
    from tokenizers import Tokenizer, models

    from titanlite.data.tokenizer import JsonTokenizer

    Tokenizer(models.WordLevel({"a": 0, "<|end_of_text|>": 1}, "a")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = documents({}, torch.float32, JsonTokenizer(tmp_path))
    assert found["tokenizer.json"] == (tmp_path / "tokenizer.json").read_bytes()
    assert found.keys() == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads(found["config.json"])["eos_token_id"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            [*PARROT, "--checkpoint.enable", "--checkpoint.last_save_in_hf"],
            "parrot has no Hugging Face names",
        ),
        (
            [*PARROT, "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path=x"],
            "--format safetensors",
        ),
        (
            [*TINY, "--checkpoint.last_save_in_hf"],
            "nothing is saved with checkpoint.enable = false",
        ),
        (
            [*TINY, "--checkpoint.initial_load_in_hf"],
            "needs a folder in checkpoint.initial_load_path",
        ),
        (
            f"{' '.join(TINY)} --checkpoint.initial_load_in_hf --checkpoint.initial_load_path=x "
            "--checkpoint.no_initial_load_model_only".split(),
            "a Hugging Face folder contains weights only",
        ),
    ],
)
def test_contradicting_keys_are_refused(words, says):
    words = words.split() if isinstance(words, str) else words
    with pytest.raises(ConfigError, match=says):
        job(words, world=1)


def test_scaled_and_plain_rope_do_not_fit_each_other(tmp_path):
    written(llama3.SPEC, SMALL, tmp_path / "hf")
    scaled = dataclasses.replace(SMALL, rope_scaling=RopeScaling())
    with pytest.raises(UserError, match="config.json: rope_scaling null, "):
        HuggingFaceFolder(tmp_path / "hf", llama3.SPEC, scaled)
    shutil.rmtree(tmp_path / "hf")
