"""Measure how fast a config trains: one JSON record of a run of `titanlite train`.

    NGPU=8 python benchmarks/train.py --config llama_8b.toml [--section.key value …]
                                         [--steps 20] [--json FILE]

The first `--steps` steps warm up (and compile), the next `--steps` are measured, and two more are
traced to see where their time goes. The run does not validate, generate or save."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import keep  # noqa: E402
from titanlite.errors import UserError  # noqa: E402
from titanlite.tools.breakdown import COMMUNICATION, WORK_KINDS, read  # noqa: E402

TRACE_WARM_UP, TRACED = 3, 2


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments, overrides = parser.parse_known_args()
    record = measure(overrides, arguments.steps)
    print(json.dumps(record, indent=1))
    if arguments.json:
        keep(arguments.json, record)


def measure(
    overrides: list[str], steps: int, timeout: float | None = None, **environ: str
) -> dict[str, Any]:
    """Train and return the record; the error of a failed run shows its last lines."""
    last = 2 * steps + TRACE_WARM_UP + TRACED
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        own = [
            *("--validation.no_enable", "--checkpoint.no_enable", "--generate.no_at_end"),
            *(
                "--metrics.no_enable_tensorboard",
                f"--job.dump_folder={folder}",
                f"--metrics.log_freq={steps}",
            ),
            *(f"--training.steps={last}", f"--lr_scheduler.total_steps={10 * last}"),
            *("--profiling.enable_profiling", f"--profiling.profile_freq={last}"),
            *(
                f"--profiling.profiler_warmup={TRACE_WARM_UP}",
                f"--profiling.profiler_active={TRACED}",
            ),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "titanlite", "train", *overrides, *own],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=timeout, cwd=Path(__file__).parents[1], env=os.environ | environ,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError("\n".join(done.stdout.strip().splitlines()[-6:]))
        return _record(Path(folder), overrides, steps, last)


def _record(folder: Path, overrides: list[str], steps: int, last: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (measured,) = [line for line in lines if line["step"] == 2 * steps and "loss" in line]
    environment = json.loads((folder / "environment.json").read_text())
    try:
        ranks = [
            read(path) for path in sorted((folder / "profile_traces" / f"step-{last}").iterdir())
        ]
        where: dict[str, Any] = {
            "exposed_communication_share": mean(
                rank.kinds[COMMUNICATION] / rank.step for rank in ranks
            ),
            "shares_of_a_traced_step": {
                k: round(mean(r.kinds[k] / r.step for r in ranks), 4) for k in WORK_KINDS
            },
        }
    except (
        UserError,
        OSError,
    ) as error:  # a container may forbid tracing its GPU; the rest is measured anyway
        where = {"no_trace": str(error)}
    return {
        "words": overrides,
        "steps": steps,
        "tokens_per_second_per_device": measured["tps"],
        "tflops": measured["tflops"],
        "mfu_percent": measured["mfu"],
        "peak_gib": measured["memory_gib"],
        "step_seconds": measured["step_seconds"],
        "step_seconds_p95": measured["step_seconds_p95"],
        "data_seconds": measured["data_seconds"],
        "recompiles": measured["recompiles"],
        "loss": measured["loss"],
        **where,
        "versions": environment["versions"],
        "device": environment["device"],
        "world_size": environment["world_size"],
        "mesh": environment["mesh"],
    }


if __name__ == "__main__":
    main()
