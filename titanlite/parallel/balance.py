"""Expert load balance: choices are counted over all ranks; a bias favors underused experts."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.parallel.build import Context
from titanlite.parallel.expert_parallel import routers
from titanlite.runtime.distributed import gather_objects


class ExpertLoad:
    """Counts and balances the load of the routers in this rank's parts."""

    def __init__(self, parts: Sequence[nn.Module], context: Context) -> None:
        self.context = context
        self.routers = [*routers(*parts).values()]
        self.has_biases = any(router.bias is not None for router in self.routers)
        self.sums = torch.zeros(0)
        """The last step's sums for each layer: every expert's choices, then the auxiliary loss."""

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Move the biases, unless the step is skipped, and start counting for the next step."""
        rows = []
        for router in self.routers:
            rows.append(torch.cat([router.counts.double(), router.auxiliary.double()[None]]))
            router.counts.zero_()
            router.auxiliary.zero_()
        self.sums = torch.stack(rows)
        if not self.has_biases:
            return
        dist.all_reduce(self.sums, group=self.context.mesh.stage)
        counts = self.sums[:, :-1]
        moves = (counts.mean(-1, keepdim=True) - counts).sign()
        moves = torch.where(skipped, 0, moves - moves.mean(-1, keepdim=True))
        for router, move in zip(self.routers, moves, strict=True):
            assert router.bias is not None
            router.bias.add_(move, alpha=router.rate)

    def load(self) -> dict[str, float]:
        """Return the spread of the last step's tokens, by the keys of metrics.jsonl.

        It communicates: all ranks must call it, and only once a step.
        """
        if not self.context.job.shape.experts:
            return {}
        own = [0.0, 0.0, 0.0]
        if self.routers:
            own = self._load_of_stage()
        pipeline_ranks = None
        if self.context.mesh.pp:
            pipeline_ranks = self.context.mesh.pp.get_group()
        stages = gather_objects(own, pipeline_ranks)
        worsts, idle, losses = zip(*stages, strict=True)
        return {
            "expert_load_max": max(worsts),
            "experts_idle": int(sum(idle)),
            "auxiliary_loss": sum(losses),
        }

    def _load_of_stage(self) -> list[float]:
        """Return the largest load over the mean, the idle experts, and the auxiliary loss."""
        if not self.has_biases:
            dist.all_reduce(self.sums, group=self.context.mesh.stage)
        counts = self.sums[:, :-1]
        worst = (counts.amax(-1) / counts.mean(-1)).max()
        idle = (counts == 0).sum()
        return torch.stack([worst, idle, self.sums[:, -1].sum()]).tolist()
