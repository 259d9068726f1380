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
    """Return the learning rate of a step, the first being 1: linear warm-up, plateau, decay towards the minimum.

    The factors are TorchTitan's: the last step of the warm-up and the first of the decay have the whole rate, and
    the minimum would be reached one step after the last.
    """
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    warmup = min(schedule.warmup_steps, total)
    decay = total - warmup if schedule.decay_ratio is None else round(total * schedule.decay_ratio)
    if step <= warmup:
        factor = step / warmup
    elif step <= total - decay or not decay:
        factor = 1.0
    else:
        progress = min(1.0, (step - 1 - (total - decay)) / decay)
        factor = schedule.min_lr_factor + (1 - schedule.min_lr_factor) * _DECAYS[schedule.decay_type](progress)
    return config.optimizer.lr * factor
