"""Lower limits of a plan's memory and time, without a rehearsal: what a search rules out by them
need not be rehearsed.
"""

import torch

from titanlite.config.job import Job
from titanlite.config.section import value_of
from titanlite.config.stages import SPLIT_BACKWARD
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import optimizer_bytes, trained_parameters
from titanlite.parallel.build import build_model
from titanlite.planner.hardware import Hardware
from titanlite.planner.record import Collective
from titanlite.planner.speed import is_compiled, transfer

FLOAT8 = "quantize.linear.float8.enable"


class Facts:
    """The facts about a job's model, on any mesh."""

    def __init__(self, job: Job, hardware: Hardware) -> None:
        self._hardware, self._layers = hardware, job.shape.layers
        model, table = build_model(job)
        trained = trained_parameters([model], table, job.spec.blocks, no_decay=())
        named = [*model.named_parameters()]
        self._gradients = sum(item.parameter.nbytes for item in trained)
        self.saved = sum(p.nbytes for _, p in named) + optimizer_bytes(trained, job.config)
        """Bytes of parameters and optimizer state, of all ranks together."""
        offloads = job.config.training.enable_cpu_offload
        self.state = 0 if offloads else self.saved + self._gradients
        """The same with gradients, in memory of GPUs."""
        self._experts = sum(p.numel() for name, p in named if table[name].tensor == "expert")
        self._others = sum(p.numel() for _, p in named) - self._experts
        trained_numel = sum(item.parameter.numel() for item in trained)
        self._trained = trained_numel / (self._others + self._experts)
        self._width = min(
            (p.size(1) for n, p in named if table[n].tensor == "embedding"), default=0
        )
        self._flops = flops_per_token(
            named, table, job.shape, job.config.training.seq_len, job.spec.blocks
        )
        self.flops = self._flops.total
        """Of a token; recomputation is left out."""

    def least_bytes(self, job: Job) -> float:
        """Return a lower limit of a step's peak: the state, what stays gathered, gradients that a
        pipeline sums up whole, and what the blocks with a backward pass start from.
        """
        layout, training, stages = job.layout, job.config.training, job.stages
        size, reshard = _size(training.mixed_precision_param), "never"
        state, samples = self.state / layout.model_shards, float(job.batch.local)
        gathered = (self._others / layout.tp + self._experts / layout.ep) / layout.pp
        if layout.pp > 1:
            summed = gathered * self._trained * _size(training.mixed_precision_reduce)
            state += summed - self._gradients / layout.model_shards
            samples = stages.size * min(stages.micro_batches, layout.pp) / layout.pp
            reshard = "default"
        if layout.dp_shard > 1 and job.config.parallelism.fsdp_reshard_after_forward == reshard:
            state += gathered * size
        tokens = samples * training.seq_len / layout.cp / layout.tp
        return state + tokens * self._width * self._flops.blocks * size

    def least_seconds(self, job: Job) -> float:
        """Return a lower limit of a step's estimate: the longer of computing and gathering."""
        layout, hardware, batch, stages = job.layout, self._hardware, job.batch, job.stages
        training, settings = job.config.training, job.config.parallelism
        dtype, reduced = training.mixed_precision_param, training.mixed_precision_reduce

        def seconds(dimension: str, ranks: int, size: float) -> float:
            one = Collective("all-gather", dimension, ranks, dtype, int(size))
            return transfer(one, layout, hardware)[0]

        is_full = job.config.activation_checkpoint.mode == "full"
        samples, tokens = batch.local * batch.accumulation, training.seq_len / layout.cp
        products = self._flops.products + is_full * self._flops.again
        attention = self._flops.attention + is_full * self._flops.attention_again
        # Under context parallel chunks attend to half of all pairs of tokens or more.
        flops = (products + attention / 2) * samples * tokens
        type_ = "float8" if value_of(job.config, FLOAT8) else dtype
        share = hardware.efficiencies[hardware.efficiency_of(type_, is_compiled(job))].share
        computing = flops / layout.tp / hardware.peak(type_) / share
        if not settings.enable_async_tensor_parallel:
            # Two gathers and two reductions in each pass of a block.
            number = 4 * (self._layers + (1 + is_full) * self._flops.blocks) * samples
            activations = tokens * self._width * _size(dtype)
            computing += number * seconds("tp", layout.tp, activations)
        computing /= layout.pp
        is_kept = settings.fsdp_reshard_after_forward == "never"
        passes = 1 if is_kept or self._flops.blocks < self._layers else 2
        steps = 1 if settings.defer_gradient_sync else batch.accumulation
        gathers = batch.accumulation * passes
        if layout.pp > 1:
            gathers = steps = 1
            if stages.schedule not in SPLIT_BACKWARD:
                # The first micro-batch goes through all other ranks' first stages, and back.
                turns = stages.micro_batches * len(stages.ranks[0])
                computing *= 1 + (layout.pp - 1) / turns
        # A reduction moves as much as a gather.
        crossing = gathers * _size(dtype) + steps * self._trained * _size(reduced)
        crossing /= layout.pp
        waits = seconds("dp_shard", layout.dp_shard, self._others / layout.tp * crossing)
        experts_on = "efsdp" if layout.ep > 1 else "dp_shard"
        waits += seconds(experts_on, layout.expert_fsdp, self._experts / layout.ep * crossing)
        return max(computing, waits)


def _size(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
