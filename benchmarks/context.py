"""Attention under context parallel, its ranks played in turn by one process: how equal is their
work?

    python benchmarks/context.py [--tokens 4096] [--rounds 7] [--json FILE]

For 2, 4 and 8 ranks, with chunks from head and tail and without: the time of the slowest rank's
attention over the mean, and the sum over the ranks over the whole sequence's attention in one
process; forward and backward, without the gather, and without making the masks of chunks, which
layers and steps share. On a CPU it is the processor time of one thread, the least of the rounds,
since other work adds to it; on a GPU it is in bfloat16, and the peak of memory shows whether a mask
of tokens x tokens was made."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.harness import keep  # noqa: E402
from titanlite.models.common.attention import CausalAttention, causal_rows  # noqa: E402
from titanlite.parallel.context_parallel import rank_chunks  # noqa: E402
from titanlite.parallel.last_attention import last_attention  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32768 if ON_GPU else 4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens, core = arguments.tokens, CausalAttention()
    core.attend_last = last_attention(torch.device("cuda")) if ON_GPU else None
    q, k, v = (_random(heads, tokens) for heads in (HEADS, KV_HEADS, KV_HEADS))
    whole = [range(tokens)]
    plays = {("whole", 1, 0): whole}
    for degree in (2, 4, 8):
        for rank in range(degree):
            plays["headtail", degree, rank] = rank_chunks(tokens, degree, rank, True)
            plays["none", degree, rank] = rank_chunks(tokens, degree, rank, False)
    seconds: dict[tuple[str, int, int], list[float]] = {play: [] for play in plays}
    for number in range(arguments.rounds + 1):
        for play, chunks in plays.items():
            taken = _time(core, q, k, v, chunks)
            if number:  # the first round warms up
                seconds[play].append(taken)
    least = {play: min(times) for play, times in seconds.items()}  # other work only adds
    results = {}
    for split in ("headtail", "none"):
        for degree in (2, 4, 8):
            ranks = [least[split, degree, rank] for rank in range(degree)]
            slowest, total = max(ranks) / np.mean(ranks), sum(ranks) / least["whole", 1, 0]
            print(
                f"{split:<8} {degree} ranks: the slowest {slowest:.2f} of the mean, "
                f"all {total:.2f} of one process"
            )
            results[f"{split}, {degree} ranks"] = {
                "slowest_of_mean": slowest,
                "all_of_one_process": total,
            }
    if ON_GPU:
        peak = torch.cuda.max_memory_allocated()
        print(
            f"peak memory {peak / 2**30:.2f} GiB; "
            f"a mask of tokens x tokens would take {2 * tokens**2 / 2**30:.2f}"
        )
    if arguments.json:
        keep(arguments.json, results)


def _random(heads: int, tokens: int) -> torch.Tensor:
    tensor = torch.randn(1, heads, tokens, HEAD_DIM)
    return tensor.to("cuda", torch.bfloat16) if ON_GPU else tensor


def _time(
    core: CausalAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunks: list[range]
) -> float:
    """Return the seconds of attention from these chunks to all that they see, forward and
    backward.
    """
    parts = [(q[:, :, c.start : c.stop], k[:, :, : c.stop], v[:, :, : c.stop]) for c in chunks]
    if ON_GPU:
        torch.cuda.synchronize()
    else:
        for part, chunk in zip(parts, chunks, strict=True):
            causal_rows(len(chunk), chunk.stop, part[0].dtype, part[0].device)
    clock = time.perf_counter if ON_GPU else time.process_time
    start = clock()
    for part in parts:
        seen = core(*(leaves := [tensor.detach().requires_grad_() for tensor in part]))
        torch.autograd.grad(seen, leaves, torch.ones_like(seen))
    if ON_GPU:
        torch.cuda.synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
