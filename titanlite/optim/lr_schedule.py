"""The learning rate as a pure function of (config, step), so that a resume needs no schedule state."""

import math
from collections.abc import Callable

from titanlite.config.schema import JobConfig

_DECAYS: dict[str, Callable[[float], float]] = {  # the factor after a fraction of the decay
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}


def learning_rate(config: JobConfig, step: int) -> float:
    """Return the learning rate of a step, the first being 1: linear warm-up, plateau, decay to the minimum.

    Both ramps end one step outside the run, so that neither the first nor the last step has a rate of zero.
    """
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    warmup = min(schedule.warmup_steps, total)
    decay = total - warmup if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    if step <= warmup:
        factor = step / (warmup + 1)
    elif step <= total - decay:
        factor = 1.0
    else:
        progress = min(1.0, (step - (total - decay)) / (decay + 1))
        factor = schedule.min_lr_factor + (1 - schedule.min_lr_factor) * _DECAYS[schedule.decay_type](progress)
    return config.optimizer.lr * factor
