"""Rules of pipeline parallel: the stages of the keys, and the needs of a schedule."""

from collections.abc import Iterable
from math import ceil

from titanlite.config.pipeline_order import faults_of, read_csv, stages_of
from titanlite.config.rules.context import Faults, InvalidField, RuleContext, Rules
from titanlite.config.rules.parallel import legal_degrees
from titanlite.config.schema import KEYS
from titanlite.config.stages import (
    IN_ROUNDS,
    SINGLE,
    V_SHAPED,
    Stages,
    ends_weigh,
    fits,
    number_of_stages,
    split_layers,
    splits_backward,
    stages_of_ranks,
)
from titanlite.layout import divisors

RULES = Rules()

_PIPELINE, _FSDP = "parallelism.pipeline_parallel_", "parallelism.fsdp_"
_SCHEDULE, _CSV, _NAMES = f"{_PIPELINE}schedule", f"{_PIPELINE}schedule_csv", "parallelism.module_fqns_per_model_part"


def bare_stages(stages: Stages, blocks: str) -> str:
    """Return a line about stages that have no layer, or an empty string."""
    layers = [sum(name.startswith(f"{blocks}.") for name in names) for names in stages.names]
    bare = [f"{stage}" for stage, number in enumerate(layers) if not number]
    why = f"have none of the {sum(layers)} layers, so their ranks mostly wait"
    return f"stages {_listed(bare)} of {len(layers)} {why}" * bool(bare)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


def _micro_batches(context: RuleContext) -> tuple[int, int]:
    """Return how many micro-batches a step has, and the sequences of each."""
    training, size = context.config.training, context.config.parallelism.pipeline_parallel_microbatch_size
    local, total = training.local_batch_size, training.global_batch_size
    size = size if context.layout.pp > 1 else local
    if local % size or (total != -1 and total % (local * context.layout.batch)):
        raise InvalidField("the batch does not divide")
    return (local if total == -1 else total // context.layout.batch) // size, size


@RULES.add
def _micro_batches_divide_the_batch(context: RuleContext) -> Faults:
    local, key = context.config.training.local_batch_size, f"{_PIPELINE}microbatch_size"
    if context.layout.pp > 1 and local % context.config.parallelism.pipeline_parallel_microbatch_size:
        yield key, f"does not divide training.local_batch_size {local}; legal: {_listed(divisors(local))}"


@RULES.add
def _csv_is_an_order(context: RuleContext) -> Faults:
    settings, pp = context.config.parallelism, context.layout.pp
    if pp == 1 or not settings.pipeline_parallel_schedule_csv:
        context.order = ()
        return
    if settings.pipeline_parallel_schedule != KEYS[_SCHEDULE].default:
        yield _SCHEDULE, f"{_CSV} gives the order; remove one of the two"
    try:
        order = read_csv(settings.pipeline_parallel_schedule_csv)
    except (OSError, ValueError) as error:
        yield _CSV, f"cannot be read: {error}"
        return
    faults = list(faults_of(order, pp, _micro_batches(context)[0]))
    yield from ((_CSV, why) for why in faults)
    if not faults:
        context.order = order


@RULES.add
def _schedule_runs_as_many_stages(context: RuleContext) -> Faults:
    settings, pp, layers = context.config.parallelism, context.layout.pp, context.shape.layers
    schedule, named = settings.pipeline_parallel_schedule, settings.module_fqns_per_model_part
    number, of_order = number_of_stages(settings, pp, layers), sum(map(len, stages_of(context.order)))

    def is_right(number: int) -> bool:
        return number == of_order if of_order else fits(schedule, pp, number)

    if pp == 1 or is_right(number):
        context.number_of_stages = number if pp > 1 else 1
        return
    each = "one stage" if schedule in SINGLE else "two stages" if schedule in V_SHAPED else "two or more stages"
    needs = f"{_CSV} has {of_order}" if of_order else f"{schedule} runs {each} on each of {pp} ranks"
    if named:
        yield _NAMES, f"names {number} stages, and {needs}"
    elif settings.pipeline_parallel_layers_per_stage:
        total = layers + sum(ends_weigh(settings))
        legal = [size for size in range(1, total + 1) if is_right(ceil(total / size))]
        why = f"{total} layers, the weights of the ends included, make {number} stages, and {needs}"
        yield f"{_PIPELINE}layers_per_stage", f"{why}; legal: {_listed(legal)}"
    else:
        context.number_of_stages = of_order


@RULES.add
def _layers_fill_the_stages(context: RuleContext) -> Faults:
    settings, layers, spec = context.config.parallelism, context.shape.layers, context.spec
    (first, last), stages = ends_weigh(settings), context.number_of_stages
    if context.layout.pp > 1 and settings.module_fqns_per_model_part:
        return
    if split := split_layers(layers, stages, first, last):
        parts = [[f"{spec.blocks}.{i}" for i in part] for part in split]
        parts[0][:0], parts[-1][len(parts[-1]) :] = spec.before, spec.after
        context.stage_names = tuple(map(tuple, parts))
        return
    each = (layers + first + last) // stages
    counted = f"{layers} layers (the embedding counts as {first}, the head as {last})"
    why = f"{counted} give {stages} stages {each} or {each + 1}"
    if not each:
        order = f"{settings.pipeline_parallel_schedule} at degree {context.layout.pp}"
        legal = legal_degrees(context, "pipeline_parallel_degree", context.world or 0)
        why = f"{order} makes {stages} stages; {counted} leave some of them empty"
        yield f"{_PIPELINE}degree", f"{why}; legal: {_listed(legal)}"
    for end, weight in (("first", first), ("last", last)):
        if 0 < each < weight:
            ends = {n: (n, last) if end == "first" else (first, n) for n in range(layers + 1)}
            legal = [n for n, both in ends.items() if split_layers(layers, stages, *both)]
            yield f"{_PIPELINE}{end}_stage_less_layers", f"{why}; legal: {_listed(legal)}"


@RULES.add
def _named_modules_are_the_models(context: RuleContext) -> Faults:
    spec, named = context.spec, context.config.parallelism.module_fqns_per_model_part
    if not named or context.layout.pp == 1:
        return
    modules = [*spec.before, *(f"{spec.blocks}.{i}" for i in range(context.shape.layers)), *spec.after]
    given = [name for names in named for name in names]
    faults = {
        "unknown": [name for name in given if name not in modules],
        "missing": [name for name in modules if name not in given],
        "named twice": sorted({name for name in given if given.count(name) > 1}),
        "not in the first stage": [name for name in spec.before if name in given and name not in named[0]],
        "without modules": [f"stage {number}" for number, names in enumerate(named) if not names],
    }
    if not any(faults.values()):
        faults = {"not in the model's order": [a for a, b in zip(given, modules, strict=True) if a != b][:1]}
    if any(faults.values()):
        yield _NAMES, "; ".join(f"{what}: {_listed(names)}" for what, names in faults.items() if names)
        return
    assert context.number_of_stages
    context.stage_names = tuple(map(tuple, named))


@RULES.add
def _stages_are_known(context: RuleContext) -> Faults:
    """Set context.stages, once nothing is wrong with them."""
    pp, names, order = context.layout.pp, context.stage_names, context.order
    schedule = "" if pp == 1 or order else context.config.parallelism.pipeline_parallel_schedule
    ranks = stages_of(order) or stages_of_ranks(schedule, pp, len(names))
    context.stages = Stages(names, ranks, schedule, *_micro_batches(context), order)
    yield from ()


@RULES.add
def _schedule_has_its_micro_batches(context: RuleContext) -> Faults:
    stages, pp, training = context.stages, context.layout.pp, context.config.training
    n, step = stages.micro_batches, training.local_batch_size // stages.size
    needed, legal = "", list[int]()
    if stages.schedule in ("1F1B", "DualPipeV") and n < len(stages.names):
        needed = f"as many micro-batches as stages ({len(stages.names)}) or more"
        legal = [ceil(len(stages.names) / step) * step]
    elif stages.schedule in IN_ROUNDS and n % max(1, n // pp):
        needed = f"its micro-batches in equal rounds, {n // pp} with {pp} ranks"
        right = [m for m in range(step, 2 * n * pp, step) if m % max(1, m // pp) == 0]
        legal = [*[m for m in right if m < n][-1:], *[m for m in right if m > n][:1]]
    if needed:
        batches = _listed(m * stages.size * context.layout.batch for m in legal)
        yield _SCHEDULE, f"needs {needed}, and a step has {n}; training.global_batch_size could be {batches}"


@RULES.add
def _gathers_are_the_schedules(context: RuleContext) -> Faults:
    """All but GPipe and 1F1B gather a stage's parameters as a whole, before the stage is first used."""
    settings, pp = context.config.parallelism, context.layout.pp
    reshard, schedule = settings.fsdp_reshard_after_forward, settings.pipeline_parallel_schedule
    if pp == 1 or context.layout.max_shard_degree == 1:
        return
    if schedule not in SINGLE or settings.pipeline_parallel_schedule_csv:
        name = (
            "the runtime of pipeline_parallel_schedule_csv" if settings.pipeline_parallel_schedule_csv else schedule
        )
        why = f"{name} gathers whole stages and keeps them"
        if reshard not in ("default", "never"):
            yield f"{_FSDP}reshard_after_forward", f'{why}; use "never" (the default here), or GPipe or 1F1B'
        for way in ("forward", "backward"):
            if getattr(settings, f"fsdp_{way}_prefetch"):
                yield f"{_FSDP}{way}_prefetch", f"{why}; remove the key, or use GPipe or 1F1B"
    elif settings.fsdp_backward_prefetch and reshard in ("default", "never"):
        why = "under pipeline parallel parameters stay gathered, so that nothing is gathered in a backward pass"
        yield f"{_FSDP}backward_prefetch", f'{why}; remove the key, or use fsdp_reshard_after_forward "always"'


@RULES.add
def _sums_wait_for_the_end_of_the_step(context: RuleContext) -> Faults:
    if context.layout.pp > 1 and context.config.parallelism.defer_gradient_sync == "replicas":
        why = "under pipeline parallel gradients are kept whole until the end of the step, and then summed once"
        yield "parallelism.defer_gradient_sync", f"{why}; remove the key"


@RULES.add
def _halves_of_the_backward_pass_can_run(context: RuleContext) -> Faults:
    settings, compiler = context.config.parallelism, context.config.compile
    if context.layout.pp == 1 or not splits_backward(settings.pipeline_parallel_schedule, context.order):
        return
    recompute, instead = context.config.activation_checkpoint, "use Interleaved1F1B or LoopedBFS"
    if compiler.enable and "model" in compiler.components:
        why = "a compiled block would run its whole backward pass for each of the halves"
        yield "compile.components", f'{why}; remove "model", or {instead}'
    if recompute.mode in ("full", "selective"):  # torch 2.14: llama3 10 times, not once
        why = "a split backward pass would recompute a block again for each of its parameters"
        yield "activation_checkpoint.mode", f'{why}; use "none", or {instead}'


@RULES.add
def _tied_weights_are_on_two_ranks(context: RuleContext) -> Faults:
    stages = context.stages
    if context.layout.pp == 1 or len(stages.names) - 1 not in next(of for of in stages.ranks if 0 in of):
        return
    if tied := [rule.pattern for rule in context.spec.rules(context.model) if rule.tied]:
        why = f"the first and the last stage are on one rank, and {_listed(tied)} would be there twice"
        yield _SCHEDULE if stages.schedule else _CSV, f"{why}; use a schedule without the V shape"


@RULES.add
def _groups_fit_the_stages(context: RuleContext) -> Faults:
    size, blocks = context.config.parallelism.fsdp_blocks_per_group, f"{context.spec.blocks}."
    most = max(sum(name.startswith(blocks) for name in names) for names in context.stages.names)
    if context.layout.pp > 1 and most < size <= context.shape.layers:
        yield f"{_FSDP}blocks_per_group", f"the largest stage has {most} blocks; at most {most}"
