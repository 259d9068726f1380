"""The trainer: builds everything in order, then runs the loop. One step reads top to bottom in `train_step`."""

from __future__ import annotations

import gc
import hashlib
import logging
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config.check import Job
from titanlite.config.load import to_toml
from titanlite.data.loader import Ahead, MicroBatch, build_loader
from titanlite.data.order import Share
from titanlite.data.stream import Stream
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.errors import UserError
from titanlite.finite import FiniteWatch
from titanlite.generate import generate
from titanlite.grad_norm import clip_grad_norm
from titanlite.loss import count_valid, token_loss_sum
from titanlite.lr_schedule import learning_rate
from titanlite.observe.memory import allocator_tags, used
from titanlite.observe.metrics import JsonLines, Sink, StepRecord, TensorBoard
from titanlite.observe.run_folder import describe_run
from titanlite.observe.summary import describe_start
from titanlite.observe.throughput import flops_per_token, peak_tflops
from titanlite.optim import build_optimizer, implementation, split_by_decay, state_per_element
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model, parallelize
from titanlite.runtime.cluster import Place
from titanlite.runtime.determinism import agree_on_seed, reseed, use_deterministic_algorithms
from titanlite.runtime.distributed import set_collective_timeout
from titanlite.validate import validation_loss


class Trainer:
    """A job on this rank. The process group must exist."""

    def __init__(self, job: Job, place: Place, device: torch.device, log: logging.Logger) -> None:
        config = job.config
        self.job, self.place, self.device, self.log = job, place, device, log
        self.folder = Path(config.job.dump_folder)
        self.step, self.tokens = 0, 0
        if config.debug.deterministic:
            use_deterministic_algorithms()
        elsewhere = config.model_copy(update={"job": config.job.model_copy(update={"dump_folder": ""})})
        self._agree("the config", hashlib.sha256(to_toml(elsewhere).encode()).hexdigest()[:16])
        self._agree("the kind of device", device.type)
        self.seed = agree_on_seed(config.debug.seed)
        self.mesh = build_mesh(job.layout, device.type)
        self._open_data()
        self._build_model()
        self._build_optimizer()
        self.finite = FiniteWatch(device, self.mesh.loss)
        self._open_metrics()

    # ---------------------------------------------------------------- building

    def _open_data(self) -> None:
        job, config = self.job, self.job.config
        self.tokenizer = open_tokenizer(job)
        coordinate = job.layout.batch_coordinate(self.place.rank)
        self.share = Share(coordinate, job.batch.data_parallel, job.batch.local, job.batch.accumulation)
        self.data = training_data(job, self.tokenizer, self.seed)
        self._agree("the data of [training]", self.data.fingerprint)
        if config.validation.enable:
            held_out = validation_data(job, self.tokenizer)
            self._agree("the data of [validation]", held_out.fingerprint)
            self.validation_loader = build_loader(
                held_out,
                Share(coordinate, job.batch.data_parallel, config.validation.local_batch_size),
                consumed=0,
                steps=None if config.validation.steps == -1 else config.validation.steps,
                settings=config.training.dataloader,
            )

    def _agree(self, what: str, mine: str) -> None:
        """Stop where ranks hold different things."""
        everyone: list[str] = [""] * self.place.world
        dist.all_gather_object(everyone, mine)
        if odd := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
            raise UserError(
                f"{what} differs between ranks: rank 0 has {everyone[0]}, rank {odd[0]} has {everyone[odd[0]]}"
            )

    def _build_model(self) -> None:
        model, self.table = build_model(self.job)
        self.flops = flops_per_token(
            model.named_parameters(), self.table, self.job.shape, self.job.config.training.seq_len
        )
        parallelize(model, self.job, self.mesh, self.table, self.seed, self.device)
        self.parts: list[nn.Module] = [model]  # a pipeline rank will hold several

    def _build_optimizer(self) -> None:
        config = self.job.config.optimizer
        named = [item for part in self.parts for item in part.named_parameters()]
        self.decayed, self.exempt = split_by_decay(named, self.table, config.no_decay)
        self.trained = [parameter for _, parameter in (*self.decayed, *self.exempt)]
        self.optimizer = build_optimizer(self.decayed, self.exempt, config)

    def _open_metrics(self) -> None:
        config = self.job.config
        self.peak = peak_tflops(self.device)
        self.sinks: list[Sink] = []
        if self.place.rank == 0:
            describe_run(self.folder, self.job, self.seed, self.device.type)
            self.sinks.append(JsonLines(self.folder / "metrics.jsonl"))
            if config.metrics.enable_tensorboard:
                self.sinks.append(TensorBoard(self.folder / config.metrics.save_tb_folder))

    def describe(self) -> list[str]:
        """What the start of the run prints."""
        hosts: list[str] = [""] * self.place.world
        dist.all_gather_object(hosts, self.place.host)
        return describe_start(
            self.job,
            self.parts[0],
            self.table,
            device=self.device,
            hosts=hosts,
            seed=self.seed,
            samples=self.data.samples,
            fingerprint=self.data.fingerprint,
            flops=self.flops,
            decayed=len(self.decayed),
            exempt=len(self.exempt),
            states=state_per_element(self.job.config.optimizer),
            implementation=implementation(self.job.config.optimizer),
        )

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Run to the target step."""
        config, steps = self.job.config, self.job.config.training.steps
        gc.disable()  # or ranks would collect at different times, and wait for each other
        consumed = self.step * self.share.per_step
        loader = build_loader(self.data, self.share, consumed, None, config.training.dataloader)
        self.batches = Ahead(loader, self.device)
        self._start_clock()
        while self.step < steps:
            self.step += 1
            self.train_step()
            if self.step == 1:
                set_collective_timeout(config.comm.train_timeout_seconds)
            if self.step % config.training.gc_freq == 0:
                gc.collect()
            if config.validation.enable and (self.step % config.validation.freq == 0 or self.step == steps):
                self.validate()
        self.finite.settle()
        if config.generate.at_end:
            self.show_sample()
        self.close()

    def train_step(self) -> None:
        """One optimizer step."""
        config = self.job.config
        micro_batches = self.next_micro_batches()
        valid_tokens = self.finite.share(count_valid(torch.stack([b.labels for b in micro_batches])))
        if isinstance(self.data, Stream) and not self.data.repeat and not valid_tokens.item():
            raise self._data_ended()  # all ranks are out; the wait for the device is the price of an unknown length
        loss = self.forward_backward(micro_batches, valid_tokens)
        norm = clip_grad_norm(self.trained, config.training.max_norm)
        self.finite.record(self.step, loss, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.tokens += self.job.batch.total * config.training.seq_len
        if self.step == 1 or self.step % config.metrics.log_freq == 0 or self.step == config.training.steps:
            self._log_step(loss, norm, micro_batches)

    def next_micro_batches(self) -> list[MicroBatch]:
        """This rank's part of the global batch, on the device."""
        began = time.perf_counter()
        found = [batch.to(self.device) for batch in islice(self.batches, self.share.accumulation)]
        self._data_seconds += time.perf_counter() - began
        if len(found) < self.share.accumulation:
            raise self._data_ended()
        return found

    def _data_ended(self) -> UserError:
        size = "" if self.data.samples is None else f"it has {self.data.samples} windows, and "
        ended = f"the data ended after step {self.step - 1} of {self.job.config.training.steps}"
        return UserError(f"{ended}: {size}training.repeat is false")

    def forward_backward(self, micro_batches: Sequence[MicroBatch], valid_tokens: torch.Tensor) -> torch.Tensor:
        """Gradients of (sum of token losses / valid tokens); returns this rank's part of that loss.

        The only place that knows how a step is run: a pipeline schedule replaces it and nothing else.
        """
        (model,) = self.parts
        coordinates = self.job.layout.coordinates(self.place.rank)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(micro_batches):
            reseed(self.seed, self.step, number, self.share.coordinate, coordinates["tp"])
            logits = model(batch.tokens, batch.positions, batch.documents)
            loss = token_loss_sum(logits, batch.labels) / valid_tokens.clamp(min=1)
            loss.backward()
            total += loss.detach()
        return total

    def validate(self) -> None:
        """Log the loss on held-out data."""
        began = time.perf_counter()
        loss = validation_loss(self.parts[0], self.validation_loader, self.device, self.mesh.loss)
        self.log.info(f"validation at step {self.step}: loss {loss:.5f}")
        for sink in self.sinks:
            sink.validation(self.step, loss)
        self._paused += time.perf_counter() - began

    def show_sample(self) -> None:
        """Print what the model writes."""
        settings = self.job.config.generate
        text = generate(self.parts[0], self.tokenizer, settings, self.job.positions, self.seed, self.device)
        self.log.info(f"a sample, at temperature {settings.temperature:g}:\n")
        self.log.info("\n".join(f"    {line}" for line in text.splitlines()) + "\n")

    def close(self) -> None:
        """End the readers and the sinks."""
        self.batches.close()
        for sink in self.sinks:
            sink.close()

    # ---------------------------------------------------------------- measuring

    def _start_clock(self) -> None:
        self._clock, self._clock_step = time.perf_counter(), self.step
        self._paused = self._data_seconds = 0.0

    def _log_step(self, loss: torch.Tensor, norm: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """The one place where the host waits for the device."""
        job = self.job
        labels = torch.stack([batch.labels for batch in micro_batches])
        total, largest = self._loss_over_ranks(loss, count_valid(labels))
        steps = self.step - self._clock_step
        seconds = (time.perf_counter() - self._clock - self._paused) / steps
        per_second = job.batch.total * job.config.training.seq_len / seconds / job.layout.world
        tflops = per_second * self.flops / 1e12
        memory = used(self.device)
        record = StepRecord(
            step=self.step,
            loss=total,
            max_loss=largest,
            grad_norm=norm.item(),
            lr=self.optimizer.param_groups[0]["lr"],
            tokens=self.tokens,
            tps=per_second,
            tflops=tflops,
            mfu=100 * tflops / self.peak if self.peak else None,
            step_seconds=seconds,
            data_seconds=self._data_seconds / steps,
            memory_gib=memory.gib,
        )
        self.log.info(record.line(job.config.training.steps, memory.percent))
        for sink in self.sinks:
            sink.step(record, allocator_tags(self.device))
        self._start_clock()

    def _loss_over_ranks(self, loss: torch.Tensor, valid_tokens: torch.Tensor) -> tuple[float, float]:
        """The global loss, and the largest mean loss of a rank that had valid tokens."""
        sums = torch.stack([loss, valid_tokens.double()])
        dist.all_reduce(sums, group=self.mesh.loss)
        mean = torch.where(valid_tokens > 0, loss * sums[1] / valid_tokens, -torch.inf)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=self.mesh.loss)
        return sums[0].item(), mean.item()
