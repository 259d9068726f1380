"""Exchanges between ranks: context parallel trades heads for tokens, expert parallel sends tokens,
pipeline parallel the gradients of tied weights, and Muon matrices.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def send_rows(
    rows: Tensor,
    group: dist.ProcessGroup | None,
    send: list[int] | None = None,
    receive: list[int] | None = None,
) -> Tensor:
    """Send rows to the ranks of a group: equally many to each, or as many as `send` says.

    Return the rows that arrive, without a gradient.
    """
    count = len(rows)
    if receive:
        count = sum(receive)
    arrived = rows.new_empty(count, *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived


def swap(own: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    """Send a tensor to a rank of the group, and return the one that it sends, of the same size."""
    theirs = torch.empty_like(own)
    send = dist.P2POp(dist.isend, own, group=group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return theirs


class AllToAll(torch.autograd.Function):
    """Send rows to other ranks; the backward pass returns their gradients.

    Used instead of DTensor, which would gather everything on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        group: dist.ProcessGroup,
        send: list[int] | None = None,
        receive: list[int] | None = None,
    ) -> Tensor:
        ctx.back = (group, receive, send)
        return send_rows(rows, group, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return send_rows(gradient, *ctx.back), None, None, None
