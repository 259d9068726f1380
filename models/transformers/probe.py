"""What a class supports, found in seconds by trying a small instance on the CPU.

Nothing here can be assumed, since a class does not declare it. The answers are cached by everything
that they depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from titanlite.errors import first_line
from titanlite.models.transformers import kernels
from titanlite.models.transformers.flavor import flavor_of
from titanlite.models.transformers.model import build, module_names_of, transformers_config

_SMALL = {
    64: "hidden_size n_embd d_model dim embedding_size word_embed_proj_dim embed_dim",
    128: "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff max_position_embeddings "
    "n_positions shared_expert_intermediate_size shared_intermediate_size decoder_ffn_dim",
    256: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    32: "moe_intermediate_size mamba_d_head",
    16: "head_dim global_head_dim q_lora_rank kv_lora_rank v_head_dim qk_head_dim sliding_window "
    "mamba_head_dim rotary_dim linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input chunk_size attention_chunk_size lru_width_per_head",
    8: "num_heads qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state ssm_state_size",
    4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads "
    "num_local_experts num_experts n_routed_experts moe_num_experts mamba_n_heads "
    "linear_num_value_heads decoder_layers num_decoder_layers decoder_attention_heads "
    "num_decoder_attention_heads encoder_attention_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "linear_num_key_heads n_groups mamba_n_groups top_k_experts",
    1: "n_group topk_group first_k_dense_replace n_shared_experts",
    0: "num_kv_shared_layers",
}
_GIVEN = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
"""For keys that are null, since some classes' default config does not build a model."""
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_SIZES: dict[str, int] = {}
for _size, _keys in _SMALL.items():
    _SIZES |= dict.fromkeys(_keys.split(), _size)
_LARGEST = 20_000_000
"""The most parameters of a small instance."""
QUESTIONS = ("causal", "documents", "chunks", "buffers", "compiles")
_LENGTH = 24
_FIRST = 11
"""The length of the first of two documents in a sequence of _LENGTH."""


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with small sizes, and lists of layers shortened to match."""
    small: dict[str, Any] = {}
    depth = next((values[key] for key in _DEPTHS if key in values), 0)
    for key, value in values.items():
        small[key] = value
        if key == "per_layer_config" and value:
            small[key] = {number: each for number, each in value.items() if int(number) < 4}
        elif isinstance(value, Mapping) and key != "attribute_map":
            small[key] = shrunk(value)
        elif isinstance(value, list | tuple) and depth and len(value) == depth:
            later = [each for each in value[4:] if each not in value[:4]]
            fourth = [*later, *value[3:]][:1]  # of another kind, if there is one
            small[key] = [*value[:3], *fourth]
        elif key == "attention_types":
            small[key] = [[value[0][0], 4 // len(value[0][0])]]
        elif value is None and key in _GIVEN:
            small[key] = _GIVEN[key]
        elif isinstance(value, bool) or not isinstance(value, int | float):
            continue
        elif key in _SIZES:
            small[key] = min(value, _SIZES[key])
        elif key.endswith("_token_id"):
            small[key] = min(value, 3)
        elif "drop" in key or "jitter" in key:
            small[key] = 0.0
    if "kv_lora_rank" in small:  # latent attention
        small["num_key_value_heads"] = small["num_attention_heads"]
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            small["head_dim"] = small["qk_rope_head_dim"]
    if small.get("mamba_d_ssm"):
        small["mamba_d_ssm"] = small["mamba_n_heads"] * small["mamba_d_head"]
    return small


def small_config(config: Any) -> dict[str, Any]:
    """Return the content of a config.json for a small instance of a config's class."""
    full = config.to_dict()
    fields = [field.name for field in dataclasses.fields(config)]
    given = {key: full[key] for key in fields if key in full}
    return shrunk(given) | {"model_type": config.model_type}


@lru_cache
def probe(values: str) -> dict[str, str]:
    """Return the answers by question: "yes", or the difference seen."""
    versions = f"{transformers.__version__} {torch.__version__} {kernels.found()}"
    content = f"3 {versions} {values}"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = base / f"titanlite/classes/{hashlib.sha256(content.encode()).hexdigest()[:24]}.json"
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    with kernels.torch_functions():
        answers = _answers(values)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(answers))
    return answers


def _answers(values: str) -> dict[str, str]:
    flavor = flavor_of(json.loads(values))
    unknown = ""
    for small in (flavor, flavor_of(small_config(transformers_config(flavor)))):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in build(small, 1).parameters())
            if size > _LARGEST:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model: Any = build(small, _LENGTH)
                return _ask(model.eval(), small)
        except Exception as error:
            unknown = f": {type(error).__name__}: {first_line(error)}"
    return dict.fromkeys(QUESTIONS, f"unknown, no small instance runs{unknown}")


@torch.no_grad()
def _ask(model: Any, flavor: Any) -> dict[str, str]:
    tokens = torch.randint(4, model.config.get_text_config().vocab_size, (1, _LENGTH))
    before = tokens.clone()
    after = tokens.clone()
    before[:, :_FIRST] = tokens[:, :_FIRST].flip(1)
    after[:, _FIRST:] = tokens[:, _FIRST:].flip(1)
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_LENGTH - _FIRST)])[None]
    documents = (torch.arange(_LENGTH)[None] >= _FIRST).long()
    plain = model(tokens)
    looks: tuple[Callable[[], str], ...] = (
        lambda: _differ(plain[:, :_FIRST], model(after)[:, :_FIRST]),
        lambda: _differ(
            model(tokens, positions, documents)[:, _FIRST:],
            model(before, positions, documents)[:, _FIRST:],
        ),
        lambda: _differ(plain, model(tokens, head=lambda hidden, output: output(hidden))),
        lambda: _restored(model, flavor),
        lambda: _compiled(model, tokens, plain),
    )
    return {name: _answer(look) for name, look in zip(QUESTIONS, looks, strict=True)}


def _answer(look: Callable[[], str]) -> str:
    try:
        return look() or "yes"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _differ(found: Tensor, expected: Tensor) -> str:
    error = float((found - expected).norm() / expected.norm())
    if error < 1e-5:
        return ""
    return f"logits differ by {error:.0e}"


def _restored(model: Any, flavor: Any) -> str:
    """Return the buffers that a model built without memory restores differently."""
    with torch.device("meta"):
        restored: Any = build(flavor, _LENGTH)
    restored.to_empty(device="cpu")
    for module in restored.modules():
        if [*module.buffers(recurse=False)]:
            module.reset_buffers()
    found = dict(restored.named_buffers())
    wrong = []
    for name, buffer in model.named_buffers():
        if not torch.equal(found[name], buffer):
            wrong.append(name)
    if not wrong:
        return ""
    return f"not {', '.join(wrong)}"


def _compiled(model: Any, tokens: Tensor, plain: Tensor) -> str:
    """Compile every block as one graph."""
    torch.compiler.reset()
    for block in model.get_submodule(module_names_of(model)["blocks"]).children():
        block.forward = torch.compile(block.forward, fullgraph=True, backend="eager")
    try:
        return _differ(model(tokens), plain)
    finally:
        torch.compiler.reset()
