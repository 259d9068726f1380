"""`titanlite generate`: text from a checkpoint of any mesh, in one process without process
groups.
"""

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from titanlite.checkpoint.manifest import read_state
from titanlite.config.options import declare, positive_int
from titanlite.data.tokenizer import Tokenizer, open_tokenizer, printable, require_tokenizer
from titanlite.errors import UserError, print_notice
from titanlite.tools.load import add_checkpoint, load_model, named_model, saved_job

SMALL = 10_000_000
"""Parameters of a model below which several threads would wait longer than they compute."""
_KEYS = {
    "prompt": "generate.prompt",
    "tokens": "generate.tokens",
    "temperature": "generate.temperature",
    "seed": "debug.seed",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = 'example: titanlite generate outputs --prompt "def " --tokens 100 --seed 1'
    samples = "texts to sample, with --seed and the seeds after it (default: 1)"
    nucleus = (
        "nucleus sampling: keep the most likely tokens whose probabilities add up to P (default: 1)"
    )
    options = {
        "--prompt TEXT": "the text to continue (default: the run's generate.prompt)",
        "--chat": "the prompt is a user's question: put it into the chat template of the tokenizer",
        "--tokens N": "tokens to generate (default: the run's generate.tokens)",
        "--temperature T": "of sampling; 0 = greedy (default: the run's generate.temperature)",
        "--samples N": (samples, positive_int, 1),
        "--top-k K": ("draw only from the K most likely tokens (default: from all)", int),
        "--top-p P": (nucleus, float, 1.0),
        "--seed N": "each seed gives a different text (default: the run's seed)",
    }
    declare(parser, options)
    add_checkpoint(parser)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Load the model and print what it generates, as it comes."""
    top_k = arguments.top_k
    top_p = arguments.top_p
    count = arguments.samples
    if top_k is not None and top_k < 1:
        raise UserError(f"--top-k {top_k}: must be 1 or more")
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p {top_p:g}: must be above 0 and at most 1")
    is_mistyped = overrides and overrides[0].startswith("-") and "." not in overrides[0]
    if arguments.dump and not is_mistyped and not arguments.dump.exists():
        words = [str(arguments.dump), *takewhile(lambda word: word[:1] != "-", overrides)]
        meant = shlex.quote(" ".join(words))
        raise UserError(f"{arguments.dump} does not exist; a text to continue is --prompt {meant}")
    options = {key: getattr(arguments, name) for name, key in _KEYS.items()}
    overrides += [f"--{key}={value}" for key, value in options.items() if value is not None]
    job, folder = saved_job(named_model(arguments), overrides)
    tokenizer = require_tokenizer(open_tokenizer(job), "generation")
    from titanlite.parallel.context_parallel import TokenShare
    from titanlite.runtime.distributed import pick_device
    from titanlite.train.forward import WholeModel
    from titanlite.train.generate import generate

    device = pick_device(job.config.job.device, 0)
    settings = job.config.generate
    if arguments.chat:
        from titanlite.data.chat import ChatTokenizer

        question = {"role": "user", "content": settings.prompt}
        text = ChatTokenizer(tokenizer.assets).prompt([question])
        settings = settings.model_copy(update={"prompt": text})
    if count > 1 and settings.temperature == 0:
        raise UserError(f"--samples {count}: at temperature 0 every seed gives the same text")
    model = load_model(job, folder, device)  # verifies the folder
    _limit_threads(model)
    runner = WholeModel(model, TokenShare(device))
    given = job.config.debug.seed
    saved = read_state(folder)["position"]["seed"]
    first_seed = saved if given is None else given
    print_notice(f"{folder}, temperature {settings.temperature:g}, seed {first_seed}")
    narrow = narrowing(settings.temperature, top_k, top_p)
    for number, seed in enumerate(range(first_seed, first_seed + count), start=1):
        if number > 1:
            print()
        if count > 1:
            print(f"----- sample {number} of {count}, seed {seed} -----")
        show = Show(tokenizer)
        text = generate(runner, tokenizer, settings, job.positions, seed, narrow, show)
        print(text[show.shown :])
    return 0


def _limit_threads(model: Any) -> None:
    """Compute a small model in one thread, since one token is too little work to share."""
    import torch

    size = sum(parameter.numel() for parameter in model.parameters())
    if "OMP_NUM_THREADS" not in os.environ and size < SMALL:
        torch.set_num_threads(1)


class Show:
    """Prints a text as its tokens arrive, except an end that the next token may change, such as
    half a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.shown = 0

    def __call__(self, tokens: list[int]) -> None:
        text = self._tokenizer.decode([token for token in tokens if token != self._tokenizer.end])
        text = printable(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        print(text[self.shown :], end="", flush=True)
        self.shown = max(self.shown, len(text))


def narrowing(temperature: float, top_k: int | None, top_p: float) -> Callable[[Any], Any]:
    """Return a filter that rules out all tokens but the `top_k` most likely, and those outside of
    --top-p.
    """

    def narrow(logits: Any) -> Any:
        ranked, order = logits.sort(descending=True, stable=True)
        kept = (ranked[:top_k] / max(temperature, 1e-6)).softmax(-1)
        kept = kept[(kept.cumsum(-1) - kept) < top_p]
        return logits.index_fill(0, order[len(kept) :], -float("inf"))

    if top_k is not None or top_p < 1:
        return narrow
    return lambda logits: logits
