"""Open data sets by name, each as one long stream of token ids that can be read at any offset.

Bytes and shards are read from their files on demand; other text is tokenized once, into a cache.
"""

import bisect
import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.needs import STREAMS
from titanlite.config.urls import is_url
from titanlite.data.chat import ChatTokenizer
from titanlite.data.documents import Documents, standard_library, text_files
from titanlite.data.foreign import require_manifest
from titanlite.data.prepare import check_tokenizer, prepare_in_cache
from titanlite.data.remote import at_once, folder_of
from titanlite.data.shards import Remote, ShardSource, ended, spans
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, require_tokenizer
from titanlite.errors import RunFailed, UserError, nearest

NAMES = ("python-stdlib", "python-stdlib-validation", "text", "tokens", "chat", *STREAMS)


def find_documents(key: str, name: str, path: str, text_key: str = "text") -> Documents | None:
    """Find the documents of a data set, or None for shards.

    Errors name the config section `key`.
    """
    if name in ("python-stdlib", "python-stdlib-validation"):
        return standard_library(held_out=name.endswith("-validation"))
    if name == "text":
        return replace(text_files(f"{key}.dataset_path", path), text_key=text_key)
    if name == "chat":
        chats = text_files(f"{key}.dataset_path", path)
        others = [name for name in chats.names if not name.endswith((".jsonl", ".jsonl.gz"))]
        if others:
            why = f"{others[0]} has no chats: they are lines of .jsonl or .jsonl.gz files"
            raise UserError(why, f"{key}.dataset_path", path)
        if text_key == "text":
            text_key = "messages"
        return replace(chats, text_key=text_key)
    if name == "tokens":
        if not is_url(path):
            require_manifest(f"{key}.dataset_path", Path(path))
        return None
    close = nearest(name, NAMES)
    hint = f"; did you mean {close}?" if close else "."
    legal = f"{', '.join(NAMES)}, or a data set of the Hugging Face hub: OWNER/NAME"
    raise UserError(f"is not a data set{hint} Legal: {legal}", f"{key}.dataset", name)


def open_source(
    key: str,
    name: str,
    path: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    text_key: str = "text",
) -> "Source":
    """Open the token stream of a data set; only shards do not need a tokenizer."""
    documents = find_documents(key, name, path, text_key)
    if documents is None:
        source = open_shards(key, path, vocab_size)
        check_tokenizer(key, source.folder, tokenizer)
        return source
    tokenizer = require_tokenizer(tokenizer, f'{key}.dataset = "{name}"')
    if name == "chat":
        chats = ChatTokenizer(tokenizer.assets)
        folder = prepare_in_cache(name, documents, chats, ChatTokenizer)
        return ShardSource(folder, chats.vocab_size)
    if isinstance(tokenizer, ByteTokenizer) and documents.are_plain:
        return ByteSource(documents, tokenizer)
    return ShardSource(prepare_in_cache(name, documents, tokenizer), vocab_size)


def open_shards(key: str, path: str, vocab_size: int) -> ShardSource:
    """Open a folder of shards, or a URL of one."""
    remote = Remote(path) if is_url(path) else None
    return ShardSource(folder_of(key, path), vocab_size, remote)


def in_turn(function: Callable[..., object], *columns: Any) -> None:
    for row in zip(*columns, strict=True):
        function(*row)


def each_of(sources: "list[Source]") -> Callable[..., None]:
    """Return how to read windows of sources: one after another, or in parallel from a store."""
    is_remote = any(isinstance(source, ShardSource) and source.remote for source in sources)
    return at_once if is_remote else in_turn


class ByteSource:
    """Text files as a stream of bytes, which need not be valid UTF-8."""

    def __init__(self, documents: Documents, tokenizer: ByteTokenizer) -> None:
        self._documents = documents
        self.end = tokenizer.end
        self.folder = documents.root
        self._stops = list(itertools.accumulate(size + 1 for size in documents.sizes))
        self.tokens = self._stops[-1]
        self.fingerprint = f"{documents.fingerprint(tokenizer.fingerprint)}+{self._hash_content()}"
        self.state = ""
        self.has_index = False

    def is_end(self, start: int, tokens: np.ndarray) -> np.ndarray:
        return tokens == self.end

    def _hash_content(self) -> str:
        """Hash the whole content up to 64 MiB, or 1,024 samples of 64 KiB of a longer one."""
        checksum = 0
        size = 1 << 16
        for start in range(0, self.tokens, max(size, self.tokens >> 10)):
            ids = self.read(start, min(size, self.tokens - start))
            checksum = zlib.crc32(ids.astype(np.uint8).tobytes(), checksum)
        return f"{checksum:08x}"

    def document_ends(self, begin: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the position after each document in a region, and the region's end."""
        if stop is None:
            stop = self.tokens
        first = bisect.bisect_right(self._stops, begin)
        last = bisect.bisect_right(self._stops, stop)
        return ended(np.asarray(self._stops[first:last], dtype=np.int64), stop)

    def read(self, start: int, count: int) -> np.ndarray:
        out = np.full(count, self.end, dtype=np.int64)
        filled = 0
        for document, offset, length in spans(self._stops, start, count):
            path = self._documents.root / self._documents.names[document]
            # The span may include the end token.
            size = min(length, self._documents.sizes[document] - offset)
            try:
                content = np.fromfile(path, dtype=np.uint8, count=size, offset=offset)
            except OSError as error:
                raise RunFailed(
                    f"the data changed during the run: {path}: {error.strerror}"
                ) from None
            if len(content) != size:
                raise RunFailed(
                    f"the data changed during the run: {path} is shorter than it was at the start"
                )
            out[filled : filled + size] = content
            filled += length
        return out


Source = ShardSource | ByteSource
"""A stream of token ids, with an end token after each document or an index of document ends."""
DatasetPlace = tuple[str, str, str]
"""A section of the config, the name of its data set and its path."""


def require_ends(source: Source, key: str) -> None:
    """Raise a UserError if the source does not mark where documents end."""
    if source.end < 0 and not source.has_index:
        raise UserError(
            f"{key}: these shards do not mark document ends, which document_mask and first-fit "
            "need; prepare them with their tokenizer (--tokenizer)"
        )
