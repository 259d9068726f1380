"""Rules of the mesh and of the techniques that split or speed up the model.

A rule refuses what contradicts something; a key that merely has nothing to do declares its needs
(needs.py)."""

import math
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from titanlite.config.layout import Layout, divisors
from titanlite.config.rules.check import Check, InvalidField, Refusals, Refuse
from titanlite.config.schema import JobConfig
from titanlite.config.stages import fills_stages
from titanlite.errors import counted
from titanlite.registry import ModelDims, ModelSpec, expert_paths

BUDGETING_BACKENDS = ("inductor", "aot_eager")
"""Compiler backends that honor an activation memory budget."""

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""The keys of all degrees but the sharding one, which may be -1."""

_FLOAT8 = "quantize.linear.float8."


def apply_rules(
    check: Check,
    world: int,
    layout: Layout | None,
    spec: ModelSpec | None,
    model: Any,
    shape: ModelDims | None,
) -> None:
    """Apply the rules of this file."""
    config = check.config
    check.apply(_tensor_parallel_divides_the_model, config, world, spec, model, shape)
    check.apply(_context_parallel_divides_the_sequence, config, world, spec, shape)
    check.apply(_expert_parallel_finds_experts, config, spec, model, shape)
    check.apply(_expert_parallel_divides_experts_and_ranks, layout, shape)
    check.apply(_pipeline_parallel_may_cut_the_model, config, spec)
    check.apply(_groups_fit_the_model, config, shape)
    check.apply(_resharding_splits_the_sharding_ranks, config, layout)
    check.apply(_replicated_parameters_are_not_offloaded, config)
    check.apply(_compiler_honors_the_memory_budget, config)
    check.apply(_recomputation_finds_blocks, config, shape)
    check.apply(_float8_can_multiply, config)
    check.apply(_float8_fills_its_rows, config, layout)
    check.apply(_float8_can_be_gathered, config)


def find_layout(
    refuse: Refuse,
    config: JobConfig,
    world: int,
    *,
    spec: ModelSpec | None,
    shape: ModelDims | None,
) -> Layout | None:
    """Return the mesh; refuse degrees that do not fill the world.

    Without a world size, it is the smallest that the degrees allow.
    """
    settings = config.parallelism
    degree = {name: getattr(settings, key) for name, key in DEGREES.items()}
    shard = settings.data_parallel_shard_degree
    others = math.prod(degree.values())
    ep = settings.expert_parallel_degree
    experts = bool(shape and shape.experts)
    if not world and shard == -1:
        shard = 1
        if experts:
            shard = ep // math.gcd(ep, degree["cp"] * degree["tp"])
    world = world or others * shard
    if world % others == 0 and shard in (-1, world // others):
        return Layout(dp_shard=world // others, ep=ep, experts=experts, **degree)
    ranks = counted(world, "rank")
    keys = {key: degree[name] for name, key in DEGREES.items() if degree[name] > 1}
    if shard != -1:
        keys["data_parallel_shard_degree"] = shard
    (first, value), *more = keys.items()
    if more:  # which of them is wrong cannot be known
        product = " × ".join([f"{value}", *(f"{key} {number}" for key, number in more)])
        needed = others * max(shard, 1)
        why = f"{product} = {needed} ranks are needed, and this run has {world}"
        if shard == -1:
            why = f"{product} = {needed} does not divide {ranks}"
        start = f"start {needed}"
        if needed <= 16:
            start += f" (NGPU={needed} on one node)"
        why += f"; {start}, or change a degree"
    elif shard != -1:
        why = f"{shard} is not the number of ranks, {world}; use -1 or {world}"
    else:
        if value > world:
            ranks += f" (NGPU={value} starts {value})"
        why = _does_not_divide(value, ranks, legal_degrees(first, world, config, spec, shape))
    refuse(f"parallelism.{first}", why)
    return None


def legal_degrees(
    key: str, world: int, config: JobConfig, spec: ModelSpec | None, shape: ModelDims | None
) -> list[int]:
    """Return the legal degrees: divisors of the remaining ranks (world 0: any) and of all that a
    degree splits.
    """
    settings = config.parallelism
    others = math.prod(getattr(settings, other) for other in DEGREES.values() if other != key)
    sizes = [world // others if world % others == 0 else world]
    if not (spec and shape):
        return divisors(sizes[0])
    with suppress(InvalidField):
        if key == "tensor_parallel_degree":
            sizes += _split_by_tensor_parallel(config, shape).values()
        elif key == "context_parallel_degree":
            if not spec.core:
                return [1]
            sizes += _split_by_context_parallel(config, shape).values()
        elif key == "pipeline_parallel_degree":
            degrees = divisors(sizes[0]) if world else range(1, shape.layers + 3)
            return [degree for degree in degrees if fills_stages(settings, degree, shape.layers)]
    return divisors(math.gcd(*sizes))


def _does_not_divide(degree: int, what: str, legal: list[int]) -> str:
    return f"{degree} does not divide {what}; legal: {', '.join(map(str, legal))}"


def _split_by_tensor_parallel(config: JobConfig, shape: ModelDims) -> dict[str, int]:
    """Return the sizes that a tensor-parallel degree must divide."""
    training = config.training
    validation = config.validation
    sizes = {"attention heads": shape.heads, "key and value heads": shape.kv_heads}
    sizes["tokens in a sequence"] = training.seq_len
    if validation.enable and validation.seq_len:
        sizes["tokens in a validation sequence"] = validation.seq_len
    return sizes


def _split_by_context_parallel(config: JobConfig, shape: ModelDims) -> dict[str, int]:
    """Return the sizes that a context-parallel degree must divide; 1 where other splits leave
    nothing.
    """
    settings = config.parallelism
    sizes = _split_by_tensor_parallel(config, shape)
    unit = settings.tensor_parallel_degree
    what = ""
    if settings.context_parallel_rotate_method == "allgather":
        sizes = {name: size for name, size in sizes.items() if "tokens" in name}
        if settings.context_parallel_load_balancer == "headtail":
            unit *= 2
            what = " into 2 equal chunks a rank (head and tail)"
    if settings.tensor_parallel_degree > 1:
        what += f" for tensor_parallel_degree {settings.tensor_parallel_degree}"
    parts = dict[str, int]()
    for name, size in sizes.items():
        parts[f"{size} {name}{what}"] = 1 if size % unit else size // unit
    return parts


def _unsplit(spec: ModelSpec, model: Any, shape: ModelDims) -> str:
    """Return the rows that a model's table lacks for tensor parallel, or an empty string.

    Slices of sequences come from the embedding, and whole ones are seen behind column layers.
    """
    if spec.unsplit:
        return spec.unsplit
    rules = spec.rules(model)
    roles = {rule.tensor for rule in rules} | {"head" for rule in rules if rule.tied}
    missing = {"embedding", "head"} - roles
    if missing:
        return f'no row of its table has the role "{min(missing)}"'
    for rule in rules:
        name = rule.pattern.rpartition(".")[2]
        if rule.tensor not in ("replicated", "expert") and name not in ("weight", "bias", "*"):
            alone = 'a parameter outside of such a module is "replicated"'
            return f'{rule.pattern} has the role "{rule.tensor}" of a module with a weight; {alone}'
    length = f"{spec.blocks}.0.{spec.core}".count(".")
    roles_of = {(".".join(r.pattern.split(".")[:length]), r.tensor) for r in rules}
    for number in range(shape.layers):
        path = f"{spec.blocks}.{number}.{spec.core}".rpartition(".")[0]
        inside = {role for pattern, role in roles_of if fnmatchcase(path, pattern)}
        if inside and "column" not in inside:
            return (
                f'no row inside of {path} has the role "column", '
                "so attention would see only a slice of the tokens"
            )
    return ""


def _tensor_parallel_divides_the_model(
    config: JobConfig, world: int, spec: ModelSpec, model: Any, shape: ModelDims
) -> Refusals:
    tp = config.parallelism.tensor_parallel_degree
    if tp == 1:
        return
    key = "parallelism.tensor_parallel_degree"
    why = _unsplit(spec, model, shape)
    if why:
        yield key, f"{spec.name} cannot be split: {why}; legal: 1"
        return
    legal = legal_degrees("tensor_parallel_degree", world, config, spec, shape)
    for what, size in _split_by_tensor_parallel(config, shape).items():
        if size % tp:
            yield key, _does_not_divide(tp, f"{size} {what}", legal)


def _context_parallel_divides_the_sequence(
    config: JobConfig, world: int, spec: ModelSpec, shape: ModelDims
) -> Refusals:
    cp = config.parallelism.context_parallel_degree
    key = "context_parallel_degree"
    if cp > 1 and not spec.core:
        why = spec.unsplit or (
            "its ModelSpec names no core, the part of attention that would have to see the "
            "tokens of all ranks"
        )
        yield f"parallelism.{key}", f"{spec.name} cannot split sequences: {why}; legal: 1"
        return
    legal = legal_degrees(key, world, config, spec, shape)
    for what, size in _split_by_context_parallel(config, shape).items():
        if size % cp:
            yield f"parallelism.{key}", _does_not_divide(cp, what, legal)


def _expert_parallel_finds_experts(
    config: JobConfig, spec: ModelSpec, model: Any, shape: ModelDims
) -> Refusals:
    if config.parallelism.expert_parallel_degree > 1 and not (
        shape.experts and expert_paths(spec.rules(model), spec.blocks)
    ):
        why = f"the table of {spec.name} {config.model.flavor} has no experts"
        yield "parallelism.expert_parallel_degree", f"{spec.unsplit or why}; legal: 1"


def _expert_parallel_divides_experts_and_ranks(layout: Layout, shape: ModelDims) -> Refusals:
    experts = shape.experts
    ranks = layout.fsdp * layout.tp
    sizes = {"experts": experts, "ranks of data_parallel_shard x context x tensor parallel": ranks}
    for what, size in sizes.items():
        if experts and size % layout.ep:
            why = _does_not_divide(layout.ep, f"{size} {what}", divisors(math.gcd(experts, ranks)))
            yield "parallelism.expert_parallel_degree", why


def _pipeline_parallel_may_cut_the_model(config: JobConfig, spec: ModelSpec) -> Refusals:
    if config.parallelism.pipeline_parallel_degree > 1 and spec.unsplit:
        why = f"{spec.name} cannot be cut into stages: {spec.unsplit}; legal: 1"
        yield "parallelism.pipeline_parallel_degree", why


def _groups_fit_the_model(config: JobConfig, shape: ModelDims) -> Refusals:
    if config.parallelism.fsdp_blocks_per_group > shape.layers:
        yield "parallelism.fsdp_blocks_per_group", f"the model has {shape.layers} blocks"


def _resharding_splits_the_sharding_ranks(config: JobConfig, layout: Layout) -> Refusals:
    reshard = config.parallelism.fsdp_reshard_after_forward
    if not isinstance(reshard, int) or layout.max_shard_degree == 1:
        return
    legal = [d for d in divisors(layout.fsdp) if 1 < d < layout.fsdp]
    if layout.tp * layout.ep > 1:
        what = "experts that expert parallel splits"
        if layout.tp > 1:
            what = "matrices that tensor parallel splits"
        why = f"FSDP2 keeps {what} on all sharding ranks or on one"
        yield "parallelism.fsdp_reshard_after_forward", f'{why}; use "always" or "never"'
    elif reshard not in legal:
        instead = f"legal: {', '.join(map(str, legal))}"
        if not legal:
            instead = 'use "always" or "never"'
        yield (
            "parallelism.fsdp_reshard_after_forward",
            f"must split {layout.fsdp} sharding ranks; {instead}",
        )


def _replicated_parameters_are_not_offloaded(config: JobConfig) -> Refusals:
    if config.parallelism.fsdp_keep_whole and config.training.enable_cpu_offload:
        why = "training.enable_cpu_offload only moves sharded parameters; use one or the other"
        yield "parallelism.fsdp_keep_whole", why


def _compiler_honors_the_memory_budget(config: JobConfig) -> Refusals:
    compiler = config.compile
    if config.activation_checkpoint.mode != "memory_budget":
        return
    why = "the compiler chooses which activations fit the budget"
    if not (compiler.enable and "model" in compiler.components):
        yield (
            "activation_checkpoint.mode",
            f'{why}; set compile.enable, with "model" in compile.components',
        )
    elif compiler.backend not in BUDGETING_BACKENDS:
        listed = " or ".join(f'"{name}"' for name in BUDGETING_BACKENDS)
        yield "compile.backend", f"{why}, which this backend does not do; use {listed}"


def _recomputation_finds_blocks(config: JobConfig, shape: ModelDims) -> Refusals:
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    if settings.mode == "selective" and option != "op" and int(option) > shape.layers:
        why = f"the model has {shape.layers} blocks; at most {shape.layers}"
        yield "activation_checkpoint.selective_ac_option", why


def _float8_can_multiply(config: JobConfig) -> Refusals:
    is_float64 = config.training.mixed_precision_param == "float64"
    if config.quantize.linear.float8.enable and is_float64:
        yield _FLOAT8 + "enable", "float8 products come out in float32 or bfloat16, not in float64"


def _float8_fills_its_rows(config: JobConfig, layout: Layout) -> Refusals:
    float8 = config.quantize.linear.float8
    training = config.training
    tokens = training.local_batch_size * training.seq_len // layout.cp
    if (
        float8.enable
        and tokens % 16
        and float8.recipe_name != "rowwise_with_gw_hp"
        and not float8.emulate
    ):
        size = "training.local_batch_size x training.seq_len"
        if layout.cp > 1:
            size += " / context_parallel_degree"
        why = f"a weight gradient sums over {size} = {tokens} tokens"
        yield _FLOAT8 + "enable", f"{why}, which must be a multiple of 16; change one of the two"


def _float8_can_be_gathered(config: JobConfig) -> Refusals:
    float8 = config.quantize.linear.float8
    if not (float8.enable and float8.enable_fsdp_float8_all_gather):
        return
    key = _FLOAT8 + "enable_fsdp_float8_all_gather"
    if float8.recipe_name != "tensorwise":
        rows = f'"{float8.recipe_name}" scales rows'
        why = f"{rows}, and a shard does not see the rows of other shards"
        yield key, f'{why}; remove the key, or use recipe_name = "tensorwise"'
    if isinstance(config.parallelism.fsdp_reshard_after_forward, int):
        why = f"weights that stay sharded over some ranks lose their float8 form; with {key}"
        yield "parallelism.fsdp_reshard_after_forward", f'{why} use "always" or "never"'
