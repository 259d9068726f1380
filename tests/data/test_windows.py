"""Windows: packing, document masks, and mixtures."""

import json
import pickle
import time

import numpy as np
import pytest
import torch

from tests.jobs import FLOAT64, TINY, job, run_to_end, trainer, validated
from titanlite.config.load import ConfigError
from titanlite.data import packing_plan
from titanlite.data.loader import MicroBatch
from titanlite.data.mixture import Mixture
from titanlite.data.packing import (
    IGNORED,
    Concatenated,
    Packed,
)
from titanlite.data.packing_plan import cut_documents, first_fit
from titanlite.data.shards import ShardSource
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer, open_tokenizer
from titanlite.data.trained import WindowSource
from titanlite.data.windows import Windows, training_data
from titanlite.errors import UserError
from titanlite.runtime import store
from titanlite.train.forward import Forward
from titanlite.train.generate import generate
from titanlite.train.loss import count_valid, token_loss_sum
from titanlite.train.summary import describe_start

TEXTS = ["abcdefghijklm", "no", "", "p", "qrstuvwx", "yz0123456789ABCDEFGH"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    return tmp_path / "texts"


def source(folder):
    return open_source("training", "text", str(folder), ByteTokenizer(), 256)


def window(windows, number: int, rows: int = 4):
    out = np.full((rows, windows._seq_len), 99, dtype=np.int64)  # what the memory held before
    windows.fill(out, number)
    return out


def text_of(row) -> str:
    return bytes(int(i) for i in row).decode()


def test_concatenated_windows_number_documents_and_restart_positions(folder):
    windows = Concatenated(source(folder), 8, masked=True, key="training")
    tokens, labels, documents, positions = window(windows, 1)
    assert text_of(tokens) == "ijklm\0no"
    assert documents.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert labels.tolist() == [*b"jklm\0", IGNORED, *b"o\0"], (
        "nothing is predicted across document boundaries"
    )
    plain = window(Concatenated(source(folder), 8, masked=False, key="training"), 1, rows=2)
    assert text_of(plain[1]) == "jklm\0no\0"


def test_packed_windows_hold_whole_documents(folder):
    packed = Packed(source(folder), 16, "training")
    seen = []
    for number in range(packed.samples):
        tokens, labels, documents, positions = window(packed, number)
        assert (window(packed, number, rows=2) == [tokens, labels]).all()
        for document in range(documents.max() + 1):
            inside = documents == document
            assert positions[inside].tolist() == list(range(inside.sum()))
            assert tokens[inside][1:].tolist() == labels[inside][:-1].tolist()
            seen.append(text_of([tokens[inside][0], *labels[inside]]))
        assert (labels[documents == -1] == IGNORED).all()
    long = TEXTS[-1] + "\0"  # cut after 16; the next piece begins with the last label
    expected = [text + "\0" for text in TEXTS[:-1] if text] + [long[:17], long[16:]]
    assert sorted(seen) == sorted(expected)
    assert Packed(source(folder), 16, "training").samples == packed.samples, (
        "the cached plan is the same"
    )


def packed_text(folder, ids: list[int], end: int) -> list[list[int]]:
    """Write a shard, pack it, and return the tokens and labels of every document."""
    np.asarray(ids, np.uint16).tofile(folder / "a.npy")
    packed = Packed(ShardSource("training", folder, 100, end), 8, "training")
    found = []
    for number in range(packed.samples):
        tokens, labels, documents, _ = window(packed, number)
        for document in range(documents.max() + 1):
            inside = documents == document
            found.append([int(tokens[inside][0]), *labels[inside].tolist()])
    return sorted(found)


def test_a_packing_plan_belongs_to_an_end_token_and_a_content(tmp_path):
    ids = [1, 2, 9, 3, 7, 4, 5, 9, 6, 7, 8, 9]
    assert packed_text(tmp_path, ids, end=9) == [[1, 2, 9], [3, 7, 4, 5, 9], [6, 7, 8, 9]]
    assert packed_text(tmp_path, ids, end=7) == [[1, 2, 9, 3, 7], [4, 5, 9, 6, 7], [8, 9]]
    ids = [1, 9, 2, 3, 4, 5, 9, 6, 7, 8, 5, 9]
    assert packed_text(tmp_path, ids, end=9) == [[1, 9], [2, 3, 4, 5, 9], [6, 7, 8, 5, 9]]


def test_a_packing_plan_is_on_disk_before_it_has_its_name_and_a_damaged_one_is_made_again(
    tmp_path, monkeypatch
):
    calls = []
    for name in ("sync", "rename"):
        real = getattr(store, name)

        def call(*paths, name=name, real=real):
            calls.append((name, paths[0].name))
            real(*paths)

        monkeypatch.setattr(store, name, call)
    ids = [1, 2, 9, 3, 4, 4, 5, 9]
    expected = packed_text(tmp_path, ids, end=9)
    (plan,) = (tmp_path / ".titanlite").glob("*.plan")
    draft = f".{plan.name}.new"
    assert calls[:2] == [("sync", draft), ("rename", draft)]
    content = plan.read_bytes()
    for damaged in (b"", content[:100], content[:-1], content[:-300], b"\xff" * len(content)):
        plan.write_bytes(damaged)
        assert packed_text(tmp_path, ids, end=9) == expected
        assert plan.read_bytes() == content


def test_a_large_source_is_packed_in_parts_and_its_plan_is_mapped(tmp_path, monkeypatch):
    """Every token is predicted once, also of documents that a part or a shard cuts."""
    rng = np.random.default_rng(0)
    for name in "abc":
        ids = rng.integers(10, 100, size=700)
        ids[rng.integers(0, 700, size=40)] = 9
        ids.astype(np.uint16).tofile(tmp_path / f"{name}.npy")
    shards = ShardSource("training", tmp_path, 100, end=9)
    whole = Packed(shards, 32, "training")
    monkeypatch.setattr(packing_plan, "PART_TOKENS", 500)
    packed = pickle.loads(pickle.dumps(Packed(shards, 32, "training")))
    assert len(pickle.dumps(packed)) < 1000 and isinstance(packed._plan._numbers, np.memmap)
    seen = np.zeros(2100, dtype=int)
    for number in range(packed.samples):
        pieces = [*packed._plan.pieces(number)]
        assert sum(length for _, length in pieces) <= 32
        for start, length in pieces:
            ids = shards.read(start, length + 1)
            assert 9 not in ids[:-1], "a piece is of one document"
            seen[start : start + length] += 1
    ends = np.union1d(shards.document_ends(), np.arange(500, 2100, 500))
    expected = np.ones(2100, dtype=int)
    expected[ends - 1] = 0  # the last token of a document has no next one to predict
    assert (seen == expected).all()
    assert whole.samples <= packed.samples < 1.2 * whole.samples


def test_first_fit_pads_little_and_loses_nothing():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 513, size=20_000)
    order, stops = first_fit(lengths, 1024)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    used = np.add.reduceat(lengths[order], np.concatenate([[0], stops[:-1]]))
    assert used.max() <= 1024
    assert lengths.sum() / (len(stops) * 1024) > 0.97
    assert first_fit(np.asarray([6, 5, 4, 3, 2]), 10)[0].tolist() == [0, 2, 1, 3, 4]


def test_cut_documents_predict_every_token_once():
    starts, lengths = cut_documents(np.asarray([1, 10, 12]), seq_len=4)
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == [(1, 4), (5, 4), (10, 1)]


def masked_and_separate_losses(folder: str, texts: str, packing: str) -> tuple[float, float, float]:
    """Return the losses of training and validation under a mask, and that of the documents one by
    one.
    """
    argv = [
        *TINY,
        *FLOAT64,
        "--training.document_mask",
        f"--training.packing={packing}",
        "--training.steps=1",
    ]
    for section in ("training", "validation"):
        argv += [f"--{section}.dataset=text", f"--{section}.dataset_path={texts}"]
    run = trainer([*argv, "--validation.enable"], folder)
    model = run.parts[0]
    assert isinstance(run.data, Windows)
    rows = torch.stack([torch.as_tensor(run.data[i]) for i in range(run.data.samples)])
    valid = count_valid(rows[:, 1])
    assert valid > 20
    training = run.runner.forward_backward(0, [MicroBatch(rows)], valid).item()
    validation = validated(run)
    with torch.no_grad():
        separate = torch.zeros((), dtype=torch.float64)
        for row in rows:
            for document in row[2].unique():
                inside = row[2] == document
                separate += token_loss_sum(
                    model(row[0][inside].unsqueeze(0)), row[1][inside].unsqueeze(0)
                )
    return training, validation, (separate / valid).item()


@pytest.mark.parametrize("packing", ["concatenate", "first-fit"])
def test_a_document_mask_separates_documents(pool, folder, tmp_path, packing):
    (losses,) = pool.run(
        masked_and_separate_losses, str(tmp_path / "out"), str(folder), packing, world=1
    )
    training, validation, separate = losses
    assert training == pytest.approx(separate, rel=1e-12)
    assert validation == pytest.approx(separate, rel=1e-12)


def test_masked_packed_training_is_the_same_on_1_and_2_ranks(pool, folder, tmp_path):
    argv = [
        *TINY,
        "--training.dataset=text",
        f"--training.dataset_path={folder}",
        "--training.document_mask",
    ]
    argv += ["--training.packing=first-fit", "--training.global_batch_size=4"]
    one = pool.run(
        run_to_end, [*argv, "--training.local_batch_size=4"], str(tmp_path / "1"), world=1
    )[0]["weights"]
    two = pool.run(run_to_end, argv, str(tmp_path / "2"), world=2)[0]["weights"]
    assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6) for name in one)


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (0.5, 0.25, 0.25), (0.9, 0.05, 0.03, 0.02), (0.3333, 0.6667), (1.0,)]
)
def test_every_prefix_of_a_mixture_has_its_weights_to_within_a_sample(weights):
    mixture = Mixture(weights)
    served = np.zeros(len(weights), dtype=int)
    for index in range(3 * mixture.period if mixture.period < 1000 else mixture.period + 50):
        chosen, number = mixture(index)
        assert number == served[chosen], "each source is read in order"
        served[chosen] += 1
        assert all(abs(served - (index + 1) * np.asarray(weights)) < 1)
    source, _ = mixture(10**12)
    assert 0 <= source < len(weights)


def test_a_mixture_of_50_sources_with_weights_of_four_digits_is_there_in_a_second():
    weights = [0.0199 + 0.0001 * (number % 3) for number in range(49)]
    weights = [round(weight, 4) for weight in weights]
    began = time.process_time()
    mixture = Mixture((*weights, round(1 - sum(weights), 4)))
    assert mixture.period == 10_000 and time.process_time() - began < 1


def mixture_of(*parts: str) -> str:
    return "--training.mixture=[" + ", ".join(parts) + "]"


def letters_drawn(folder: str, argv: list[str]) -> tuple[list[str], list[str]]:
    """Train; return the first letters of 100 samples, and the lines of the start about data."""
    run = trainer(argv, folder)
    lines = [line for line in describe_start(run) if line.startswith("data")]
    run.train()
    assert isinstance(run.data, Windows)
    return [chr(int(run.data[i][0][0])) for i in range(100)], lines


def test_the_sources_of_a_mixture_are_shuffled_independently(folder):
    twins: list[WindowSource] = [
        Concatenated(source(folder), 2, False, "training") for _ in range(2)
    ]
    windows = Windows(twins, 2, seed=0, repeat=True, weights=(0.5, 0.5))
    first, second = (
        [order(number) for number in range(twins[0].samples)] for order in windows._orders
    )
    assert sorted(first) == sorted(second) and first != second


def test_a_mixture_draws_from_its_sources_by_weight_and_has_no_epochs(pool, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name * 200)
    a, b = (
        f'{{dataset = "text", dataset_path = "{tmp_path}/{n}.txt", weight = {w}}}'
        for n, w in (("a", 0.7), ("b", 0.3))
    )
    argv = [*TINY, "--checkpoint.enable", mixture_of(a, b)]
    ((drawn, (line,)),) = pool.run(letters_drawn, str(tmp_path / "out"), argv, world=1)
    assert (drawn.count("a"), drawn.count("b")) == (70, 30)
    places = [f"{weight} {tmp_path}/{name}.txt" for weight, name in ((0.7, "a"), (0.3, "b"))]
    assert f"{' + '.join(places)}, 24 windows of 16 tokens, fingerprint " in line
    assert (
        json.loads((tmp_path / "out/checkpoint/step-3/state.json").read_text())["position"]["epoch"]
        is None
    )


@pytest.mark.parametrize(
    ("parts", "more", "message"),
    [
        (['{dataset = "python-stdlib", weight = 0.5}'], [], "must add up to 1, not 0.5 = 0.5"),
        (['{dataset = "python-stdlib", weight = 0.00001}'], [], "must be multiples of 0.0001"),
        (['{dataset = "text", weight = 1.0}'], [], "needs a folder or file in dataset_path"),
        (
            ['{dataset = "python-stdlib", weight = 1.0}'],
            ["--training.no_repeat"],
            "so it never ends",
        ),
        (['{dataset = "python-stdlib"}'], [], "training.mixture"),
        (['{dataset = "python-stdlib", weight = 2.0}'], [], "training.mixture"),
    ],
)
def test_a_wrong_mixture_is_refused(parts, more, message):
    with pytest.raises(ConfigError) as caught:
        job([*TINY, mixture_of(*parts), *more], 1)
    assert message in str(caught.value)


def test_shards_without_a_tokenizer_can_only_be_trained_on(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.npy")
    argv = [
        *TINY,
        "--model.overrides.vocab_size=300",
        "--training.dataset=tokens",
        f"--training.dataset_path={tmp_path}",
    ]
    plain = job(argv, 1)
    tokenizer = open_tokenizer(plain)
    assert tokenizer is None
    assert training_data(plain, tokenizer, 0).samples == 12
    with pytest.raises(
        UserError, match="generate.at_end = true: this needs a tokenizer, .* model.hf_assets_path"
    ):
        open_tokenizer(job([*argv, "--generate.at_end"], 1))
    with pytest.raises(UserError, match="generation: this needs a tokenizer"):
        generate(
            Forward([torch.nn.Identity()], torch.device("cpu")),
            tokenizer,
            plain.config.generate,
            16,
            0,
        )
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match='validation.dataset = "text": this needs a tokenizer'):
        open_source("validation", "text", str(tmp_path), tokenizer, 300)
    for more in ("--training.document_mask", "--training.packing=first-fit"):
        masked = job([*argv, more], 1)
        with pytest.raises(
            UserError,
            match="these shards do not mark document ends, which document_mask and first-fit need",
        ):
            training_data(masked, open_tokenizer(masked), 0)
