"""Whole runs on any mesh: losses, norms, weights, validation and samples are those of one
process.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.data.test_chat import CHAT, PLAIN, chat_options, folder
from tests.jobs import FLOAT64, MOE, TINY, full, job, relative_error, trainer
from tests.lanes import sample
from tests.parallel.rows import (
    CHUNKS,
    COMPILED,
    CP,
    EP,
    FULL,
    HSDP,
    INTERLEAVED,
    LORA,
    MODELS,
    PP,
    RECOMPUTED,
    SCHEDULE,
    SGD,
    SMALL,
    TP,
    ULYSSES,
    UNBALANCED,
    ZBV,
    Row,
    numbers,
    validation_and_sample,
)

ADAMW = ["--optimizer.name=AdamW", "--optimizer.eps=1e-3"]
ZERO_BUBBLE = f"{SCHEDULE}InterleavedZeroBubble"
# Of SGD, so that gradients of another scale show.
CHATS = [CHAT, CHAT[:2], CHAT[2:], [CHAT[0], {"role": "assistant", "content": "yes " * 12}]] * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, list[str]]:
    """Return options of models, each with its data."""
    path = tmp_path_factory.mktemp("data")
    texts = "".join(
        json.dumps({"text": f"{number} " + "ab" * (number % 5), "url": "x"}) + "\n"
        for number in range(99)
    )
    (path / "texts").mkdir()
    (path / "texts/a.jsonl").write_text(texts)
    text = f"--training.dataset_path={path}/texts"
    chats = chat_options(folder(path / "chats", PLAIN, CHATS))
    chats += [*SGD, "--training.max_norm=1e9"]
    chats += ["--training.packing=concatenate", "--training.no_document_mask"]
    balanced = [*MOE, *ADAMW, "--optimizer.lr=0.01"]
    return {
        "bias": [*balanced, "--model.overrides.balance=bias"],
        "sequence": [*balanced, "--model.overrides.balance=sequence"],
        "lora": LORA,
        "fused": [*TINY, *ADAMW, "--optimizer.implementation=fused"],
        "foreach": [*TINY, *ADAMW, "--optimizer.implementation=foreach"],
        "chats": chats,
        "documents": [*MODELS["gpt2"], "--training.document_mask", text],
    }


def trained(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    """Train; return the weights of this rank's parts, whole, with biases of routers."""
    common = "--metrics.log_freq=1 --lr_scheduler.warmup_steps=0 --debug.seed=3"
    run = trainer([*argv, *common.split(), "--training.global_batch_size=4"], folder)
    run.train()
    return {name: full(tensor) for name, tensor in run.state.weights().items()}


RUNS = {
    "lora, tp": Row("lora", 2, TP),
    "documents, cp": Row("documents", 2, CP),
    "bias, ep": Row("bias", 2, f"{EP} {RECOMPUTED}selective"),
    "sequence, tp": Row("sequence", 2, TP),
    "sequence, accumulated": Row("sequence", 1),
    "bias, compiled": Row("bias", 1, f"{COMPILED} {FULL}"),
    "bias, split backward": Row("bias", 2, f"{PP} {ZERO_BUBBLE} --model.overrides.n_layers=4"),
    "sequence, stages": Row("sequence", 2, f"{PP} {FULL}"),
    "sequence, cp": Row("sequence", 2, CP),
    "lora, replicas": Row("lora", 4, f"{HSDP} {FULL}"),
    "replicated and sharded": Row("fused", 2, SMALL),
    "foreach": Row("foreach", 2, SMALL),
    "lora, stages": Row("lora", 2, PP),
    "chats, dp": Row("chats", 2),
    "lora, cp": Row("lora", 2, CP),
}


@pytest.mark.parametrize(
    "name",
    sample(
        RUNS,
        "lora, stages",
        "chats, dp",
        "documents, cp",
        "replicated and sharded",
        "bias, ep",
        "sequence, accumulated",
        nightly=["lora, replicas", "bias, compiled"],
    ),
)
def test_losses_norms_and_weights_of_a_run_are_those_of_one_process(pool, tmp_path, models, name):
    """Of chats, the ranks' windows have other numbers of trained tokens; the loss is over those of
    the global batch.
    """
    row = RUNS[name]
    argv, words = [*models[row.model], *FLOAT64], row.words.split()
    argv += [word for word in words if word.startswith("--model.")]
    one = [*argv, "--training.local_batch_size=4"]
    (expected,) = pool.run(trained, one, str(tmp_path / "one"), world=1)
    local = 4 // job(one, row.ranks).layout.data_parallel if PP in row.words else 1
    argv += [f"--training.local_batch_size={local}", *words]
    ranks = pool.run(trained, argv, str(tmp_path / "many"), world=row.ranks)
    steps = numbers(tmp_path / "one")
    assert len(steps) == 3
    assert numbers(tmp_path / "many") == [pytest.approx(step, rel=1e-10) for step in steps]
    found: dict[str, torch.Tensor] = {}
    for parameters in ranks:
        found |= parameters
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        assert relative_error(found[parameter], value) <= 1e-10, parameter


DROPOUT = "--model.overrides.dropout=0.5"
VALIDATED = {
    "stages": Row("gpt2", 2, f"{PP} {INTERLEAVED} {DROPOUT}"),
    "cp": Row("even", 2, CP),
    "experts": Row("experts", 2, EP),
    "tp": Row("even", 2, TP),
    "ulysses": Row("even", 2, f"{CP} {ULYSSES}"),
    "unbalanced": Row("even", 2, f"{CP} {UNBALANCED}"),
    "stages in a V": Row("four", 4, f"{PP} {ZBV} {CP} --training.document_mask"),
    "whole logits": Row("even", 2, f"{TP} --parallelism.disable_loss_parallel {CHUNKS}2"),
}


@pytest.mark.parametrize("name", sample(VALIDATED, "stages", "cp"))
def test_validation_and_generation_equal_one_process(pool, tmp_path, name):
    """Sequences of other lengths and batches of other sizes than in training, which ranks do not
    divide: some have no window. The text grows past the chunks of a sequence, so that the last
    token changes its rank; every rank draws the same numbers. Dropout is off.
    """
    row = VALIDATED[name]
    sizes = "--training.local_batch_size=4 --validation.local_batch_size=3 --validation.seq_len=24"
    argv = [*MODELS[row.model], *sizes.split(), *row.words.split()]
    one = [word for word in argv if not word.startswith("--parallelism")]
    ((loss, text),) = pool.run(validation_and_sample, one, str(tmp_path), world=1)
    ranks = pool.run(validation_and_sample, argv, str(tmp_path), world=row.ranks)
    assert [found[1] for found in ranks] == [text] * row.ranks
    for found, _ in ranks:
        assert found == pytest.approx(loss, rel=1e-12)
