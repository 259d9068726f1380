"""Rows run on local processes: a pool of ranks, and one reference for each variant and precision."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.data.shards import id_type
from titanlite.verify.harness import measure
from titanlite.verify.measurements import BOUNDS, Finding
from titanlite.verify.model_under_test import SEQ_LEN, TOKENS, ModelUnderTest, build_job
from titanlite.verify.pool import Pool, RankFailed
from titanlite.verify.reference import reference
from titanlite.verify.table import LAYOUTS, SAMPLES, Row

PRELOAD = ["titanlite.verify.harness", "torch._inductor.compile_fx"]
TIMEOUT = 300.0
"""Seconds that a row may take; compiling is the slowest."""


@dataclass(frozen=True)
class Result:
    """How a row came out: the worst that was found on any rank."""

    row: Row
    what: str
    error: float
    rank: int
    seconds: float

    @property
    def bound(self) -> float:
        return BOUNDS[self.row.precision]

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


@contextmanager
def proof(subject: ModelUnderTest, ranks: int = 0) -> Iterator[Callable[..., Result]]:
    """A function that runs a row, with a fault's name or none, on up to `ranks` processes (0: as many as any needs).

    One compile backend a process, since a second one fails there: the rows of inductor get processes of their own.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says when it starts and stops
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")  # what ends, the system frees
    ranks = ranks or max(LAYOUTS[layout].world for layout in subject.layouts)
    pool = Pool(ranks, PRELOAD)
    with tempfile.TemporaryDirectory(prefix="titanlite-verify-") as folder:
        rows = Rows(subject, Path(folder))

        def run(row: Row, fault: str = "") -> Result:
            if row.compile == "inductor":
                with closing(Pool(row.mesh.world, PRELOAD)) as own:
                    return rows.run(own, row, fault)
            return rows.run(pool, row, fault)

        with closing(pool):
            yield run


class Rows:
    """Runs rows of a subject on a pool."""

    def __init__(self, subject: ModelUnderTest, folder: Path) -> None:
        self._subject, self._folder = subject, folder
        self._references: dict[tuple[str, str], tuple[str, float]] = {}
        vocab_size = build_job(subject.command_line(Row("1"), folder), 1).shape.vocab_size
        np.zeros(2 * SAMPLES * SEQ_LEN, id_type(vocab_size)).tofile(folder / TOKENS)

    def run(self, pool: Pool, row: Row, fault: str = "") -> Result:
        """Compare one row with its reference."""
        began = time.monotonic()
        try:
            expected, max_norm = self._reference(pool, row)
            words = self._subject.command_line(row, self._folder, max_norm)
            arguments = (words, expected, BOUNDS[row.precision], fault)
            findings = pool.run(measure, *arguments, world=row.mesh.world, timeout=TIMEOUT)
        except RankFailed as error:
            findings = [Finding(str(error).strip().splitlines()[-1].rpartition("harness.Failed: ")[2], "")]
        rank = max(range(len(findings)), key=lambda rank: findings[rank].error)
        return Result(row, str(findings[rank]), findings[rank].error, rank, time.monotonic() - began)

    def _reference(self, pool: Pool, row: Row) -> tuple[str, float]:
        """The file with what the plain module does, and the norm that it clips to."""
        precision = "float32" if row.precision == "bfloat16" else row.precision
        plain = Row("1", variant=row.variant, precision=precision)
        key = (plain.variant, plain.precision)
        if key not in self._references:
            path = str(self._folder / f"{'-'.join(key)}.pt")
            words = self._subject.command_line(plain, self._folder)
            self._references[key] = path, pool.run(reference, words, path, world=1, timeout=TIMEOUT)[0]
        return self._references[key]
