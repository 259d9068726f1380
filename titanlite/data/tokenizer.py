"""Text to token ids and back: a Hugging Face tokenizer.json, or bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlite.config.job import Job
from titanlite.config.rules.data import BYTE_VOCABULARY
from titanlite.errors import UserError


class Tokenizer(Protocol):
    vocab_size: int
    end: int
    """The id that stands after each document."""
    fingerprint: str
    assets: str
    """The folder it was read from; empty where it needs none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> Iterator[Sequence[int] | np.ndarray]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; the zero byte, which no text holds, ends a document."""

    vocab_size = BYTE_VOCABULARY
    end = 0
    fingerprint = "bytes"
    assets = ""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts)

    def decode(self, tokens: list[int]) -> str:
        return np.asarray(tokens, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class IdsOnly:
    """For token shards that came without a tokenizer: text is ids with blanks between, documents have no end."""

    end = -1
    fingerprint = "ids"
    assets = ""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split() if word.isdigit() and int(word) < self.vocab_size]

    def encode_batch(self, texts: list[str]) -> Iterator[list[int]]:
        return map(self.encode, texts)

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class JsonTokenizer:
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f'model.hf_assets_path = "{folder}": cannot read tokenizer.json there: {error.strerror}. '
                f'To fetch one: hf download REPO --include "tokenizer*" --local-dir "{folder}"'
            ) from None
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        self._backend.no_truncation()  # a file may ask for both, and would cut every document
        self._backend.no_padding()
        self.assets = str(folder)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end = self._end_of_text(folder)

    def _end_of_text(self, folder: Path) -> int:
        """The id of tokenizer_config.json's eos_token, else of one of the usual names."""
        settings = folder / "tokenizer_config.json"
        try:
            named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
        except ValueError as error:
            raise UserError(f"{settings} is not JSON: {error}") from None
        named = named.get("content") if isinstance(named, dict) else named
        for name in (named, "<|end_of_text|>", "<|endoftext|>", "</s>"):
            token = self._backend.token_to_id(name) if name else None
            if token is not None:
                return token
        raise UserError(f"{folder}: no end-of-text token; name it as eos_token in tokenizer_config.json")

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> Iterator[list[int]]:
        return (one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False))

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


def load_tokenizer(assets: str) -> Tokenizer:
    """The tokenizer in a folder; bytes where none is named."""
    return JsonTokenizer(Path(assets)) if assets else ByteTokenizer()


def open_tokenizer(job: Job) -> Tokenizer:
    """The tokenizer of a job, refused where it has ids beyond the model's vocabulary.

    Token shards may bring their own, and can do without.
    """
    training, assets, vocab_size = job.config.training, job.config.model.hf_assets_path, job.shape.vocab_size
    if training.dataset == "tokens" and not assets:
        if not (Path(training.dataset_path) / "tokenizer.json").is_file():
            return ByteTokenizer() if vocab_size == BYTE_VOCABULARY else IdsOnly(vocab_size)
        assets = training.dataset_path
    tokenizer = load_tokenizer(assets)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f'model.hf_assets_path = "{assets}": the tokenizer has ids up to {tokenizer.vocab_size - 1}, '
            f"beyond the model's vocabulary of {vocab_size}"
        )
    return tokenizer


def printable(text: str) -> str:
    """Nothing that a model or a data set holds reaches the terminal as a control sequence."""
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
