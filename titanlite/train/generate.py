"""Sample text from a model on any mesh: all ranks run the forward pass, and rank 0's choice is broadcast."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Generate
from titanlite.data.loader import MicroBatch
from titanlite.data.tokenizer import Tokenizer, printable, require_tokenizer
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.runtime.determinism import derive_seed
from titanlite.runtime.page import OWN_PAGE


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling for every length of a growing text costs more than it saves
def generate(
    parts: Sequence[nn.Module],
    tokenizer: Tokenizer | None,
    settings: Generate,
    positions: int,
    seed: int,
    device: torch.device,
    multiple: int = 1,
    own_positions: Callable[[int], torch.Tensor | None] = lambda length: None,
    group: dist.ProcessGroup | None = None,
    pipeline: Pipeline | None = None,
    narrow: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    show: Callable[[list[int]], None] = lambda tokens: None,
) -> str:
    """Return the prompt and what follows it, until the end of the document or settings.tokens.

    `narrow` may rule out tokens, by a logit of -inf; `show` sees the text's tokens before each further one.
    The model sees the last `positions` tokens, padded at the end to a `multiple`: tensor parallel splits sequences.
    Under context parallel a rank has `own_positions` of a length, and the ranks of `group` all of them.
    `pipeline` runs several parts.
    """
    tokenizer = require_tokenizer(tokenizer, "generation")
    tokens = tokenizer.encode(settings.prompt) or [tokenizer.end]
    # Of the prompt too: with the same random numbers, texts of different prompts are alike.
    generator = torch.Generator().manual_seed(derive_seed("generate", seed, settings.prompt))
    source = pipeline.first_with_loss if pipeline else 0
    nn.ModuleList(parts).eval()
    for _ in range(settings.tokens):
        OWN_PAGE.enter("sample")
        show(tokens)
        context = tokens[-positions:]
        padded = torch.tensor([context + [tokenizer.end] * (-len(context) % multiple)], device=device)
        batch = MicroBatch(padded.unsqueeze(1), own_positions(padded.size(1)))
        last_logits = partial(_logits_at, len(context) - 1, group)
        logits = pipeline.forward(batch, last_logits) if pipeline else last_logits(parts[0], batch, batch.tokens)
        token = torch.zeros((), dtype=torch.int64, device=device)
        if logits is not None:  # only a pipeline's last stage has them
            token = _sample(narrow(logits.cpu()), settings.temperature, generator).to(device)
        if dist.is_initialized():
            dist.broadcast(token, src=source)
        tokens.append(int(token))
        if tokens[-1] == tokenizer.end:
            break
    nn.ModuleList(parts).train()
    return printable(tokenizer.decode([token for token in tokens if token != tokenizer.end]))


def _logits_at(
    position: int, group: dist.ProcessGroup | None, model: nn.Module, batch: MicroBatch, inputs: torch.Tensor
) -> torch.Tensor:
    """Return all logits at a position of the sequence; `inputs` are its tokens, or a last stage's hidden states."""
    if batch.own_positions is None:
        return _whole(model(inputs)[0, position])
    own = (batch.own_positions == position).nonzero().flatten().tolist()  # one rank of the group has it
    logits = _whole(model(inputs, batch.positions)[0, own[0] if own else 0]) * len(own)
    dist.all_reduce(logits, group=group)
    return logits


def _whole(logits: torch.Tensor) -> torch.Tensor:
    """Return all logits in float32, where each rank may hold a slice of the vocabulary."""
    return (logits.full_tensor() if isinstance(logits, DTensor) else logits).float()


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature < 1e-6:  # as good as 0, and a division by it would overflow
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
