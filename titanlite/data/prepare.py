"""Text into token shards, on all cores, resumable, published whole.

The documents are cut into units in a fixed order, so that a unit's shard is the same bytes whoever writes it. A shard
has its name only when it is whole; a run that was killed leaves the finished ones in a staging folder, and the next
run with the same sources and tokenizer goes on from there. One rename publishes the folder. No torch in here: worker
processes start in a fraction of a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.documents import SEGMENT_BYTES, Documents, Piece, Segment, pieces, segments
from titanlite.data.shards import HEADER_BYTES, MANIFEST, header, id_type, read_manifest
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.errors import UserError

UNIT_BYTES = 16 << 20
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True)
class Unit:
    """What becomes one shard."""

    number: int
    source: str
    root: Path
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Written:
    """What a worker made of a unit."""

    number: int
    tokens: int
    documents: int


def prepare(
    sources: dict[str, Documents],
    assets: str,
    out: Path,
    workers: int,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Make the folder `out` of the sources' documents, tokenized by `assets` ("" for bytes); its manifest."""
    tokenizer = load_tokenizer(assets)
    fingerprint = "-".join(documents.fingerprint(tokenizer.fingerprint) for documents in sources.values())
    state = "-".join(documents.state() for documents in sources.values())
    if existing := read_manifest(out):
        if existing["fingerprint"] == fingerprint and existing["state"] != state:
            raise UserError(f"the text of {out} was written again since; remove the folder to prepare it anew")
        if existing["fingerprint"] != fingerprint:
            raise UserError(f"{out} holds other data or another tokenizer's; choose another folder or remove it")
        say(f"{out} is already prepared")
        return existing
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and was not made by this command; choose another folder")
    units = list(_units(sources))
    staging = _staging(out, f"{fingerprint} {state}", say)
    written = {unit.number: _finished(staging, unit, tokenizer.vocab_size) for unit in units}
    todo = [unit for unit in units if written[unit.number] is None]
    if len(todo) < len(units):
        say(f"going on with {len(units) - len(todo)} of {len(units)} shards already done")
    total = sum(unit.size for unit in units)
    done = total - sum(unit.size for unit in todo)
    progress(done, total)
    for unit, result in _write_all(todo, staging, assets, workers):
        written[unit.number] = result
        done += unit.size
        progress(done, total)
    manifest = {"state": state, **_manifest(units, written, tokenizer, fingerprint, assets)}
    _publish(staging, out, manifest, assets)
    return manifest


def _units(sources: dict[str, Documents]) -> Iterator[Unit]:
    """Pieces of one source in order, together until they are large enough."""
    number = 0
    for name, documents in sources.items():
        gathered: list[Piece] = []
        for piece in pieces(documents, UNIT_BYTES):
            gathered.append(piece)
            if sum(p.size for p in gathered) >= UNIT_BYTES:
                yield Unit(number, name, documents.root, tuple(gathered))
                number, gathered = number + 1, []
        if gathered:
            yield Unit(number, name, documents.root, tuple(gathered))
            number += 1


def _staging(out: Path, of: str, say: Callable[[str], None]) -> Path:
    """The folder of finished shards; emptied when it belongs to other sources."""
    staging = out.parent / f".{out.name}.preparing"
    plan = staging / ".plan.json"
    wanted = json.dumps({"of": of, "unit_bytes": UNIT_BYTES})
    if staging.exists() and not (plan.exists() and plan.read_text() == wanted):
        say(f"{staging} belongs to other data or another tokenizer; beginning anew")
        shutil.rmtree(staging)
    staging.mkdir(parents=True, exist_ok=True)
    plan.write_text(wanted)
    return staging


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06}.bin"


def _finished(staging: Path, unit: Unit, vocab_size: int) -> Written | None:
    path = shard_path(staging, unit.number)
    if not path.exists():
        return None
    tokens = (path.stat().st_size - HEADER_BYTES) // id_type(vocab_size).itemsize
    return Written(unit.number, tokens, len(np.load(path.with_suffix(".ends.npy"))))


def _write_all(units: list[Unit], staging: Path, assets: str, workers: int) -> Iterator[tuple[Unit, Written]]:
    """Shards in the order in which they are finished."""
    if workers == 1 or len(units) <= 1:
        tokenizer = load_tokenizer(assets)
        yield from ((unit, _write(unit, staging, tokenizer)) for unit in units)
        return
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, _begin_worker, (assets,))
    try:
        futures = {pool.submit(_write_in_worker, unit, staging): unit for unit in units}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise UserError("a worker process died (out of memory?); the same command goes on from here") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _begin_worker(assets: str) -> None:
    """A worker has one core: the tokenizer's own threads would only fight the other workers."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(assets)


def _write_in_worker(unit: Unit, staging: Path) -> Written:
    assert _worker_tokenizer is not None
    return _write(unit, staging, _worker_tokenizer)


def _write(unit: Unit, staging: Path, tokenizer: Tokenizer) -> Written:
    """One shard, under another name until it is whole and on disk."""
    path = shard_path(staging, unit.number)
    draft = path.with_suffix(f".draft-{socket.gethostname()}-{os.getpid()}")
    dtype = id_type(tokenizer.vocab_size)
    ends: list[int] = []
    tokens = 0
    with draft.open("wb") as out:
        out.write(bytes(HEADER_BYTES))
        for batch in _batches(segment for piece in unit.pieces for segment in segments(unit.root, piece)):
            for segment, ids in zip(batch, tokenizer.encode_batch([s.text for s in batch]), strict=True):
                out.write(np.asarray(ids, dtype=dtype).tobytes())
                tokens += len(ids)
                if segment.ends:
                    out.write(dtype.type(tokenizer.end).tobytes())
                    tokens += 1
                    ends.append(tokens)
        out.seek(0)
        out.write(header(tokens, dtype))
        out.flush()
        os.fsync(out.fileno())
    np.save(path.with_suffix(".ends.npy"), np.asarray(ends, dtype=np.int64))
    draft.rename(path)
    return Written(unit.number, tokens, len(ends))


def _batches(all_segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Some segments at a time, as many as the tokenizer likes at once."""
    batch: list[Segment] = []
    size = 0
    for segment in all_segments:
        batch.append(segment)
        size += len(segment.text)
        if size >= SEGMENT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _manifest(
    units: list[Unit], written: dict[int, Written | None], tokenizer: Tokenizer, fingerprint: str, assets: str
) -> dict[str, Any]:
    by_source: dict[str, dict[str, int]] = {}
    shards = []
    for unit in units:
        result = written[unit.number]
        assert result is not None
        counts = by_source.setdefault(unit.source, {"tokens": 0, "documents": 0})
        counts["tokens"] += result.tokens
        counts["documents"] += result.documents
        name = shard_path(Path(), unit.number).name
        shards.append({"file": name, "tokens": result.tokens, "documents": result.documents, "source": unit.source})
    return {
        "fingerprint": fingerprint,
        "tokens": sum(counts["tokens"] for counts in by_source.values()),
        "documents": sum(counts["documents"] for counts in by_source.values()),
        "vocab_size": tokenizer.vocab_size,
        "end": tokenizer.end,
        "tokenizer": assets or "bytes",
        "sources": by_source,
        "shards": shards,
    }


def _publish(staging: Path, out: Path, manifest: dict[str, Any], assets: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if assets and (Path(assets) / name).is_file():
            shutil.copyfile(Path(assets) / name, staging / name)
    for draft in staging.glob("*.draft-*"):  # of a run that was killed
        draft.unlink()
    with (staging / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    if out.exists() and not any(out.iterdir()):
        out.rmdir()
    try:
        staging.rename(out)
    except OSError:
        if read_manifest(out) != manifest:  # another node, on a disk without locks, may have been first
            raise
    parent = os.open(out.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


class ConsoleProgress:
    """A bar on a terminal, a line now and then elsewhere: how much, how fast, how long still."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None
        self._said = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        self._began = self._began or (now, done)
        seconds = max(now - self._began[0], 1e-9)
        rate = (done - self._began[1]) / seconds
        live = sys.stderr.isatty()
        if not live and now - self._said < 5 and done < total:
            return
        self._said = now
        share = done / total if total else 1.0
        eta = f"{(total - done) / rate:.0f} s left" if rate else ""
        bar = "=" * round(30 * share)
        text = f"[{bar:<30}] {share:4.0%}  {done / 1e6:,.1f} of {total / 1e6:,.1f} MB  {rate / 1e6:,.1f} MB/s  {eta}"
        again = live and done < total  # the next one overwrites it
        print(f"\r{text:<90}" if live else text, end="" if again else "\n", file=sys.stderr, flush=True)
