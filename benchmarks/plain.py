"""A hand-written training loop, which titanlite's Trainer is compared with.

python benchmarks/plain.py --flavor 1B --seq 8192 --batch 2 --steps 20 [--layers 8] [--compile]
[--json FILE]"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.harness import keep  # noqa: E402
from titanlite.data.shards import id_type  # noqa: E402
from titanlite.data.shuffle import SampleOrder  # noqa: E402
from titanlite.models.llama3 import FLAVORS, SPEC, shape  # noqa: E402
from titanlite.observe.throughput import flops_per_token, peak_tflops  # noqa: E402
from titanlite.parallel.build import build_meta_model  # noqa: E402

LOG = 10


class Plain:
    """Trains with torch's own calls on a memory-mapped file, and reads the loss every LOG steps."""

    def __init__(
        self,
        flavor: Any,
        data: Path,
        seq: int,
        batch: int,
        weights: dict[str, torch.Tensor] | None = None,
        device: str = "cpu",
        compiler: str = "",
        mixed: bool = False,
        replicas: bool = False,
        build: Callable[[Any, int], torch.nn.Module] = SPEC.module,
    ) -> None:
        self.tokens, self.seq, self.batch, self.device = (
            np.load(data, mmap_mode="r"),
            seq,
            batch,
            device,
        )
        self.order = SampleOrder((len(self.tokens) - 1) // seq, seed=0)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        with torch.device(device):
            self.model = build(flavor, seq)
        if weights:
            self.model.load_state_dict(weights)
        blocks = list(self.model.get_submodule("layers").children())
        self.loss: Any = float32_loss
        if compiler:  # the method, not the module, so that FSDP2's hooks stay out of the graph
            self.loss = torch.compile(self.loss, backend=compiler)
            for block in blocks:
                block.forward = torch.compile(block.forward, fullgraph=True, backend=compiler)
        self.called: torch.nn.Module = self.model
        if replicas:
            self.called = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif mixed or self.world > 1:
            wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            policy = wide if mixed else MixedPrecisionPolicy()
            embedding, *head = (
                self.model.get_submodule(name) for name in ("tok_embeddings", "norm", "output")
            )
            if not flavor.tied:
                fully_shard(embedding, mp_policy=policy)
            for block in blocks:
                fully_shard(block, mp_policy=policy)
            fully_shard(
                [embedding, *head] if flavor.tied else head,
                mp_policy=policy,
                reshard_after_forward=False,
            )
            fully_shard(self.model, mp_policy=policy)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        exempt = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": exempt, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.done, self.losses, self.norms = 0, list[float](), list[float]()

    def next_batch(self) -> torch.Tensor:
        first = (self.done * self.world + self.rank) * self.batch
        starts = [self.order(number) * self.seq for number in range(first, first + self.batch)]
        rows = np.stack([self.tokens[s : s + self.seq + 1] for s in starts]).astype(np.int64)
        batch = torch.from_numpy(rows)
        return (
            batch.pin_memory().to(self.device, non_blocking=True)
            if self.device == "cuda"
            else batch
        )

    def step(self) -> None:
        batch = self.next_batch()
        self.done += 1
        logits = self.called(batch[:, :-1])
        loss = self.loss(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.done == 1 or self.done % LOG == 0:
            mean = loss.detach() / self.world
            dist.all_reduce(mean)
            self.losses.append(mean.item())
            self.norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def float32_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss. If compiled, the float32 logits take no memory."""
    return F.cross_entropy(logits.float(), labels)


def write_tokens(path: Path, vocab_size: int, count: int) -> None:
    """Write random tokens, since it does not matter what a model learns from them."""
    np.save(
        path, np.random.default_rng(0).integers(vocab_size, size=count).astype(id_type(vocab_size))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flavor", default="debugmodel", choices=FLAVORS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    flavor = FLAVORS[arguments.flavor]
    flavor = dataclasses.replace(flavor, n_layers=arguments.layers) if arguments.layers else flavor
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = Path(folder) / "0.npy"
        write_tokens(data, flavor.vocab_size, 1 << 22)
        plain = Plain(
            flavor,
            data,
            arguments.seq,
            arguments.batch,
            device=device,
            compiler="inductor" * arguments.compile,
            mixed=True,
        )
        for _ in range(arguments.warmup):
            plain.step()
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        wait()
        began = time.perf_counter()
        for _ in range(arguments.steps):
            plain.step()
        wait()
        seconds = (time.perf_counter() - began) / arguments.steps
    named = list(plain.model.named_parameters())
    _, table = build_meta_model(SPEC, flavor)
    flops = flops_per_token(named, table, shape(flavor), arguments.seq, SPEC.blocks).total
    rate = arguments.batch * arguments.seq / seconds
    peak = peak_tflops(torch.device(device))
    record = {
        "step_seconds": seconds, "tokens_per_second_per_device": rate,
        "tflops": rate * flops / 1e12,
        "mfu_percent": 100 * rate * flops / 1e12 / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "losses": plain.losses,
    }  # fmt: skip
    print(record)
    if arguments.json:
        keep(arguments.json, record)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
