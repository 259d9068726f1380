"""Qwen 3 as a plain single-device module."""

from torch import Tensor, nn

from titanlite.models.common.attention import Mask, RotaryAttention
from titanlite.models.common.decoder import Decoder
from titanlite.models.common.feed_forward import SwiGLU
from titanlite.models.common.moe import Experts, MoE, Router
from titanlite.models.common.rope import Rope
from titanlite.models.qwen3 import QwenConfig


class Block(nn.Module):
    def __init__(self, c: QwenConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = RotaryAttention(c.dim, c.n_heads, c.n_kv_heads, c.head_dim, c.norm_eps)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        if c.experts:
            router = Router(c.dim, c.experts, c.top_k, normalize=c.normalize, balance=c.balance)
            self.moe = MoE(router, Experts(c.experts, c.dim, c.expert_dim))
        else:
            self.feed_forward = SwiGLU(c.dim, c.hidden_dim)

    def forward(self, h: Tensor, rotations: Tensor, mask: Mask | None) -> Tensor:
        h = h + self.attention(self.attention_norm(h), rotations, mask)
        if hasattr(self, "moe"):
            return h + self.moe(self.ffn_norm(h))
        return h + self.feed_forward(self.ffn_norm(h))


class Qwen(Decoder):
    def __init__(self, c: QwenConfig, positions: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.rope = Rope(c.head_dim, positions, c.rope_theta)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tied:
            self.output.weight = self.tok_embeddings.weight

    def block_inputs(self, positions: Tensor | None, length: int) -> tuple[Tensor, ...]:
        return (self.rope(positions, length),)
