"""Measure a layer with experts on one rank: the cost of routing, and the gain of the grouped
product over a loop.

    python benchmarks/experts.py [--tokens 2048] [--rounds 30] [--json FILE]

Forward and backward of a layer with 32 experts, 4 of them per token, against a gated feed-forward
layer of the same active width, which does the same products; and of the experts alone, by torch's
grouped product and by a loop over them. Rounds take turns, in float32 on a CPU and in bfloat16 on a
GPU."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.harness import keep, ratio  # noqa: E402
from titanlite.models.common.feed_forward import SwiGLU  # noqa: E402
from titanlite.models.common.moe import Experts, MoE, Router  # noqa: E402

DIM, HIDDEN, EXPERTS, TOP_K = 512, 384, 32, 4
ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)


class Looped(Experts):
    """The same experts, computed one after the other."""

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        parts = zip(tokens.split(counts.tolist()), self.w1, self.w2, self.w3, strict=True)
        return torch.cat(
            [F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2) for x, w1, w2, w3 in parts]
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=65536 if ON_GPU else 2048)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    grouped, looped = Experts(EXPERTS, DIM, HIDDEN), Looped(EXPERTS, DIM, HIDDEN)
    routed = MoE(Router(DIM, EXPERTS, TOP_K), grouped)
    modules = {"routed": routed, "dense": SwiGLU(DIM, TOP_K * HIDDEN), "looped": looped}
    for module in modules.values():
        _prepare(module)
    looped.load_state_dict(grouped.state_dict())
    x = torch.randn(1, arguments.tokens, DIM).to(DEVICE, DTYPE)
    with torch.no_grad():
        _, chosen, counts = routed.router(x)
        rows = x.flatten(0, 1)[chosen.flatten().argsort(stable=True) // TOP_K]
    runs: dict[str, Callable[[], Tensor]] = {
        "routed": lambda: routed(x),
        "dense": lambda: modules["dense"](x),
        "grouped": lambda: grouped(rows, counts),
        "looped": lambda: looped(rows, counts),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(arguments.rounds + 1):
        for name, forward in runs.items():
            taken = _time(forward)
            if number:  # the first round warms up
                seconds[name].append(taken)
    routing, grouping = (
        ratio(seconds["routed"], seconds["dense"]),
        ratio(seconds["grouped"], seconds["looped"]),
    )
    print(f"layer with experts / dense layer of the same active width: {routing}")
    print(f"grouped product / loop over the experts: {grouping}")
    if arguments.json:
        sizes = {
            "tokens": arguments.tokens,
            "dim": DIM,
            "hidden": HIDDEN,
            "experts": EXPERTS,
            "top_k": TOP_K,
        }
        keep(
            arguments.json,
            sizes | {"routed_of_dense": asdict(routing), "grouped_of_looped": asdict(grouping)},
        )


def _prepare(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    module.to(DEVICE, DTYPE)


def _time(forward: Callable[[], Tensor]) -> float:
    """Return the seconds of a forward and a backward pass."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    forward().square().sum().backward()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
