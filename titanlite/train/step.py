"""One training step: forward, backward, gradient norm, update. It needs no data, log or checkpoint.

Whoever takes a step calls `forward_backward`, `clip_gradients` and `update` in this order; stopping, logging and
saving are left to the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from titanlite.data.loader import MicroBatch
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel import replicated, tensor
from titanlite.parallel.build import Context
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime.determinism import reseed
from titanlite.train.chunked_loss import model_loss
from titanlite.train.loss import token_loss_sum


@dataclass
class StepRunner:
    """Take training steps with the parts of a model on this rank."""

    context: Context
    parts: list[nn.Module]
    """One today; a pipeline rank holds several."""
    parameters: list[nn.Parameter]
    """Those that are trained."""
    optimizer: torch.optim.Optimizer
    seed: int
    rank: int

    def __post_init__(self) -> None:
        self.config = self.context.job.config
        settings = self.config.compile
        compiled = settings.enable and "loss" in settings.components
        self.token_loss = torch.compile(token_loss_sum, backend=settings.backend) if compiled else token_loss_sum
        self.replicated = [p for part in self.parts for p in replicated_parameters(part, self.context)]

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of (sum of token losses / valid tokens); return this rank's part of that loss.

        `valid_tokens` counts the whole global batch. This is the only place that knows how the parts are run: a
        pipeline schedule replaces it and nothing else.
        """
        (model,), config, layout = self.parts, self.config, self.context.job.layout
        chunks, deferred = config.training.loss_chunks, config.parallelism.defer_gradient_sync
        own = layout.coordinates(self.rank)  # cp only where there is any: runs without it resume bit for bit
        coordinates = layout.batch_coordinate(self.rank), own["tp"], *[own["cp"]] * (layout.cp > 1)
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for number, batch in enumerate(micro_batches):
            if deferred and isinstance(model, FSDPModule):
                sync = model.set_requires_all_reduce if deferred == "replicas" else model.set_requires_gradient_sync
                sync(number == len(micro_batches) - 1)
            reseed(self.seed, step, number, *coordinates)
            with record_function("forward"):
                loss = model_loss(model, batch, chunks, self.token_loss) / valid_tokens.clamp(min=1)
            with record_function("backward"):
                loss.backward()
            total += loss.detach()
        tensor.sum_gradients(self.parameters)
        reduction = getattr(torch, config.training.mixed_precision_reduce)
        replicated.sum_gradients(self.replicated, self.context.mesh.loss, reduction)
        return total

    @record_function("gradient norm")
    def clip_gradients(self) -> torch.Tensor:
        """Clip the gradients to training.max_norm; return the norm they had."""
        norm = clip_grad_norm(self.parameters, self.config.training.max_norm)
        return norm.to(self.context.device)  # the norm of offloaded gradients is on the CPU

    @record_function("optimizer")
    def update(self, step: int) -> None:
        """Change the weights at the learning rate of this step, and free the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"], group["training_step"] = learning_rate(self.config, step), step
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.notify_converters()

    def notify_converters(self) -> None:
        """Tell each converter that the weights are new."""
        for converter in self.context.converters:
            converter.after_optimizer_step(self.parts)
