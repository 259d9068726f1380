"""Windows: packing, document masks, and mixtures."""

import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from tests.data.assets import listed
from tests.jobs import FLOAT64, TINY, job, trainer, validated
from tests.messages import refused, says
from titanlite.data import packing_plan
from titanlite.data.loader import MicroBatch
from titanlite.data.mixture import Mixture
from titanlite.data.packing import IGNORED, Concatenated, Packed
from titanlite.data.packing_plan import first_fit
from titanlite.data.shards import ShardSource
from titanlite.data.sources import open_source
from titanlite.data.tokenizer import ByteTokenizer, open_tokenizer
from titanlite.data.trained import WindowSource
from titanlite.data.windows import Windows, training_data
from titanlite.parallel.context_parallel import TokenShare
from titanlite.runtime import store
from titanlite.train.forward import WholeModel
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


def documents_of(windows) -> list[list[int]]:
    """Return the ids of every document, or piece of one, in all windows."""
    found = []
    for number in range(windows.samples):
        tokens, labels, documents, positions = window(windows, number)
        assert (window(windows, number, rows=2) == [tokens, labels]).all()
        assert (labels[documents == -1] == IGNORED).all()
        for document in range(documents.max() + 1):
            inside = documents == document
            assert positions[inside].tolist() == list(range(inside.sum()))
            assert tokens[inside][1:].tolist() == labels[inside][:-1].tolist()
            found.append([int(tokens[inside][0]), *labels[inside].tolist()])
    return sorted(found)


def test_concatenated_windows_number_documents_and_restart_positions(folder):
    windows = Concatenated(source(folder), 8, masked=True, key="training")
    tokens, labels, documents, positions = window(windows, 1)
    assert bytes(tokens.tolist()) == b"ijklm\0no"
    assert documents.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    # Nothing is predicted across document boundaries.
    assert labels.tolist() == [*b"jklm\0", IGNORED, *b"o\0"]
    plain = window(Concatenated(source(folder), 8, masked=False, key="training"), 1, rows=2)
    assert bytes(plain[1].tolist()) == b"jklm\0no\0"


def test_packed_windows_hold_whole_documents(folder):
    long = f"{TEXTS[-1]}\0"  # cut after 16; the next piece begins with the last label
    expected = [f"{text}\0" for text in TEXTS[:-1] if text] + [long[:17], long[16:]]
    for _ in range(2):  # by its cached plan
        found = documents_of(Packed(source(folder), 16, "training"))
        assert found == sorted(list(text.encode()) for text in expected)


def packed_digits(folder, digits: str, end: int, seq_len: int = 8) -> list[str]:
    """Write digits as a shard, pack it, and return its documents."""
    np.asarray([*map(int, digits)], np.uint16).tofile(folder / "a.bin")
    shards = ShardSource(listed(folder / "a.bin", "uint16", end), 100)
    found = documents_of(Packed(shards, seq_len, "training"))
    return ["".join(map(str, document)) for document in found]


def test_a_packing_plan_belongs_to_an_end_token_a_length_and_a_content(tmp_path):
    assert packed_digits(tmp_path, "129374596789", end=9) == ["129", "37459", "6789"]
    assert packed_digits(tmp_path, "129374596789", end=7) == ["12937", "45967", "89"]
    cut = ["129", "374", "459", "678", "89"]
    assert packed_digits(tmp_path, "129374596789", end=9, seq_len=2) == cut
    assert packed_digits(tmp_path, "192345967859", end=9) == ["19", "23459", "67859"]


def test_a_packing_plan_is_on_disk_before_it_has_its_name_and_a_damaged_one_is_made_again(
    tmp_path, monkeypatch
):
    calls = []

    def record(name, real, path, *more):
        calls.append((name, path.name))
        real(path, *more)

    for name in ("sync", "rename"):
        monkeypatch.setattr(store, name, partial(record, name, getattr(store, name)))
    digits = "12934459"
    expected = packed_digits(tmp_path, digits, end=9)
    (plan,) = (tmp_path / "a.bin-listed/.titanlite").glob("*.plan")
    draft = f".{plan.name}.new"
    assert [call for call in calls if draft in call] == [("sync", draft), ("rename", draft)]
    content = plan.read_bytes()
    for damaged in (b"", content[:100], content[:-1], content[:-300], b"\xff" * len(content)):
        plan.write_bytes(damaged)
        assert packed_digits(tmp_path, digits, end=9) == expected
        assert plan.read_bytes() == content


def test_a_large_source_is_packed_in_parts_and_its_plan_is_mapped(tmp_path, monkeypatch):
    """Every token is predicted once, also of documents that a part or a shard cuts."""
    rng = np.random.default_rng(0)
    for name in "abc":
        ids = rng.integers(10, 100, size=700)
        ids[rng.integers(0, 700, size=40)] = 9
        ids.astype(np.uint16).tofile(tmp_path / f"{name}.npy")
    shards = ShardSource(listed(tmp_path, "uint16", 9), 100)
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


def masked_and_separate_losses(argv: list[str], folder: str) -> tuple[float, float, float]:
    """Return the losses of training and validation under a mask, and that of the documents one by
    one.
    """
    run = trainer(argv, folder)
    model = run.parts[0]
    data = run.data.training
    assert isinstance(data, Windows)
    rows = torch.stack([torch.as_tensor(data[i]) for i in range(data.samples)])
    valid = count_valid(rows[:, 1])
    assert valid > 20
    training = run.runner.forward_backward(0, [MicroBatch(rows)], lambda: valid).item()
    validation = validated(run)
    separate = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for tokens, labels, documents, _ in rows:
            for document in documents.unique():
                inside = documents == document
                logits = model(tokens[inside].unsqueeze(0))
                separate += token_loss_sum(logits, labels[inside].unsqueeze(0))
    return training, validation, (separate / valid).item()


@pytest.mark.parametrize("packing", ["concatenate", "first-fit"])
def test_a_document_mask_separates_documents(pool, folder, tmp_path, packing):
    argv = [*TINY, *FLOAT64, "--validation.enable", f"--validation.dataset_path={folder}"]
    argv += [f"--training.dataset_path={folder}", f"--training.packing={packing}"]
    argv += ["--training.document_mask"]
    (losses,) = pool.run(masked_and_separate_losses, argv, str(tmp_path / "out"), world=1)
    training, validation, separate = losses
    assert training == pytest.approx(separate, rel=1e-12)
    assert validation == pytest.approx(separate, rel=1e-12)


@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (0.5, 0.25, 0.25), (0.9, 0.05, 0.03, 0.02), (0.3333, 0.6667), (1.0,)]
)
def test_every_prefix_of_a_mixture_has_its_weights_to_within_a_sample(weights):
    mixture = Mixture(weights)
    served = np.zeros(len(weights), dtype=int)
    for index in range(min(3 * mixture.period, 3000)):
        chosen, number = mixture(index)
        assert number == served[chosen], "each source is read in order"
        served[chosen] += 1
        assert all(abs(served - (index + 1) * np.asarray(weights)) < 1)
    source, _ = mixture(10**12)
    assert 0 <= source < len(weights)


def letters_drawn(folder: str, argv: list[str]) -> tuple[str, str]:
    """Train; return the first letters of 100 samples, and the line of the start about data."""
    run = trainer(argv, folder)
    (line,) = [line for line in describe_start(run) if line.startswith("data")]
    run.train()
    assert isinstance(run.data.training, Windows)
    return "".join(chr(int(run.data.training[i][0][0])) for i in range(100)), line


def test_the_sources_of_a_mixture_are_shuffled_independently(folder):
    twins: list[WindowSource] = [Concatenated(source(folder), 2, False, "training")] * 2
    windows = Windows(twins, 2, seed=0, repeat=True, weights=(0.5, 0.5))
    first, second = ([order(i) for i in range(twins[0].samples)] for order in windows._orders)
    assert sorted(first) == sorted(second) and first != second


def test_a_mixture_draws_from_its_sources_by_weight_and_has_no_epochs(pool, tmp_path):
    parts = []
    for name, weight in (("a", 0.7), ("b", 0.3)):
        path = tmp_path / f"{name}.txt"
        path.write_text(name * 200)
        parts.append(f'{{dataset = "text", dataset_path = "{path}", weight = {weight}}}')
    argv = [*TINY, "--training.dataset=python-stdlib", "--training.dataset_path="]
    argv += [f"--training.mixture=[{', '.join(parts)}]", "--checkpoint.enable"]
    ((drawn, line),) = pool.run(letters_drawn, str(tmp_path / "out"), argv, world=1)
    assert (drawn.count("a"), drawn.count("b")) == (70, 30)
    says(line, f"0.7 {tmp_path}/a.txt + 0.3 {tmp_path}/b.txt, 24 windows of 16", "fingerprint ")
    state = json.loads((tmp_path / "out/checkpoint/step-3/state.json").read_text())
    assert state["position"]["epoch"] is None


def test_shards_without_a_tokenizer_can_only_be_trained_on(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.npy")
    argv = [*TINY, "--model.overrides.vocab_size=300"]
    argv += ["--training.dataset=tokens", f"--training.dataset_path={listed(tmp_path, 'uint16')}"]
    plain = job(argv, 1)
    assert open_tokenizer(plain) is None
    assert training_data(plain, None, 0).samples == 12
    with refused("generate.at_end = true", "model.hf_assets_path"):
        open_tokenizer(job([*argv, "--generate.at_end"], 1))
    runner = WholeModel(torch.nn.Identity(), TokenShare(torch.device("cpu")))
    with refused("generation", "tokenizer"):
        generate(runner, None, plain.config.generate, 16, 0)
    (tmp_path / "a.txt").write_text("text")
    with refused('validation.dataset = "text"', "tokenizer"):
        open_source("validation", "text", str(tmp_path), None, 300)
    for more in ("--training.document_mask", "--training.packing=first-fit"):
        with refused("document_mask", "first-fit"):
            training_data(job([*argv, more], 1), None, 0)
