"""The table of one GPU: two models; eager, compiled or in float8; recomputing nothing, some
operations, or all.

    python benchmarks/gpu.py [--json benchmarks/gpu.json] [--seconds 530] [--steps 6] [--small]

All rows train in bfloat16 mixed precision. The most important rows come first, and none is started
that might not end within --seconds: run the command again for the remaining rows, then for those
that failed. `--small` runs the same rows with the debug model on any machine."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks.plain import write_tokens  # noqa: E402
from benchmarks.ratios import keep  # noqa: E402
from benchmarks.train import measure  # noqa: E402
from titanlite.models.llama3 import FLAVORS  # noqa: E402

# both models' output layers stay in bfloat16: one is tied, one left out
FLOAT8 = "--quantize.linear.float8.enable"
TECHNIQUES = {
    "compile": ["--compile.enable"],
    "compile + float8 tensorwise": ["--compile.enable", FLOAT8],
    "eager": [],
    "compile + float8 rowwise": [
        "--compile.enable",
        FLOAT8,
        "--quantize.linear.float8.recipe_name=rowwise",
    ],
}
RECOMPUTE = {
    "op": [
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    ],
    "none": ["--activation_checkpoint.mode=none"],
    "full": ["--activation_checkpoint.mode=full"],
}
LONGEST = 120.0
"""Time limit of a row in seconds; none is started with less time left."""


@dataclass(frozen=True)
class Model:
    """A model that fits on the GPU."""

    name: str
    flavor: str
    layers: int
    batch: int
    seq: int

    @property
    def overrides(self) -> list[str]:
        return [
            f"--model.flavor={self.flavor}",
            f"--model.overrides.n_layers={self.layers}",
            f"--training.seq_len={self.seq}",
            f"--training.local_batch_size={self.batch}",
            "--training.mixed_precision_param=bfloat16",
        ]


def models(small: bool) -> list[Model]:
    """Return Llama 1B, and 8B's width with as many layers as fit without recomputation."""
    if small:
        return [Model("small", "debugmodel", 2, 4, 128)]
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    # A layer: 3.5 GB of float32 parameters, gradients and AdamW, and 3 GB of activations;
    # embedding, head and logits: 27 GB. Estimated from shapes, not measured.
    return [
        Model("1B", "1B", 16, 1, 8192),
        Model("8B width", "8B", max(2, int((0.9 * gib - 27) / 6.5)), 1, 8192),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path("benchmarks/gpu.json"))
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        rows = table_of(models(arguments.small), arguments.steps, arguments.json, Path(folder))
        records = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        due = [name for name in rows if name not in records or "failed" in records[name]]
        for name in sorted(due, key=lambda name: name in records):
            if time.monotonic() + LONGEST > until:
                print(f"not enough time, run again: {name}", flush=True)
                continue
            try:
                rows[name]()
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                keep(arguments.json, name, {"failed": str(error)})
    print(table(arguments.json))


def table_of(
    models: list[Model], steps: int, path: Path, folder: Path
) -> dict[str, Callable[[], None]]:
    """Return the functions that measure the rows and store their records; the plain loops come
    first.
    """
    rows: dict[str, Callable[[], None]] = {}
    for model in models:
        for flags in (["--compile"], []):
            name = f"{model.name}, plain loop{', compiled' if flags else ''}"
            rows[name] = partial(_plain_loop, model, flags, steps, path, name)
    for (technique, switches), (recompute, more), model in product(
        TECHNIQUES.items(), RECOMPUTE.items(), models
    ):
        name = f"{model.name}, {technique}, recompute {recompute}"
        rows[name] = partial(_row, model, [*switches, *more], steps, path, name, folder)
    return rows


def _row(
    model: Model, overrides: list[str], steps: int, path: Path, name: str, folder: Path
) -> None:
    tokens = folder / f"{model.flavor}.npy"
    if not tokens.exists():
        write_tokens(tokens, FLAVORS[model.flavor].vocab_size, 1 << 22)
    data = [
        "--training.dataset=tokens",
        f"--training.dataset_path={tokens}",
        "--model.hf_assets_path=",
    ]
    keep(
        path, name, measure([*model.overrides, *data, *overrides], steps, timeout=LONGEST, NGPU="1")
    )


def _plain_loop(model: Model, flags: list[str], steps: int, path: Path, name: str) -> None:
    """Run the plain loop, with the allocator settings of titanlite's launcher."""
    shape = [f"--layers={model.layers}", f"--seq={model.seq}", f"--batch={model.batch}"]
    kept = [f"--steps={steps}", f"--warmup={steps}", f"--json={path}", f"--name={name}"]
    script = Path(__file__).with_name("plain.py")
    done = subprocess.run(
        [sys.executable, script, f"--flavor={model.flavor}", *shape, *kept, *flags],
        capture_output=True, text=True, check=False, timeout=LONGEST,
        env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])


def table(path: Path) -> str:
    """Return the records as a Markdown table."""
    lines = ["| row | tokens/s | TFLOP/s | MFU | peak GiB | step |", "|---|---|---|---|---|---|"]
    for name, record in json.loads(path.read_text()).items():
        if "failed" in record:
            lines.append(f"| {name} | failed: {record['failed'].splitlines()[-1]} | | | | |")
            continue
        mfu = "" if record["mfu_percent"] is None else f"{record['mfu_percent']:.1f} %"
        peak = "" if record["peak_gib"] is None else f"{record['peak_gib']:.1f}"
        rate = f"{record['tokens_per_second_per_device']:,.0f} | {record['tflops']:.4g}"
        lines.append(
            f"| {name} | {rate} | {mfu} | {peak} | {1000 * record['step_seconds']:.0f} ms |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
