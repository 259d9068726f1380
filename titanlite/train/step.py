"""One training step: forward, backward, gradient norm, update. It needs no data, log or checkpoint.

A caller takes a step by `forward_backward`, `clip_gradients` and `update` in this order; stopping,
logging and saving are left to the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from titanlite.data.loader import MicroBatch
from titanlite.optim.build import TrainedParam
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.optim.skip import step_unless
from titanlite.parallel import replicated, tensor_parallel
from titanlite.parallel.balance import Balance
from titanlite.parallel.build import Context
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime.page import phase
from titanlite.train.forward import ModelRunner


@dataclass
class StepRunner:
    """Take training steps with the parts of a model on this rank."""

    context: Context
    model: ModelRunner
    trained: Sequence[TrainedParam]
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.config = self.context.job.config
        self.parameters = [item.parameter for item in self.trained]
        self.replicated: list[nn.Parameter] = []
        for part in self.model.parts:
            self.replicated += replicated_parameters(part, self.context)
        self.balance = Balance(self.model.parts, self.context)

    def take(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch on the device, with this rank's tokens as its own."""
        return self.model.share.take(batch)

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of (sum of token losses / valid tokens).

        Return this rank's part of that loss. `valid_tokens` counts the whole global batch.
        """
        total = self.model.gradients(step, micro_batches, valid_tokens)
        tensor_parallel.sum_gradients(self.parameters)
        reduction = getattr(torch, self.config.training.mixed_precision_reduce)
        replicated.sum_gradients(self.replicated, self.context.mesh.data, reduction)
        self.model.sum_tied_gradients()
        return total

    @phase("gradient norm")
    def clip_gradients(self, max_norm: float | None = None, p: float = 2.0) -> torch.Tensor:
        """Clip the gradients to a norm, training.max_norm by default; return the norm before."""
        if max_norm is None:
            max_norm = self.config.training.max_norm
        stages = self.context.mesh.pp
        norm = clip_grad_norm(self.parameters, max_norm, p, stages, self.model.copies)
        return norm.to(self.context.device)  # the norm of offloaded gradients is on the CPU

    @phase("optimizer")
    def update(self, step: int, norm: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Update the weights at this step's learning rate, and free the gradients.

        The biases of routers change too, unless the norm is not finite. Where `skipped` is true,
        nothing changes.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
            group["training_step"] = step
        step_unless(skipped, self.optimizer)  # optimizer.step(), undone where `skipped` is true
        self.optimizer.zero_grad(set_to_none=True)
        if skipped is None:
            skipped = ~norm.isfinite()
        self.balance.end_step(skipped)
        self.notify_converters()

    def notify_converters(self) -> None:
        """Run each converter's update for new weights."""
        for converter in self.context.converters:
            converter.after_optimizer_step(self.model.parts)
