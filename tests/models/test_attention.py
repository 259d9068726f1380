"""The attention kernels give equal results."""

import pytest
import torch

from titanlite.models.common.attention import CausalAttention, flex_document_attention


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flex_attention_equals_the_masked_kernel(kv_heads):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 40, 16, generator=generator)
    k, v = (torch.randn(2, kv_heads, 40, 16, generator=generator) for _ in range(2))
    documents = torch.stack([torch.arange(40) // 7, torch.arange(40) // 23])
    with torch.no_grad():
        expected = CausalAttention()(q, k, v, documents)
        assert (flex_document_attention(q, k, v, documents) - expected).abs().max() <= 1e-6
        assert (CausalAttention()(q, k, v) - expected).abs().max() > 1e-2, "the mask must matter"
