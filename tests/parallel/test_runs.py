"""Whole runs on any mesh: losses, norms, weights, validation and samples are those of one
process.
"""

from __future__ import annotations

import json

import pytest
import torch

from tests.data.test_chat import CHAT, PLAIN, chat_options, folder
from tests.jobs import FLOAT64, MOE, QUIET, TINY, full, job, relative_error, trainer
from tests.lanes import sample
from tests.parallel.rows import (
    CHUNKS,
    COMPILED,
    CP,
    EP,
    EP4,
    EVEN,
    FREEZE,
    FULL,
    HSDP,
    INTERLEAVED,
    LORA,
    MODELS,
    PP,
    RECOMPUTED,
    RESHARD,
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
BF16_STATE = [*EVEN, "--optimizer.state_dtype=bfloat16"]
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
    own = [option for option in chats if option not in TINY or option in QUIET]
    chats += ["--model.overrides.n_kv_heads=2", *SGD, "--training.max_norm=1e9"]
    concatenated = ["--training.packing=concatenate", "--training.no_document_mask"]
    balanced = [*MOE, *ADAMW, "--optimizer.lr=0.01"]
    return {
        "bias": [*balanced, "--model.overrides.balance=bias"],
        "sequence": [*balanced, "--model.overrides.balance=sequence"],
        "lora": LORA,
        "fused": [*TINY, *ADAMW, "--optimizer.implementation=fused"],
        "foreach": [*TINY, *ADAMW, "--optimizer.implementation=foreach"],
        "bf16 state": BF16_STATE,
        "chats": chats,
        "concatenated chats": [*chats, *concatenated],
        "documents": [*MODELS["gpt2"], "--training.document_mask", text],
        "stream": [*EVEN, "--training.dataset=c4_test", text],
        "gemma": [*own, "--model.name=transformers", "--model.flavor=gemma2", *SGD],
    }


def trained(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    """Train; return the weights of this rank's parts, whole, with biases of routers."""
    common = "--metrics.log_freq=1 --lr_scheduler.warmup_steps=0 --debug.seed=3"
    run = trainer([*argv, *common.split(), "--training.global_batch_size=4"], folder)
    run.train()
    return {name: full(tensor) for name, tensor in run.state.weights().items()}


RUNS = {
    "lora, tp": Row("lora", 2, TP),
    "chats, tp": Row("chats", 2, TP),
    "documents, cp": Row("documents", 2, CP),
    "bias, ep": Row("bias", 2, f"{EP} {RECOMPUTED}selective"),
    "sequence, tp": Row("sequence", 2, TP),
    "sequence, accumulated": Row("sequence", 1),
    "bias, compiled": Row("bias", 1, f"{COMPILED} {FULL}"),
    "bias, split backward": Row("bias", 2, f"{PP} {ZERO_BUBBLE} --model.overrides.n_layers=4"),
    "sequence, stages": Row("sequence", 2, f"{PP} {FULL}"),
    "bias, frozen": Row("bias", 2, f"{EP} {TP} {FREEZE}['layers.*.experts.*']"),
    "bias, ep over dp and tp": Row("bias", 4, f"{EP4} {TP} {FULL}"),
    "sequence, ep over dp and cp": Row("sequence", 4, f"{EP4} {CP}"),
    "lora, replicas": Row("lora", 4, f"{HSDP} {FULL}"),
    "replicated and sharded": Row("fused", 2, SMALL),
    "foreach": Row("foreach", 2, SMALL),
    "lora, stages": Row("lora", 2, PP),
    "chats, stages": Row("concatenated chats", 2, PP),
    "chats, dp": Row("concatenated chats", 2),
    "stream": Row("stream", 2, f"{CP} {ULYSSES}"),
    "gemma": Row("gemma", 2, FULL),
    "lora, cp": Row("lora", 4, CP),
    "lora, dp and tp": Row("lora", 4, TP),
    "chats, cp": Row("chats", 4, CP),
    "resharded to two": Row("fused", 4, f"{CP} {RESHARD}2"),
    "bf16 state": Row("bf16 state", 2, CP),
}
ERRORS = {"gemma": 1e-5, "bf16 state": 1e-4}


@pytest.mark.parametrize(
    "name",
    sample(
        RUNS,
        "lora, tp",
        "chats, tp",
        "documents, cp",
        "replicated and sharded",
        "bias, ep",
        "sequence, tp",
        "sequence, accumulated",
    ),
)
def test_losses_norms_and_weights_of_a_run_are_those_of_one_process(pool, tmp_path, models, name):
    """Of chats, the ranks' windows have other numbers of trained tokens; the loss is over those of
    the global batch.
    """
    row, error = RUNS[name], ERRORS.get(name, 1e-10)
    for needed in {"stream": ["datasets"], "gemma": ["transformers"]}.get(name, []):
        pytest.importorskip(needed)
    argv = [*models[row.model], *FLOAT64 * (name != "gemma")]
    words = row.words.split()
    argv += [word for word in words if word.startswith("--model.")]
    one = [*argv, "--training.local_batch_size=4"]
    (expected,) = pool.run(trained, one, str(tmp_path / "one"), world=1)
    local = 4 // job(one, row.ranks).layout.batch if PP in row.words else 1
    argv += [f"--training.local_batch_size={local}", *words]
    ranks = pool.run(trained, argv, str(tmp_path / "many"), world=row.ranks)
    steps = numbers(tmp_path / "one")
    assert len(steps) == 3
    assert numbers(tmp_path / "many") == [pytest.approx(step, rel=error) for step in steps]
    found: dict[str, torch.Tensor] = {}
    for parameters in ranks:
        found |= parameters
    assert found.keys() == expected.keys()
    for parameter, value in expected.items():
        assert relative_error(found[parameter], value) <= error, parameter


DROPOUT = "--model.overrides.dropout=0.5"
VALIDATED = {
    "stages": Row("gpt2", 2, f"{PP} {INTERLEAVED} {DROPOUT}"),
    "cp": Row("even", 2, CP),
    "experts": Row("experts", 2, EP),
    "tp": Row("even", 4, TP),
    "ulysses": Row("even", 2, f"{CP} {ULYSSES}"),
    "unbalanced": Row("even", 4, f"{CP} {UNBALANCED}"),
    "ep over dp and cp": Row("experts", 4, f"{EP4} {CP}"),
    "stages of experts": Row("experts", 4, f"{PP} {EP}"),
    "stages in a V": Row("four", 4, f"{PP} {ZBV} {CP} --training.document_mask"),
    "whole logits": Row("four", 4, f"{PP} {TP} --parallelism.disable_loss_parallel {CHUNKS}2"),
}


@pytest.mark.parametrize("name", sample(VALIDATED, "stages", "cp", "experts", "tp"))
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
