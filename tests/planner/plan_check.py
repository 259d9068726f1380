"""Compare the planner's rehearsals with real processes: the bytes of the peak and every collective
must be equal.

Each row of plan_rows.toml takes four steps of the real trainer on gloo processes, counted as a
rehearsal is, and a step after the first, when the optimizer has its state, must equal the
rehearsal. A rehearsal runs the same code, so gathers are also compared with the table's."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.config.toml import read_toml
from titanlite.models.common.attention import causal_rows
from titanlite.planner.record import Collective
from titanlite.planner.rehearse import blank_batches, count_later_step, record_step
from titanlite.runtime.cluster import RankInfo
from titanlite.train.trainer import Trainer
from titanlite.verify.model_under_test import SEQ_LEN, build_job, read_model
from titanlite.verify.pool import Pool
from titanlite.verify.runner import write_tokens
from titanlite.verify.table import SAMPLES, Row

MODELS = {
    "llama3": "dim=64 n_layers=4 n_heads=4 n_kv_heads=2 hidden_dim=128",
    "gpt2": "dim=64 n_layers=4 n_heads=4 vocab_size=257",
    "mixture": "dim=64 n_layers=2 n_heads=4 n_kv_heads=2 head_dim=16 expert_dim=32 experts=4"
    " top_k=2",
}
NAMED = {
    "mixture": (
        "--model.name=qwen3 --model.flavor=debugmodel_moe",
        "--debug.moe_force_load_balance",
    )
}
"""Models whose key is not their name: what names them, and further keys."""


@dataclass(frozen=True)
class PlanRow:
    """A row of the table."""

    row: Row
    gathers: Counter[str] | None
    """The number of all-gathers of a step, by dimension of the mesh, if it is known."""
    more: tuple[str, ...]
    model: str

    def __str__(self) -> str:
        chosen = [
            f"{key} {value}"
            for key, value in vars(self.row).items()
            if value != getattr(Row(""), key)
        ]
        return ", ".join([self.model, *chosen, *self.more])


def row(
    layout: str,
    dp_shard: int = 0,
    tp: int = 0,
    more: Sequence[str] = (),
    model: str = "llama3",
    gathers: Mapping[str, int] | None = None,
    **columns: str,
) -> PlanRow:
    """Return a row with its all-gathers on each dimension, further overrides, and its choices of
    columns.
    """
    expected = Counter[str](dp_shard=dp_shard, tp=tp)
    expected.update(gathers or {})
    chosen = Row(layout, **{"precision": "float32", **columns})
    return PlanRow(chosen, expected, tuple(more), model)


ROWS = [row(**one) for one in read_toml(Path(__file__).with_name("plan_rows.toml"))["rows"]]


def command_line(plan_row: PlanRow, folder: Path) -> list[str]:
    """Return the arguments of a row whose data lie in a folder."""
    overrides = [f"--model.overrides.{field}" for field in MODELS[plan_row.model].split()]
    named, *more = NAMED.get(plan_row.model, [f"--model.name={plan_row.model}"])
    model = read_model([*named.split(), *overrides], {})
    line = [*model.command_line(plan_row.row, folder), *more, *plan_row.more]
    if "--training.document_mask" in plan_row.more:  # the ends of documents are a tokenizer's
        (folder / "text.txt").write_text("text " * 2 * SAMPLES * SEQ_LEN)
        line += ["--training.dataset=text", f"--training.dataset_path={folder / 'text.txt'}"]
    return line


def check(plan_row: PlanRow, folder: Path, pool: Pool) -> list[str]:
    """Return the differences between the rehearsal of a row and processes of a pool."""
    line = command_line(plan_row, folder)
    world = plan_row.row.mesh.world
    job = build_job(line, world)
    write_tokens(folder)
    counted = pool.run(count_processes, line, world=world, timeout=300)
    differences = []
    for rank in range(world):
        peak, moment, collectives = counted[rank]
        rehearsed = record_step(job, rank, as_on_cuda=False)
        if (peak, moment) != (rehearsed.peak, rehearsed.moment):
            there = f"{rehearsed.peak:,} bytes at {rehearsed.moment} rehearsed"
            differences.append(f"rank {rank}: {peak:,} bytes at {moment}, {there}")
        differences += [
            f"rank {rank}: {line}" for line in _compare(collectives, rehearsed.collectives())
        ]
    return differences + missing_gathers(plan_row.gathers, counted[0][2])


def count_processes(line: list[str]) -> tuple[int, str, Counter[Collective]]:
    """Take steps as a rank of the pool; return the peak of one after the first, its moment, and the
    collectives.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    job = build_job(line, world)
    Path(job.config.job.dump_folder).mkdir(exist_ok=True)
    # The pool's processes have made other rows' masks, and graphs that count against a limit.
    causal_rows.cache_clear()
    torch.compiler.reset()
    trainer = Trainer.start(
        job, RankInfo(rank, world, rank, ""), torch.device("cpu"), logging.Logger("quiet")
    )
    trainer.report.close()
    recording = count_later_step(trainer.runner, blank_batches(trainer.runner))
    return recording.peak, recording.moment, recording.collectives()


def missing_gathers(expected: Counter[str] | None, collectives: Counter[Collective]) -> list[str]:
    """Describe the all-gathers of a step that are more or fewer than expected."""
    if expected is None:
        return []
    found = Counter[str]()
    for collective, count in collectives.items():
        if collective.kind == "all-gather":
            found[collective.dimension] += count
    return _compare(found, expected, "{0} all-gathers on {2}, expected {1}")


def _compare(
    found: Counter[Any], expected: Counter[Any], line: str = "{2}: {0}, {1} rehearsed"
) -> list[str]:
    """Describe the numbers that differ."""
    return [
        line.format(found[one], expected[one], one)
        for one in sorted({*found, *expected}, key=str)
        if found[one] != expected[one]
    ]
