"""One training step: forward, backward, gradient norm, update. It needs no data, log or checkpoint.

A caller takes a step by `forward_backward`, `clip_gradients` and `update` in this order; stopping,
logging and saving are left to the trainer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.data.loader import MicroBatch
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.optim.skip import step_unless
from titanlite.parallel import replicated, tensor_parallel
from titanlite.parallel.balance import Balance
from titanlite.parallel.build import Context
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime.determinism import reseed
from titanlite.runtime.page import phase
from titanlite.train.forward import build_forward
from titanlite.train.loss import model_loss, token_loss_sum


@dataclass
class StepRunner:
    """Take training steps with the parts of a model on this rank."""

    context: Context
    parts: list[nn.Module]
    """The whole model, or this rank's pipeline stages in their order."""
    parameters: list[nn.Parameter]
    """The trained ones."""
    optimizer: torch.optim.Optimizer
    seed: int
    rank: int

    def __post_init__(self) -> None:
        self.config = self.context.job.config
        self.token_loss = token_loss_sum
        settings = self.config.compile
        if settings.enable and "loss" in settings.components:
            self.token_loss = torch.compile(token_loss_sum, backend=settings.backend)
        self.replicated: list[nn.Parameter] = []
        for part in self.parts:
            self.replicated += replicated_parameters(part, self.context)
        self.pipeline: Pipeline | None = None
        self.pp: DeviceMesh | None = None
        if self.context.job.layout.pp > 1:
            self.pipeline = Pipeline(self.context, self.parts, self._loss, self._reseed)
            # Looked up once: in every step it would make a new mesh of one dimension, and wait for
            # the device.
            self.pp = self.context.mesh.world["pp"]
        self.forward = build_forward(self.context, self.parts, self.rank, self.pipeline)
        self.has_loss = self.pipeline is None or self.pipeline.has_loss
        self.balance = Balance(self.parts, self.context)

    def forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Add the gradients of (sum of token losses / valid tokens).

        Return this rank's part of that loss. `valid_tokens` counts the whole global batch.
        """
        if self.pipeline:
            smaller: list[MicroBatch] = []
            for batch in micro_batches:
                smaller += batch.split(self.context.job.stages.size)
            total = self.pipeline.forward_backward(step, smaller, valid_tokens)
        else:
            total = self._forward_backward(step, micro_batches, valid_tokens)
        tensor_parallel.sum_gradients(self.parameters)
        reduction = getattr(torch, self.config.training.mixed_precision_reduce)
        replicated.sum_gradients(self.replicated, self.context.mesh.data, reduction)
        if self.pipeline:
            self.pipeline.sum_tied_gradients()
        return total

    def _forward_backward(
        self, step: int, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Run a whole model, one micro-batch after the other."""
        (model,) = self.parts
        deferred = self.config.parallelism.defer_gradient_sync
        total = torch.zeros((), dtype=torch.float64, device=self.context.device)
        for number, batch in enumerate(micro_batches):
            if deferred and isinstance(model, FSDPModule):
                is_last = number == len(micro_batches) - 1
                if deferred == "replicas":
                    model.set_requires_all_reduce(is_last)
                else:
                    model.set_requires_gradient_sync(is_last)
            self._reseed(step, number)
            with phase("forward"):
                loss = self._loss(model, batch, batch.tokens) / valid_tokens.clamp(min=1)
            with phase("backward"):
                loss.backward()
            total += loss.detach()
        return total

    def _loss(self, model: nn.Module, batch: MicroBatch, inputs: torch.Tensor) -> torch.Tensor:
        return model_loss(
            model, batch, inputs, self.forward.loss_chunks, self.token_loss, self._runs_again
        )

    def _runs_again(self) -> bool:
        return self.pipeline is not None and self.pipeline.runs_again

    def _reseed(self, step: int, micro_batch: int, *stage: int) -> None:
        """Seed dropout.

        cp and stage enter the seed only when used, so that runs without them resume bit for bit.
        """
        layout = self.context.job.layout
        own = layout.coordinates(self.rank)
        coordinates = [layout.batch_coordinate(self.rank), own["tp"]]
        if layout.cp > 1:
            coordinates.append(own["cp"])
        reseed(self.seed, step, micro_batch, *coordinates, *stage)

    @phase("gradient norm")
    def clip_gradients(self, max_norm: float | None = None, p: float = 2.0) -> torch.Tensor:
        """Clip the gradients to a norm, training.max_norm by default; return the norm before."""
        if max_norm is None:
            max_norm = self.config.training.max_norm
        copies = self.pipeline.copies if self.pipeline else []
        norm = clip_grad_norm(self.parameters, max_norm, p, self.pp, copies)
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
            converter.after_optimizer_step(self.parts)
