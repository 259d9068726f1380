"""The tokenizer of a job: one for all its data, the one that its shards were prepared with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.assets import make_assets
from tests.jobs import TINY, job
from titanlite.config.load import ConfigError
from titanlite.data.documents import text_files
from titanlite.data.prepare import prepare
from titanlite.data.tokenizer import load_tokenizer, open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.errors import UserError
from titanlite.launch.preflight import check_machine

ARGV = [*TINY, "--model.overrides.vocab_size=600"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Tokenizers code/ and cats/, and a text prepared with each, as bytes, and without a
    manifest.
    """
    root = tmp_path_factory.mktemp("tokenizers")
    for name, text in (
        ("code", "def f(x): return x + 1\n" * 20),
        ("cats", "the cat sat on the mat again\n" * 20),
    ):
        (root / name).mkdir()
        make_assets(root / name, [text])
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("the cat sat; def f(x): return x\n" * 80)
    for name in ("code", "cats", ""):
        assets = str(root / name) if name else ""
        prepare(
            {"text": text_files("x", str(root / "text"))}, assets, root / f"by-{name or 'bytes'}", 1
        )
    (root / "raw").mkdir()
    np.arange(200, dtype=np.uint16).tofile(root / "raw" / "a.npy")
    return root


def tokens(path: Path) -> list[str]:
    return ["--training.dataset=tokens", f"--training.dataset_path={path}"]


def mixture(*paths: Path) -> list[str]:
    parts = (
        f'{{dataset = "tokens", dataset_path = "{path}", weight = {1 / len(paths)}}}'
        for path in paths
    )
    return [f"--training.mixture=[{', '.join(parts)}]"]


def text_of_windows(argv: list[str]) -> str:
    """Open the data of a job, and decode a window of each part with the job's tokenizer."""
    opened = job(argv, 1)
    tokenizer = open_tokenizer(opened)
    assert tokenizer
    parts: list[Any] = [training_data(opened, tokenizer, 0)] + [
        validation_data(opened, tokenizer)
    ] * opened.config.validation.enable
    return "".join(tokenizer.decode(part[0][0].tolist()) for part in parts)


def test_prepared_shards_bring_their_tokenizer_to_all_text(root):
    validation = [
        "--validation.enable",
        "--validation.dataset=text",
        f"--validation.dataset_path={root}/text",
    ]
    for argv in (
        tokens(root / "by-code"),
        mixture(root / "by-code", root / "by-code"),
        tokens(root / "by-bytes"),
    ):
        shown = text_of_windows([*ARGV, *argv, *validation])
        assert set(shown.split()) & {"the", "cat", "def", "return"}
    assert text_of_windows(
        [*ARGV, *tokens(root / "by-code"), f"--model.hf_assets_path={root}/code"]
    )


def refusals(root: Path) -> dict[str, tuple[list[str], str, str]]:
    """Return command lines by what is wrong with them, with the two names that the message must
    have.
    """
    code, cats, in_bytes = root / "by-code", root / "by-cats", root / "by-bytes"
    validation = [
        "--validation.enable",
        "--validation.dataset=tokens",
        f"--validation.dataset_path={cats}",
    ]
    return {
        "another tokenizer": (
            [*tokens(code), f"--model.hf_assets_path={root}/cats"],
            f"{root}/code",
            f"{root}/cats",
        ),
        "a file of it": (
            [*tokens(code / "shard-000000.bin"), f"--model.hf_assets_path={root}/cats"],
            f"{root}/code",
            f"{root}/cats",
        ),
        "bytes": (
            [*tokens(in_bytes), f"--model.hf_assets_path={root}/cats"],
            "bytes",
            f"{root}/cats",
        ),
        "two": (mixture(code, cats), f"{root}/cats", f"{code}"),
        "bytes beside a tokenizer": (mixture(code, in_bytes), "bytes", f"{code}"),
        "validation": ([*tokens(code), *validation], f"{root}/cats", f"{code}"),
    }


WRONG = [
    "another tokenizer",
    "a file of it",
    "bytes",
    "two",
    "bytes beside a tokenizer",
    "validation",
]


@pytest.mark.parametrize("wrong", WRONG)
def test_shards_of_another_tokenizer_are_refused_with_both_names(root, wrong):
    argv, theirs, ours = refusals(root)[wrong]
    with pytest.raises(UserError) as caught:
        text_of_windows([*ARGV, *argv])
    message = str(caught.value)
    assert (
        f"was prepared with the tokenizer {theirs} (" in message
        and f"but the job's is {ours} (" in message
    )


def test_the_launcher_refuses_them_before_anything_starts(root):
    argv, theirs, ours = refusals(root)["another tokenizer"]
    with pytest.raises(UserError, match="nothing was started") as caught:
        check_machine(job([*ARGV, *argv], 1), "cpu", 1)
    assert theirs in str(caught.value) and ours in str(caught.value)
    argv = [*ARGV, *tokens(root / "raw"), "--validation.enable"]
    with pytest.raises(
        UserError,
        match="nothing was started\n.*python-stdlib-validation.*: this needs a tokenizer, ",
    ):
        check_machine(job(argv, 1), "cpu", 1)


def test_a_manifest_without_a_fingerprint_is_compared_by_the_copy_of_the_tokenizer(root, tmp_path):
    prepare({"text": text_files("x", str(root / "text"))}, str(root / "code"), tmp_path / "old", 1)
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    assert manifest.pop("tokenizer_fingerprint") == load_tokenizer(str(root / "code")).fingerprint
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest))
    assert text_of_windows([*ARGV, *tokens(tmp_path / "old")])
    with pytest.raises(UserError, match="was prepared with the tokenizer"):
        text_of_windows([*ARGV, *tokens(tmp_path / "old"), f"--model.hf_assets_path={root}/cats"])


def test_another_end_token_is_another_tokenizer(root, tmp_path):
    """Text is prepared again, in a cache and by the command, and prepared shards are refused."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((root / "code" / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    text = ["--training.dataset=text", f"--training.dataset_path={root}/text"]
    ends = []
    for assets in (root / "code", tmp_path):
        opened = job(
            [*ARGV, *text, f"--model.hf_assets_path={assets}", "--training.document_mask"], 1
        )
        tokenizer = open_tokenizer(opened)
        data = training_data(opened, tokenizer, 0)
        ends.append([tokenizer.end, data._sources[0]._source.end])
    assert ends[0][0] == ends[0][1] != ends[1][0] == ends[1][1]
    with pytest.raises(UserError, match="end token 0.*, but the job's is .*, end token [^0]"):
        text_of_windows([*ARGV, *tokens(root / "by-code"), f"--model.hf_assets_path={tmp_path}"])
    with pytest.raises(UserError, match="holds other data or another tokenizer's"):
        prepare({"text": text_files("x", str(root / "text"))}, str(tmp_path), root / "by-code", 1)


def test_a_mixture_without_shards_needs_a_tokenizer_for_its_text(root):
    """`training.dataset`, which a mixture replaces, decides nothing."""
    part = f'{{dataset = "text", dataset_path = "{root}/text", weight = 1.0}}'
    with pytest.raises(ConfigError, match="model.hf_assets_path"):
        small = "--model.overrides.vocab_size=100"
        job([*ARGV, small, "--training.dataset=tokens", f"--training.mixture=[{part}]"], 1)


def test_a_folder_with_a_model_alone_serves_where_all_data_are_shards(root, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assets = f"--model.hf_assets_path={tmp_path}"
    opened = open_tokenizer(job([*ARGV, assets, *tokens(root / "raw")], 1))
    assert opened is None or opened.assets == ""
    with pytest.raises(UserError, match="cannot read tokenizer.json there"):
        open_tokenizer(job([*ARGV, assets], 1))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="cannot read tokenizer.json there"):
        open_tokenizer(job([*ARGV, assets, *tokens(root / "raw")], 1))


def test_bytes_may_be_fewer_than_the_vocabulary():
    opened = open_tokenizer(job(ARGV, 1))
    assert opened and opened.vocab_size == 256 and opened.decode([104, 599, 105]) == "h\ufffdi"


@pytest.mark.parametrize(
    "shape",
    [
        "as a text",
        "as a table",
        "in special_tokens_map.json",
        "of several added tokens",
        "with ids of a larger one",
    ],
)
def test_tokens_that_only_the_config_of_a_tokenizer_defines_have_the_ids_of_transformers(
    tmp_path, shape
):
    """TorchTitan's test tokenizer is such a folder: its tokenizer.json lacks the end-of-text
    token.
    """
    transformers = pytest.importorskip("transformers", reason="the oracle for ids")
    make_assets(tmp_path, ["the cat sat on the mat"], 300)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    for name in [token["content"] for token in document["added_tokens"]]:
        del document["model"]["vocab"][name]
    vocabulary = {token: number for number, token in enumerate(document["model"]["vocab"])}
    document["model"]["vocab"], document["added_tokens"] = vocabulary, []
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    names = (
        ["<|begin|>", "<|end_of_text|>"]
        if "several" in shape or "larger" in shape
        else ["<|end_of_text|>"]
    )
    options = {
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    first = len(vocabulary)
    declared = 128_000 if "larger" in shape else first
    added = {
        str(declared + number): {"content": name, **options} for number, name in enumerate(names)
    }
    eos: Any = {"content": names[-1], **options} if shape == "as a table" else names[-1]
    settings: dict[str, Any] = {
        "added_tokens_decoder": added,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if shape == "in special_tokens_map.json":
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    else:
        settings["eos_token"] = eos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = load_tokenizer(str(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, eos_token=names[-1])
    text = f"the cat{names[-1]} sat"
    assert ours.end == theirs.convert_tokens_to_ids(names[-1]) == first + len(names) - 1
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode([ours.end]) == names[-1] and ours.vocab_size == len(theirs)


@pytest.mark.parametrize(
    "declared",
    [["a"], {"x": {"content": "a"}}, {"1": "a"}, {"1": {"id": 1}}, {"1": {"content": 1}}],
)
def test_added_tokens_that_are_no_table_of_tokens_are_named(tmp_path, declared):
    make_assets(tmp_path, ["the cat"], 300)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    with pytest.raises(UserError, match="added_tokens_decoder in tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


def test_an_end_token_that_is_nowhere_defined_is_named(tmp_path):
    make_assets(tmp_path, ["the cat"], 300)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = []
    document["model"]["vocab"].pop("<|end_of_text|>")
    document["model"]["vocab"] = {
        token: number for number, token in enumerate(document["model"]["vocab"])
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    with pytest.raises(
        UserError, match=r'eos_token is "<\|eot\|>", which tokenizer.json does not have'
    ):
        load_tokenizer(str(tmp_path))
