"""Sample text from a model on any mesh: all ranks run the forward pass, and rank 0's choice is broadcast."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.config.schema import Generate
from titanlite.data.tokenizer import Tokenizer, printable, require_tokenizer
from titanlite.runtime.determinism import derive_seed


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
    narrow: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
    show: Callable[[list[int]], None] = lambda tokens: None,
) -> str:
    """Return the prompt and what follows it, until the end of the document or settings.tokens.

    `narrow` may rule out tokens, by a logit of -inf; `show` sees the text's tokens before each further one.
    The model sees the last `positions` tokens, padded at the end to a `multiple`: tensor parallel splits sequences.
    """
    (model,) = parts  # the only case today
    tokenizer = require_tokenizer(tokenizer, "generation")
    tokens = tokenizer.encode(settings.prompt) or [tokenizer.end]
    # Of the prompt too: with the same random numbers, texts of different prompts are alike.
    generator = torch.Generator().manual_seed(derive_seed("generate", seed, settings.prompt))
    model.eval()
    for _ in range(settings.tokens):
        show(tokens)
        context = tokens[-positions:]
        padded = context + [tokenizer.end] * (-len(context) % multiple)
        logits = model(torch.tensor([padded], device=device))[0, len(context) - 1]
        if isinstance(logits, DTensor):  # each rank holds a slice of the vocabulary
            logits = logits.full_tensor()
        token = _sample(narrow(logits.float().cpu()), settings.temperature, generator).to(device)
        if dist.is_initialized():
            dist.broadcast(token, src=0)
        tokens.append(int(token))
        if tokens[-1] == tokenizer.end:
            break
    model.train()
    return printable(tokenizer.decode([token for token in tokens if token != tokenizer.end]))


def _sample(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
