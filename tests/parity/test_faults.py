"""Known faults are detected, and the message names what is wrong."""

from __future__ import annotations

from functools import partial

import pytest

from tests.lanes import sample
from tests.messages import says
from tests.parity.known_faults import FAULTS, measure_with
from titanlite.cli import main
from titanlite.verify.model_under_test import read_model
from titanlite.verify.runner import row_runner

MISMATCHES = {  # part of the message, for each fault in llama3
    "reduction-dropped": "gradient of layers.0.attention",
    "divided-twice": "gradient of ",
    "seed-per-rank": "tok_embeddings.weight",
    "same-shards": "initial value of tok_embeddings.weight",
    "hsdp-made-fsdp": "gradient of ",
    "norms-not-reduced": "norm.weight",
    "column-made-whole": "layers.0.attention",
    "tie-broken": "output.weight",
    "frozen-thawed": "gradient of layers.1.",
    "prefetch-reversed": "was gathered instead of layers.",
    "accumulation-in-bf16": "gradient of ",
    "accumulation-forgotten": "gradient of ",
    "norm-in-float32": "norm of all gradients (p = 2)",
    "clip-by-local-norm": "norm of all gradients (p = 2)",
    "replicas-counted": "norm of all gradients (p = 2)",
    "parts-orthogonalized": "after 1 Muon step: layers.",
    "state-not-written": "after 3 AdamW steps: ",
    "labels-per-rank": "gradient of ",
    "reduction-in-bf16": "gradient of ",
    "documents-mixed": "gradient of ",
    "documents-dropped": "gradient of ",
    "keys-not-summed": "gradient of layers.",
    "order-forgotten": "gradient of layers.",
    "positions-restart": "gradient of layers.",
    "tokens-counted-whole": "gradient of ",
    "context-not-reduced": "gradient of ",
    "documents-cut": "gradient of layers.",
    "microbatch-averaged": "gradient of ",
    "pipeline-undivided": "gradient of ",
    "stage-norm-local": "norm of all gradients (p = ",
    "tie-unsummed": "gradient of tok_embeddings.weight",
    "seed-by-stage-number": "initial value of layers.2.",
    "last-microbatch-lost": "gradient of ",
    "positions-guessed": "gradient of layers.",
    "blocks-swapped": "initial value of layers.0.",
    "loss-on-one-rank": "loss",
    "loss-in-bf16": "loss differs by ",
    "names-wrapped": "layers.0.wrapped.",
    "vectors-unsummed": "gradient of ",
    "summed-early": "gradient of ",
    "waited-too-late": "gradient of ",
    "replicas-summed-in-bf16": "gradient of ",
    "cast-forgotten": "in layers.0.attention",
    "gathered-twice": "tok_embeddings was gathered instead of ",
}
OF_EXPERTS = {  # in qwen3 with experts
    "expert-sum-over-ep": "gradient of layers.0.moe.experts.w",
    "router-unsummed": "gradient of layers.0.moe.router.weight",
    "dispatch-shifted": "gradient of layers.0.moe.",
    "combine-unsorted": "gradient of layers.0.moe.",
    "counts-per-rank": "moe.router.bias",
    "counts-per-microbatch": "gradient of layers.0.moe.",
    "recounted": "choices of experts in layers.",
    "experts-one-matrix": ".moe.experts.w",
    "expert-slices-swapped": "initial value of layers.0.moe.experts.w",
}


SAMPLED = ("same-shards",)
ALL = MISMATCHES | OF_EXPERTS
IN_LONG = ["norms-not-reduced", "prefetch-reversed", "accumulation-forgotten", "dispatch-shifted"]
NIGHTLY = [name for name in ALL if name not in (*SAMPLED, *IN_LONG)]
LLAMA = read_model([], {})
QWEN = read_model(["--model.name=qwen3", "--model.flavor=debugmodel_moe"], {})


@pytest.fixture(scope="module")
def runners(pool):
    with row_runner(LLAMA, pool) as llama, row_runner(QWEN, pool) as qwen:
        yield {"llama": llama, "qwen": qwen}


def test_every_fault_has_its_message():
    assert ALL.keys() == FAULTS.keys() and len(FAULTS) >= 10


@pytest.mark.parametrize("name", sample(ALL, *SAMPLED, long=IN_LONG, nightly=NIGHTLY))
def test_a_fault_is_detected_and_named(runners, name):
    model, run = (QWEN, runners["qwen"]) if name in OF_EXPERTS else (LLAMA, runners["llama"])
    rows = (row for row in FAULTS[name].rows if row.layout in model.layouts)
    result = run(next(rows), measure=partial(measure_with, name))
    assert not result.passed and ALL[name] in result.what, result


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--model lama3", "did you mean llama3?"),
        ("--fulll", "did you mean --full?"),
        ("--model", "one argument"),
        ("--out x.md", "add --full"),
        ("--only 1 --full", "remove --full"),
    ],
)
def test_invalid_options_exit_2_with_one_line(capfd, words, remedy):
    code = main(["verify", *words.split()])
    err = capfd.readouterr().err
    assert code == 2 and err.count("\n") == 1
    says(err, remedy)
