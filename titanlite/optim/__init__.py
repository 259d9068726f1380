"""Optimizers, the gradient norm and the learning rate: which parameters are trained, and how. The public face.

May import config, registry, runtime, and parallel for views of sharded tensors. Never knows data or checkpoints.
"""

from titanlite.optim.build import (
    TrainedParam,
    adam,
    adam_options,
    build_optimizer,
    groups,
    implementation,
    optimizer_bytes,
    sgd,
    trained_parameters,
)

__all__ = [
    "TrainedParam",
    "adam",
    "adam_options",
    "build_optimizer",
    "groups",
    "implementation",
    "optimizer_bytes",
    "sgd",
    "trained_parameters",
]
