"""Convert text to token ids and back: with a Hugging Face tokenizer.json, or as bytes."""

import hashlib
import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.job import Job
from titanlite.config.rules.data import BYTE_VOCABULARY
from titanlite.config.schema import JobConfig
from titanlite.data.documents import plain_text
from titanlite.data.remote import folder_of
from titanlite.data.shards import TOKENIZER_SETTINGS, read_shard_manifest
from titanlite.errors import UserError


class ByteTokenizer:
    """Every byte of UTF-8 is a token; the zero byte, which text never contains, ends a document."""

    vocab_size = BYTE_VOCABULARY
    end = 0  # the id of the end-of-text token, which follows each document
    fingerprint = "bytes"
    assets = ""  # the folder it was loaded from, if any
    texts = staticmethod(plain_text)  # the documents in a field's value

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> Iterator[np.ndarray]:
        return (np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts)

    def decode(self, tokens: list[int]) -> str:
        text = b"".join(bytes([token]) if token < self.vocab_size else b"\xff" for token in tokens)
        # Ids beyond bytes, of a larger vocabulary, are replaced as well.
        return text.decode("utf-8", errors="replace")


def byte_files() -> dict[str, bytes]:
    """Return the files of a transformers tokenizer with the same ids.

    It has no end-of-text token, since transformers would find that token's character in texts.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes in GPT-2's notation
    others = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown}
    vocabulary |= {chr(256 + number): byte for number, byte in enumerate(others)}
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    by_byte["trim_offsets"] = False
    content = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    texts = {"tokenizer.json": content, "tokenizer_config.json": settings}
    return {name: json.dumps(text).encode() for name, text in texts.items()}


class JsonTokenizer:
    """A tokenizer.json, run by the tokenizers library."""

    def texts(self, value: Any) -> list[str]:
        """Return the documents in the value of a field."""
        return plain_text(value)

    def __init__(self, folder: Path, origin: str = "model.hf_assets_path") -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(
                f"cannot read tokenizer.json there: {error.strerror}. "
                f"Without {origin}, bytes are tokens. "
                "transformers makes one from vocab.json and the like: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER). "
                'To fetch one: hf download REPO --include "tokenizer*" '
                f"--local-dir {shlex.quote(str(folder))}",
                origin,
                str(folder),
            ) from None
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        self._backend.no_truncation()  # a file may request both, which would cut documents
        self._backend.no_padding()
        self.settings = settings = _settings(folder)
        added = self._add_tokens(folder, settings.get("added_tokens_decoder", {}))
        if added:
            content += json.dumps(added).encode()
        self.assets = str(folder)
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.end = self._find_end_token(folder, settings.get("eos_token"))

    def _add_tokens(
        self, folder: Path, declared: dict[str, dict[str, Any]]
    ) -> dict[str, int | None]:
        """Add the tokens of tokenizer_config.json that tokenizer.json lacks; return their ids.

        As in transformers, declared ids only give the order, and new tokens get the next free ids.
        """
        from tokenizers import AddedToken

        known = {repr(token) for token in self._backend.get_added_tokens_decoder().values()}
        added = []
        try:
            for number in sorted(declared, key=int):
                fields = declared[number]
                options = {name: fields[name] for name in _TOKEN_OPTIONS & fields.keys()}
                token = AddedToken(fields["content"], **options)
                if repr(token) not in known:
                    added.append(token)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{folder}: added_tokens_decoder in tokenizer_config.json: {error!r}"
            ) from None
        self._backend.add_tokens(added)
        return {token.content: self._backend.token_to_id(token.content) for token in added}

    def _find_end_token(self, folder: Path, eos: Any) -> int:
        """Return the id of the eos_token, or of one of the usual names."""
        if isinstance(eos, dict):
            eos = eos.get("content")
        for name in (eos, "<|end_of_text|>", "<|endoftext|>", "</s>"):
            token = self._backend.token_to_id(name) if name else None
            if token is not None:
                return token
        if eos:
            raise UserError(f'{folder}: eos_token is "{eos}", which tokenizer.json does not have')
        raise UserError(
            f"{folder}: no end-of-text token; name it as eos_token in tokenizer_config.json"
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> Iterator[list[int]]:
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            yield encoding.ids

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


_TOKEN_OPTIONS = {"single_word", "lstrip", "rstrip", "normalized", "special"}


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings next to a tokenizer.json; tokenizer_config.json has precedence."""
    settings: dict[str, Any] = {}
    for name in TOKENIZER_SETTINGS:
        path = folder / name
        try:
            if path.is_file():
                settings |= json.loads(path.read_bytes())
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not JSON: {error}") from None
    return settings


Tokenizer = ByteTokenizer | JsonTokenizer


def load_tokenizer(assets: str, origin: str = "model.hf_assets_path") -> Tokenizer:
    """Load the tokenizer in the folder `assets`, or bytes for "".

    Errors name the key or option `origin`.
    """
    with suppress(OSError):
        if assets and Path(assets, "tokenizer.json").read_bytes() == byte_files()["tokenizer.json"]:
            return ByteTokenizer()
    if assets:
        return JsonTokenizer(Path(assets), origin)
    return ByteTokenizer()


def tokenizer_of(config: JobConfig) -> Tokenizer | None:
    """Load the tokenizer of model.hf_assets_path, or else of the token shards; None if the shards
    have none. Where all data are shards, a model's folder may be without one.
    """
    shards = []
    for name, part in config.training.named_sources:
        if part.dataset == "tokens":
            shards.append(folder_of(name, part.dataset_path))
    assets = config.model.hf_assets_path
    if len(shards) == len(config.training.named_sources) and is_model_alone(Path(assets)):
        assets = ""
    if not assets:
        copies = (str(folder) for folder in shards if (folder / "tokenizer.json").is_file())
        assets = next(copies, "")
    manifests = [read_shard_manifest(folder) for folder in shards]
    is_known = any(manifest and manifest["tokenizer"] for manifest in manifests)
    if shards and not assets and not is_known:
        return None
    return load_tokenizer(assets)


def is_model_alone(folder: Path) -> bool:
    """Return whether a folder has a model without a tokenizer."""
    return (folder / "config.json").is_file() and not (folder / "tokenizer.json").exists()


def open_tokenizer(job: Job) -> Tokenizer | None:
    """Load the tokenizer of a job; None if it has token shards without one.

    Raise a UserError if it has ids beyond the model's vocabulary, or if generate.at_end needs a
    missing one.
    """
    tokenizer = tokenizer_of(job.config)
    if job.config.generate.at_end:
        require_tokenizer(tokenizer, "generate.at_end = true")
    if tokenizer and tokenizer.vocab_size > job.shape.vocab_size:
        key = "model.hf_assets_path"
        place = job.config.model.hf_assets_path
        if not place:
            key = "training.dataset_path"
            place = job.config.training.dataset_path or tokenizer.assets
        raise UserError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, beyond the model's "
            f"vocabulary of {job.shape.vocab_size}; "
            f"--model.overrides.vocab_size {tokenizer.vocab_size}",
            key,
            place,
        )
    return tokenizer


def require_tokenizer(tokenizer: Tokenizer | None, purpose: str) -> Tokenizer:
    """Return the tokenizer; raise a UserError that names the `purpose` if there is none."""
    if tokenizer is None:
        raise UserError(
            f"{purpose}: this needs a tokenizer, and the token shards have none; "
            "name the folder of a tokenizer.json in model.hf_assets_path"
        )
    return tokenizer


def printable(text: str) -> str:
    """Replace control characters, so that text from a model or data set cannot control the
    terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)
