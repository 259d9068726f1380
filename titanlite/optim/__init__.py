"""Optimizers, the gradient norm and the learning rate; the public face of the package.

May import parallel (views of sharded tensors) and the rooms below it.
Never imports data, checkpoints or the trainer.
"""

from titanlite.optim.build import (
    TrainedParam,
    adam,
    adam_options,
    build_optimizer,
    check_trained,
    groups,
    optimizer_bytes,
    optimizer_title,
    sgd,
    trained_parameters,
)
