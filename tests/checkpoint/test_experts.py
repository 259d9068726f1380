"""Checkpoints of a model with experts: biases of routers and stacked momentum, on any mesh, and at
Hugging Face.
"""

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.layouts import save_and_load_everywhere
from tests.checkpoint.saved import SAVING
from tests.jobs import MOE, TINY, full, trainer
from tests.messages import says
from titanlite.checkpoint.load import load_tensors
from titanlite.cli import main

BIAS = '--model.overrides.balance="bias"'
_SAVING = SAVING[len(TINY) :]  # of another model
MODEL = [*MOE, BIAS, "--model.overrides.experts=6", "--optimizer.name=Muon"]
EP2, TP2 = (f"--parallelism.{each}_parallel_degree=2" for each in ("expert", "tensor"))
LAYOUTS = {"one": (1, []), "ep2 of tp2": (2, [EP2, TP2])}
"""With 3 experts on a rank, FSDP on 2 ranks splits dimension 1."""
BIAS_OF = "model.layers.{}.moe.router.bias"


@pytest.mark.long
def test_biases_and_momentum_are_loaded_bit_for_bit_on_every_mesh(pool, tmp_path):
    assert save_and_load_everywhere(pool, tmp_path, LAYOUTS, MODEL) == []


def start(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the weights that a run starts from."""
    return {name: full(tensor) for name, tensor in trainer(argv, folder).state.weights().items()}


@pytest.mark.long
def test_biases_stay_out_of_hugging_face_and_start_at_zero(train, pool, tmp_path, capsys):
    run, plain, hf, imported = (tmp_path / name for name in ("run", "plain", "hf", "imported"))
    one_step = [*MOE, *_SAVING, "--training.steps=1"]

    def tool(*words: object) -> int:
        return main(["checkpoint", *map(str, words)])

    train([*one_step, BIAS], run, ranks=2)
    saved = load_tensors(run / "checkpoint/step-1")
    biases = [saved[BIAS_OF.format(layer)] for layer in range(2)]
    assert all(bias.any() and bias.dtype == torch.float32 for bias in biases)
    whole = ["--dtype", "float32"]
    assert tool("export", run, plain, *whole, "--format", "safetensors") == 0
    written = load_file(next(plain.glob("*.safetensors")))
    assert torch.equal(written[BIAS_OF.format(1).removeprefix("model.")], biases[1])
    assert tool("export", run, hf, *whole) == 2 and not hf.exists()
    says(capsys.readouterr().err, "layers.0.moe.router.bias", 'balance = "sequence" or "none"')

    shutil.rmtree(run)
    train([*one_step, '--model.overrides.balance="none"'], run)
    assert tool("export", run, hf, *whole) == 0
    assert tool("import", hf, imported, *MOE, BIAS) == 0
    saved = load_tensors(run / "checkpoint/step-1")
    weights = {name: tensor for name, tensor in saved.items() if name.startswith("model.")}
    for source in ([f"path={hf}", "in_hf"], [f"path={imported}"]):
        argv = [*MOE, BIAS, *(f"--checkpoint.initial_load_{each}" for each in source)]
        begun = pool.run(start, argv, str(tmp_path / "start"), world=1)[0]
        assert all(torch.equal(begun[name], weight) for name, weight in weights.items())
        assert not any(begun[BIAS_OF.format(layer)].any() for layer in range(2))
