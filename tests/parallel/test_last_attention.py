"""Attention in two parts is causal attention from the last tokens, on a CPU's kernels as on
cuDNN's.
"""

import pytest
import torch
import torch.nn.functional as F

from models.common.attention import causal_rows
from titanlite.parallel.last_attention import attend_in_two_parts

HEADS, KV_HEADS, SIZE = 4, 2, 8


def inputs(last: int, tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(last)
    shapes = (HEADS, last), (KV_HEADS, tokens), (KV_HEADS, tokens)
    return tuple(
        torch.randn(2, heads, count, SIZE, dtype=torch.float64, requires_grad=True)
        for heads, count in shapes
    )


def in_two_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend_in_two_parts(q, k, v, 0.0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("last", "tokens"), [(1, 9), (10, 20)])
def test_attention_in_two_parts_has_the_values_and_gradients_of_a_mask(last, tokens, compiled):
    q, k, v = inputs(last, tokens)
    mask = causal_rows(last, tokens, q.dtype, q.device)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    attend = torch.compile(in_two_parts, fullgraph=True, backend="aot_eager")
    found = (attend if compiled else in_two_parts)(q, k, v)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    gradient = torch.randn_like(expected)
    pairs = (torch.autograd.grad(values, (q, k, v), gradient) for values in (found, expected))
    for own, other in zip(*pairs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-14)
