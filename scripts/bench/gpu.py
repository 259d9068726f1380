"""The table of one GPU: two models, eager, compiled and in float8, recomputing nothing, by operation, or everything.

    python scripts/bench/gpu.py [--json benchmarks/gpu.json] [--seconds 530] [--steps 6] [--small]

Rows are in the order of their worth. One that is in the file already is not run again, and none is begun that might
not end in time: call it again for what is left. `--small` has the same rows at the debug model's size, anywhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from scripts.bench.plain import write_tokens  # noqa: E402
from scripts.bench.ratios import keep  # noqa: E402
from scripts.bench.train import measure  # noqa: E402
from titanlite.models.llama3 import FLAVORS  # noqa: E402

FLOAT8 = "--quantize.linear.float8.enable"
TECHNIQUES = {
    "compile": ["--compile.enable"],
    "compile + float8 tensorwise": ["--compile.enable", FLOAT8],
    "eager": [],
    "compile + float8 rowwise": ["--compile.enable", FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"],
}
RECOMPUTE = {
    "op": ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    "none": ["--activation_checkpoint.mode=none"],
    "full": ["--activation_checkpoint.mode=full"],
}
LONGEST = 75.0
"""Seconds that a row is given; none is begun with less left."""


@dataclass(frozen=True)
class Model:
    """What is trained, so that it fits."""

    name: str
    flavor: str
    layers: int
    batch: int
    seq: int

    @property
    def words(self) -> list[str]:
        return [
            f"--model.flavor={self.flavor}",
            f"--model.overrides.n_layers={self.layers}",
            f"--training.seq_len={self.seq}",
            f"--training.local_batch_size={self.batch}",
        ]


def models(small: bool) -> list[Model]:
    """llama 1B as it is, and 8B's width with as many layers as fit without recomputing."""
    if small:
        return [Model("small", "debugmodel", 2, 4, 128)]
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    # A layer: 3.5 GB of float32 parameters, gradients and AdamW, and 3 GB of activations; embedding, head and
    # logits: 27 GB. Estimated from shapes, not measured.
    return [Model("1B", "1B", 16, 1, 8192), Model("8B width", "8B", max(2, int((0.9 * gib - 27) / 6.5)), 1, 8192)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path("benchmarks/gpu.json"))
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for model, technique, recompute in product(models(asked.small), TECHNIQUES, RECOMPUTE):
            write = Path(folder) / f"{model.flavor}.npy"
            if not write.exists():
                write_tokens(write, FLAVORS[model.flavor].vocab_size, 1 << 22)
            if recompute == "op" and technique == "compile":
                _floor(model, asked, until)
            name = f"{model.name}, {technique}, recompute {recompute}"
            if _is_due(asked.json, name, until):
                data = ["--training.dataset=tokens", f"--training.dataset_path={write}", "--model.hf_assets_path="]
                words = [*model.words, *data, *TECHNIQUES[technique], *RECOMPUTE[recompute]]
                with _failure_kept(asked.json, name):
                    keep(asked.json, name, measure(words, asked.steps, timeout=LONGEST))
    print(table(asked.json))


def _is_due(path: Path, name: str, until: float) -> bool:
    known = path.exists() and name in json.loads(path.read_text())
    late = not known and time.monotonic() + LONGEST > until
    if late:
        print(f"left for another call: {name}", flush=True)
    return not known and not late


@contextmanager
def _failure_kept(path: Path, name: str) -> Iterator[None]:
    """A row that fails, or that a time limit ends, is a record as well: the table goes on."""
    try:
        yield
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        keep(path, name, {"failed": str(error)})


def _floor(model: Model, asked: argparse.Namespace, until: float) -> None:
    """The plain loop, which recomputes nothing."""
    for flags in (["--compile"], []):
        name = f"{model.name}, plain loop{', compiled' if flags else ''}"
        if _is_due(asked.json, name, until):
            shape = [f"--layers={model.layers}", f"--seq={model.seq}", f"--batch={model.batch}"]
            steps = [f"--steps={asked.steps}", f"--warmup={asked.steps}", f"--json={asked.json}", f"--name={name}"]
            command = [str(Path(__file__).with_name("plain.py")), f"--flavor={model.flavor}", *shape, *steps, *flags]
            with _failure_kept(asked.json, name):
                done = subprocess.run(
                    [sys.executable, *command], capture_output=True, text=True, check=False, timeout=LONGEST
                )
                if done.returncode:
                    raise RuntimeError(done.stderr.strip()[-400:])


def table(path: Path) -> str:
    """The records, a line each."""
    lines = ["| what | tokens/s | TFLOP/s | MFU | peak GiB | step |", "|---|---|---|---|---|---|"]
    for name, record in json.loads(path.read_text()).items():
        if "failed" in record:
            lines.append(f"| {name} | failed: {record['failed'].splitlines()[-1]} | | | | |")
            continue
        mfu = "" if record["mfu_percent"] is None else f"{record['mfu_percent']:.1f} %"
        peak = "" if record["peak_gib"] is None else f"{record['peak_gib']:.1f}"
        rate = f"{record['tokens_per_second_per_device']:,.0f} | {record['tflops']:.4g}"
        lines.append(f"| {name} | {rate} | {mfu} | {peak} | {1000 * record['step_seconds']:.0f} ms |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
