"""One training step: forward, backward, gradient norm, update. It needs no data, log or checkpoint.

Whoever takes a step calls `forward_backward`, `clip_gradients` and `update` in this order; stopping, logging and
saving are left to the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlite.data.loader import MicroBatch
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.optim.skip import step_unless
from titanlite.parallel import replicated, tensor
from titanlite.parallel.balance import Balance
from titanlite.parallel.build import Context
from titanlite.parallel.pipeline import Pipeline
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime.determinism import reseed
from titanlite.runtime.page import phase
from titanlite.train.chunked_loss import model_loss
from titanlite.train.loss import token_loss_sum


@dataclass
class StepRunner:
    """Take training steps with the parts of a model on this rank."""

    context: Context
    parts: list[nn.Module]
    """The whole model, or this rank's pipeline stages in their order."""
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
        is_split = self.context.job.layout.pp > 1
        self.pipeline = Pipeline(self.context, self.parts, self._loss, self._reseed) if is_split else None
        # Looked up once: the mesh would make a mesh of one dimension, and wait for the device, in every step.
        self.stages = self.context.mesh.world["pp"] if is_split else None
        self.has_loss = self.pipeline is None or self.pipeline.has_loss
        self.balance = Balance(self.parts, self.context)

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of (sum of token losses / valid tokens); return this rank's part of that loss.

        `valid_tokens` counts the whole global batch. This is the only place that knows how the parts are run.
        """
        if self.pipeline:
            cut = [part for batch in micro_batches for part in batch.split(self.context.job.stages.size)]
            total = self.pipeline.forward_backward(step, cut, valid_tokens)
        else:
            total = self._forward_backward(step, micro_batches, valid_tokens)
        tensor.sum_gradients(self.parameters)
        reduction = getattr(torch, self.config.training.mixed_precision_reduce)
        replicated.sum_gradients(self.replicated, self.context.mesh.data, reduction)
        if self.pipeline:
            self.pipeline.sum_tied_gradients()
        return total

    def _forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Do so with a whole model, one micro-batch after the other."""
        (model,), deferred = self.parts, self.config.parallelism.defer_gradient_sync
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for number, batch in enumerate(micro_batches):
            if deferred and isinstance(model, FSDPModule):
                sync = model.set_requires_all_reduce if deferred == "replicas" else model.set_requires_gradient_sync
                sync(number == len(micro_batches) - 1)
            self._reseed(step, number)
            with phase("forward"):
                loss = self._loss(model, batch) / valid_tokens.clamp(min=1)
            with phase("backward"):
                loss.backward()
            total += loss.detach()
        return total

    def _loss(self, model: nn.Module, batch: MicroBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        chunks, pipeline = self.config.training.loss_chunks, self.pipeline
        runs_again = (lambda: pipeline.runs_again) if pipeline else (lambda: False)
        return model_loss(model, batch, chunks, self.token_loss, hidden, runs_again)

    def _reseed(self, step: int, micro_batch: int, *stage: int) -> None:
        """Seed dropout; stage and cp count only where there are any: runs without them resume bit for bit."""
        layout = self.context.job.layout
        own = layout.coordinates(self.rank)
        coordinates = layout.batch_coordinate(self.rank), own["tp"], *[own["cp"]] * (layout.cp > 1)
        reseed(self.seed, step, micro_batch, *coordinates, *stage)

    @phase("gradient norm")
    def clip_gradients(self, max_norm: float | None = None, p: float = 2.0) -> torch.Tensor:
        """Clip the gradients to a norm, that of training.max_norm by default; return the norm they had."""
        max_norm = self.config.training.max_norm if max_norm is None else max_norm
        copies = self.pipeline.copies if self.pipeline else []
        norm = clip_grad_norm(self.parameters, max_norm, p, self.stages, copies)
        return norm.to(self.context.device)  # the norm of offloaded gradients is on the CPU

    @phase("optimizer")
    def update(self, step: int, norm: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Change the weights at the learning rate of this step, free the gradients, and change the biases of routers
        unless the gradients' norm is not finite. Where `skipped` is true, nothing is changed."""
        for group in self.optimizer.param_groups:
            group["lr"], group["training_step"] = learning_rate(self.config, step), step
        step_unless(skipped, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        self.balance.end_step(~norm.isfinite() if skipped is None else skipped)
        self.notify_converters()

    def notify_converters(self) -> None:
        """Tell each converter that the weights are new."""
        for converter in self.context.converters:
            converter.after_optimizer_step(self.parts)
