"""Sample text from a model on any mesh: all ranks run the forward pass, and rank 0's choice is
broadcast.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Generate
from titanlite.data.loader import MicroBatch
from titanlite.data.tokenizer import Tokenizer, printable, require_tokenizer
from titanlite.runtime.determinism import derive_seed
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.forward import ModelRunner, evaluating, take


@torch.compiler.set_stance("force_eager")  # compiling for every length would cost more
def generate(
    runner: ModelRunner,
    tokenizer: Tokenizer | None,
    settings: Generate,
    positions: int,
    seed: int,
    narrow: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    show: Callable[[list[int]], None] = lambda tokens: None,
) -> str:
    """Return the prompt and its continuation, until the end of the document or settings.tokens.

    The model sees the last `positions` tokens. `narrow` may rule out tokens by setting their logits
    to -inf; `show` is called with the tokens so far before each new one.
    """
    tokenizer = require_tokenizer(tokenizer, "generation")
    tokens = tokenizer.encode(settings.prompt) or [tokenizer.end]
    # Seeded by the prompt too: with the same random numbers, different prompts get similar texts.
    generator = torch.Generator().manual_seed(derive_seed("generate", seed, settings.prompt))
    share = runner.share
    with evaluating(runner):
        for _ in range(settings.tokens):
            OWN_PAGE.enter("sample")
            show(tokens)
            seen = tokens[-positions:]
            missing = -len(seen) % share.multiple
            padded = seen + [tokenizer.end] * missing
            batch = take(runner, MicroBatch(torch.tensor([[padded]])))
            last_logits = partial(_logits_at, len(seen) - 1, share.sequence_ranks)
            logits = runner.evaluate(batch, last_logits)
            token = torch.zeros((), dtype=torch.int64, device=share.device)
            if logits is not None:  # in a pipeline only the last stage has them
                token.copy_(_sample(narrow(logits.cpu()), settings.temperature, generator))
            if dist.is_initialized():
                dist.broadcast(token, src=runner.source)
            tokens.append(int(token))
            if tokens[-1] == tokenizer.end:
                break
    return printable(tokenizer.decode([token for token in tokens if token != tokenizer.end]))


def _logits_at(
    position: int,
    group: dist.ProcessGroup | None,
    model: nn.Module,
    batch: MicroBatch,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """Return all logits at a position of the sequence.

    `inputs` are its tokens, or a last stage's hidden states.
    """
    if batch.own_positions is None:
        return _whole(model(inputs)[0, position])
    own = (batch.own_positions == position).nonzero().flatten().tolist()
    index = 0
    if own:
        index = own[0]
    logits = _whole(model(inputs, batch.positions)[0, index])
    if group is not None:
        logits *= len(own)  # one rank of the group has the position
        dist.all_reduce(logits, group=group)
    return logits


def _whole(logits: torch.Tensor) -> torch.Tensor:
    """Return all logits in float32, even if each rank holds a slice of the vocabulary."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return logits.float()


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature < 1e-6:  # practically 0, and dividing by it would overflow
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
