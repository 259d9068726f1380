"""Runs rows on local processes: a pool of ranks, and one reference for each variant and
precision.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.data.foreign import list_tokens, token_files
from titanlite.errors import UserError
from titanlite.parallel.build import build_model
from titanlite.registry import Role
from titanlite.runtime.torch_private import INDUCTOR_MODULE
from titanlite.verify.harness import measure
from titanlite.verify.measurements import BOUNDS, Mismatch, steps_of
from titanlite.verify.model_under_test import SEQ_LEN, TOKENS, ModelUnderTest, build_job
from titanlite.verify.pool import Pool, RankFailed
from titanlite.verify.reference import measure_reference
from titanlite.verify.table import EXTRAS, SAMPLES, Row

PRELOAD = ["titanlite.verify.harness", INDUCTOR_MODULE]
TIMEOUT_SECONDS = 300.0
"""The limit for one row; compiling takes longest."""
OTHER_ROLES: dict[Role, list[Role]] = {
    "column": ["row"],
    "row": ["column"],
    "replicated": ["column", "row"],
    "norm": ["column", "row"],
    "embedding": ["head"],
    "head": ["embedding"],
}
"""Roles that may have been intended. Tensor parallel treats a norm and a replicated parameter
alike.
"""


@dataclass(frozen=True)
class Result:
    """The worst error of a row, and the rank that found it."""

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


def check_tables(model: ModelUnderTest) -> None:
    """Raise a UserError with all parameters and rows that do not match one to one, in the first
    variant that has any.
    """
    for variant in model.variants:
        job = build_job(model.command_line(Row("1", variant=variant), Path()), 1)
        try:
            build_model(job)
        except UserError as error:
            raise UserError(f"{model.name}, {variant}: {error}") from None


@contextmanager
def open_pool(world: int, device: str = "") -> Iterator[Pool]:
    """Yield a pool; its ranks write errors and torch's log to a file that is removed if empty."""
    file, path = tempfile.mkstemp(prefix="titanlite-verify-", suffix=".log")
    os.close(file)
    try:
        with closing(Pool(world, PRELOAD, path, device)) as pool:
            yield pool
    finally:
        if not os.path.getsize(path):
            os.unlink(path)


@contextmanager
def row_runner(model: ModelUnderTest, pool: Pool) -> Iterator["RowRunner"]:
    """Yield a function that runs a row."""
    # Otherwise the profiler prints when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # The system frees what killed ranks leave.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    on_cpu: AbstractContextManager[Pool] = nullcontext(pool)
    if pool.device == "cuda":  # for new groups a pool on GPUs would have to restart its processes
        on_cpu = closing(Pool(1, PRELOAD, pool.log))
    with tempfile.TemporaryDirectory(prefix="titanlite-verify-") as folder, on_cpu as references:
        yield RowRunner(model, Path(folder), pool, references)


def write_tokens(folder: Path) -> None:
    """Write the shards of zeros that the jobs of a folder open."""
    ids = folder / "ids.bin"
    np.zeros(2 * SAMPLES * SEQ_LEN, np.uint16).tofile(ids)
    list_tokens({"ids": token_files("ids", str(ids), "uint16")}, "uint16", -1, folder / TOKENS)


class RowRunner:
    """Compares rows of one model with their references, which are kept in `folder`."""

    def __init__(self, model: ModelUnderTest, folder: Path, pool: Pool, references: Pool) -> None:
        self._model = model
        self._folder = folder
        self._pool = pool
        self._on_cpu = references
        self._references: dict[tuple[str, ...], tuple[str, float]] = {}
        write_tokens(folder)

    def wrong_role(self, layout: str) -> str:
        """Return a diagnosis of the model's table if a tensor-parallel layout fails, by trying
        other roles.
        """
        row = Row(layout, precision="float64")
        if self(row).passed:
            return ""
        job = build_job(self._model.command_line(row, self._folder), row.mesh.world)
        for rule in job.spec.rules(job.model_config):
            for role in OTHER_ROLES.get(rule.tensor, []):
                if (
                    not rule.pattern.endswith(".bias")
                    and self(row, role=(rule.pattern, role)).passed
                ):
                    return (
                        f"the row {rule.pattern} = {rule.tensor} is wrong: "
                        f"with {role} this layout passes"
                    )
        return "no other role of a single row makes this layout pass"

    def __call__(
        self,
        row: Row,
        role: tuple[str, Role] | None = None,
        measure: Callable[..., Mismatch] = measure,
    ) -> Result:
        """Compare one row with its reference, using what `measure` finds on each rank."""
        start = time.monotonic()
        ranks: AbstractContextManager[Pool] = nullcontext(self._pool)
        if row.compile == "inductor":
            # New processes, since a process can't compile with a second backend.
            ranks = closing(Pool(row.mesh.world, PRELOAD, self._pool.log, self._model.device))
        try:
            with ranks as pool:
                reference, max_norm = self._reference(row)
                overrides = self._model.command_line(row, self._folder, max_norm)
                worst = pool.run(
                    measure,
                    overrides,
                    reference,
                    row,
                    role,
                    world=row.mesh.world,
                    timeout=TIMEOUT_SECONDS,
                )
        except RankFailed as error:
            if self._pool.log:
                with open(self._pool.log, "a", encoding="utf-8") as log:
                    log.write(f"{row}\n{error}\n")
            last_line = str(error).strip().splitlines()[-1]
            worst = [(math.inf, last_line.rpartition("harness.RowFailed: ")[2])]
        rank = max(range(len(worst)), key=lambda rank: worst[rank][0])
        largest, what = worst[rank]
        return Result(row, what, largest, rank, time.monotonic() - start)

    def _reference(self, row: Row) -> tuple[str, float]:
        """Return the file with the plain module's measurements, and the norm that it clips to."""
        precision = row.precision
        if row.precision == "bfloat16":
            precision = "float32"
        if self._model.device:
            precision = "float64"
        experts = []
        if row.is_narrow:
            experts = self._model.every_expert
        key = (row.variant, precision, row.batch, *experts)
        if key not in self._references:
            path = str(self._folder / f"{'-'.join(key)}.pt")
            overrides = self._model.command_line(
                Row("1", variant=row.variant, precision=precision), self._folder
            )
            overrides += experts
            if row.extra == "large":
                overrides.append(EXTRAS["large"])
            own = build_job(self._model.command_line(row, self._folder), row.mesh.world)
            steps = steps_of(own.config)
            max_norm = self._on_cpu.run(
                measure_reference,
                overrides,
                path,
                row.batch,
                steps,
                world=1,
                timeout=TIMEOUT_SECONDS,
            )[0]
            self._references[key] = path, max_norm
        return self._references[key]
