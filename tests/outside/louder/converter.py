"""A converter that doubles the output of norms, and one that renames a parameter, which is
refused.
"""

from torch import nn
from torch.distributed.tensor import DTensor


class LouderNorm(nn.RMSNorm):
    def forward(self, x):
        return 2 * super().forward(x)


class Louder:
    def __init__(self, job):
        self.seen = []

    def convert(self, model):
        assert all(p.is_meta and not isinstance(p, DTensor) for p in model.parameters()), (
            "before sharding"
        )
        norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
        for norm in norms:
            norm.__class__ = LouderNorm
        return [f"louder     {len(norms)} norms"]

    def after_optimizer_step(self, parts):
        self.seen.append(
            sum(p.detach().double().sum().item() for part in parts for p in part.parameters())
        )


class Renaming(Louder):
    def convert(self, model):
        model.scale = model.norm.weight
        model.norm = nn.Identity()
        return []
