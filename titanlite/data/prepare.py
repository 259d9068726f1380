"""Turn text into token shards: on all cores, resumable, published by one rename.

A shard's bytes do not depend on the process that writes it. In a staging folder, it gets its name
only when complete, and the next run with the same sources and tokenizer continues from there.
Imports no torch, so that workers start fast.
"""

import fcntl
import itertools
import json
import multiprocessing
import os
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from titanlite.data.documents import SEGMENT_BYTES, Documents, Piece, pieces, segments
from titanlite.data.shards import (
    DATA_MANIFEST,
    HEADER_BYTES,
    TOKENIZER_FILES,
    ends_file,
    id_type,
    read_shard_manifest,
    shard_header,
    write_ends,
)
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.errors import UserError
from titanlite.runtime import store
from titanlite.runtime.bucket import Place
from titanlite.runtime.cluster import cores
from titanlite.runtime.page import OWN_PAGE, phase
from titanlite.runtime.parent import exit_with_parent
from titanlite.runtime.store import LocalPath

T = TypeVar("T")
UNIT_BYTES = 16 << 20
MOST_UNIT_BYTES = 4 << 30
UNITS = 1024
"""Amount of text per shard: a fraction of the total, within bounds, since each shard costs time at
a start.
"""
Load = Callable[[str], Tokenizer]
"""Loads the tokenizer of a folder."""


@dataclass(frozen=True)
class Unit:
    """The documents of one shard."""

    number: int
    source: str
    root: Path
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def prepare(
    sources: dict[str, Documents],
    assets: str,
    out: Place,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    log: Callable[[str], None] = lambda message: None,
    load: Load = load_tokenizer,
) -> dict[str, Any]:
    """Write the sources' tokens as shards to the folder `out` and return its manifest.

    `assets` is the tokenizer's folder ("" for bytes), from which `load` loads it.
    """
    tokenizer = load(assets)
    fingerprint = "-".join(
        documents.fingerprint(tokenizer.fingerprint) for documents in sources.values()
    )
    state = "-".join(documents.state() for documents in sources.values())
    if existing := read_shard_manifest(out):
        if (existing["fingerprint"], existing["end"]) != (fingerprint, tokenizer.end):
            raise UserError(
                f"{out} holds other data or another tokenizer's; choose another folder or remove it"
            )
        if existing["state"] != state:
            raise UserError(
                f"the text of {out} has changed since; remove the folder to prepare it again"
            )
        log(f"{out} is already prepared")
        return existing
    if out.is_taken(DATA_MANIFEST):
        raise UserError(f"{out} exists and was not made by this command; choose another folder")
    units = list(_units(sources))
    staging = _open_staging(out, f"{fingerprint} {tokenizer.end} {state}", log)
    todo = [unit for unit in units if not _shard_path(staging, unit).exists()]
    if len(todo) < len(units):
        log(f"continuing: {len(units) - len(todo)} of {len(units)} shards are already done")
    total = sum(unit.size for unit in units)
    done = total - sum(unit.size for unit in todo)
    progress(done, total)
    for unit in _write_all(todo, staging, tokenizer, load, workers):
        done += unit.size
        progress(done, total)
    manifest = {"state": state, **_manifest(units, staging, tokenizer, fingerprint, assets)}
    _publish(staging, out, manifest, assets)
    return manifest


def check_tokenizer(key: str, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Raise a UserError if a folder of shards was prepared with another tokenizer."""
    manifest = read_shard_manifest(folder)
    if manifest is None or tokenizer is None or not manifest["tokenizer"]:
        return
    fingerprint = manifest["tokenizer_fingerprint"]
    if (fingerprint, manifest["end"]) != (tokenizer.fingerprint, tokenizer.end):
        raise UserError(
            f'{key}.dataset_path = "{folder}" was prepared with the tokenizer '
            f"{manifest['tokenizer']} (fingerprint {fingerprint}, end token {manifest['end']}), "
            f"but the job's is {tokenizer.assets or 'bytes'} (fingerprint {tokenizer.fingerprint}, "
            f"end token {tokenizer.end}); remove model.hf_assets_path if the shards' own is meant, "
            "or prepare the text again"
        )


def _units(sources: dict[str, Documents]) -> Iterator[Unit]:
    """Yield each source's pieces in order, grouped into units of about the same size."""
    number = itertools.count()
    total = sum(sum(documents.sizes) for documents in sources.values())
    size = max(UNIT_BYTES, min(total // UNITS, MOST_UNIT_BYTES))
    for name, documents in sources.items():
        for group in _groups(pieces(documents, UNIT_BYTES), size, lambda piece: piece.size):
            yield Unit(next(number), name, documents.root, tuple(group))


def _groups(items: Iterable[T], limit: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Group items in order; a group ends when its size reaches the limit."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def _open_staging(out: Place, identity: str, log: Callable[[str], None]) -> LocalPath:
    """Return the folder of finished shards, emptied if it was made from data of another
    identity.
    """
    staging = out.draft()
    plan_file = staging / ".plan.json"
    plan = json.dumps({"of": identity, "unit_bytes": UNIT_BYTES, "units": UNITS})
    if staging.exists() and not (plan_file.exists() and plan_file.read_text() == plan):
        log(f"{staging} was made from different data; starting over")
        staging.remove()
    staging.mkdir(parents=True, exist_ok=True)
    plan_file.write_text(plan)
    return staging


def _shard_path(staging: Path, unit: Unit) -> Path:
    return staging / f"shard-{unit.number:06}.bin"


def _write_all(
    units: list[Unit], staging: Path, tokenizer: Tokenizer, load: Load, workers: int
) -> Iterator[Unit]:
    """Write the units' shards and yield each unit when its shard is finished."""
    if workers == 1 or len(units) <= 1:
        for unit in units:
            _write(unit, staging, tokenizer)
            yield unit
        return
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, exit_with_parent)
    try:
        work = partial(_write_in_worker, staging, load, tokenizer.assets)
        futures = {pool.submit(work, unit): unit for unit in units}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    except BrokenProcessPool:
        raise UserError(
            "a worker process died (out of memory?); run the same command again to continue"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@cache
def _load_once(load: Load, assets: str) -> Tokenizer:
    return load(assets)


def _write_in_worker(staging: Path, load: Load, assets: str, unit: Unit) -> None:
    # A worker has one core; threads of the tokenizer would compete with other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _write(unit, staging, _load_once(load, assets))


def _write(unit: Unit, staging: Path, tokenizer: Tokenizer) -> None:
    """Write one shard, under a temporary name until it is complete and on disk."""
    path = _shard_path(staging, unit)
    draft = path.with_suffix(f".draft-{socket.gethostname()}-{os.getpid()}")
    dtype = id_type(tokenizer.vocab_size)
    ends: list[int] = []
    tokens = crc32 = 0
    with store.whole_file(path, draft) as out:
        out.write(bytes(HEADER_BYTES))
        read = partial(segments, unit.root, texts=tokenizer.texts)
        text = itertools.chain.from_iterable(map(read, unit.pieces))
        for batch in _groups(text, SEGMENT_BYTES, lambda segment: len(segment.text)):
            for segment, ids in zip(
                batch, tokenizer.encode_batch([s.text for s in batch]), strict=True
            ):
                if segment.ends and tokenizer.end >= 0:
                    ids = [*ids, tokenizer.end]
                content = np.asarray(ids, dtype=dtype).tobytes()
                out.write(content)
                crc32 = zlib.crc32(content, crc32)
                tokens += len(content) // dtype.itemsize
                if segment.ends:
                    ends.append(tokens)
        out.seek(0)
        out.write(shard_header(tokens, dtype, crc32))
        write_ends(staging, unit.number, np.asarray(ends, dtype=np.int64))


def _manifest(
    units: list[Unit], staging: Path, tokenizer: Tokenizer, fingerprint: str, assets: str
) -> dict[str, Any]:
    shards: list[dict[str, Any]] = []
    content = 0
    for unit in units:
        path = _shard_path(staging, unit)
        tokens = (path.stat().st_size - HEADER_BYTES) // id_type(tokenizer.vocab_size).itemsize
        documents = len(np.load(ends_file(staging, unit.number)))
        crc32 = np.fromfile(path, dtype=np.uint32, count=4)[3]
        content = zlib.crc32(crc32.tobytes(), content)
        shard = {"file": path.name, "tokens": tokens, "documents": documents, "source": unit.source}
        shards.append(shard)
    return {
        "fingerprint": fingerprint,
        "content": f"{content:08x}",
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": assets or "bytes",
        "tokenizer_fingerprint": tokenizer.fingerprint,
        **with_counts(shards),
    }


def with_counts(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a manifest's list of shards, with their tokens and documents in all and by source."""
    total = Counter[str]()
    sources: dict[str, Counter[str]] = {}
    for shard in shards:
        counts = {"tokens": shard["tokens"], "documents": shard["documents"]}
        total.update(counts)
        sources.setdefault(shard["source"], Counter()).update(counts)
    return {**total, "sources": sources, "shards": shards}


def _publish(staging: LocalPath, out: Place, manifest: dict[str, Any], assets: str) -> None:
    for name in TOKENIZER_FILES:
        if assets and (Path(assets) / name).is_file():
            (staging / name).put((Path(assets) / name).read_bytes())
    for draft in staging.glob("*.draft-*"):  # of a run that was killed
        draft.unlink()
    (staging / DATA_MANIFEST).put(json.dumps(manifest, indent=1).encode())
    out.publish_draft(DATA_MANIFEST)


def prepare_in_cache(
    name: str,
    documents: Documents,
    tokenizer: Tokenizer,
    load: Load = load_tokenizer,
) -> Path:
    """Prepare a data set next to its text, unless that was done before, and return the folder."""
    key = f"{documents.fingerprint(tokenizer.fingerprint)}-{tokenizer.end}-{documents.state()}"

    def move(done: int, total: int) -> None:
        """Show progress, so that minutes of it do not count as a hang."""
        OWN_PAGE.enter("tokenization")

    with _locked_cache(documents.root, key) as folder, phase("tokenization"):
        prepare({name: documents}, tokenizer.assets, folder, cores(), move, load=load)
    return folder


def cached_file(
    root: Path, name: str, read: Callable[[Path], T], write: Callable[[BinaryIO], None]
) -> T:
    """Read a file of a cache and return the result; write it first if it is missing or damaged."""
    with _locked_cache(root, name) as path:
        with suppress(OSError, ValueError, IndexError):
            return read(path)
        with store.whole_file(path) as file:
            write(file)
        return read(path)


@contextmanager
def _locked_cache(root: Path, name: str) -> Iterator[LocalPath]:
    """Yield the path of a cache next to the data, or in the user's cache if that is not writable.

    One process writes it while the others wait. If the file system has no locks, nobody waits, and
    the data should be prepared beforehand.
    """
    folder = root / ".titanlite"
    try:
        existing = folder if folder.exists() else root
        if not os.access(existing, os.W_OK):
            folder = store.user_cache()
        folder.mkdir(parents=True, exist_ok=True)
        lock_file = (folder / f"{name}.lock").open("w")
    except (OSError, RuntimeError) as error:  # a random user id has no home
        why = f"{root} can't be written to, nor can the user's cache: {error}".rstrip(".")
        raise UserError(
            f"{why}; name a folder for tokens and packing plans in XDG_CACHE_HOME"
        ) from None
    with lock_file:
        with suppress(
            OSError
        ):  # not the lock of runtime/lock.py, which lasts as long as the process, and never waits
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield LocalPath(folder, name)
