"""The learning rate as a pure function of (config, step): a resume needs no schedule state."""

import math
from collections.abc import Callable

from titanlite.config.schema import JobConfig

_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
}
"""The factor of the learning rate after a fraction of the decay."""


def learning_rate(config: JobConfig, step: int) -> float:
    """Return the learning rate of a step: linear warm-up, plateau, decay towards the minimum.

    The first step is 1. The factors are TorchTitan's: the last step of the warm-up and the first of
    the decay have the full rate, and the minimum would be reached one step after the last.
    """
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    warmup = min(schedule.warmup_steps, total)
    decay = total - warmup
    if schedule.decay_ratio is not None:
        decay = round(total * schedule.decay_ratio)
    if step <= warmup:
        factor = step / warmup
    elif step <= total - decay or not decay:
        factor = 1.0
    else:
        progress = min(1.0, (step - 1 - (total - decay)) / decay)
        minimum = schedule.min_lr_factor
        factor = minimum + (1 - minimum) * _DECAYS[schedule.decay_type](progress)
    return config.optimizer.lr * factor
