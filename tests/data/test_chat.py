"""Chats: trained is exactly what the assistant says; a template can run no code, and those that trl
ships give the text, ids and masks that transformers gives.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import numpy as np
import pytest

from tests.data.assets import make_assets
from tests.jobs import TINY, run_to_end
from tests.messages import refused, says
from titanlite.data.chat import BEGIN, END, READ_ONLY, TODAY, ChatTokenizer, _spans
from titanlite.data.packing import IGNORED, LABELS, TOKENS, Concatenated, Packed
from titanlite.data.sources import find_documents, open_source
from titanlite.data.tokenizer import load_tokenizer
from titanlite.data.trained import Trained
from titanlite.errors import UserError

DEBUG = Path(__file__).parents[2] / "train_configs" / "sft_debug"
PLAIN = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As Qwen 3: only the last turn thinks.
CHANGING = PLAIN.replace("m.content", "(m.content if loop.last else m.content.split('|')[-1])")
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "how are you 漢字 👍🏽"},
    {"role": "user", "content": "world"},
    {"role": "assistant", "content": "fine"},
]


def folder(path: Path, template: str, chats: list = [CHAT], key: str = "messages") -> str:  # noqa: B006
    """Write a tokenizer with a template, and chats."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_bytes((DEBUG / "tokenizer.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if template:
        (path / "chat_template.jinja").write_text(template)
    (path / "chats.jsonl").write_text("".join(json.dumps({key: chat}) + "\n" for chat in chats))
    return str(path)


def trained_text(assets: str, messages: list) -> list[str]:
    """Return the text of each sample, with brackets around its trained tokens."""
    tokenizer = ChatTokenizer(assets)
    found = []
    for ids in tokenizer.encode_batch(tokenizer.texts(messages)):
        text = ""
        for trained, group in itertools.groupby(ids.tolist(), lambda token: token < READ_ONLY):
            plain = [token % READ_ONLY for token in group]
            part = tokenizer._backend.decode(plain, skip_special_tokens=False)
            text += f"[{part}]" if trained else part
        found.append(text)
    return found


@pytest.mark.parametrize(
    ("template", "end"),
    [((DEBUG / "chat_template.jinja").read_text(), "]\n"), (PLAIN, "\n]")],
    ids=["by marks", "by prefixes"],
)
def test_the_assistants_tokens_are_trained_and_no_other(tmp_path, template, end):
    assets = folder(tmp_path, template)
    assert trained_text(assets, CHAT) == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[how are you 漢字 👍🏽"
        f"<|im_end|>{end}"
        f"<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\n[fine<|im_end|>{end}"
    ]


def test_a_turn_is_a_sample_where_a_later_one_changes_it(tmp_path):
    assets = folder(tmp_path, CHANGING)
    assert len(trained_text(assets, CHAT)) == 1
    thinking = [{**each, "content": f"hm|{each['content']}"} for each in CHAT]
    with refused("'hm|how"):
        trained_text(assets, [CHAT[0], thinking[1], CHAT[2], thinking[3]])
    eos_at_the_end = PLAIN + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    first, second = trained_text(folder(tmp_path, eos_at_the_end), CHAT)
    assert first.endswith("assistant\n[how are you 漢字 👍🏽<|im_end|>\n<|endoftext|>]")
    assert second.endswith(
        "漢字 👍🏽<|im_end|>\n<|im_start|>user\nworld<|im_end|>\n"
        "<|im_start|>assistant\n[fine<|im_end|>\n<|endoftext|>]"
    )


def test_windows_ignore_the_labels_of_what_is_only_read(tmp_path):
    chats = [CHAT, CHAT[:2]]
    assets = folder(tmp_path, PLAIN, chats)
    source = open_source("training", "chat", f"{assets}/chats.jsonl", load_tokenizer(assets), 259)
    tokenizer = ChatTokenizer(assets)
    ids = [next(iter(tokenizer.encode_batch(tokenizer.texts(chat)))) for chat in chats]
    stream = np.concatenate(ids)

    def filled(windows: Concatenated | Packed, size: int) -> np.ndarray:
        out = np.empty((windows.samples, 4, size), np.int64)
        for number, window in enumerate(out):
            Trained(windows).fill(window, number)
        return out

    for number, window in enumerate(filled(Concatenated(source, 8, True, "k"), 8)):
        part = stream[number * 8 : number * 8 + 9]
        assert (window[TOKENS] == part[:-1] % READ_ONLY).all()
        assert (window[LABELS] == np.where(part[1:] < READ_ONLY, part[1:], IGNORED)).all()
    packed = filled(Packed(source, 200, "k"), 200)
    assert packed[:, TOKENS].max() < READ_ONLY
    assert (packed[:, LABELS] != IGNORED).sum() == (stream < READ_ONLY).sum()


def chat_options(assets: str) -> list[str]:
    given = f"--training.dataset=chat --training.dataset_path={assets}/chats.jsonl "
    given += f"--model.hf_assets_path={assets} --model.overrides.vocab_size=259 "
    given += "--training.packing=first-fit --training.document_mask --training.seq_len=96"
    return [*TINY, *given.split()]


def test_a_template_can_run_no_code(tmp_path):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = ChatTokenizer(folder(tmp_path, attack))
    with refused("'__class__'"):
        tokenizer.texts(CHAT)
    with refused("template fails"):
        ChatTokenizer(folder(tmp_path, "{{ messages.append(1) }}")).texts(CHAT)


@pytest.mark.parametrize(
    ("template", "chat", "named"),
    [
        ("", CHAT, "tokenizer_config.json"),
        ("{% for %}", CHAT, "template is invalid"),
        ("{{ raise_exception('only tools') }}", CHAT, "only tools"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", CHAT, "loses"),
        (PLAIN, CHAT[:1], "chats.jsonl: line 1: no message"),
        (PLAIN, "hello", 'line 1: "hello"'),
        (PLAIN, [{"role": "assistant", "content": [{"type": "image"}]}], "line 1: "),
        (PLAIN, [{"role": "assistant", "content": "\ud83d"}], "surrogate pair"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line_before_anything_starts(
    tmp_path, tool, template, chat, named
):
    assets = folder(tmp_path, template, [chat])
    options = [word for word in chat_options(assets) if "preflight" not in word]
    out = f"--job.dump_folder={tmp_path}/out"
    says(tool("train", "--config", "debug.toml", *options, out, code=2), named)
    assert not (tmp_path / "out").exists()


def test_a_missing_column_and_another_one_are_named(tmp_path):
    assets = folder(tmp_path, PLAIN, key="turns")
    args = ("training", "chat", f"{assets}/chats.jsonl", load_tokenizer(assets), 259)
    with refused('chats.jsonl: line 1: no "messages"'):
        open_source(*args)
    assert open_source(*args, "turns").tokens > 20
    with refused("chat template"):
        open_source("training", "chat", args[2], load_tokenizer(""), 259)


def test_the_date_of_a_template_is_always_the_same(tmp_path):
    tokenizer = ChatTokenizer(folder(tmp_path, "{{ strftime_now('%d %B %Y') }}" + PLAIN))
    assert tokenizer.texts(CHAT)[0].startswith("01 January 2025<|im_start|>")
    assert BEGIN not in tokenizer._render(CHAT) and END not in tokenizer._render(CHAT)


def test_a_content_in_parts_is_one_text(tmp_path):
    parts = [{"type": "text", "text": "how are you"}, {"type": "text", "text": " 漢字 👍🏽"}]
    in_parts = [CHAT[0], {**CHAT[1], "content": parts}, *CHAT[2:]]
    assets = folder(tmp_path, PLAIN)
    assert trained_text(assets, in_parts) == trained_text(assets, CHAT)


def test_data_show_has_documents_apart_and_what_is_trained_in_brackets(tmp_path, tool):
    assets = folder(tmp_path, PLAIN, [CHAT[:2]] * 3)

    def show(name: str, size: int, *more: str) -> str:
        return tool("data show", tmp_path / name, f"--training.seq_len={size}", "--n=1", *more)

    packed = (f"--model.hf_assets_path={assets}", "--training.packing=first-fit", "--ids")
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    says(show("chats.jsonl", 64, *packed), f"{'-' * 20}\n{head}⟦how are you", "⟦ 71 78")
    (tmp_path / "b.txt").write_text("abcdefgh" * 9)
    shown = show("b.txt", 8).splitlines()
    assert shown[0].startswith("⟦like this⟧: trained") and not shown[1]
    assert shown[2] == "window 0: 8 of 8 trained" and shown[4][1] == "⟦"


@pytest.mark.parametrize("name", ["notes.txt", "more.parquet"])
def test_a_file_that_holds_no_chats_is_named(tmp_path, name):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / name).write_text("hello")
    with refused(name, ".jsonl"):
        find_documents("training", "chat", str(tmp_path))


def test_generate_puts_a_question_into_the_template_and_needs_one(pool, tmp_path, tool):
    assets = folder(tmp_path / "a", PLAIN)
    saving = ["--checkpoint.enable", "--training.steps=1"]
    ask = ("generate", "--chat", "--prompt=hello", "--tokens=1", "--checkpoint")
    pool.run(run_to_end, [*chat_options(assets), *saving], str(tmp_path / "chats"), world=1)
    question = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tool(*ask, tmp_path / "chats").startswith(question)
    pool.run(run_to_end, [*TINY, *saving], str(tmp_path / "text"), world=1)
    says(tool(*ask, tmp_path / "text", code=2), "chat template")


WHEEL = "trl==1.16.0"
TALK = [*CHAT[:3], {"role": "assistant", "content": "  you are \n"}]
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
    try:
        want = theirs.apply_chat_template(chat, tokenize=False)
    except Exception as error:
        with refused("template fails"):
            own.texts(chat)
        assert "not supported" in str(error) or "no attribute 'text'" in str(error)
        return []
    found = ["text"] * (_spans(own._render(chat))[0] != want)
    asked = {"tokenize": False, "add_generation_prompt": True}
    found += ["prompt"] * (own.prompt(chat[:-1]) != theirs.apply_chat_template(chat[:-1], **asked))
    try:
        samples = own.texts(chat)
    except UserError as error:  # a template that takes only parts loses a plain text
        says(error, "loses")
        return found + ["refused"] * all(each["content"] in want for each in chat)
    if "{% generation" in theirs.chat_template or "{%- generation" in theirs.chat_template:
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        encoded = theirs.apply_chat_template(chat, **options)
        (ids,) = own.encode_batch(samples)
        found += ["ids"] * ((ids % READ_ONLY).tolist() != encoded["input_ids"])
        mask = (ids < READ_ONLY).astype(np.int64).tolist()
        found += ["mask"] * (mask != encoded["assistant_masks"])
    return found


@pytest.mark.nightly
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
    assert len(sources) == 72 and not wrong
