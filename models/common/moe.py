"""A mixture of experts: a router chooses some experts for each token; no token is dropped.

There is no parallelism in this file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.common import BalanceMethod, Score


@dataclass(frozen=True)
class RouterContext:
    """What a router must know about the run; by default that of one process."""

    sequences: int = 1
    """Sequences of the whole global batch: the auxiliary loss is their mean."""
    forced: bool = False
    """Choose all experts in turn, whatever their scores."""
    sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
    """Sums counts over the ranks that share sequences."""
    runs_again: Callable[[], bool] = lambda: False
    """Whether a forward pass is a recomputation, which has been counted already."""


class Router(nn.Module):
    """Chooses `top_k` experts for each token, and their weights, in float32 or wider.

    Balance "sequence" adds an auxiliary loss: `coefficient` x experts x sum over experts of (share
    of a sequence's choices x mean probability). Balance "bias" adds a bias to the scores for the
    choice only, not for the weights; after each step the framework moves it by `rate`.
    """

    compiled_methods = ("choose", "balance_loss")
    bias: Tensor | None
    counts: Tensor  # this rank's choices of each expert in this step; the framework resets them
    auxiliary: Tensor  # this rank's part of this step's auxiliary loss; reset likewise
    context = RouterContext()  # expert parallel replaces it
    coefficient = 1e-3
    rate = 1e-3

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        balance: BalanceMethod = "sequence",
        score: Score = "softmax",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.score = score
        self.normalize = normalize
        self.balance = balance
        self.weight = nn.Parameter(torch.empty(experts, dim))
        bias = None
        if balance == "bias":
            bias = torch.zeros(experts)
        self.register_buffer("bias", bias)
        counts = torch.zeros(experts, dtype=torch.int64)
        self.register_buffer("counts", counts, persistent=False)
        auxiliary = torch.zeros((), dtype=torch.float64)
        self.register_buffer("auxiliary", auxiliary, persistent=False)

    def reset_buffers(self) -> None:
        """Zero the bias and the counts."""
        for buffer in self.buffers():
            buffer.zero_()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights and numbers of the chosen experts (batch, tokens, top_k), and how often
        each expert was chosen.
        """
        context = self.context
        shares, weights, chosen, counts, load = self.choose(x, context.forced)
        if not (self.training and torch.is_grad_enabled()):
            return weights, chosen, load
        is_first = not context.runs_again()
        if is_first:
            self.counts += load
        if shares is not None:
            total = context.sum_over_sequence(counts)
            loss, gradient = self.balance_loss(shares.detach(), total, context.sequences)
            weights = _WithLoss.apply(weights, shares, gradient)
            if is_first:
                self.auxiliary += loss
        return weights, chosen, load

    def choose(
        self, x: Tensor, forced: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """Return the experts' shares of the scores, summed over the tokens (batch, experts), or
        None without an auxiliary loss; then weights and numbers of the chosen experts, their counts
        (batch, experts), and the sum of these over the batch.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        bias: Tensor | int = 0
        if self.bias is not None:
            bias = self.bias
        chosen = (scores.detach() + bias).topk(self.top_k, sorted=False).indices
        experts = len(self.counts)
        if forced:
            in_turn = torch.arange(chosen.numel(), device=x.device) % experts
            chosen = in_turn.view_as(chosen)
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        choices = chosen.flatten(1)
        # int64 would break the graph.
        counts = choices.new_zeros(len(x), experts, dtype=torch.int32)
        counts.scatter_add_(1, choices, torch.ones_like(choices, dtype=torch.int32))
        load = counts.sum(0)
        if self.balance != "sequence":
            return None, weights, chosen, counts, load
        if self.score != "softmax":
            scores = scores / scores.sum(-1, keepdim=True)
        return scores.sum(1), weights, chosen, counts, load

    def balance_loss(self, shares: Tensor, total: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of the sequences' auxiliary loss, given the counts of all tokens,
        and the loss's gradient by `shares`.

        It is linear in the tokens' probabilities, so the ranks' parts add up.
        """
        total = total.to(shares.dtype)
        choices = total.sum(-1, keepdim=True)  # top_k for each token of the sequence
        scale = self.coefficient * len(self.counts) * self.top_k / sequences
        gradient = scale * total / choices**2
        return (gradient * shares).sum(), gradient


class Experts(nn.Module):
    """Gated feed-forward layers, each for different tokens."""

    compiled_methods = ("ends", "gated")

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs for tokens (n, dim), which are in the order of their experts.

        `counts` has the number of tokens for each expert.
        """
        ends = self.ends(counts)
        gates = grouped_product(tokens, self.w1, counts, ends)
        values = grouped_product(tokens, self.w3, counts, ends)
        return grouped_product(self.gated(gates, values), self.w2, counts, ends)

    @staticmethod
    def ends(counts: Tensor) -> Tensor:
        """Return where each group of rows ends."""
        return counts.cumsum(0, dtype=torch.int32)

    @staticmethod
    def gated(gates: Tensor, values: Tensor) -> Tensor:
        return F.silu(gates) * values


def grouped_product(
    x: Tensor, weight: Tensor, counts: Tensor, ends: Tensor | None = None
) -> Tensor:
    """Multiply the rows of each group by the group's matrix in (groups, outputs, inputs).

    `counts` has the number of rows of each group, and `ends` its running sum in int32.
    """
    outputs, inputs = weight.shape[1:]
    is_aligned = outputs * x.element_size() % 16 == 0 and inputs * x.element_size() % 16 == 0
    if is_aligned and x.dtype != torch.float64:
        if ends is None:
            ends = Experts.ends(counts)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    groups = zip(x.split(sizes_on_host(counts, len(x))), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups])


def sizes_on_host(counts: Tensor, rows: int) -> list[int]:
    """Return how many of `rows` each group has.

    This waits for the GPU, but only sizes in tests are not multiples of 16 bytes.
    """
    return counts.tolist()


class MoE(nn.Module):
    """Sends every token to its chosen experts, and sums their outputs by the router's weights."""

    compiled_methods = ("in_order", "mixed")

    def __init__(self, router: Router, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared  # computes every token

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output of (batch, tokens, dim)."""
        weights, chosen, counts = self.router(x)
        tokens, order, position = self.in_order(x, chosen)
        mixed = self.mixed(self.experts(tokens, counts), weights, order, position)
        if self.shared is None:
            return mixed
        return mixed + self.shared(x)

    @staticmethod
    def in_order(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row for each choice in the order of the experts, that order, and the choices'
        positions in it.
        """
        order = chosen.flatten().argsort(stable=True)
        position = inverse(order).view_as(chosen)
        rows = order // chosen.shape[-1]
        tokens = GatherRows.apply(x.flatten(0, 1), rows, position.flatten(0, 1))
        return tokens, order, position  # type: ignore[return-value]

    @staticmethod
    def mixed(outputs: Tensor, weights: Tensor, order: Tensor, position: Tensor) -> Tensor:
        """Return the weighted sums of the choices' outputs."""
        own = GatherRows.apply(outputs, position, order)
        return (weights.to(own.dtype).unsqueeze(-2) @ own).squeeze(-2)


def inverse(order: Tensor) -> Tensor:
    """Return the position of each number in a permutation."""
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order), device=order.device)
    return position


class GatherRows(torch.autograd.Function):
    """Return rows by their numbers.

    `uses` has the position of each row in the result, or several as (rows, times), so that the
    backward pass adds in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, uses: Tensor) -> Tensor:
        ctx.save_for_backward(uses)
        return x[rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (uses,) = ctx.saved_tensors
        own = gradients[0].flatten(0, -2)[uses]
        if uses.dim() > 1:
            own = own.sum(1)
        return own, None, None


class _WithLoss(torch.autograd.Function):
    """Return `x`; the backward pass gives `shares` the gradient of a loss that is linear in them,
    as a term of the model's loss.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], *ctx.saved_tensors, None
