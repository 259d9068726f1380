"""Text to token ids and back: a Hugging Face tokenizer.json, or bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

import numpy as np

from titanlite.config.check import BYTE_VOCABULARY
from titanlite.errors import UserError


class Tokenizer(Protocol):
    vocab_size: int
    end: int
    """The id that stands between documents."""
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token; the zero byte, which no text holds, ends a document."""

    vocab_size = BYTE_VOCABULARY
    end = 0
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, tokens: list[int]) -> str:
        return np.asarray(tokens, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class JsonTokenizer:
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f'model.hf_assets_path = "{folder}": cannot read tokenizer.json there: {error.strerror}'
            ) from None
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end = self._end_of_text(folder)

    def _end_of_text(self, folder: Path) -> int:
        """The id of tokenizer_config.json's eos_token, else of one of the usual names."""
        settings = folder / "tokenizer_config.json"
        named = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.is_file() else None
        named = named.get("content") if isinstance(named, dict) else named
        for name in (named, "<|end_of_text|>", "<|endoftext|>", "</s>"):
            token = self._backend.token_to_id(name) if name else None
            if token is not None:
                return token
        raise UserError(f"{folder}: no end-of-text token; name it as eos_token in tokenizer_config.json")

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


def open_tokenizer(hf_assets_path: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of model.hf_assets_path, refused where it has ids beyond the model's vocabulary."""
    tokenizer: Tokenizer = JsonTokenizer(Path(hf_assets_path)) if hf_assets_path else ByteTokenizer()
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f'model.hf_assets_path = "{hf_assets_path}": the tokenizer has ids up to {tokenizer.vocab_size - 1}, '
            f"beyond the model's vocabulary of {vocab_size}"
        )
    return tokenizer
