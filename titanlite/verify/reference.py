"""The reference: the single-device module with torch's loss and clipping, on the whole batch at
once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from titanlite.checkpoint.hf.export import write_folder
from titanlite.checkpoint.hf.names import Translation, documents
from titanlite.config.job import Job
from titanlite.data.packing import IGNORED
from titanlite.optim import build_optimizer, trained_parameters
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel.build import build_model, persistent_buffers
from titanlite.parallel.expert_parallel import routers
from titanlite.parallel.init import materialize
from titanlite.runtime.store import LocalPath
from titanlite.verify import measurements
from titanlite.verify.measurements import GRADIENT, INITIAL, LOSS, NORM, Measured, with_optimizer
from titanlite.verify.model_under_test import IMPORTED, build_job
from titanlite.verify.table import SAMPLES


def measure_reference(
    overrides: list[str], path: str, kind: str, steps_of: Mapping[str, int]
) -> float:
    """Write the plain module's measurements to a file, with these steps of each optimizer.

    Return the norm it clipped to: half of the first gradient norm.
    """
    job = build_job(overrides, 1)
    config = job.config
    batch = measurements.ragged_batch(job.shape.vocab_size, config.training.seq_len, kind)
    texts = batch.tokens.split(measurements.lengths_of(config.training.seq_len, kind), dim=1)
    model, table = build_model(job)
    materialize(model, table, config.debug.seed or 0, torch.device("cpu"))
    trained = trained_parameters([model], table, job.spec.blocks, config.optimizer.no_decay)
    parameters = dict(model.named_parameters())
    tensors = parameters | persistent_buffers(model)
    measured: Measured = {INITIAL: measurements.values(tensors)}
    if kind == "imported":
        _write_hf(LocalPath(path).parent / IMPORTED, job, parameters)
    for router in routers(model).values():
        router.context = replace(router.context, sequences=SAMPLES)
    step = 0
    max_norm = 0.0
    for name, steps in steps_of.items():
        optimizer = build_optimizer(trained, with_optimizer(config, name))
        for _ in range(steps):
            step += 1
            optimizer.zero_grad()
            if len(texts) > 1:
                _count_whole_sequences(model, texts)
            logits = torch.cat([model(text) for text in texts], dim=1).flatten(0, 1)
            loss = F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED)
            loss.backward()
            grads = {name: g.double() for name, g in measurements.gradients(parameters).items()}
            norm = get_total_norm(grads.values())
            if step == 1:
                largest = get_total_norm(grads.values(), math.inf)
                measured[GRADIENT] = grads
                measured[NORM] = {"(p = 2)": norm, "(p = inf)": largest}
                measured[LOSS] = {"": loss.detach()}
                measured |= measurements.routed(model)
                max_norm = norm.item() / 2
            clip_grads_with_norm_([item.parameter for item in trained], max_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            optimizer.step()
            _balance(model)
        measured[measurements.after_steps(name, steps)] = measurements.values(tensors)
    torch.save(measured, path)
    return max_norm


def _count_whole_sequences(model: nn.Module, documents: Sequence[torch.Tensor]) -> None:
    """Let the routers sum their choices over all documents of a sequence, since their loss is that
    of the whole sequence.
    """

    def keep(counts: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        counts.append(own)
        return own

    def total(counts: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor:
        return torch.stack(counts).sum(0)

    counted = {router: list[torch.Tensor]() for router in routers(model).values()}
    for router, counts in counted.items():
        router.context = replace(router.context, sum_over_sequence=partial(keep, counts))
    for document in documents:
        model(document)
    for router, counts in counted.items():
        router.context = replace(router.context, sum_over_sequence=partial(total, counts))
        router.counts.zero_()
        router.auxiliary.zero_()


@torch.no_grad()
def _balance(model: nn.Module) -> None:
    """Raise the bias of experts chosen less often than the mean, and lower that of the others."""
    for router in routers(model).values():
        if router.bias is not None:
            move = (router.counts.double().mean() - router.counts).sign()
            router.bias += router.rate * (move - move.mean())
        router.counts.zero_()
        router.auxiliary.zero_()


def _write_hf(folder: LocalPath, job: Job, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a Hugging Face folder of these weights, in their own type."""
    translation = Translation(job.spec, job.model_config)
    tensors = translation.hf_tensors(getattr(torch, job.config.training.dtype))
    files = documents(translation.config, tensors[0].dtype, None)
    write_folder(folder, tensors, files, lambda name: weights[name].detach())
