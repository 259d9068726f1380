"""Compare titanlite with TorchTitan 0.2.2's own trainer on fake H100s: what a step costs a rank's
GPU and its host, and the allocator's peaks.

Kernels compute nothing there, so that the host's time is what is left of a step. It is given as
processor milliseconds, the least of all steps after the fifth and of all turns, since the clock of
a fake GPU means nothing.

    python benchmarks/beside_torchtitan.py [--models 8b6 1b moe] [--ranks 1 2] [--turns 3]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.harness import keep  # noqa: E402
from tests.gpu import fake_gpu  # noqa: E402
from tests.jobs import OUTSIDE  # noqa: E402
from tests.runs import environment  # noqa: E402
from titanlite.errors import format_table  # noqa: E402

HERE = ROOT / "benchmarks/beside"
WARM_UP = 5
STEPS = 150
SECONDS = 2400


@dataclass(frozen=True)
class Model:
    """A model in the terms of both programs."""

    ours: str
    name: str
    """TorchTitan's."""
    theirs: dict[str, Any]
    tokens: int
    compiled: bool = True


LLAMA = {"vocab_size": 128256, "n_kv_heads": 8, "rope_theta": 500000}
MODELS = {
    "8b6": Model(
        "--model.flavor=8B --model.overrides.n_layers=6",
        "llama3",
        LLAMA
        | {"dim": 4096, "n_layers": 6, "n_heads": 32}
        | {"ffn_dim_multiplier": 1.3, "multiple_of": 1024},
        8192,
    ),
    "1b": Model(
        "--model.flavor=1B --model.overrides.tied=false",
        "llama3",
        LLAMA
        | {"dim": 2048, "n_layers": 16, "n_heads": 32}
        | {"ffn_dim_multiplier": 1.5, "multiple_of": 256},
        8192,
    ),
    "moe": Model(
        "--model.name=qwen3 --model.flavor=debugmodel_moe --model.overrides.dim=256 "
        "--model.overrides.n_layers=4 --model.overrides.n_heads=8 --model.overrides.n_kv_heads=4 "
        "--model.overrides.head_dim=64 --model.overrides.expert_dim=768 "
        "--model.overrides.experts=64 --model.overrides.top_k=8 "
        "--model.overrides.vocab_size=32768 --model.overrides.balance=bias",
        "qwen3",
        {
            "dim": 256,
            "n_layers": 4,
            "n_heads": 8,
            "n_kv_heads": 4,
            "head_dim": 64,
            "vocab_size": 32768,
            "moe_enabled": True,
            "moe_inter_dim": 768,
            "moe_args": {
                "num_experts": 64,
                "num_shared_experts": 0,
                "top_k": 8,
                "score_func": "softmax",
                "route_norm": True,
                "score_before_experts": False,
            },
        },
        4096,
        compiled=False,
    ),
}
LENGTH = [f"--training.steps={STEPS}", "--metrics.log_freq=1000"]


def options_of(model: Model) -> list[str]:
    """Return what both are told of a model's training, but for its sizes."""
    options = [
        "--training.local_batch_size=1",
        f"--training.seq_len={model.tokens}",
        "--training.mixed_precision_param=bfloat16",
        "--activation_checkpoint.mode=none",
    ]
    if model.compiled:
        options.append("--compile.enable")
    return options


def torchtitan_of(model: Model) -> tuple[list[str], dict[str, str]]:
    """Return the module of TorchTitan's trainer with its options for a model, and its variables."""
    options = ["--model.name=sized", "--model.flavor=sized"]
    options.append("--experimental.custom_import=beside_torchtitan")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "TITAN_NAME": model.name,
        "TITAN_MODEL": json.dumps(model.theirs),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as in its run_train.sh, and here
    }
    return ["torchtitan.train", *options_of(model), *options], variables


def run_titanlite(model: Model, ranks: int, folder: Path, library: Path) -> None:
    argv = [*LENGTH, *options_of(model), *model.ours.split(), "--model.package=beside_titanlite"]
    path = os.pathsep.join([str(ROOT), OUTSIDE, str(HERE)])
    fake_gpu.train(library, folder, ranks, argv, seconds=SECONDS, PYTHONPATH=path)


def run_torchtitan(model: Model, ranks: int, folder: Path, library: Path) -> None:
    argv, of_model = torchtitan_of(model)
    argv += [*LENGTH, f"--job.dump_folder={folder / 'run'}", "--comm.init_timeout_seconds=2000"]
    processes = []
    for rank in range(ranks):
        variables = {
            **environment(),
            **fake_gpu.environment(library, folder / "traces", ranks),
            **of_model,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29577",
        }
        command = [sys.executable, "-m", *argv]
        processes.append(subprocess.Popen(command, env=variables, cwd=ROOT))
    codes = [process.wait(SECONDS) for process in processes]
    assert not any(codes), f"TorchTitan's ranks ended with {codes}"


WHO = {"TorchTitan": run_torchtitan, "titanlite": run_titanlite}


def trace_of_rank_0(folder: Path) -> fake_gpu.Trace:
    """Return the trace of the process that trained; its helpers have its rank too."""
    traces = [fake_gpu.read_trace(file) for file in folder.glob("rank-0.*.trace")]
    return max(traces, key=lambda trace: len(trace.events))


def row_of(trace: fake_gpu.Trace) -> dict[str, Any]:
    """Return what the steps after the warm-up cost a rank's GPU and host."""
    begins = []
    for place, event in enumerate(trace.events):
        if event.kind == "mark" and event.name.startswith("step "):
            begins.append((place, [int(word) for word in event.name.split()[1:]]))
    times = []
    for (_, one), (_, following) in zip(begins[WARM_UP:], begins[WARM_UP + 1 :], strict=False):
        times.append(following[1] - one[1])
    first, last = begins[-2][0], begins[-1][0]
    step = fake_gpu.Trace(trace.events[first:last])
    copies = Counter(event.facts["way"] for event in step.of("copy"))
    calls, sizes = Counter[str](), Counter[str]()
    for event in step.of("collective"):
        calls[event.name] += 1
        sizes[event.name] += int(event.facts["count"]) * BYTES[int(event.facts["type"])]
    _, (_, _, allocated, reserved) = begins[-1]
    return {
        "processor ms": round(min(times) / 1e6, 1),
        "launches": len(step.of("launch")),
        "copies D2D / H2D / D2H": " / ".join(str(copies[way]) for way in ("D2D", "H2D", "D2H")),
        "collectives (elements' MB)": ", ".join(
            f"{calls[name]} {name} ({sizes[name] / 1e6:.4g})" for name in calls
        ),
        "waits": ", ".join(f"{count} {kind}" for kind, count in step.waits().items()),
        "peak, reserved GB": f"{allocated / 1e9:.2f}, {reserved / 1e9:.2f}",
    }


BYTES = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]
"""Bytes of each of NCCL's types."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--who", nargs="+", choices=WHO, default=[*WHO])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    library = fake_gpu.build()
    rows = []
    for name in options.models:
        kind = "compiled" if MODELS[name].compiled else "eager"
        for ranks in options.ranks:
            turns: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for who in options.who * options.turns:
                with tempfile.TemporaryDirectory() as folder:
                    WHO[who](MODELS[name], ranks, Path(folder), library)
                    turns[who].append(row_of(trace_of_rank_0(Path(folder) / "traces")))
            for who, found in turns.items():
                row = min(found, key=itemgetter("processor ms"))
                rows.append({"model": f"{name} {kind}", "ranks": ranks, "who": who, **row})
                print(json.dumps(rows[-1]), flush=True)
    print(format_table([[str(each) for each in row.values()] for row in rows], [*rows[0]]))
    if options.json:
        keep(options.json, {"turns": options.turns, "rows": rows})


if __name__ == "__main__":
    main()
