"""The mixture of experts, against a loop over tokens in float64.

tests/parallel proves it of sequences in parts.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.models.common.moe import Experts, MoE, Router, RouterContext

DIM, HIDDEN, EXPERTS = 16, 24, 4


def build(dtype: torch.dtype = torch.float64, **options: Any) -> MoE:
    generator = torch.Generator().manual_seed(0)
    moe = MoE(Router(DIM, EXPERTS, 2, **options), Experts(EXPERTS, DIM, HIDDEN))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.3, generator=generator)
    for parameter in moe.parameters():
        parameter.data = parameter.data.to(dtype)
    return moe


def inputs(dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 7, DIM, generator=generator, dtype=dtype).requires_grad_()


def one_by_one(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the auxiliary loss, token by token."""
    router: Any = moe.router
    experts: Any = moe.experts
    out, loss = torch.zeros_like(x), x.new_zeros(())
    for b, sequence in enumerate(x):
        chosen, probabilities = x.new_zeros(EXPERTS), x.new_zeros(EXPERTS)
        for t, token in enumerate(sequence):
            logits = router.weight @ token
            scores = logits.softmax(0) if router.score == "softmax" else logits.sigmoid()
            preferred = scores if router.bias is None else scores + router.bias
            best = preferred.topk(router.top_k).indices
            total = scores[best].sum() if router.normalize else 1
            for e in best:
                hidden = F.silu(experts.w1[e] @ token) * (experts.w3[e] @ token)
                out[b, t] = out[b, t] + scores[e] / total * (experts.w2[e] @ hidden)
                chosen[e] += 1
            probabilities = probabilities + scores / scores.sum()
        shares = chosen / chosen.sum()
        loss = loss + EXPERTS * (shares * probabilities / len(sequence)).sum()
    return out, router.coefficient * loss / router.context.sequences


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("balance", ["sequence", "bias", "none"])
def test_layer_equals_a_loop_over_tokens(score, normalize, balance):
    """Outputs, the auxiliary loss, and gradients of their sum."""
    moe, x = build(score=score, normalize=normalize, balance=balance), inputs()
    router: Any = moe.router
    router.context = RouterContext(sequences=6)
    router.coefficient = 0.5
    if balance == "bias":
        router.bias.copy_(torch.tensor([0.5, 0.0, -0.5, 0.1]))
    expected, loss = one_by_one(moe, x)
    found = moe(x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    direction = torch.randn(
        found.shape, generator=torch.Generator().manual_seed(2), dtype=found.dtype
    )
    objective = (expected * direction).sum() + (loss if balance == "sequence" else 0)
    leaves = [x, *moe.parameters()]
    gradients = torch.autograd.grad(objective, leaves)
    (found * direction).sum().backward()
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad is not None and torch.allclose(leaf.grad, gradient, rtol=0, atol=1e-13)
    assert abs(router.auxiliary.item() - (loss.item() if balance == "sequence" else 0)) < 1e-15
    assert router.counts.sum() == 2 * 7 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 9, 0], [0] * EXPERTS])
def test_grouped_products_equal_those_of_float64(dtype, counts):
    """With experts that have no token, whose gradients are zeros."""
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    results = []
    for kind in (dtype, torch.float64):
        experts = build(dtype=kind).experts
        x = inputs().detach().flatten(0, 1)[: sum(counts)].to(kind).requires_grad_()
        experts(x, torch.tensor(counts)).pow(2).sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in experts.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected).norm() <= tolerance * expected.norm()
        idle = [expert for expert, count in enumerate(counts) if not count]
        assert found.dim() == 2 or not found[idle].any()


def test_only_first_forward_passes_of_training_are_counted():
    moe = build()
    router: Any = moe.router
    with torch.no_grad():
        moe(inputs())
    moe.eval()(inputs())
    router.context = RouterContext(runs_again=lambda: True)
    moe.train()(inputs())
    assert not router.counts.any() and not router.auxiliary
    router.context = RouterContext()
    moe(inputs())
    assert router.counts.sum() == 28 and router.auxiliary > 0


def test_the_router_of_bfloat16_computes_in_float32():
    x = inputs(dtype=torch.bfloat16)
    router: Any = build(dtype=torch.bfloat16).router
    weights, chosen, _ = router(x)
    best = F.linear(x.float(), router.weight.float()).softmax(-1).topk(2, sorted=False)
    assert torch.equal(chosen, best.indices) and weights.dtype == torch.float32
    assert torch.equal(weights, best.values / best.values.sum(-1, keepdim=True))
