"""TorchTitan's own trainer on CPUs: a process that imports it once, and forks a run's ranks for
each line of JSON that it reads.

Nothing of an algorithm is replaced, only what gloo and a CPU lack."""

import json
import os
import pickle
import sys
import time
import traceback
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

LOCAL = 4
"""Rows of a micro-batch."""
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 256}
SIZES |= {"rope_theta": 10000.0}
QWEN = {"head_dim": 16, "hidden_dim": 64}
EXPERTS = {"num_experts": 4, "num_shared_experts": 0, "top_k": 2, "score_func": "softmax"}
EXPERTS |= {"route_norm": True, "score_before_experts": False, "use_grouped_mm": False}
COMMON = f"""--model.flavor=tiny --training.steps=20 --training.seq_len=32
    --training.global_batch_size=8 --training.local_batch_size={LOCAL} --optimizer.lr=1e-3
    --lr_scheduler.warmup_steps=2 --training.mixed_precision_param=float32 --debug.seed=7
    --metrics.log_freq=1 --checkpoint.enable --checkpoint.interval=8
    --checkpoint.no-last-save-model-only"""


def use_cpu() -> None:
    """Let torchtitan take the CPU for an accelerator."""
    accelerator: Any = types.ModuleType("accelerator")
    accelerator.__getattr__ = lambda name: getattr(torch.cpu, name)
    accelerator.get_device_name = lambda device=None: "CPU"
    accelerator.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=1)
    accelerator.memory_stats = lambda device=None: {}
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        setattr(accelerator, name, lambda device=None: None)
    barrier, divide, histc = dist.barrier, FSDPModule.set_gradient_divide_factor, torch.histc

    def whole_sum(module: Any, factor: float) -> None:  # gloo has no PREMUL_SUM
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    def counts(x: Any, bins: int, **bounds: Any) -> Any:  # histc has no kernel for whole numbers
        if x.is_floating_point():
            return histc(x, bins, **bounds)
        return torch.bincount(x.flatten(), minlength=bins)

    for owner, name, value in (
        (torch._utils, "_get_available_device_type", lambda: "cpu"),
        (torch._utils, "_get_device_module", lambda kind: accelerator),
        (dist, "barrier", lambda group=None, device_ids=None: barrier(group)),
        (FSDPModule, "set_gradient_divide_factor", whole_sum),
        (torch, "histc", counts),
        (time, "sleep", lambda seconds: None),
    ):
        setattr(owner, name, value)


class Rows:
    """A data loader of the rows in a file, in their order."""

    def __init__(self, job: dict[str, Any], ranks: int, rank: int) -> None:
        rows = torch.load(job["rows"], weights_only=True)[job["first"] :]
        own = rows.view(-1, ranks, 8 // ranks, *rows.shape[1:])[:, rank]
        self.batches = own.reshape(-1, LOCAL, *rows.shape[1:])
        self.state = {f"dp_rank_{rank}": pickle.dumps(rank), "world_size": ranks}

    def __iter__(self) -> Any:
        return (({"input": batch[:, 0]}, batch[:, 1]) for batch in self.batches)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def args_of(spec: Any, kind: str) -> Any:
    """Return the sizes of a tiny model."""
    flavor = type(spec.model_args["debugmodel"])
    if kind == "llama3":
        return flavor(**SIZES, multiple_of=8)
    if kind == "tied":
        return flavor(**SIZES, **QWEN, enable_weight_tying=True)
    experts = import_module("torchtitan.models.moe").MoEArgs(**EXPERTS)
    return flavor(**SIZES, **QWEN, moe_enabled=True, moe_inter_dim=16, moe_args=experts)


def train(job: dict[str, Any]) -> None:
    """Be a rank of a run."""
    specs = import_module("torchtitan.protocols.train_spec")
    name = "llama3" if job["kind"] == "llama3" else "qwen3"
    spec = specs.get_train_spec(name)
    spec.model_args = {"tiny": args_of(spec, job["kind"])}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = lambda dp_world_size, dp_rank, **_: Rows(job, dp_world_size, dp_rank)
    specs.register_train_spec(name, spec)
    processor = import_module("torchtitan.components.metrics").MetricsProcessor
    out, folder = [], Path(job["folder"])

    def log(_: Any, step: int, loss: float, most: float, norm: float, extra_metrics: Any) -> None:
        out.append(json.dumps({"step": step, "loss": float(loss), "norm": norm, **extra_metrics}))

    processor.log = log
    argv = [*COMMON.split(), f"--model.name={name}", f"--job.dump_folder={folder}", *job["argv"]]
    trainer = import_module("torchtitan.train").Trainer(
        import_module("torchtitan.config").ConfigManager().parse_args(argv)
    )
    trainer.train()
    trainer.close()
    if dist.get_rank() == 0:
        (folder / "losses.jsonl").write_text("\n".join(out))


def rank_of(job: dict[str, Any], rank: int) -> int:
    """Fork a rank; return its process."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        variables = {"RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": 0}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": job["port"]}
        os.environ.update({name: str(value) for name, value in variables.items()})
        torch.set_num_threads(1)
        train(job)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    use_cpu()
    for module in ("train", "models.llama3", "models.qwen3"):
        import_module(f"torchtitan.{module}")
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [rank_of(job, rank) for rank in range(job["ranks"])]
        print("codes", [os.waitpid(pid, 0)[1] for pid in ranks], flush=True)
