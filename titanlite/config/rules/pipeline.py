"""Rules of pipeline parallel: the stages that the keys lead to, and what each schedule needs."""

from titanlite.config.rules.context import Faults, InvalidField, RuleContext, Rules
from titanlite.config.stages import SINGLE, Stages, split_layers, stages_of_ranks

RULES = Rules()


@RULES.add
def _layers_fill_the_stages(context: RuleContext) -> Faults:
    """Set context.stages."""
    parallelism, spec, pp = context.config.parallelism, context.spec, context.layout.pp
    schedule, size = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_microbatch_size
    training, batch = context.config.training, context.layout.batch
    per_step = training.local_batch_size
    if training.global_batch_size != -1:
        if training.global_batch_size % (per_step * batch):
            raise InvalidField("training.global_batch_size")
        per_step = training.global_batch_size // batch
    if pp == 1:
        schedule, size = "", training.local_batch_size
    count = pp * (1 if schedule in SINGLE or pp == 1 else 2)
    first, last = (getattr(parallelism, f"pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last"))
    try:
        split = split_layers(context.shape.layers, count, first, last)
    except ValueError as error:
        yield "parallelism.pipeline_parallel_degree", str(error)
        return
    parts = [[f"{spec.blocks}.{i}" for i in part] for part in split]
    parts[0][:0], parts[-1][len(parts[-1]) :] = spec.before, spec.after
    ranks = stages_of_ranks(schedule, pp, count)
    context.stages = Stages(tuple(map(tuple, parts)), ranks, schedule, per_step // size, size)
