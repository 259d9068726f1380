"""The tokenizer of a job: one for all its data, the one that its shards were prepared with."""

import json
import shutil
from typing import Any

import numpy as np
import pytest

from tests.data.assets import listed, make_assets
from tests.jobs import TINY, job
from tests.messages import refused
from titanlite.config.load import ConfigError
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import ByteTokenizer, byte_files, load_tokenizer, open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.launch.preflight import check_machine
from titanlite.runtime.store import LocalPath

ARGV = [*TINY, "--model.overrides.vocab_size=600"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> LocalPath:
    """Tokenizers code/ and cats/, a text prepared with each and as bytes, and ids listed without a
    tokenizer.
    """
    root = tmp_path_factory.mktemp("tokenizers")
    for name in ("code", "cats", "text", "raw"):
        (root / name).mkdir()
    make_assets(root / "code", ["def f(x): return x + 1\n" * 20])
    make_assets(root / "cats", ["the cat sat on the mat again\n" * 20])
    (root / "text" / "a.txt").write_text("the cat sat; def f(x): return x\n" * 80)
    prepared(root, "code", root / "by-code")
    prepared(root, "cats", root / "by-cats")
    prepared(root, "", root / "by-bytes")
    np.arange(200, dtype=np.uint16).tofile(root / "raw" / "a.npy")
    listed(root / "raw", "uint16")
    return root


def prepared(root: LocalPath, assets: str, out: LocalPath) -> dict[str, Any]:
    folder = str(root / assets) if assets else ""
    return prepare({"text": text_files("x", str(root / "text"))}, folder, out, 1)


def tokens(path: LocalPath, section: str = "training") -> list[str]:
    return [f"--{section}.dataset=tokens", f"--{section}.dataset_path={path}"]


def assets(path: LocalPath) -> list[str]:
    return [f"--model.hf_assets_path={path}"]


def mixture(*paths: LocalPath, kind: str = "tokens") -> list[str]:
    weight = 1 / len(paths)
    parts = (
        f'{{dataset = "{kind}", dataset_path = "{path}", weight = {weight}}}' for path in paths
    )
    unset = ["--training.dataset=python-stdlib", "--training.dataset_path="]
    return [*unset, f"--training.mixture=[{', '.join(parts)}]"]


def text_of_windows(argv: list[str]) -> str:
    """Open the data of a job, and decode a window of each part with the job's tokenizer."""
    opened = job([*ARGV, *argv], 1)
    tokenizer = open_tokenizer(opened)
    assert tokenizer
    parts: list[Any] = [training_data(opened, tokenizer, 0)]
    if opened.config.validation.enable:
        parts.append(validation_data(opened, tokenizer))
    return "".join(tokenizer.decode(part[0][0].tolist()) for part in parts)


def test_prepared_shards_bring_their_tokenizer_to_all_text(root):
    validation = ["--validation.enable", f"--validation.dataset_path={root}/text"]
    for argv in (
        tokens(root / "by-code"),
        mixture(root / "by-code", root / "by-code"),
        tokens(root / "by-bytes"),
    ):
        shown = text_of_windows([*argv, *validation])
        assert set(shown.split()) & {"the", "cat", "def", "return"}
    assert text_of_windows([*tokens(root / "by-code"), *assets(root / "code")])


VALIDATED = "--validation.enable"


@pytest.mark.parametrize(
    ("training", "validation", "given", "named"),
    [
        ("by-code", "", "cats", "code cats"),
        ("by-bytes", "", "cats", "bytes cats"),
        ("by-code by-cats", "", "", "cats by-code"),
        ("by-code by-bytes", "", "", "bytes by-code"),
        ("by-code", "by-cats", "", "cats by-code"),
    ],
)
def test_shards_of_another_tokenizer_are_refused_with_both_names(
    root, training, validation, given, named
):
    paths = [root / name for name in training.split()]
    argv = tokens(*paths) if len(paths) == 1 else mixture(*paths)
    if given:
        argv += assets(root / given)
    if validation:
        argv += [*tokens(root / validation, "validation"), VALIDATED]
    with refused(*(name if name == "bytes" else f"{root}/{name} (" for name in named.split())):
        text_of_windows(argv)


def test_the_launcher_refuses_them_before_anything_starts(root):
    argv = [*ARGV, *tokens(root / "by-code"), *assets(root / "cats")]
    with refused("nothing was", f"{root}/code", f"{root}/cats"):
        check_machine(job(argv, 1), "cpu", 1)
    with refused("nothing was", "validation.dataset", "tokenizer"):
        check_machine(job([*ARGV, *tokens(root / "raw-listed"), VALIDATED], 1), "cpu", 1)


def test_another_end_token_is_another_tokenizer(root, tmp_path):
    """Text is prepared again, in a cache and by the command, and prepared shards are refused."""
    shutil.copy(root / "code/tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    ends = []
    for folder in (root / "code", tmp_path):
        argv = [*ARGV, f"--training.dataset_path={root}/text", "--training.document_mask"]
        opened = job([*argv, *assets(folder)], 1)
        tokenizer = open_tokenizer(opened)
        data = training_data(opened, tokenizer, 0)
        assert tokenizer.end == data._sources[0]._source.end
        ends.append(tokenizer.end)
    assert ends[0] != ends[1]
    with refused(*(f"end token {end}" for end in ends)):
        text_of_windows([*tokens(root / "by-code"), *assets(tmp_path)])
    with refused(root / "by-code", "tokenizer"):
        documents = text_files("x", str(root / "text"))
        prepare({"text": documents}, str(tmp_path), root / "by-code", 1)


def test_a_mixture_without_shards_needs_a_tokenizer_for_its_text(root):
    with refused("model.hf_assets_path", kind=ConfigError):
        argv = [*ARGV, "--model.overrides.vocab_size=100", *mixture(root / "text", kind="text")]
        job(argv, 1)


def test_a_folder_with_a_model_alone_serves_where_all_data_are_shards(root, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    argv = [*ARGV, *assets(tmp_path)]
    assert open_tokenizer(job([*argv, *tokens(root / "raw-listed")], 1)) is None
    with refused(tmp_path, "tokenizer.json"):
        open_tokenizer(job(argv, 1))
    (tmp_path / "config.json").unlink()
    with refused(tmp_path, "tokenizer.json"):
        open_tokenizer(job([*argv, *tokens(root / "raw-listed")], 1))


def test_bytes_may_be_fewer_than_the_vocabulary():
    opened = open_tokenizer(job(ARGV, 1))
    assert opened and opened.vocab_size == 256 and opened.decode([104, 599, 105]) == "h\ufffdi"


def without_end_token(folder: LocalPath) -> int:
    """Write a tokenizer.json that lacks the end token, and return its number of tokens."""
    make_assets(folder, ["the cat sat on the mat"], 300)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"] = []
    del document["model"]["vocab"]["<|end_of_text|>"]
    vocabulary = {token: number for number, token in enumerate(document["model"]["vocab"])}
    document["model"]["vocab"] = vocabulary
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return len(vocabulary)


OPTIONS = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
EOS = "<|end_of_text|>"


@pytest.mark.parametrize(
    ("names", "eos", "file", "larger"),
    [
        ([EOS], EOS, "tokenizer_config.json", 0),
        ([EOS], {"content": EOS, "special": True, **OPTIONS}, "tokenizer_config.json", 0),
        ([EOS], EOS, "special_tokens_map.json", 0),
        (["<|begin|>", EOS], EOS, "tokenizer_config.json", 128_000),
    ],
)
def test_tokens_that_only_the_config_of_a_tokenizer_defines_have_the_ids_of_transformers(
    tmp_path, names, eos, file, larger
):
    """TorchTitan's test tokenizer is such a folder: its tokenizer.json lacks the end-of-text
    token.
    """
    transformers = pytest.importorskip("transformers", reason="the oracle for ids")
    first = without_end_token(tmp_path)
    added = {
        str((larger or first) + number): {"content": name, "special": True, **OPTIONS}
        for number, name in enumerate(names)
    }
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    settings: dict[str, dict] = {"tokenizer_config.json": kind}
    settings.setdefault(file, {})["eos_token"] = eos
    for name, content in settings.items():
        (tmp_path / name).write_text(json.dumps(content))
    ours = load_tokenizer(str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, eos_token=EOS)
    text = f"the cat{EOS} sat"
    assert ours.end == theirs.convert_tokens_to_ids(EOS) == first + len(names) - 1
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([ours.end]) == EOS and ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"eos_token": "<|eot|>"}, 'eos_token is "<|eot|>"'),
        *(
            ({"added_tokens_decoder": wrong}, "added_tokens_decoder in tokenizer_config.json")
            for wrong in (["a"], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"content": 1}})
        ),
    ],
)
def test_a_token_that_is_nowhere_or_wrongly_defined_is_named(tmp_path, settings, named):
    without_end_token(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused(named):
        load_tokenizer(str(tmp_path))


def test_bytes_have_a_tokenizer_of_transformers_with_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the oracle for ids")
    for name, content in byte_files().items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(1, 0x250))) + " a\r\n\t  b 'll €\U0001f600 don't.\n\n"
    assert theirs(text)["input_ids"] == ByteTokenizer().encode(text)
    assert theirs.decode([0, *ByteTokenizer().encode(text)]) == f"\0{text}"
    assert len(theirs) == 256 and isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)
