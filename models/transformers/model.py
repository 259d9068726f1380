"""A class of transformers as a model: its config, forward pass, buffers and table.

The class is not changed: its forward pass computes logits, and its `_init_weights` determines the
initial values.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    masking_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from titanlite.errors import UserError, nearest, some_of
from titanlite.models.transformers.flavor import flavor_of
from titanlite.models.transformers.initial import recorded
from titanlite.registry import ModelDims, Rule

_IGNORED = ("_*", "auto_map", "*transformers*", "unsloth*", "model_max_length")
"""Keys of a config.json that no class reads."""
_MOST_KEPT = 1 << 16
"""The largest number of elements of a tensor that is kept as it was built."""
_NO_VALUE = re.compile("(new_)?(empty|normal|uniform|bernoulli|randn?)(_like|_strided)?_?")
"""Functions whose results are random or unset."""
transformers.logging.set_verbosity_error()


def transformers_config(flavor: Any) -> Any:
    """Return the config object of a flavor; refuse what transformers would silently accept."""
    values = copy.deepcopy(dataclasses.asdict(flavor))
    kind = values.pop("model_type")
    if kind not in CLASSES:
        close = nearest(kind, [*CLASSES])
        hint = ""
        if close:
            hint = f"; nearest: {close}"
        raise UserError(
            f'model_type "{kind}" has no causal language model in transformers '
            f"{transformers.__version__}{hint}. Code in a folder is never run: install the package "
            "that registers the class, and name it in model.package"
        )
    try:
        config = AutoConfig.for_model(kind, **values)
    except Exception as error:
        why = " ".join(str(error).split())
        raise UserError(f"transformers refuses the config of {kind}: {why}") from None
    known = {field.name for field in dataclasses.fields(type(config))} | {*config.attribute_map}
    for key in values.keys() & vars(config).keys() - known:
        is_ignored = any(fnmatchcase(key, pattern) for pattern in _IGNORED)
        if not is_ignored and not re.search(rf"\b{re.escape(key)}\b", _code_of(type(config))):
            hint = f"; nearest: {nearest(key, [*known]) or 'none'}"
            raise UserError(f"{kind} has no key {key} in its config.json{hint}")
    if config.is_encoder_decoder or getattr(config, "vision_config", None):
        raise UserError(f"{kind} is not a text-only decoder")
    weight = getattr(config, "router_aux_loss_coef", 0) or 0
    if getattr(config, "output_router_logits", False) and weight > 0:
        raise UserError(
            f"router_aux_loss_coef {weight:g} with output_router_logits: this loss depends on the "
            "micro-batch, so no two meshes would train the same model; set one to 0 or false"
        )
    return config


@lru_cache
def _code_of(config_class: type) -> str:
    """Return the source of a class, which may read keys that its config does not declare."""
    classes: Any = config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return "".join(Path(inspect.getfile(each)).read_text() for each in classes)


def dims(flavor: Any) -> ModelDims:
    config = transformers_config(flavor).get_text_config()
    heads = _one(config, "num_attention_heads") or 1
    return ModelDims(
        config.num_hidden_layers,
        heads,
        _one(config, "num_key_value_heads") or heads,
        _one(config, "head_dim") or config.hidden_size // heads,
        config.vocab_size,
        max(0, _one(config, "max_position_embeddings") or 0) or 1 << 30,
    )


def _one(config: Any, name: str) -> int | None:
    """Return a size of a config; None if it has none, or one for each layer."""
    try:
        return getattr(config, name)
    except Exception:  # an AttributeError, or the library's own error
        return None


def config_json(flavor: Any) -> dict[str, Any]:
    config = transformers_config(flavor)
    return json.loads(config.to_json_string()) | {"architectures": [CLASSES[config.model_type]]}


def build(flavor: Any, positions: int) -> nn.Module:
    """Return an instance of the class on torch's default device, with our forward pass."""
    config = transformers_config(flavor)
    make = partial(
        AutoModelForCausalLM.from_config, config, dtype=torch.float32, trust_remote_code=False
    )
    with values_as_built():
        try:
            model = make(attn_implementation="sdpa")
        except ValueError as error:
            if "scaled_dot" not in str(error):
                raise
            model = make(attn_implementation="eager")
    for part in (model.config, model.config.get_text_config()):
        part.use_cache = False  # not every forward pass takes it as an argument
    with_experts = getattr(model, "set_experts_implementation", None)
    if with_experts and any("experts" in name for name, _ in model.named_modules()):
        with_experts(_register_experts())
    model.forward = MethodType(forward, model)
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            built = {n: b.clone() for n, b in buffers.items() if b.numel() <= _MOST_KEPT}
            module.reset_buffers = partial(_reset, model, module, built)  # type: ignore[assignment]
            if torch.get_default_device().type == "meta":
                for name, buffer in buffers.items():
                    module._buffers[name] = buffer.to("meta")
    return model


def _register_experts() -> str:
    """Return the name of an implementation of experts that compiles and supports all types.

    "eager" loops over data, "grouped_mm" does not support float64, and "batched_mm" copies an
    expert's matrices for each of its tokens, hundreds of gigabytes in a real model.
    """
    from transformers.integrations import moe

    def forward_experts(self: nn.Module, hidden: torch.Tensor, *args: Any, **more: Any) -> Any:
        is_double = hidden.dtype == torch.float64
        run = moe.grouped_mm_experts_forward
        if is_double:
            run = moe.batched_mm_experts_forward
        return run(self, hidden, *args, **more)

    moe.ALL_EXPERTS_FUNCTIONS.register("titanlite", forward_experts)
    return "titanlite"


@contextmanager
def values_as_built() -> Iterator[None]:
    """Build models without memory, but keep the values of their buffers and small parameters."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            built = parameter.detach()
            parameter = nn.Parameter(built.to("meta"), parameter.requires_grad)
            if built.numel() <= _MOST_KEPT and not built.isnan().any():
                parameter.built = built  # type: ignore[attr-defined]
        register(self, name, parameter)

    if torch.get_default_device().type != "meta":
        yield
        return
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with torch.device("cpu"), _NoValues():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _NoValues(TorchFunctionMode):
    """Turns small results that are random or unset into NaN."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        has_no_value = _NO_VALUE.fullmatch(getattr(func, "__name__", ""))
        if has_no_value and result.is_floating_point() and result.numel() <= _MOST_KEPT:
            result.detach().fill_(float("nan"))
        return result


def forward(
    self: Any,
    tokens: Tensor,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
    head: Callable[[Tensor, Any], Tensor] | None = None,
) -> Tensor:
    """Return logits of (batch, tokens), or the result of `head`, which is called with hidden states
    and a function that turns them into logits.
    """
    own = type(self).forward
    known = inspect.signature(own).parameters
    given: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "position_ids": positions}
    given = {name: value for name, value in given.items() if name in known and value is not None}
    with _packed(documents):
        if head is None:
            return own(self, **given).logits
        hidden = self.get_decoder()(**given)[0]
    return head(hidden, _Tail(self))


@contextmanager
def _packed(documents: Tensor | None) -> Iterator[None]:
    """Let the library build masks for these documents, which it would guess from positions."""
    # transformers 5.24. Its masks keep sliding windows, which ours would lose.
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: documents
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


class _Output(dict):
    """A decoder's result, by attribute, name or number."""

    __getattr__ = dict.get

    def __getitem__(self, key: Any) -> Any:
        if key == 0:
            return self.get("last_hidden_state")
        return self.get(key)


class _Tail:
    """The class's forward pass after its decoder: the output layer with its scales and caps."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.get_output_embeddings().parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        decoder = self.model.get_decoder()
        decoder.forward = lambda *args, **kwargs: _Output(last_hidden_state=hidden)
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        try:
            return type(self.model).forward(self.model, input_ids=tokens).logits
        finally:
            del decoder.forward


def _reset(model: Any, module: nn.Module, built: dict[str, Tensor]) -> None:
    """Fill a module's buffers as the class does, or as it built them; leave its parameters."""
    buffers = dict(module.named_buffers(recurse=False))
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
        else:
            buffer.zero_()
    own: list[Any] = [*module.parameters(recurse=False)]
    for parameter in own:
        parameter._is_hf_initialized = True
    model.base_model._init_weights(module)  # some classes read what only the inner model has
    for parameter in own:
        del parameter._is_hf_initialized
    if any(type(buffer) is not Tensor for buffer in module.buffers(recurse=False)):
        return  # fake tensors of a rehearsal have no values
    lost = [name for name, buffer in buffers.items() if buffer.isnan().any()]
    for name in built.keys() & lost:
        buffers[name].copy_(built[name])
        lost.remove(name)
    if lost:
        raise UserError(
            f"{type(module).__name__} does not restore {', '.join(lost)}: the model is built "
            "without memory, so values set in __init__ are lost"
        )


@lru_cache
def module_names(values: str) -> dict[str, Any]:
    return module_names_of(on_meta(json.loads(values)))


def module_names_of(model: Any) -> dict[str, Any]:
    """Return the names of a class's blocks, and of the modules before and after them."""
    split = {*(model._no_split_modules or ())}
    lists = {}
    for n, m in model.named_modules():
        if isinstance(m, nn.ModuleList) and len(m):
            lists[n] = m
    blocks = {n: m for n, m in lists.items() if {type(b).__name__ for b in m} <= split} or lists
    if not blocks:
        raise UserError(f"{type(model).__name__} has no list of blocks")
    path = max(blocks, key=lambda name: len(blocks[name]))
    parent = model.get_submodule(path.rpartition(".")[0])
    prefix = path.removesuffix(path.rpartition(".")[2])
    before = []
    after = []
    for name, child in parent.named_children():
        if isinstance(child, nn.Embedding):
            before.append(prefix + name)
        elif "norm" in type(child).__name__.lower():
            after.append(prefix + name)
    tables = model.get_input_embeddings()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            above = name.rpartition(".")[0]
            own = model.get_submodule(above).parameters(recurse=False)
            if {*head.parameters()}.isdisjoint(own):
                after.append(name)
            else:  # BERT's bias is in both
                after.append(above)
        elif module is tables and name not in before:
            before.append(name)
    return {"blocks": path, "before": tuple(before), "after": tuple(after)}


@lru_cache
def rules(values: str) -> tuple[Rule, ...]:
    """Return a row for each parameter, with the class's initial values."""
    model: Any = on_meta(json.loads(values))
    initial, faults = recorded(model)
    if faults:
        raise UserError(f"{type(model).__name__}: initial values are not known:{some_of(faults)}")
    seconds = _second_names(model)
    per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    head = model.get_output_embeddings()
    table = []
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        role: Any = "replicated"
        if isinstance(owner, nn.Embedding):
            role = "embedding"
        elif owner is head:
            role = "head"
        active = 1.0
        if per_token and parameter.dim() == 3 and "experts" in name:
            active = min(1.0, per_token / len(parameter))
        second = seconds.get(name, "")
        table.append(Rule(name, initial[name], role, name, tied=second, active=active))
    return tuple(table)


def _second_names(model: nn.Module) -> dict[str, str]:
    """Return the second name of every parameter that has one, by its first."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    found = dict[str, str]()
    for name, parameter in named:
        if name != first[parameter]:
            found[first[parameter]] = name
    return found


def on_meta(values: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return build(flavor_of(values), 1)
