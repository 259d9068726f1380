"""Turn chats into token ids with the tokenizer's template, and mark those that the assistant wrote.

A template is untrusted code: it runs in Jinja2's sandbox, with a fixed date. The assistant's text
is what the template marks with {% generation %}, or otherwise what a turn adds to the chat before
it. If later turns change an earlier one, each turn is a sample.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titanlite.data.fingerprint import fingerprint
from titanlite.data.tokenizer import JsonTokenizer
from titanlite.errors import UserError, first_line

READ_ONLY = 1 << 31
"""Added to the id of a token that is read but not predicted."""
BEGIN = "\udc00"
END = "\udc01"
"""Marks around trained text: halves of surrogate pairs, which text never contains."""
TODAY = datetime(2025, 1, 1)
"""The date for templates; with the real one, data would differ every day."""


class Generation(Extension):
    """The tag {% generation %}, which puts marks around its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return BEGIN + caller() + END


class ChatTokenizer(JsonTokenizer):
    """A tokenizer for chats, whose texts have marks around the trained parts."""

    def __init__(self, assets: str) -> None:
        if not assets:
            why = "chats need a tokenizer with a chat template: a folder in model.hf_assets_path"
            raise UserError(why)
        super().__init__(Path(assets))
        self.end = -1  # no end token is added to a chat
        self.vocab_size += READ_ONLY
        self._backend.post_processor = None  # the template writes all special tokens
        source = _find_template(Path(assets), self.settings)
        self._template = _compile(source)
        self._special = dict[str, Any]()
        for name, value in self.settings.items():
            if name.endswith("_token"):
                self._special[name] = value["content"] if isinstance(value, dict) else value
        self.fingerprint = fingerprint(f"{self.fingerprint} {self._special} {source}")

    def texts(self, value: Any) -> list[str]:
        """Return the samples of a chat."""
        json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        messages = _messages(value)
        turns = [n for n, each in enumerate(messages) if each.get("role") == "assistant"]
        trained = {n for n in turns if _is_trained(messages[n])}
        if not trained:
            if turns:
                raise UserError("no message of the assistant is trained: all have weight 0")
            raise UserError("no message of the assistant, so there is nothing to train on")
        samples = self._samples(messages, turns, trained)
        text, _ = _spans(samples[-1])
        for message in messages[: turns[-1] + 1]:
            content = message.get("content") or ""
            # Templates may drop the thoughts of earlier turns.
            if content.rpartition("</think>")[2].strip() not in text:
                raise UserError(f"the chat template loses the message {content[:40]!r}")
        return samples

    def prompt(self, messages: list[Any]) -> str:
        """Return the text of a chat, up to where the assistant answers."""
        return _spans(self._render(messages, prompts=True))[0]

    def encode_batch(self, texts: list[str]) -> Iterator[Any]:
        """Yield the ids of each text; a token is trained if one of its characters is."""
        plain, spans = zip(*map(_spans, texts), strict=True)
        encodings = self._backend.encode_batch(plain, add_special_tokens=False)
        for encoding, trained in zip(encodings, spans, strict=True):
            begins, stops = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            ids = np.asarray(encoding.ids, dtype=np.int64) + READ_ONLY
            for begin, stop in trained:
                ids[(begins < stop) & (stops > begin)] %= READ_ONLY
            yield ids

    def _render(self, messages: list[Any], prompts: bool = False) -> str:
        given = {"messages": messages, "add_generation_prompt": prompts, **self._special}
        try:
            return self._template.render(tools=None, documents=None, **given)
        except Exception as error:  # a template may raise anything
            raise UserError(f"the chat template fails: {first_line(error)}") from None

    def _samples(self, messages: list[Any], turns: list[int], trained: set[int]) -> list[str]:
        whole = self._render(messages)
        if BEGIN in whole:
            return [_without_marks(whole, [turn not in trained for turn in turns])]
        found = []
        for turn in turns:
            if turn not in trained:
                continue
            before = self._render(messages[:turn], prompts=True)
            text = self._render(messages[: turn + 1])
            found.append((text, len(commonprefix([before, text]))))
        if not all(whole.startswith(text) for text, _ in found):
            return [_mark(text, begin, len(text)) for text, begin in found]
        for text, begin in reversed(found):
            whole = _mark(whole, begin, len(text))
        return [whole]


def _is_trained(message: dict[str, Any]) -> bool:
    """Return whether a message's weight is 1, the default (OpenAI's key; axolotl's is "train")."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise UserError(f'a message has "weight": {json.dumps(weight)}; legal: 0 and 1')
    return bool(weight) and message.get("train", True) is not False


def _without_marks(marked: str, dropped: list[bool]) -> str:
    """Return a text without the marks around some of the assistant's turns."""
    if not any(dropped):
        return marked
    first, *pieces = marked.split(BEGIN)
    if len(pieces) != len(dropped):
        raise UserError(
            f"the chat template marks {len(pieces)} parts of {len(dropped)} messages of the "
            'assistant, so that none can be left out by "weight": 0 or "train": false'
        )
    parts = []
    for piece, drop in zip(pieces, dropped, strict=True):
        if drop:
            parts.append("".join(piece.rsplit(END, 1)))
        else:
            parts.append(BEGIN + piece)
    return first + "".join(parts)


def _mark(text: str, begin: int, stop: int) -> str:
    return text[:begin] + BEGIN + text[begin:stop] + END + text[stop:]


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without its marks, and the spans between them."""
    text = ""
    spans = []
    for piece in marked.split(BEGIN):
        trained, _, rest = piece.rpartition(END)
        spans.append((len(text), len(text + trained)))
        text += trained + rest
    return text, spans


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat, with the parts of each text joined."""
    found = []
    try:
        for message in value:
            content = message.get("content")
            if isinstance(content, list):
                message = {**message, "content": "".join(part["text"] for part in content)}
            elif not isinstance(content, str) and "tool_calls" not in message:
                raise TypeError
            found.append(message)
    except (AttributeError, KeyError, TypeError):
        shown = json.dumps(value)[:40]
        raise UserError(f'{shown} is not a list of {{"role": …, "content": "…"}}') from None
    return found


def _find_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several templates, by name
        found = {each["name"]: each["template"] for each in found}.get("default")
    if not found:
        why = "no chat template in its chat_template.jinja or tokenizer_config.json"
        raise UserError(why, "model.hf_assets_path", str(folder))
    return found


def _compile(source: str) -> Template:
    """Compile a template with the names that transformers provides."""

    def fail(message: str) -> NoReturn:
        raise TemplateError(message)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    sandbox: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    sandbox.globals |= {"raise_exception": fail, "strftime_now": TODAY.strftime}
    try:
        return sandbox.from_string(source)
    except TemplateError as error:
        raise UserError(f"the chat template is invalid: {first_line(error)}") from None
