"""The reference: the single-device module with torch's own loss and clipping, on the whole batch at once."""

import math

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_, get_total_norm

from titanlite.data.packing import IGNORED
from titanlite.optim import build_optimizer, trained_parameters
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.build import build_model
from titanlite.parallel.init import materialize
from titanlite.verify import measurements
from titanlite.verify.measurements import GRADIENT, INITIAL, LOSS, NORM, Measured, with_optimizer
from titanlite.verify.model_under_test import build_job


def measure_reference(overrides: list[str], path: str, kind: str) -> float:
    """Write the plain module's measurements to a file, and return the norm it clipped to: half of its own."""
    job = build_job(overrides, 1)
    config = job.config
    batch = measurements.ragged_batch(job.shape.vocab_size, config.training.seq_len, kind)
    documents = batch.tokens.split(measurements.lengths_of(config.training.seq_len, kind), dim=1)
    model, table = build_model(job)
    materialize(model, table, config.debug.seed or 0, torch.device("cpu"))
    trained = trained_parameters([model], table, job.spec.blocks, config.optimizer.no_decay)
    parameters = dict(model.named_parameters())
    measured: Measured = {INITIAL: measurements.values(parameters)}
    step, max_norm = 0, 0.0
    for name, steps in measurements.steps_of(config).items():
        optimizer = build_optimizer(trained, with_optimizer(config, name))
        for _ in range(steps):
            step += 1
            optimizer.zero_grad()
            logits = torch.cat([model(document) for document in documents], dim=1)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
            loss.backward()
            if step == 1:
                grads = measurements.gradients(parameters)
                norms = {f"(p = {p:g})": get_total_norm(grads.values(), p) for p in (2.0, math.inf)}
                measured |= {GRADIENT: grads, NORM: norms, LOSS: {"": loss.detach()}}
                max_norm = norms["(p = 2)"].item() / 2
            clip_grad_norm_([item.parameter for item in trained], max_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.step()
        measured[measurements.after_steps(name)] = measurements.values(parameters)
    torch.save(measured, path)
    return max_norm
