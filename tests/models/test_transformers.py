"""Classes of transformers train as they are, with the numbers of one process on every mesh that
they have.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.jobs import QUIET, job, relative_error, require_close, run_to_end
from tests.lanes import sample
from tests.messages import refused, says
from tests.models.small import built, random, require_apart, tokens
from tests.runs import python
from titanlite import cli
from titanlite.checkpoint.hf.export import write_folder
from titanlite.checkpoint.hf.load import HuggingFaceFolder
from titanlite.checkpoint.hf.names import Translation, documents
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data
from titanlite.models.transformers import convert
from titanlite.models.transformers.flavor import flavor_of
from titanlite.models.transformers.initial import recorded
from titanlite.models.transformers.model import build, transformers_config, values_as_built
from titanlite.models.transformers.probe import shrunk, small_config
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.build import build_meta_model, persistent_buffers
from titanlite.parallel.init import materialize
from titanlite.registry import get_model
from titanlite.verify import command
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner
from titanlite.verify.table import Row

SPEC = get_model("transformers")
THEIRS = [*QUIET, "--model.name=transformers", "--training.global_batch_size=4", "--debug.seed=3"]
SMALL_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SPLIT = ["--training.loss_chunks=3", "--activation_checkpoint.mode=full"]
FLAVORS = ("gemma2", "debugmodel", "gpt_neox", "falcon", "mixtral", "mamba2")


def of(flavor: str) -> list[str]:
    return [*THEIRS, f"--model.flavor={flavor}"]


def small(kind: str) -> Any:
    return flavor_of(small_config(transformers_config(flavor_of({"model_type": kind}))))


def plain_loop(argv: list[str]) -> dict[str, torch.Tensor]:
    """Train the class as anybody would, from the same weights and with the same samples."""
    found = job(argv, 1)
    model, table = build_meta_model(found.spec, found.model_config, 16)
    materialize(model, table, 3, torch.device("cpu"))
    theirs: Any = AutoModelForCausalLM.from_config(
        transformers_config(found.model_config), dtype=torch.float32, attn_implementation="eager"
    )
    theirs.load_state_dict(model.state_dict())
    data: Any = training_data(found, open_tokenizer(found), 3)
    for step in (1, 2, 3):
        rows = torch.from_numpy(data.__getitems__(range(4 * step - 4, 4 * step)))
        logits = theirs(rows[:, 0]).logits
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1].flatten()).backward()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter -= learning_rate(found.config, step) * parameter.grad
                parameter.grad = None
    return dict(theirs.named_parameters())


@pytest.mark.parametrize("flavor", sample(FLAVORS))
def test_a_class_trains_on_two_ranks_and_resumes_on_one_as_in_a_plain_loop(pool, tmp_path, flavor):
    """SGD: Adam would hide a gradient of another scale."""
    argv = [*of(flavor), "--optimizer.name=SGD", "--optimizer.lr=0.1", "--training.max_norm=1e9"]
    argv += ["--lr_scheduler.warmup_steps=1", "--optimizer.weight_decay=0.0"]
    saving = [*argv, "--checkpoint.enable", "--lr_scheduler.total_steps=3"]
    pool.run(run_to_end, [*saving, *SPLIT, "--training.steps=2"], str(tmp_path), world=2)
    (resumed,) = pool.run(run_to_end, saving, str(tmp_path), world=1)
    assert resumed["step"] == 3
    require_close(resumed["weights"], plain_loop(argv), 1e-5)


@pytest.mark.parametrize("degree", ["tensor", "context", "pipeline", "expert"])
def test_what_only_registered_models_have_is_refused_by_name(degree):
    key = f"parallelism.{degree}_parallel_degree"
    with refused("1 configuration error", f"{key} = 2", "registered models"):
        job([*of("debugmodel"), f"--{key}=2"], 2)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"hiden_size": 3}, ["hiden_size", "config.json", "hidden_size"]),
        ({"model_type": "lama"}, ["nearest: llama"]),
        ({"model_type": "bert", **SMALL_BERT}, ["model.name", "later tokens"]),
        ({"hidden_size": "wide"}, ["llama", "hidden_size"]),
        ({"num_attention_heads": 5}, ["attention heads"]),
        ({"model_type": "mixtral", "output_router_logits": True}, ["router_aux_loss_coef"]),
    ],
)
def test_a_config_that_transformers_would_take_silently_is_one_line(overrides, named):
    argv = [f"--model.overrides.{key}={json.dumps(value)}" for key, value in overrides.items()]
    with refused(*named) as caught:
        job([*of("debugmodel"), *argv], 1)
    assert len(caught.value.faults) == 1, str(caught.value)


@pytest.mark.parametrize("flavor", ["mamba2", "gemma2"])
def test_initial_values_have_the_distribution_of_the_class(flavor):
    """GPT-2's differ by depth, Mamba 2's are no normal distribution."""
    config = SPEC.configure(flavor, {})
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**dataclasses.asdict(config)))
    model, _ = built(SPEC, config)
    found = dict(model.named_parameters())
    for name, parameter in theirs.named_parameters():
        # Biases, and the row of the padding token.
        assert torch.equal(found[name] == 0, parameter == 0), name
        spread = parameter.std() if parameter.numel() > 1 else parameter.new_zeros(())
        if parameter.numel() > 500:
            assert abs(found[name].std() / spread - 1) < 0.2, name
        elif not spread:
            assert torch.equal(found[name], parameter), name
    require_close(dict(model.named_buffers()), dict(theirs.named_buffers()), 0.0)


@pytest.mark.nightly
def test_verify_has_the_rows_that_a_class_allows_and_proves_them(pool):
    model = read_model(["--model.name=transformers", "--model.flavor=gemma2"], {})
    rows = command.table(model).values()
    assert {row.mesh.tp * row.mesh.pp * row.mesh.cp for row in rows} == {1}
    assert {"hsdp2x2", "dp2"} <= {row.layout for row in rows}
    assert not any(row.precision == "float64" or row.extra == "kept whole" for row in rows)
    with row_runner(model, pool) as run:
        result = run(Row("hsdp2x2", "op", precision="float32"))
    assert result.passed, f"{result.what} {result.error:.1e}"


IMPORTS = """
import importlib, sys, titanlite.train.worker
from titanlite import cli
for module, _ in cli.COMMANDS.values(): importlib.import_module(module)
cli.main(["models", "transformers"]); cli.main(["config"])
assert "transformers" not in sys.modules
from titanlite.models.transformers import library; library()
assert "transformers" in sys.modules
from huggingface_hub import constants; assert not constants.HF_HUB_OFFLINE
"""


@pytest.mark.long
def test_importing_titanlite_imports_no_transformers_and_a_class_leaves_the_hub_within_reach(
    tmp_path,
):
    done = python("-c", IMPORTS, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_without_the_library_one_line_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("titanlite.models.transformers.find_spec", lambda name: None)
    assert cli.main(["config", "--model.name", "transformers"]) == 2
    says(capsys.readouterr().err, "pip install", "'titanlite[hf]'")


def test_a_folder_gives_the_flavor(tmp_path):
    values = dataclasses.asdict(SPEC.flavors["gemma2"])
    values |= {"pad_token_id": None, "num_hidden_layers": 2}
    Path(tmp_path, "config.json").write_text(json.dumps(values))
    found = job([*of("hf"), f"--model.hf_assets_path={tmp_path}"], 1)
    assert found.shape.layers == 2 and found.model_config.pad_token_id is None
    assert found.spec.blocks == "model.layers"


@pytest.mark.parametrize(
    "flavor", sample(("mixtral", "gemma2", "deepseek_v3", "lara_mini"), "mixtral")
)
def test_a_folder_is_that_of_the_class_and_comes_back(tmp_path, flavor):
    """Mixtral's experts are joined in the class and apart in the folder, Lara Mini's projections
    the other way round; DeepSeek's routers have a bias that is no parameter."""
    config = SPEC.configure(flavor, {}) if flavor in SPEC.flavors else small(flavor)
    model, _ = built(SPEC, config)
    buffers = persistent_buffers(model)
    biases = [buffer.uniform_() for name, buffer in buffers.items() if name.endswith("_bias")]
    weights = dict(model.named_parameters()) | buffers
    assert bool(biases) == (flavor == "deepseek_v3")
    translation = Translation(SPEC, config)
    files = documents(translation.config, torch.float32, None)
    tensors = translation.hf_tensors(torch.float32)
    write_folder(tmp_path / "hf", tensors, files, lambda name: weights[name].detach())
    names = {tensor.name for tensor in tensors}
    assert (names == weights.keys()) == (flavor == "gemma2")
    theirs, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, attn_implementation="eager"
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    given = tokens(2, 32)
    assert relative_error(theirs(given).logits, model(given)) < 1e-6
    folder = HuggingFaceFolder(tmp_path / "hf", SPEC, config)
    for name, weight in weights.items():
        assert torch.equal(folder.read(name), weight), name


def test_a_folder_whose_names_depend_on_other_parameters_is_refused(monkeypatch):
    """No class of transformers is known to have one."""

    def two_at_a_time(model: Any, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [*own]
        return {"+".join(names[i : i + 2]): own[names[i]] for i in range(0, len(names), 2)}

    monkeypatch.setattr(convert, "revert_weight_conversion", two_at_a_time)
    with refused("MistralForCausalLM", "--format safetensors"):
        Translation(SPEC, small("mistral"))


@pytest.mark.parametrize(
    ("values", "before", "after"),
    [
        (
            # FSDP would give an embedding inside another module, which the output shares, to
            # another group of modules
            {
                "model_type": "modernbert-decoder",
                "vocab_size": 256,
                "num_hidden_layers": 2,
                "pad_token_id": 0,
            },
            ("model.embeddings.tok_embeddings",),
            ("model.final_norm", "decoder"),
        ),
        (
            # The bias is a parameter of the output layer and of the module around it
            {"model_type": "bert", "is_decoder": True, **SMALL_BERT},
            None,
            ("cls.predictions",),
        ),
    ],
    ids=["tied embedding", "bias of two owners"],
)
def test_what_two_modules_share_is_gathered_with_both(values, before, after):
    found = SPEC.of(SPEC.configure("hf", values))
    assert found.after == after and before in (None, found.before)


BUILT = [("falcon_h1", "mup_vector"), ("gemma3n_text", "per_layer_input_scale")]
BUILT.append(("apertus", "alpha"))


@pytest.mark.parametrize(("kind", "name"), sample(BUILT, BUILT[0]))
def test_what_a_class_sets_when_it_is_built_has_its_value(kind, name):
    """Falcon H1's `_init_weights` does not know its buffer, Gemma 3n's is that of the inner model;
    Apertus' activations have two small parameters.
    """
    config = small(kind)
    meta, _ = build_meta_model(SPEC, config, 8)
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *meta.buffers()])
    (own, _), theirs = built(SPEC, config, 8), build(config, 8)
    found = dict(own.named_parameters()) | dict(own.named_buffers())
    expected = {each: value for each, value in theirs.named_parameters() if name in each}
    expected |= theirs.named_buffers()
    named = [value for each, value in expected.items() if name in each]
    assert named and all(value.any() for value in named)
    require_close({each: found[each] for each in expected}, expected, 0.0)


class Odd(LlamaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.known = torch.nn.Parameter(torch.arange(3.0))
        self.filled = torch.nn.Parameter(torch.empty(3).fill_(0.5))
        self.unset = torch.nn.Parameter(torch.empty(3))
        self.drawn = torch.nn.Parameter(torch.randn(3))
        self.like = torch.nn.Parameter(torch.rand_like(torch.zeros(3)))
        self.in_place = torch.nn.Parameter(torch.zeros(3).uniform_())
        self.later = torch.nn.Parameter(torch.zeros(3))
        torch.nn.init.normal_(self.later)
        self.large = torch.nn.Parameter(torch.zeros(1 << 17))


def test_what_a_class_draws_or_leaves_unset_when_it_is_built_is_no_value():
    """Every rank would have another one."""
    with torch.device("meta"), values_as_built():
        model = Odd(transformers_config(small("llama")))
    initial, faults = recorded(model)
    found = {fault.partition(":")[0] for fault in faults}
    assert found == {"unset", "drawn", "like", "in_place", "later", "large"}
    shard, edit = torch.zeros(2), initial["known"].edit
    assert edit
    edit(shard, (1,), 0)
    assert shard.tolist() == [1.0, 2.0]


def test_a_small_instance_has_as_many_kinds_of_layers_as_layers():
    for layers, expected in (([*"ab"], [*"ab"]), ([*"abaabc"], [*"abac"])):
        given = {"num_hidden_layers": len(layers), "layer_types": layers}
        assert shrunk(given) == {"num_hidden_layers": len(expected), "layer_types": expected}


LEARNED = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
LEARNED |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


@pytest.mark.parametrize("positions", ["relative", "learned"])
def test_documents_are_kept_apart_as_if_each_were_alone(positions):
    learned = flavor_of({**LEARNED, "vocab_size": 256})
    require_apart(random(SPEC, learned if positions == "learned" else SPEC.configure("gemma2", {})))
