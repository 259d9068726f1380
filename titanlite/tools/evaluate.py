"""`titanlite evaluate`: the loss of a checkpoint from any mesh, in one process without process
groups.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from titanlite.config.options import declare
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from titanlite.errors import UserError, format_table, print_notice
from titanlite.observe.progress import track
from titanlite.tools.load import add_checkpoint, load_model, named_model, saved_job


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = "example: titanlite evaluate outputs --dataset text --dataset-path my-text"
    about = "batches of validation.local_batch_size windows "
    about += "(default: all of --dataset, or the run's validation.steps)"
    options = {
        "--dataset NAME": "a data set by name (default: the run's validation set)",
        "--dataset-path PATH": "its folder or file",
        "--steps N": about,
    }
    declare(parser, options)
    add_checkpoint(parser)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Print the loss, the bits per byte, and the amount of data."""
    overrides += _own_data(arguments)
    job, folder = saved_job(named_model(arguments), overrides)
    settings = job.config.validation
    if not settings.enable:
        raise UserError(
            f"{folder}: the run has no validation set (validation.enable is off); "
            "name one with --dataset"
        )
    from titanlite.data.loader import build_loader
    from titanlite.data.shuffle import RankSlice
    from titanlite.data.windows import validation_data
    from titanlite.parallel.context_parallel import TokenShare
    from titanlite.runtime.distributed import pick_device
    from titanlite.train.forward import WholeModel
    from titanlite.train.validate import validation_loss

    device = pick_device(job.config.job.device, 0)
    tokenizer = open_tokenizer(job)
    data = validation_data(job, tokenizer)
    model = load_model(job, folder, device)  # verifies the folder
    everything = RankSlice(0, 1, settings.local_batch_size)
    steps = None if settings.steps == -1 else settings.steps
    batches: Any = build_loader(data, everything, 0, steps, job.config.training.dataloader)
    if data.samples is not None:  # a stream's length is unknown
        batches = track(batches, batches.batch_sampler.steps, "batches")
    loader: Any = Counted(batches, tokenizer)
    print_notice(f"{folder} on {settings.dataset} {settings.dataset_path}".rstrip())
    runner = WholeModel(model, TokenShare(device))
    loss = validation_loss(runner, loader, job.config.training.loss_chunks)
    assert loss is not None
    bits = "n/a"
    if loader.bytes:
        bits = f"{loss * loader.tokens / math.log(2) / loader.bytes:.5f}"
    size = "n/a: the token shards have no tokenizer"
    if tokenizer:
        size = f"{loader.bytes:,}"
    windows = f"{loader.windows:,} of {job.validation_seq_len:,} tokens"
    asked = settings.steps * settings.local_batch_size
    if arguments.steps and (data.samples or loader.windows) < asked:
        windows += f"; {steps:,} steps would take {asked:,}"
    rows = [("loss", f"{loss:.5f}"), ("bits per byte", bits), ("tokens", f"{loader.tokens:,}")]
    print(format_table([*rows, ("bytes", size), ("windows", windows)]))
    return 0


def _own_data(arguments: Namespace) -> list[str]:
    """Return the overrides of the options that name other data."""
    steps = []
    if arguments.steps:
        steps = [f"--validation.steps={arguments.steps}"]
    if arguments.dataset is None:
        if arguments.dataset_path is not None:
            raise UserError(
                f"--dataset-path {arguments.dataset_path}: name its kind too, "
                'as in "--dataset text"'
            )
        return steps
    if arguments.dataset in ("text", "tokens", "chat") and not arguments.dataset_path:
        raise UserError(f"--dataset {arguments.dataset}: name its folder or file, --dataset-path")
    return [
        f"--validation.dataset={arguments.dataset}",
        f"--validation.dataset_path={arguments.dataset_path or ''}",
        "--validation.enable",
        *(steps or ["--validation.steps=-1"]),
    ]


class Counted:
    """A loader that counts its windows, their predicted tokens and the bytes of their text."""

    def __init__(self, loader: Any, tokenizer: Tokenizer | None) -> None:
        self._loader = loader
        self._tokenizer = tokenizer
        self.windows = self.tokens = self.bytes = 0

    def __iter__(self) -> Iterator[Any]:
        from titanlite.data.packing import IGNORED

        for batch in self._loader:
            predicted = [labels[labels != IGNORED].tolist() for labels in batch[:, 1]]
            self.windows += sum(map(bool, predicted))
            self.tokens += sum(map(len, predicted))
            self.bytes += sum(map(self._count_bytes, predicted))
            yield batch

    def _count_bytes(self, tokens: list[int]) -> int:
        """Count the bytes of the tokens' text; end tokens have none, although their bits count."""
        if self._tokenizer is None:
            return 0
        text = [token for token in tokens if token != self._tokenizer.end]
        if isinstance(self._tokenizer, ByteTokenizer):
            return len(text)
        return len(self._tokenizer.decode(text).encode())
