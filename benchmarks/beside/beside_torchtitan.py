"""For TorchTitan's experimental.custom_import: a model with the sizes in TITAN_MODEL, on random
tokens.

On a fake GPU its steps are marked, and its attention is FlashAttention, since that has no cuDNN."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from benchmarks.beside.timed_steps import mark_steps

NAME = os.environ["TITAN_NAME"]
SIZES = json.loads(os.environ["TITAN_MODEL"])


class RandomTokens(IterableDataset):
    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            row = torch.randint(SIZES["vocab_size"], (self.length + 1,), generator=generator)
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, infinite: bool = True
) -> ParallelAwareDataloader:
    training = job_config.training
    rows = RandomTokens(training.seq_len, dp_rank)
    return ParallelAwareDataloader(
        rows, dp_rank, dp_world_size, batch_size=training.local_batch_size
    )


def sizes() -> Any:
    arguments = dict(SIZES)
    if "moe_args" in arguments:
        arguments["moe_args"] = MoEArgs(**arguments["moe_args"])
    args = import_module(f"torchtitan.models.{NAME}.model.args")
    kind = {"llama3": "TransformerModelArgs", "qwen3": "Qwen3ModelArgs"}[NAME]
    return getattr(args, kind)(**arguments)


register_train_spec(
    "sized",
    replace(
        get_train_spec(NAME),
        model_args={"sized": sizes()},
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
    ),
)
if "FAKE_GPU_DIR" in os.environ:
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
    mark_steps(sys.modules["__main__"].Trainer)  # python -m torchtitan.train
