"""Chats: trained is exactly what the assistant says, on any mesh; a template can run no code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.jobs import TINY, run_to_end
from titanlite.cli import main
from titanlite.data.chat import BEGIN, END, READ_ONLY, ChatTokenizer
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
        text, inside = b"", False
        for token in ids.tolist():
            if inside != (token < READ_ONLY):
                text += b"]" if inside else b"["
                inside = not inside
            piece = str(tokenizer._backend.id_to_token(token % READ_ONLY))
            table = {v: k for k, v in BYTES.items()}
            is_special = piece.startswith("<|")
            text += piece.encode() if is_special else bytes(table[c] for c in piece)
        found.append((text + b"]" * inside).decode())
    return found


def byte_letters() -> dict[int, str]:
    """Return GPT-2's letter for each byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {b: chr(b) for b in own} | {b: chr(256 + n) for n, b in enumerate(others)}


BYTES = byte_letters()


@pytest.mark.parametrize(
    ("template", "how", "end"),
    [
        ((DEBUG / "chat_template.jinja").read_text(), "by the template's marks", "]\n"),
        (PLAIN, "as what a turn adds", "\n]"),
    ],
)
def test_the_assistants_tokens_are_trained_and_no_other(tmp_path, template, how, end):
    assets = folder(tmp_path, template)
    assert trained_text(assets, CHAT) == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n[how are you 漢字 👍🏽"
        f"<|im_end|>{end}"
        f"<|im_start|>user\nworld<|im_end|>\n<|im_start|>assistant\n[fine<|im_end|>{end}"
    ]
    assert how in ChatTokenizer(assets).describe()


def test_a_turn_is_a_sample_where_a_later_one_changes_it(tmp_path):
    assets = folder(tmp_path, CHANGING)
    assert len(trained_text(assets, CHAT)) == 1
    thinking = [{**each, "content": f"hm|{each['content']}"} for each in CHAT]
    thinking[0], thinking[2] = CHAT[0], CHAT[2]
    with pytest.raises(UserError, match="loses the message 'hm|how"):
        trained_text(assets, thinking)
    eos_at_the_end = PLAIN + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    first, second = trained_text(folder(tmp_path, eos_at_the_end), CHAT)
    assert first.endswith("assistant\n[how are you 漢字 👍🏽<|im_end|>\n<|endoftext|>]")
    assert second.endswith(
        "漢字 👍🏽<|im_end|>\n<|im_start|>user\nworld<|im_end|>\n"
        "<|im_start|>assistant\n[fine<|im_end|>\n<|endoftext|>]"
    )
    assert "a sample a turn, since" in ChatTokenizer(str(tmp_path)).describe()


def test_windows_ignore_the_labels_of_what_is_only_read(tmp_path):
    assets = folder(tmp_path, PLAIN, [CHAT, CHAT[:2]])
    source = open_source("training", "chat", f"{assets}/chats.jsonl", load_tokenizer(assets), 259)
    tokenizer = ChatTokenizer(assets)
    ids = [next(iter(tokenizer.encode_batch(tokenizer.texts(c)))) for c in (CHAT, CHAT[:2])]
    assert source.document_ends().tolist() == [len(ids[0]), len(ids[0]) + len(ids[1])]
    stream = np.concatenate(ids)
    for windows in (Concatenated(source, 8, True, "k"), Packed(source, 200, "k")):
        size = windows._seq_len
        out = np.empty((4, size), np.int64)
        seen = 0
        for number in range(windows.samples):
            Trained(windows).fill(out, number)
            assert out[TOKENS].max() < READ_ONLY
            seen += int((out[LABELS] != IGNORED).sum())
            if isinstance(windows, Concatenated):
                part = stream[number * size : (number + 1) * size + 1]
                want = np.where(part[1:] < READ_ONLY, part[1:], IGNORED)
                assert (out[LABELS] == want).all() and (out[TOKENS] == part[:-1] % READ_ONLY).all()
        if isinstance(windows, Packed):
            assert seen == int((stream < READ_ONLY).sum())


def chat_options(assets: str) -> list[str]:
    given = f"--training.dataset=chat --training.dataset_path={assets}/chats.jsonl "
    given += f"--model.hf_assets_path={assets} --model.overrides.vocab_size=259 "
    given += "--training.packing=first-fit --training.document_mask --training.seq_len=96"
    return [*TINY, *given.split()]


def losses(path: Path) -> list[float]:
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


LAYOUTS = {
    "1": (1, "--training.local_batch_size=4"),
    "dp2": (2, "--training.local_batch_size=1"),
    "cp2": (2, "--parallelism.context_parallel_degree=2"),
    "pp2": (2, "--parallelism.pipeline_parallel_degree=2"),
}


def test_the_loss_is_over_the_trained_tokens_on_every_mesh_and_after_a_resume(pool, tmp_path):
    assets = folder(tmp_path / "a", PLAIN, [CHAT, CHAT[:2], CHAT[2:], CHAT] * 3)
    argv = [*chat_options(assets), "--training.global_batch_size=4", "--checkpoint.enable"]
    argv += ["--checkpoint.interval=2", "--training.steps=4", "--debug.seed=1"]
    found = {}
    for name, (world, more) in LAYOUTS.items():
        rank = pool.run(run_to_end, [*argv, more], str(tmp_path / name), world=world)[0]
        found[name] = losses(tmp_path / name)
        assert any("found as what a turn adds" in line for line in rank["start"]), "no launcher"
        assert len(found[name]) == 4
        assert found[name] == pytest.approx(found["1"], rel=1e-5), name
    begun = [*argv[:-3], "--training.steps=2", "--debug.seed=1", "--lr_scheduler.total_steps=4"]
    whole = [*argv, "--lr_scheduler.total_steps=4"]
    for each, world in ((begun, 1), (whole, 2)):
        more = LAYOUTS["1" if world == 1 else "dp2"][1]
        pool.run(run_to_end, [*each, more], str(tmp_path / "resumed"), world=world)
    assert losses(tmp_path / "resumed") == pytest.approx(found["1"], rel=1e-5)


@pytest.mark.exhaustive
def test_the_debug_config_runs_anywhere_and_learns_its_answers(tmp_path):
    command = [sys.executable, "-m", "titanlite", "train", "--config", "sft_debug.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "outputs")[-1] < 0.1 < 3 < losses(tmp_path / "outputs")[0]
    assert "assistant\n    Paris." in done.stdout
    assert "found by the template's marks" in done.stdout + done.stderr


def test_a_template_can_run_no_code(tmp_path):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = ChatTokenizer(folder(tmp_path, attack))
    with pytest.raises(UserError, match="template fails: access to attribute '__class__'"):
        tokenizer.texts(CHAT)
    with pytest.raises(UserError, match="template fails: access to attribute 'append'|unsafe"):
        ChatTokenizer(folder(tmp_path, "{{ messages.append(1) }}")).texts(CHAT)


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        ("", CHAT, "no chat template there, in chat_template.jinja or tokenizer_config.json"),
        ("{% for %}", CHAT, "the chat template is none: "),
        ("{{ raise_exception('only tools') }}", CHAT, "the chat template fails: only tools"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", CHAT, "loses the message"),
        (PLAIN, CHAT[:1], "chats.jsonl: line 1: no message of the assistant"),
        (PLAIN, "hello", 'line 1: "hello" is not a list of'),
        (PLAIN, [{"role": "assistant", "content": 3}], "is not a list of"),
        (PLAIN, [{"role": "usr", "content": "a"}, *CHAT], 'the role "usr" is not in the chat'),
        (PLAIN, [{"content": "a"}, *CHAT], 'the role "None" is not in the chat template'),
        (PLAIN, [{"role": "assistant", "content": [{"type": "image"}]}], "is not a list of"),
        (PLAIN, [{"role": "assistant", "content": "\ud83d"}], "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line_before_anything_starts(
    tmp_path, capsys, template, chat, message
):
    assets = folder(tmp_path, template, [chat])
    options = [word for word in chat_options(assets) if "preflight" not in word]
    out = f"--job.dump_folder={tmp_path}/out"
    assert main(["train", "--config", "debug.toml", *options, out]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err and "nothing was started" in err


def test_a_missing_column_and_another_one_are_named(tmp_path):
    assets = folder(tmp_path, PLAIN, key="turns")
    args = ("training", "chat", f"{assets}/chats.jsonl", load_tokenizer(assets), 259)
    with pytest.raises(UserError, match='chats.jsonl: line 1: no "messages" in it'):
        open_source(*args)
    assert open_source(*args, "turns").tokens > 20
    with pytest.raises(UserError, match="chats need a tokenizer with a chat template"):
        open_source("training", "chat", args[2], load_tokenizer(""), 259)


def test_a_template_that_ends_no_turn_or_has_a_date_is_told(tmp_path):
    no_end = PLAIN.replace("<|im_end|>", "")
    assert "will not learn to stop" in ChatTokenizer(folder(tmp_path, no_end)).describe()
    tokenizer = ChatTokenizer(folder(tmp_path, "{{ strftime_now('%d %B %Y') }}" + PLAIN))
    assert "its date is always 2025-01-01, not today's" in tokenizer.describe()
    assert tokenizer.texts(CHAT)[0].startswith("01 January 2025<|im_start|>")
    assert "will not learn" not in tokenizer.describe()
    other_end = PLAIN.replace("<|im_end|>", "<|im_start|>")
    told = "stops at <|endoftext|>, but a turn ends with <|im_start|>"
    assert told in ChatTokenizer(folder(tmp_path, other_end)).describe()
    prompt = PLAIN.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
    assert "ends in '<think>', which no" in ChatTokenizer(folder(tmp_path, prompt)).describe()
    assert BEGIN not in tokenizer._render(CHAT) and END not in tokenizer._render(CHAT)


def test_text_in_parts_is_one_text_and_a_template_gets_the_form_that_it_takes(tmp_path):
    parts = [{"type": "text", "text": "how are you"}, {"type": "text", "text": " 漢字 👍🏽"}]
    in_parts = [CHAT[0], {**CHAT[1], "content": parts}, *CHAT[2:]]
    assets = folder(tmp_path, PLAIN)
    expected = trained_text(assets, CHAT)
    assert trained_text(assets, in_parts) == expected
    for lossy in ("m.content[0].text", "m.content | map(attribute='text') | join"):
        assets = folder(tmp_path, PLAIN.replace("m.content", f"({lossy})"))
        assert trained_text(assets, CHAT) == trained_text(assets, in_parts) == expected


def test_a_question_is_put_into_the_template_as_chats_are(tmp_path):
    tokenizer = ChatTokenizer(folder(tmp_path, PLAIN))
    prompt = tokenizer.prompt(CHAT[:1])
    assert tokenizer.texts(CHAT)[0].replace(BEGIN, "").startswith(prompt + CHAT[1]["content"])


def test_data_show_has_documents_apart_and_what_is_trained_in_brackets(tmp_path, capsys):
    assets = folder(tmp_path, PLAIN, [CHAT[:2]] * 3)
    size = ["--training.seq_len=64", "--n=1"]
    given = ["data", "show", f"{assets}/chats.jsonl", f"--model.hf_assets_path={assets}"]
    assert main([*given, *size, "--training.packing=first-fit", "--ids"]) == 0
    shown = capsys.readouterr().out
    head = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert f"{'-' * 20}\n{head}⟦how are you" in shown and "⟦ 71 78" in shown
    (tmp_path / "b.txt").write_text("abcdefgh" * 9)
    assert main(["data", "show", str(tmp_path / "b.txt"), "--training.seq_len=8", "--n=1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("⟦like this⟧: trained, as targets; ") and not shown[1]
    assert shown[2] == "window 0: 8 of 8 trained" and shown[4][1] == "⟦"
    np.arange(300, 400, dtype=np.uint16).tofile(tmp_path / "c.npy")
    assert main(["data", "show", str(tmp_path / "c.npy"), "--training.seq_len=4", "--n=1"]) == 0
    assert " ⟦ " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["notes.txt", "more.parquet"])
def test_a_file_that_holds_no_chats_is_named(tmp_path, name):
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / name).write_text("hello")
    with pytest.raises(UserError, match=f"{name} holds no chats: they are lines of .jsonl"):
        find_documents("training", "chat", str(tmp_path))


def test_generate_puts_a_question_into_the_template_and_needs_one(pool, tmp_path, capsys):
    assets = folder(tmp_path / "a", PLAIN)
    saving = ["--checkpoint.enable", "--training.steps=1"]
    pool.run(run_to_end, [*chat_options(assets), *saving], str(tmp_path / "chats"), world=1)
    ask = ["generate", "--chat", "--prompt=hello", "--tokens=1", "--checkpoint"]
    assert main([*ask, str(tmp_path / "chats")]) == 0
    question = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert capsys.readouterr().out.startswith(question)
    pool.run(run_to_end, [*TINY, *saving], str(tmp_path / "text"), world=1)
    assert main([*ask, str(tmp_path / "text")]) == 2
    assert "chats need a tokenizer with a chat template" in capsys.readouterr().err
