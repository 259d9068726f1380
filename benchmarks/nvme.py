"""Measure an optimizer's step with its state on a disk, and the memory that the state still takes.

    python benchmarks/nvme.py FOLDER [--gb 1] [--steps 5] [--json FILE]

Prints seconds of AdamW's step with its state in memory and in FOLDER (optimizer.state_folder),
those that dd needs with O_DIRECT to read and write as many bytes, one after the other and at once,
and how far the process grows beyond parameters and gradients, in percent of the state. Steps on the
disk alternate with dd."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.harness import keep, ratio  # noqa: E402
from titanlite.config.schema import config_of  # noqa: E402
from titanlite.optim.streamed import Streamed  # noqa: E402

NUMEL = 8 << 20  # of all parameters but one, which is a multiple of nothing
STEP = 4 << 20


def resident() -> int:
    """Return the resident bytes of this process, including maps and shared pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """The growth of this process inside the context."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()

    @property
    def growth(self) -> int:
        return self.most - self.before


def dd(folder: str, size: int) -> tuple[float, float]:
    """Return the seconds of writing and reading this many bytes in turn, and of both at once."""
    blocks = size // STEP
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        one, other = f"{inside}/one", f"{inside}/other"
        write = ["dd", "if=/dev/zero", f"bs={STEP}", f"count={blocks}", "oflag=direct"]
        write += ["conv=notrunc"]
        read = ["dd", "of=/dev/null", f"bs={STEP}", f"count={blocks}", "iflag=direct"]
        for file in (one, other):
            subprocess.run(["fallocate", f"-l{size}", file], check=True)
            subprocess.run([*write, f"of={file}"], check=True, capture_output=True)
        began = time.perf_counter()
        subprocess.run([*write, f"of={one}"], check=True, capture_output=True)
        subprocess.run([*read, f"if={other}"], check=True, capture_output=True)
        in_turn = time.perf_counter() - began
        began = time.perf_counter()
        both = [
            subprocess.Popen(command, stderr=subprocess.DEVNULL)
            for command in ([*write, f"of={one}"], [*read, f"if={other}"])
        ]
        assert [process.wait() for process in both] == [0, 0]
        return in_turn, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--gb", type=float, default=1.0, help="of state")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    number = max(1, round(options.gb * 1e9 / 8 / NUMEL))
    parameters = [nn.Parameter(torch.randn(NUMEL)) for _ in range(number)]
    parameters.append(nn.Parameter(torch.randn(1_000_003)))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    size = 8 * sum(parameter.numel() for parameter in parameters)

    def adam() -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    config = config_of({"optimizer.state_on": "disk", "optimizer.state_folder": options.folder})
    seconds: dict[str, list[float]] = {"memory": [], "disk": [], "dd, in turn": [], "dd, both": []}
    adam()  # which imports much
    with Peak() as peak:
        disk = Streamed(adam(), config)
        disk.step()
        for _ in range(options.steps):
            began = time.perf_counter()
            disk.step()
            seconds["disk"].append(time.perf_counter() - began)
            for name, found in zip(
                ("dd, in turn", "dd, both"), dd(options.folder, size), strict=True
            ):
                seconds[name].append(found)
    memory = adam()
    memory.step()
    for _ in range(options.steps):
        began = time.perf_counter()
        memory.step()
        seconds["memory"].append(time.perf_counter() - began)
    print(f"{size / 1e9:.2f} GB of state in {options.folder}, torch {torch.__version__}")
    for name, times in seconds.items():
        print(f"{name:<12} {median(times):7.3f} s  ({min(times):.3f} to {max(times):.3f})")
    of_dd = ratio(seconds["disk"], seconds["dd, in turn"])
    share = peak.growth / size
    print(f"disk / dd in turn {of_dd}")
    print(f"in memory at most {100 * share:.1f} % of the state")
    if options.json:
        found = {"gb": size / 1e9, "seconds": seconds, "disk_of_dd": asdict(of_dd)}
        keep(options.json, found | {"share_in_memory": share})


if __name__ == "__main__":
    main()
