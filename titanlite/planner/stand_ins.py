"""Stand-ins in a rehearsal for code that reads values, or that keeps more memory on a CPU than on
CUDA.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from titanlite.planner.counting import Counting
from titanlite.planner.torch_private import CPU_ATTENTION, replaced


def balanced(
    experts: int, rank: int, imbalance: float, sizes: torch.Tensor, rows: int
) -> list[list[int]]:
    """Return how many of a rank's rows go to each rank of its experts' group, and how many come
    from each, if rows choose the experts in turn, except for the `imbalance` of what it receives.
    """
    ranks = sizes.size(1)
    counts = [rows // experts + (n < rows % experts) for n in range(experts)]
    sent = []
    for n in range(ranks):
        sent.append(sum(counts[n * experts // ranks : (n + 1) * experts // ranks]))
    received = min(rows, round(sent[rank % ranks] * imbalance))  # a group's ranks are neighbors
    return [sent, [received] * ranks]


def late_copy(values: torch.Tensor) -> Callable[[], list[float]]:
    """Keep values alive as a copy to the host does, and read zeros, which are never bad."""
    return lambda kept=values: [0.0] * len(kept)


_to = torch.Tensor.to


def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Copy what FSDP2 moves between the host and its GPU: only FSDP2 passes non_blocking, and a
    fused optimizer for scalars.
    """
    if "non_blocking" not in options or not tensor.dim() or Counting.current is None:
        return _to(tensor, *args, **options)
    return Counting.current.copy_over(tensor)


def even_groups(counts: torch.Tensor, rows: int) -> list[int]:
    return [rows // len(counts) + (n < rows % len(counts)) for n in range(len(counts))]


class _RMSNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel keeps: the result and a float32 per row; values are meaningless."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden[..., :1].to(torch.float32, copy=True))
        return hidden * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        hidden, weight, _ = ctx.saved_tensors
        weight_gradient = None
        if weight is not None:
            weight_gradient = weight.clone()
        return gradient * hidden, weight_gradient


def _rms_norm(
    hidden: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if not isinstance(hidden, DTensor):
        result = _RMSNorm.apply(hidden, weight)
        assert isinstance(result, torch.Tensor)
        return result
    assert isinstance(weight, DTensor)
    local = _RMSNorm.apply(hidden.to_local(), weight.to_local(grad_placements=(Partial(),)))
    return DTensor.from_local(local, hidden.device_mesh, hidden.placements, run_check=False)


def _no_mask(*args: Any) -> None:
    return None


def _attend_last(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    return CPU_ATTENTION(query, key, value, dropout, True)[0]


AS_ON_CUDA: dict[str, Callable[..., Any]] = {
    # torch.nn.functional's: a CPU keeps copies in float32.
    "rms_norm": _rms_norm,
    # A model's: a matrix on a CPU; on CUDA FlexAttention's, which is small.
    "attention_mask": _no_mask,
    # An attention core's under context parallel: with a mask on a CPU, with flash on CUDA.
    "attend_last": _attend_last,
}
"""Operations that keep more on a CPU than on CUDA, with stand-ins that allocate as CUDA does."""


@contextmanager
def as_on_cuda(parts: Iterable[nn.Module]) -> Iterator[None]:
    owners: list[Any] = [torch.nn.functional, *parts]
    for part in parts:
        owners += [module for module in part.modules() if hasattr(module, "attend_last")]
    with ExitStack() as patches:
        patches.enter_context(replaced(torch.Tensor, "to", to))
        for owner, (name, substitute) in product(owners, AS_ON_CUDA.items()):
            if hasattr(owner, name):
                patches.enter_context(replaced(owner, name, substitute))
        yield
