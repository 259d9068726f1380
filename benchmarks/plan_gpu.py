"""The planner's peak against torch.cuda.max_memory_allocated, on one GPU: two models, each way to
recompute, eager.

    python benchmarks/plan_gpu.py [--json benchmarks/plan.json] [--steps 4] [--seconds 530]

A row trains --steps steps and notes the measured and the planned values, and their ratio. Rows that
are in the file already are left out, and none is started that might not end within --seconds: run
the command again."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks.gpu import LONGEST, RECOMPUTE, Model, models  # noqa: E402
from benchmarks.plain import write_tokens  # noqa: E402
from benchmarks.ratios import keep  # noqa: E402
from benchmarks.train import measure  # noqa: E402
from titanlite.config.job import job_from  # noqa: E402
from titanlite.config.load import parse_command_line  # noqa: E402
from titanlite.models.llama3 import FLAVORS  # noqa: E402
from titanlite.planner.depth import fullest, plan_ranks  # noqa: E402
from titanlite.planner.hardware import GIB  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path("benchmarks/plan.json"))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=530)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "plan_gpu.py measures a GPU's allocator, and torch finds no usable GPU on this machine"
        )
    until = time.monotonic() + arguments.seconds
    done = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for model, (recompute, options) in product(models(small=False), RECOMPUTE.items()):
            name = f"{model.name}, {model.layers} layers, recompute {recompute}"
            if name in done and "failed" not in done[name]:
                continue
            if time.monotonic() + LONGEST > until:
                print(f"not enough time, run again: {name}", flush=True)
                continue
            try:
                record = compare(model, options, arguments.steps, Path(folder))
                print(
                    f"{name}: {record['measured_gib']:.2f} GiB, "
                    f"planned {record['planned_gib']:.2f}",
                    flush=True,
                )
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                record = {"failed": str(error)}
                print(f"{name}: failed: {error}", flush=True)
            keep(arguments.json, name, record)


def compare(model: Model, options: list[str], steps: int, folder: Path) -> dict[str, Any]:
    """Train a model on one GPU, and plan the same job."""
    tokens = folder / f"{model.flavor}.npy"
    if not tokens.exists():
        write_tokens(tokens, FLAVORS[model.flavor].vocab_size, 1 << 22)
    data = [
        "--training.dataset=tokens",
        f"--training.dataset_path={tokens}",
        "--model.hf_assets_path=",
    ]
    overrides = [
        *model.overrides,
        *data,
        *options,
    ]
    measured = measure(overrides, steps, timeout=LONGEST, NGPU="1")
    job = job_from(
        parse_command_line(overrides, {}),
        world=measured["world_size"],
        training=True,
        device="cuda",
    )
    plan = fullest(plan_ranks(job))
    planned = plan.peak / GIB
    return {
        "measured_gib": measured["peak_gib"],
        "planned_gib": planned,
        "planned_over_measured": planned / measured["peak_gib"],
        "moment": plan.moment,
        "at_peak_gib": {kind: size / GIB for kind, size in plan.at_peak.items()},
        "words": overrides,
        "world_size": measured["world_size"],
    }


if __name__ == "__main__":
    main()
