"""The chat templates that trl ships give the text, ids and masks that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np
import pytest

from titanlite.data.chat import READ_ONLY, TODAY, ChatTokenizer, _spans
from titanlite.errors import UserError

WHEEL = "trl==1.16.0"
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "how are you 漢字 👍🏽"},
    {"role": "user", "content": "world"},
    {"role": "assistant", "content": "  you are \n"},
]
CHATS = {
    "one turn": TALK[:2],
    "two turns": TALK,
    "a system message": [{"role": "system", "content": "be"}, *TALK],
    "thoughts": [
        {**each, "content": f"<think>\nhm\n</think>\n\n{each['content']}"}
        if each["role"] == "assistant"
        else each
        for each in TALK
    ],
}
SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|begin_of_text|> <|eot_id|> <bos> <end_of_turn>".split()
)


def templates(folder: Path) -> dict[str, str]:
    """Return trl's templates by name, from its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{WHEEL} can't be downloaded: {done.stderr.strip()[-200:]}")
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


def tokenizer_folder(folder: Path) -> str:
    """Write a tokenizer of bytes with some special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator(["hello world how are you"], trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


def differences(own: ChatTokenizer, theirs, chat: list[dict]) -> list[str]:
    """Compare one chat's text, prompt, and with marks its ids and mask; [] if both refuse it."""
    given = chat
    if own._in_parts:  # transformers leaves that to its caller
        parts = [[{"type": "text", "text": each["content"]}] for each in chat]
        given = [{**each, "content": part} for each, part in zip(chat, parts, strict=True)]
    try:
        want = theirs.apply_chat_template(given, tokenize=False)
    except Exception as error:
        with pytest.raises(UserError, match="the chat template fails"):
            own.texts(chat)
        assert "not supported" in str(error)
        return []
    found = ["text"] * (_spans(own._render(chat))[0] != want)
    asked = {"tokenize": False, "add_generation_prompt": True}
    found += ["prompt"] * (own.prompt(chat[:-1]) != theirs.apply_chat_template(given[:-1], **asked))
    samples = own.texts(chat)
    if "{% generation" in theirs.chat_template or "{%- generation" in theirs.chat_template:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = theirs.apply_chat_template(given, **options)
        (ids,) = own.encode_batch(samples)
        found += ["ids"] * ((ids % READ_ONLY).tolist() != encoded["input_ids"])
        mask = (ids < READ_ONLY).astype(np.int64).tolist()
        found += ["mask"] * (mask != encoded["assistant_masks"])
    return found


@pytest.mark.long
def test_the_templates_of_trl_render_as_in_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    clock = SimpleNamespace(now=lambda: TODAY)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", clock)
    assets = tokenizer_folder(tmp_path / "assets")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{assets}/tokenizer.json", bos_token="<s>", eos_token="</s>"
    )
    wrong, sources = {}, templates(tmp_path)
    for name, source in sources.items():
        (tmp_path / "assets" / "chat_template.jinja").write_text(source)
        own, theirs.chat_template = ChatTokenizer(assets), source
        for kind, chat in CHATS.items():
            if found := differences(own, theirs, chat):
                wrong[f"{name}, {kind}"] = found
        assert "trained on what" in own.describe()
    assert len(sources) == 72 and not wrong
