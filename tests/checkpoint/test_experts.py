"""Checkpoints of a model with experts: biases of routers and stacked momentum, on any mesh, and at
Hugging Face.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.layouts import save_and_load_everywhere
from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import MOE, TINY, full, trainer
from tests.lanes import sample
from titanlite.checkpoint.load import load_tensors
from titanlite.cli import main
from titanlite.config.job import job_from
from titanlite.config.load import ConfigError, parse_command_line

BIAS = '--model.overrides.balance="bias"'
_SAVING = SAVING[len(TINY) :]  # of another model
MODEL = [*MOE, BIAS, "--model.overrides.experts=6", "--optimizer.name=Muon"]
EP2, TP2, CP2, PP2 = (
    f"--parallelism.{d}_parallel_degree=2" for d in ("expert", "tensor", "context", "pipeline")
)
LAYOUTS = {  # with 3 experts on a rank, FSDP on 2 ranks splits dimension 1
    "few": {"one": (1, []), "ep2 of tp2": (2, [EP2, TP2])},
    "many": {
        "one": (1, []),
        "dp4": (4, []),
        "ep2 of dp4": (4, [EP2]),
        "ep2 of dp2 x tp2": (4, [EP2, TP2]),
        "ep2 of dp2 x cp2": (4, [EP2, CP2]),
        "pp2 x ep2": (4, [PP2, EP2]),
    },
}
BIAS_OF = "model.layers.{}.moe.router.bias"


@pytest.mark.parametrize("layouts", sample(LAYOUTS, "few"))
def test_biases_and_momentum_are_loaded_bit_for_bit_on_every_mesh(pool, tmp_path, layouts):
    assert save_and_load_everywhere(pool, tmp_path, LAYOUTS[layouts], MODEL) == []


@pytest.mark.long
def test_a_resumed_run_has_the_biases_of_one_that_was_not_stopped(pool, tmp_path):
    argv = [*MODEL, *_SAVING, "--training.steps=4"]
    whole = pool.run(run_until, argv, str(tmp_path / "whole"), world=1)[0]
    pool.run(run_until, argv, str(tmp_path / "stopped"), 2, world=1)
    resumed = pool.run(run_until, argv, str(tmp_path / "stopped"), world=1)[0]
    assert (
        resumed["begun"] == 2
        and BIAS_OF.format(0) in whole["state"]
        and resumed["state"] == whole["state"]
    )


def start(argv: list[str], folder: str) -> dict[str, Any]:
    """Return the weights that a run starts from."""
    return {name: full(tensor) for name, tensor in trainer(argv, folder).state.weights().items()}


@pytest.mark.long
def test_biases_stay_out_of_hugging_face_and_start_at_zero(pool, tmp_path, capsys):
    run, plain, hf, imported = (tmp_path / name for name in ("run", "plain", "hf", "imported"))
    one_step = [*MOE, *_SAVING, "--training.steps=1"]
    pool.run(run_until, [*one_step, BIAS], str(run), world=2)
    saved = load_tensors(run / "checkpoint/step-1")
    biases = [saved[BIAS_OF.format(layer)] for layer in range(2)]
    assert all(bias.any() and bias.dtype == torch.float32 for bias in biases)
    assert (
        main(["checkpoint", "show", str(run)]) == 0 and BIAS_OF.format(0) in capsys.readouterr().out
    )
    export = ["checkpoint", "export", str(run), "--dtype", "float32"]
    assert main([*export, str(plain), "--format", "safetensors"]) == 0
    written = load_file(next(plain.glob("*.safetensors")))
    assert torch.equal(written[BIAS_OF.format(1).removeprefix("model.")], biases[1])
    assert main([*export, str(hf)]) == 2 and not hf.exists()
    said = capsys.readouterr().err
    assert "layers.0.moe.router.bias" in said and 'balance = "sequence" or "none"' in said

    pool.run(
        run_until, [*one_step, '--model.overrides.balance="none"'], str(tmp_path / "none"), world=1
    )
    assert (
        main(["checkpoint", "export", str(tmp_path / "none"), str(hf), "--dtype", "float32"]) == 0
    )
    assert main(["checkpoint", "import", str(hf), str(imported), *MOE, BIAS]) == 0
    weights = load_tensors(tmp_path / "none" / "checkpoint/step-1")
    for source in (["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={hf}"],
                   [f"--checkpoint.initial_load_path={imported}"]):  # fmt: skip
        begun = pool.run(start, [*MOE, BIAS, *source], str(tmp_path / "start"), world=1)[0]
        assert all(
            torch.equal(begun[name], weights[name]) for name in weights if name.startswith("model.")
        )
        assert not any(begun[BIAS_OF.format(layer)].any() for layer in range(2))


def test_an_export_at_the_end_of_a_run_with_biases_is_refused_before_it_starts():
    line = [
        "--config",
        "debug.toml",
        *MOE,
        BIAS,
        "--checkpoint.enable",
        "--checkpoint.last_save_in_hf",
    ]
    with pytest.raises(
        ConfigError, match='last_save_in_hf.*\n.*no biases of routers \\(balance = "bias"\\)'
    ):
        job_from(parse_command_line(line, {}), world=1, training=True)
