"""The skeleton of a decoder: embedding, blocks, norm, head.

A model adds its layers; there is no parallelism here.
"""

from collections.abc import Callable

from torch import Tensor, nn

from titanlite.models.common.attention import Mask, document_mask

Head = Callable[[Tensor, nn.Module], Tensor]


class Decoder(nn.Module):
    """A decoder, or a stage of one, which may lack the embedding, the norm or the output layer."""

    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict
    """The blocks of this stage, by their number in the whole model."""
    norm: nn.Module | None
    output: nn.Module | None
    attention_dropout: float = 0.0
    """The probability that training drops one token's attention to another."""

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return hidden states of (batch, tokens); only called if there is an embedding."""
        assert self.tok_embeddings is not None
        return self.tok_embeddings(tokens)

    def block_inputs(self, positions: Tensor | None, length: int) -> tuple[Tensor, ...]:
        """Return the arguments of every block after the hidden states, such as rotary tables."""
        return ()

    def attention_mask(self, documents: Tensor, h: Tensor, last: int = 0) -> Mask:
        """Return the mask for hidden states `h`, which every block passes to its CausalAttention.

        Context parallel calls this for each chunk of a rank's tokens, which are the `last` ones in
        `documents`.
        """
        dropout = self.attention_dropout if self.training else 0.0
        return document_mask(documents, h.dtype, dropout, last)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Return logits of (batch, tokens), or the result of `head`.

        A stage without an embedding takes hidden states for `tokens`; one without an output layer
        returns them.
        """
        h = tokens
        if self.tok_embeddings is not None:
            h = self.embed(tokens, positions)
        inputs = self.block_inputs(positions, tokens.size(1))
        mask = None
        if documents is not None:
            mask = self.attention_mask(documents, h)
        for block in self.layers.values():
            h = block(h, *inputs, mask)
        if self.norm is not None:
            h = self.norm(h)
        if self.output is None:
            return h
        if head is None:
            return self.output(h)
        return head(h, self.output)
