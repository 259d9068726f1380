"""Rules of pipeline parallel: the stages of the keys, and the needs of a schedule."""

from collections.abc import Iterable
from itertools import chain, pairwise
from math import ceil
from typing import Any

from titanlite.config.layout import Batch, Layout, divisors
from titanlite.config.rules.check import Check, Refusals, Refuse
from titanlite.config.rules.parallel import legal_degrees
from titanlite.config.schema import JobConfig
from titanlite.config.stages import (
    IN_ROUNDS,
    SINGLE,
    SPLIT_BACKWARD,
    V_SHAPED,
    StageModules,
    Stages,
    ends_weigh,
    fits,
    number_of_stages,
    split_layers,
    stages_of_ranks,
)
from titanlite.registry import ModelDims, ModelSpec

_PIPELINE = "parallelism.pipeline_parallel_"
_SCHEDULE = f"{_PIPELINE}schedule"
_NAMES = "parallelism.module_fqns_per_model_part"


def check_stages(
    check: Check,
    world: int,
    layout: Layout | None,
    batch: Batch | None,
    spec: ModelSpec | None,
    model: Any,
    shape: ModelDims | None,
) -> Stages | None:
    """Apply the rules of this file; return the stages, None where a key of theirs is refused."""
    config = check.config
    micro_batch = check.find(_find_micro_batch, config, layout)
    number = check.find(_count_stages, config, layout, shape)
    modules = check.find(_find_modules, config, world, spec, shape, layout, number=number)
    stages = check.find(_stages, config, layout, batch, micro_batch, modules)
    check.apply(_schedule_has_its_micro_batches, config, layout, stages)
    check.apply(_halves_of_the_backward_pass_can_run, config, layout)
    check.apply(_tied_weights_are_on_two_ranks, spec, model, layout, stages)
    check.apply(_groups_fit_the_stages, config, spec, shape, layout, stages)
    return stages


def bare_stages(stages: Stages, blocks: str) -> str:
    """Return a line about stages that have no layer, or an empty string."""
    layers = []
    for names in stages.names:
        layers.append(sum(name.startswith(f"{blocks}.") for name in names))
    bare = [f"{stage}" for stage, number in enumerate(layers) if not number]
    why = f"have none of the {sum(layers)} layers, so their ranks mostly wait"
    if bare:
        return f"stages {_listed(bare)} of {len(layers)} {why}"
    return ""


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _find_micro_batch(refuse: Refuse, config: JobConfig, layout: Layout) -> int | None:
    """Return the sequences of a micro-batch."""
    local = config.training.local_batch_size
    size = config.parallelism.pipeline_parallel_microbatch_size
    if layout.pp == 1:
        return local
    if local % size == 0:
        return size
    legal = _listed(divisors(local))
    refuse(
        f"{_PIPELINE}microbatch_size",
        f"does not divide training.local_batch_size {local}; legal: {legal}",
    )
    return None


def _count_stages(
    refuse: Refuse, config: JobConfig, layout: Layout, shape: ModelDims
) -> int | None:
    """Return the number of stages that a schedule runs."""
    settings = config.parallelism
    pp = layout.pp
    layers = shape.layers
    if pp == 1:
        return 1
    schedule = settings.pipeline_parallel_schedule
    number = number_of_stages(settings, pp, layers)
    if fits(schedule, pp, number):
        return number
    each = "two or more stages"
    if schedule in SINGLE:
        each = "one stage"
    elif schedule in V_SHAPED:
        each = "two stages"
    needs = f"{schedule} runs {each} on each of {pp} ranks"
    if settings.module_fqns_per_model_part:
        refuse(_NAMES, f"names {number} stages, and {needs}")
    else:
        total = layers + sum(ends_weigh(settings))
        legal = []
        for size in range(1, total + 1):
            if fits(schedule, pp, ceil(total / size)):
                legal.append(size)
        why = f"{total} layers, the weights of the ends included, make {number} stages, and {needs}"
        refuse(f"{_PIPELINE}layers_per_stage", f"{why}; legal: {_listed(legal)}")
    return None


def _find_modules(
    refuse: Refuse,
    config: JobConfig,
    world: int,
    spec: ModelSpec,
    shape: ModelDims,
    layout: Layout,
    *,
    number: int | None,
) -> StageModules | None:
    """Return the modules of each stage: those that the keys name, or an even split of the
    layers.
    """
    settings = config.parallelism
    layers = shape.layers
    modules = [*spec.before, *(f"{spec.blocks}.{i}" for i in range(layers)), *spec.after]
    if layout.pp > 1 and settings.module_fqns_per_model_part:
        return _named_modules(refuse, settings.module_fqns_per_model_part, modules, spec)
    if not number:
        return None
    first, last = ends_weigh(settings)
    split = split_layers(layers, number, first, last)
    if split:
        starts = [len(spec.before) + part.start for part in split[1:]]
        bounds = pairwise([0, *starts, len(modules)])
        return tuple(tuple(modules[start:end]) for start, end in bounds)
    each = (layers + first + last) // number
    counted = f"{layers} layers (the embedding counts as {first}, the head as {last})"
    why = f"{counted} give {number} stages {each} or {each + 1}"
    if not each:
        order = f"{settings.pipeline_parallel_schedule} at degree {layout.pp}"
        legal = legal_degrees("pipeline_parallel_degree", world, config, spec, shape)
        why = f"{order} makes {number} stages; {counted} leave some of them empty"
        refuse(f"{_PIPELINE}degree", f"{why}; legal: {_listed(legal)}")
    weights = range(layers + 1)
    if 0 < each < first:
        legal = [weight for weight in weights if split_layers(layers, number, weight, last)]
        refuse(f"{_PIPELINE}first_stage_less_layers", f"{why}; legal: {_listed(legal)}")
    if 0 < each < last:
        legal = [weight for weight in weights if split_layers(layers, number, first, weight)]
        refuse(f"{_PIPELINE}last_stage_less_layers", f"{why}; legal: {_listed(legal)}")
    return None


def _named_modules(
    refuse: Refuse, named: list[list[str]], modules: list[str], spec: ModelSpec
) -> StageModules | None:
    given = [*chain(*named)]
    faults = {
        "unknown": [name for name in given if name not in modules],
        "missing": [name for name in modules if name not in given],
        "named twice": sorted({name for name in given if given.count(name) > 1}),
        "not in the first stage": [
            name for name in spec.before if name in given and name not in named[0]
        ],
        "without modules": [f"stage {number}" for number, names in enumerate(named) if not names],
    }
    if not any(faults.values()):
        moved = [name for name, right in zip(given, modules, strict=True) if name != right]
        faults = {"not in the model's order": moved[:1]}
    if not any(faults.values()):
        return tuple(map(tuple, named))
    why = [f"{what}: {_listed(names)}" for what, names in faults.items() if names]
    refuse(_NAMES, "; ".join(why))
    return None


def _stages(
    refuse: Refuse,
    config: JobConfig,
    layout: Layout,
    batch: Batch,
    micro_batch: int,
    modules: StageModules,
) -> Stages:
    """Return the stages; nothing is wrong with them."""
    schedule = ""
    if layout.pp != 1:
        schedule = config.parallelism.pipeline_parallel_schedule
    ranks = stages_of_ranks(schedule, layout.pp, len(modules))
    micro_batches = batch.local * batch.accumulation // micro_batch
    return Stages(modules, ranks, schedule, micro_batches, micro_batch)


def _schedule_has_its_micro_batches(config: JobConfig, layout: Layout, stages: Stages) -> Refusals:
    pp = layout.pp
    n = stages.micro_batches
    step = config.training.local_batch_size // stages.size
    needed = ""
    legal = list[int]()
    if stages.schedule in ("1F1B", "DualPipeV") and n < len(stages.names):
        needed = f"as many micro-batches as stages ({len(stages.names)}) or more"
        legal = [ceil(len(stages.names) / step) * step]
    elif stages.schedule in IN_ROUNDS and n % max(1, n // pp):
        needed = f"its micro-batches in equal rounds, {n // pp} with {pp} ranks"
        right = [m for m in range(step, 2 * n * pp, step) if m % max(1, m // pp) == 0]
        legal = [*[m for m in right if m < n][-1:], *[m for m in right if m > n][:1]]
    if needed:
        batches = _listed(m * stages.size * layout.data_parallel for m in legal)
        yield (
            _SCHEDULE,
            f"needs {needed}, and a step has {n}; training.global_batch_size could be {batches}",
        )


def _halves_of_the_backward_pass_can_run(config: JobConfig, layout: Layout) -> Refusals:
    compiler = config.compile
    schedule = config.parallelism.pipeline_parallel_schedule
    if layout.pp == 1 or schedule not in SPLIT_BACKWARD:
        return
    instead = "use Interleaved1F1B or LoopedBFS"
    if compiler.enable and "model" in compiler.components:
        why = "a compiled block would run its whole backward pass for each of the halves"
        yield "compile.components", f'{why}; remove "model", or {instead}'
    # Still so in torch 2.14, which recomputes a block of llama3 10 times.
    if config.activation_checkpoint.mode in ("full", "selective"):
        why = "a split backward pass would recompute a block again for each of its parameters"
        yield "activation_checkpoint.mode", f'{why}; use "none", or {instead}'


def _tied_weights_are_on_two_ranks(
    spec: ModelSpec, model: Any, layout: Layout, stages: Stages
) -> Refusals:
    if layout.pp == 1 or len(stages.names) - 1 not in next(of for of in stages.ranks if 0 in of):
        return
    tied = [rule.pattern for rule in spec.rules(model) if rule.tied]
    if tied:
        why = (
            "the first and the last stage are on one rank, "
            f"and {_listed(tied)} would be there twice"
        )
        yield _SCHEDULE, f"{why}; use a schedule without the V shape"


def _groups_fit_the_stages(
    config: JobConfig, spec: ModelSpec, shape: ModelDims, layout: Layout, stages: Stages
) -> Refusals:
    size = config.parallelism.fsdp_blocks_per_group
    most = max(sum(name.startswith(f"{spec.blocks}.") for name in names) for names in stages.names)
    if layout.pp > 1 and most < size <= shape.layers:
        yield (
            "parallelism.fsdp_blocks_per_group",
            f"the largest stage has {most} blocks; at most {most}",
        )
