"""One training step: forward, backward, gradient norm, update; without data, logs or checkpoints.

A caller takes a step with `forward_backward`, `gradient_norm` and `update`, in this order;
stopping, logging and saving are left to the trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.config.schema import JobConfig
from titanlite.data.loader import MicroBatch
from titanlite.optim.build import TrainedParam, build_optimizer, trained_parameters
from titanlite.optim.grad_norm import clip_divisor, grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.optim.update import update
from titanlite.parallel import fsdp, tensor_parallel
from titanlite.parallel.balance import ExpertLoad
from titanlite.parallel.build import Context
from titanlite.parallel.replicated import GradientSum
from titanlite.runtime.page import phase
from titanlite.train.forward import ModelRunner, build_runner
from titanlite.train.loss import count_valid


@dataclass
class StepRunner:
    """Takes training steps with the parts of a model on this rank."""

    context: Context
    model: ModelRunner
    trained: Sequence[TrainedParam]
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self.config = self.context.job.config
        self.parameters = [item.parameter for item in self.trained]
        self.balance = ExpertLoad(self.model.parts, self.context)
        self.before_last: Callable[[], None] = _nothing
        self.after_backward: list[Callable[[], None]] = []
        whole: list[nn.Parameter] = []
        for part in self.model.parts:
            whole += fsdp.not_summed(part, self.context)
        if whole:
            reduction = getattr(torch, self.config.training.mixed_precision_reduce)
            replicas = GradientSum(whole, self.context.mesh.data, reduction, self.context.device)
            self.before_last = replicas.start
            self.after_backward.append(replicas.finish)
        if self.context.job.layout.tp > 1:
            self.after_backward.append(partial(tensor_parallel.sum_gradients, self.parameters))
        self.after_backward += self.model.after_backward

    def count_valid(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the valid tokens whose losses this rank computes."""
        valid = count_valid(torch.stack([batch.labels for batch in micro_batches]))
        valid *= self.model.has_loss
        return valid

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: Callable[[], Tensor]
    ) -> Tensor:
        """Add the gradients of (sum of token losses / valid tokens).

        Return this rank's part of that loss. `valid_tokens` waits for the count of the whole
        global batch, at the first loss.
        """
        total = self.model.gradients(step, micro_batches, valid_tokens, self.before_last)
        valid_tokens()  # a stage without losses has not waited
        for sum_gradients in self.after_backward:
            sum_gradients()
        return total

    @phase("gradient norm")
    def gradient_norm(self, p: float = 2.0) -> Tensor:
        """Return the norm of the gradients, equal on all ranks, on the device that they are on."""
        return grad_norm(self.parameters, p, self.context.mesh.pp, self.model.copies)

    @phase("optimizer")
    def update(self, step: int, norm: Tensor, skipped: Tensor | None = None) -> None:
        """Clip the gradients, which have this norm, update the weights at this step's learning
        rate, and free the gradients.

        The biases of routers change too, unless the norm is not finite. If `skipped` is true,
        nothing changes.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
            group["training_step"] = step
        update(self.optimizer, clip_divisor(norm, self.config.training.max_norm), skipped)
        self.optimizer.zero_grad(set_to_none=True)
        if self.balance.routers:
            if skipped is None:
                skipped = ~norm.isfinite()
            self.balance.end_step(skipped.to(self.context.device))
        self.notify_converters()

    def notify_converters(self) -> None:
        """Tell each converter that the weights have changed."""
        for converter in self.context.converters:
            converter.after_optimizer_step(self.model.parts)


def build_step_runner(
    context: Context, parts: Sequence[nn.Module], seed: int, rank: int, config: JobConfig
) -> StepRunner:
    """Return the runner of steps for this rank's parts of the model, with the optimizer of a
    config.
    """
    blocks = context.job.spec.blocks
    trained = trained_parameters(parts, context.table, blocks, config.optimizer.no_decay)
    optimizer = build_optimizer(trained, config, seed, context.mesh)
    return StepRunner(context, build_runner(context, parts, seed, rank), trained, optimizer)


def _nothing() -> None:
    pass
