"""A mixture of experts: a router chooses some for each token, and no token is dropped. No parallelism in here."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.common import Balance, Score


class Router(nn.Module):
    """Choose `top_k` experts for each token, and their weights, in float32 or wider.

    Balance "sequence" adds a loss: experts x sum over them of (share of a sequence's choices x mean probability),
    times `coefficient`. "bias" counts for the choice alone; after a step the framework moves it by `rate`.
    """

    bias: Tensor | None
    counts: Tensor  # this rank's choices of each expert in this step; the framework zeroes it, and the next
    auxiliary: Tensor  # this rank's part of this step's loss of balance
    sequences: int = 1  # of the whole global batch: the loss is their mean
    coefficient, rate = 1e-3, 1e-3
    forced: bool = False  # choose all experts in turn, whatever their scores

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        balance: Balance = "sequence",
        score: Score = "softmax",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.top_k, self.score, self.normalize, self.balance = top_k, score, normalize, balance
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.register_buffer("bias", torch.zeros(experts) if balance == "bias" else None)
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("auxiliary", torch.zeros((), dtype=torch.float64), persistent=False)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts  # over ranks that share sequences
        self.runs_again: Callable[[], bool] = lambda: False  # this forward pass repeats a counted one: recomputation

    def reset_buffers(self) -> None:
        """Start without bias and counts."""
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and numbers of the chosen experts (batch, tokens, top_k), and counts (batch, experts)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits, experts = F.linear(x.to(wide), self.weight.to(wide)), len(self.counts)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        chosen = (scores.detach() + (0 if self.bias is None else self.bias)).topk(self.top_k).indices
        if self.forced:
            chosen = (torch.arange(chosen.numel(), device=x.device) % experts).view_as(chosen)
        weights, choices = scores.gather(-1, chosen), chosen.flatten(1)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalize else weights
        counts = choices.new_zeros(len(x), experts).scatter_add_(1, choices, torch.ones_like(choices))
        if self.training and torch.is_grad_enabled():
            loss = self._loss(scores, counts) if self.balance == "sequence" else scores.new_zeros(())
            weights = _WithLoss.apply(weights, loss)
            if not self.runs_again():
                self.counts += counts.sum(0)
                self.auxiliary += loss.detach()
        return weights, chosen, counts

    def _loss(self, scores: Tensor, counts: Tensor) -> Tensor:
        """Return the part of this rank's tokens: as it is linear in their probabilities, the ranks' parts add up."""
        probabilities = (scores / scores.sum(-1, keepdim=True)).sum(1)
        total = self.sum_over_sequence(counts).to(scores.dtype)
        choices = total.sum(-1, keepdim=True)  # top_k for each token of the sequence
        losses = len(self.counts) * self.top_k * (total * probabilities / choices**2).sum(-1)
        return self.coefficient * losses.sum() / self.sequences


class Experts(nn.Module):
    """Gated feed-forward layers, of which each has its own tokens."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, hidden, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return what the experts make of tokens (n, dim) in the order of their experts; `counts` sum to n."""
        gates, values = (grouped_product(tokens, weight, counts) for weight in (self.w1, self.w3))
        return grouped_product(F.silu(gates) * values, self.w2, counts)


def grouped_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply the rows of each group by its matrix of (groups, outputs, inputs)."""
    if x.dtype != torch.float64 and not any(size * x.element_size() % 16 for size in weight.shape[1:]):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    groups = x.split(counts.tolist())  # waits for a GPU: only sizes for tests are not multiples of 16 bytes
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(groups, weight.unbind(), strict=True)])


class MoE(nn.Module):
    """Send every token to the experts that the router chose, and add up what they make of it by its weights."""

    def __init__(self, router: Router, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared  # every token meets the shared one

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output of (batch, tokens, dim)."""
        weights, chosen, counts = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        place = inverse(order)
        tokens = GatherRows.apply(x.flatten(0, 1), order // self.router.top_k, place.view(-1, self.router.top_k))
        outputs = GatherRows.apply(self.experts(tokens, counts.sum(0)), place.view_as(chosen), order)
        mixed = (weights.to(x.dtype).unsqueeze(-2) @ outputs).squeeze(-2)
        return mixed if self.shared is None else mixed + self.shared(x)


def inverse(order: Tensor) -> Tensor:
    """Return where each number is in a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class GatherRows(torch.autograd.Function):
    """Return rows by their numbers.

    `uses` says where: one place for each row, or (rows, times), so that the backward pass adds in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, uses: Tensor) -> Tensor:
        ctx.save_for_backward(uses)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (uses,) = ctx.saved_tensors
        own = gradients[0].flatten(0, -2)[uses]
        return own.sum(1) if uses.dim() > 1 else own, None, None


class _WithLoss(torch.autograd.Function):
    """Return `x`; the backward pass gives `loss` the gradient 1, as if the model's loss had it added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_ones(())
