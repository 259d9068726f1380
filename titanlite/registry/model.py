"""The declarations of a model: a ModelSpec, which has its table and its dimensions.

A model is plain single-device code; its spec has everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from titanlite.registry.flavor import configured
from titanlite.registry.hf import HuggingFace, TorchTitan
from titanlite.registry.lora import Adapters
from titanlite.registry.rule import Rule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelDims:
    """A model's dimensions, used to check degrees and count FLOPs."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    experts: int = 0
    """Experts in each block except the first `dense_layers`."""
    dense_layers: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A registered model."""

    name: str
    flavors: Mapping[str, Any]  # frozen dataclasses
    shape: Callable[[Any], ModelDims]
    rules: Callable[[Any], tuple[Rule, ...]]
    build: str
    """"package.module:Class", imported late.

    It is called with (flavor, positions in the longest sequence).
    """
    blocks: str = "layers"
    """The ModuleDict of repeated blocks, keyed by the global layer number."""
    before: tuple[str, ...] = ("tok_embeddings",)
    """Modules that run before the blocks."""
    after: tuple[str, ...] = ("norm", "output")
    """Modules that run after the blocks."""
    core: str = ""
    """Path of the attention core inside a block (context parallel replaces it).

    Empty if unsupported.
    """
    unsplit: str = ""
    """Why only data parallel is possible; empty if the model can be split."""
    hf: HuggingFace | None = None
    """Its Hugging Face form; None if transformers does not have the model."""
    torchtitan: Callable[[Any], TorchTitan] = lambda flavor: TorchTitan()
    parameters: Callable[[Any], int] | None = None
    """Returns a flavor's number of parameters, for `titanlite models`, which does not build it."""
    active_parameters: Callable[[Any], int] | None = None
    """Returns how many of them a token uses, for a model with experts."""
    idle: Callable[[Any], Mapping[str, str]] = lambda flavor: {}
    """Returns fields that have no effect in a flavor, with the reason; a run that sets one logs it.
    """
    adapters: Adapters | None = None
    """The settings of [lora]; a job sets it."""
    unchecked_fields: tuple[str, ...] = ("dropout", "max_seq_len")
    """Fields that may differ from those that loaded weights were trained with."""

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """Return the flavor's config with some fields replaced; an error names all faults."""
        reads_folders = bool(self.hf and self.hf.fields)
        return configured(self.name, self.flavors, flavor, overrides, reads_folders)

    def of(self, model_config: Any) -> ModelSpec:
        """Return the model's spec for a flavor, since module names may depend on it."""
        return self

    def limits(self, model_config: Any) -> Mapping[str, str]:
        """Return config keys that may not be set with this model, each with the reason."""
        return {}

    def remark(self, model_config: Any) -> str:
        """Return a line about the model for the start of a run."""
        return ""

    def on_cpu(self) -> AbstractContextManager[None]:
        """Return a context in which the model calls nothing that needs GPU tensors."""
        return nullcontext()

    def module(self, model_config: Any, positions: int) -> torch.nn.Module:
        """Return a new instance of the model, on torch's default device."""
        return resolve_name(self.build)(model_config, positions)
