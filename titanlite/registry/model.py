"""The declarations of a model: a ModelSpec, which has its table and its dimensions.

A model is plain single-device code; its spec has the rest.
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
    """A model's dimensions: degrees are checked against them, FLOPs counted from them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    experts: int = 0
    """In each block but the first `dense_layers`."""
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
    """Why each rank computes with the whole model, if nothing but data parallel may split it."""
    hf: HuggingFace | None = None
    """Its Hugging Face form; None if transformers does not have the model."""
    torchtitan: Callable[[Any], TorchTitan] = lambda flavor: TorchTitan()
    parameters: Callable[[Any], int] | None = None
    """The number of a flavor's parameters, for `titanlite models`, which does not build it."""
    active_parameters: Callable[[Any], int] | None = None
    """Of these the number that a token meets, for a model with experts."""
    idle: Callable[[Any], Mapping[str, str]] = lambda flavor: {}
    """Fields without effect in a flavor, and the reason; a run that sets one logs it."""
    adapters: Adapters | None = None
    """Of [lora]; a job sets it."""
    unchecked_fields: tuple[str, ...] = ("dropout", "max_seq_len")
    """Fields that may differ from those that loaded weights were trained with, since these mean the
    same with any.
    """

    def configure(self, flavor: str, overrides: Mapping[str, Any]) -> Any:
        """Return the flavor's config with some fields replaced.

        An error names all that do not fit.
        """
        reads_folders = bool(self.hf and self.hf.fields)
        return configured(self.name, self.flavors, flavor, overrides, reads_folders)

    def of(self, model_config: Any) -> ModelSpec:
        """Return the model's spec for a flavor, where names of its modules depend on it."""
        return self

    def limits(self, model_config: Any) -> Mapping[str, str]:
        """Return config keys that the model does not allow to be set, each with the reason."""
        return {}

    def remark(self, model_config: Any) -> str:
        """Return a line about the model for the start of a run."""
        return ""

    def on_cpu(self) -> AbstractContextManager[None]:
        """Return a context in which the model calls nothing that takes no tensors of a CPU."""
        return nullcontext()

    def module(self, model_config: Any, positions: int) -> torch.nn.Module:
        """Return a new instance of the model, on torch's default device."""
        return resolve_name(self.build)(model_config, positions)
