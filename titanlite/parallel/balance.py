"""Balance of experts: after every step all ranks' choices are counted, and biases favor what too few tokens chose."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.parallel.build import Context
from titanlite.parallel.expert import routers
from titanlite.runtime.distributed import gather_objects


class Balance:
    """The routers of this rank's parts."""

    def __init__(self, parts: Sequence[nn.Module], context: Context) -> None:
        self.context, self.sums = context, torch.zeros(0)  # of a layer: the choices of each expert, auxiliary loss
        self.routers = [*routers(*parts).values()]
        self.has_biases = any(router.bias is not None for router in self.routers)

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> None:
        """Move the biases, unless the step is skipped, and begin to count the next step."""
        if not self.routers:
            return
        self.sums = torch.stack([torch.cat([r.counts.double(), r.auxiliary.double()[None]]) for r in self.routers])
        for buffer in (buffer for router in self.routers for buffer in (router.counts, router.auxiliary)):
            buffer.zero_()
        if self.has_biases:
            dist.all_reduce(self.sums, group=self.context.mesh.stage)
            counts = self.sums[:, :-1]
            moves = (counts.mean(-1, keepdim=True) - counts).sign()
            moves = torch.where(skipped, 0, moves - moves.mean(-1, keepdim=True))
            for router, move in zip(self.routers, moves, strict=True):
                router.bias.add_(move, alpha=router.rate)

    def load(self) -> dict[str, float]:
        """Return how the last step's tokens were spread, by the keys of metrics.jsonl; all ranks ask once, or not."""
        if not self.context.job.shape.experts:
            return {}
        mesh, own = self.context.mesh, [0.0] * 3
        if self.routers:
            if not self.has_biases:
                dist.all_reduce(self.sums, group=mesh.stage)
            counts = self.sums[:, :-1]
            worst = (counts.amax(-1) / counts.mean(-1)).max()
            own = torch.stack([worst, (counts == 0).sum(), self.sums[:, -1].sum()]).tolist()
        stages = gather_objects(own, mesh.world["pp"].get_group() if self.context.job.layout.pp > 1 else None)
        worsts, idle, losses = zip(*stages, strict=True)
        return {"expert_load_max": max(worsts), "experts_idle": int(sum(idle)), "auxiliary_loss": sum(losses)}
