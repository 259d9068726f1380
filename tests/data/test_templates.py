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

from tests.data.assets import make_assets
from tests.messages import refused, says
from titanlite.data.chat import READ_ONLY, TODAY, ChatTokenizer, _spans

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
SPECIAL = "</s> <s> <|im_start|> <|im_end|> <|begin_of_text|> <|eot_id|> <bos> <end_of_turn>"


def templates(folder: Path) -> dict[str, str]:
    """Return trl's templates by name, from its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"{WHEEL} can't be downloaded: {done.stderr.strip()[-200:]}")
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".jinja")]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


def differences(own: ChatTokenizer, theirs, chat: list[dict]) -> list[str]:
    """Compare one chat's text, prompt, and with marks its ids and mask; [] if both refuse it."""
    given = chat
    if own._in_parts:  # transformers leaves that to its caller
        parts = [[{"type": "text", "text": each["content"]}] for each in chat]
        given = [{**each, "content": part} for each, part in zip(chat, parts, strict=True)]
    try:
        want = theirs.apply_chat_template(given, tokenize=False)
    except Exception as error:
        with refused("template fails"):
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
    folder = tmp_path / "assets"
    folder.mkdir()
    assets = str(make_assets(folder, ["hello world how are you"], 400, SPECIAL.split()))
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{assets}/tokenizer.json", **settings
    )
    wrong, sources = {}, templates(tmp_path)
    for name, source in sources.items():
        (folder / "chat_template.jinja").write_text(source)
        own, theirs.chat_template = ChatTokenizer(assets), source
        for kind, chat in CHATS.items():
            if found := differences(own, theirs, chat):
                wrong[f"{name}, {kind}"] = found
        says(own.describe(), "trained on")
    assert len(sources) == 72 and not wrong
