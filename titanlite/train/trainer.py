"""The trainer: builds everything in order, then runs the loop. One step reads top to bottom in `train_step`."""

from __future__ import annotations

import gc
import hashlib
import logging
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function

from titanlite.checkpoint.changes import changes, check_data
from titanlite.checkpoint.load import DATA, Source, excluded
from titanlite.checkpoint.manager import Checkpoints
from titanlite.checkpoint.state import Position, TrainingState
from titanlite.config.job import Job
from titanlite.config.load import to_toml
from titanlite.config.schema import JobConfig
from titanlite.data.loader import BatchPrefetcher, MicroBatch, build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.errors import UserError
from titanlite.fault.nonfinite import NonFiniteGuard
from titanlite.observe.clock import StepClock
from titanlite.observe.memory import Retries, allocator_tags, used
from titanlite.observe.metrics import Sink, StepRecord, open_sinks
from titanlite.observe.profiler import Profiler
from titanlite.observe.run_folder import describe_run
from titanlite.observe.summary import describe_start
from titanlite.observe.throughput import flops_per_token, peak_tflops
from titanlite.optim import build_optimizer, implementation, optimizer_bytes, trained_parameters
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel import replicated, tensor
from titanlite.parallel.build import build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.replica_check import check_replicas
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.determinism import agree_on_seed, reseed, use_deterministic_algorithms
from titanlite.runtime.distributed import set_collective_timeout
from titanlite.train.chunked_loss import model_loss
from titanlite.train.generate import generate
from titanlite.train.loss import count_valid, token_loss_sum
from titanlite.train.validate import validation_loss


class Trainer:
    """A job on this rank. The process group must exist."""

    def __init__(self, job: Job, place: RankInfo, device: torch.device, log: logging.Logger) -> None:
        config = job.config
        self.job, self.place, self.device, self.log = job, place, device, log
        self.folder = Path(config.job.dump_folder)
        self.step, self.tokens, self.consumed = 0, 0, 0
        if config.debug.deterministic:
            use_deterministic_algorithms()
        self._agree("the config", _identity(config))
        self._agree("the kind of device", device.type)
        self.mesh = build_mesh(job.layout, device.type)
        self.checkpoints = Checkpoints(job, place, device, log)
        self.source = self.checkpoints.find()
        self.resumed = self.source if isinstance(self.source, Source) and self.source.resume else None
        known = self.resumed.position.seed if self.resumed else None
        self.seed = agree_on_seed(known if config.debug.seed is None else config.debug.seed)
        self._open_data()
        self._build_model()
        self._build_optimizer()
        self._restore()
        self.finite = NonFiniteGuard(device, self.mesh.loss)
        self._open_metrics()

    # ---------------------------------------------------------------- building

    def _open_data(self) -> None:
        job, config = self.job, self.job.config
        self.tokenizer = open_tokenizer(job)
        coordinate = job.layout.batch_coordinate(self.place.rank)
        self.share = RankSlice(coordinate, job.batch.data_parallel, job.batch.local, job.batch.accumulation)
        self.data = training_data(job, self.tokenizer, self.seed)
        self._agree("the data of [training]", self.data.fingerprint)
        if self.resumed:
            check_data(self.resumed, job, self.seed, self.data.fingerprint)
        if config.validation.enable:
            held_out = validation_data(job, self.tokenizer)
            self._agree("the data of [validation]", held_out.fingerprint)
            self.validation_loader = build_loader(
                held_out,
                RankSlice(coordinate, job.batch.data_parallel, config.validation.local_batch_size),
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
        self.converters = build_converters(self.job)
        self.kept_whole = parallelize(
            model, self.job, self.mesh, self.table, self.converters, self.seed, self.device, self.log.info
        )
        self.parts: list[nn.Module] = [model]  # a pipeline rank will hold several
        self.defers_sync = self.job.config.parallelism.defer_gradient_sync
        settings = self.job.config.compile
        compiles_loss = settings.enable and "loss" in settings.components
        self.loss = torch.compile(token_loss_sum, backend=settings.backend) if compiles_loss else token_loss_sum

    def _build_optimizer(self) -> None:
        config, blocks = self.job.config, self.job.spec.blocks
        named = [item for part in self.parts for item in part.named_parameters()]
        self.optimized = trained_parameters(named, self.table, blocks, config.optimizer.no_decay)
        self.trained = [item.parameter for item in self.optimized]
        self.optimizer = build_optimizer(self.optimized, config, self.seed)

    def _restore(self) -> None:
        """Take the state, and the place in the run and in the data, from where the run begins."""
        self.state = TrainingState(self.parts, self.optimizer)
        self.checkpoints.restore(self.source, self.state)
        if self.source:
            check_replicas(self.parts[0], "after loading", self.device, self.optimizer)
        self._tell_converters()
        if self.resumed:
            saved = self.resumed.position
            self.step, self.tokens = saved.step, saved.tokens
            if not excluded(DATA, self.job.config.checkpoint.exclude_from_loading):
                self.consumed = saved.consumed
            for line in changes(self.resumed, self.job, self.parts[0]):
                self.log.info(line)

    def _open_metrics(self) -> None:
        self.peak, self.retries = peak_tflops(self.device), Retries()
        self.sinks: list[Sink] = []
        if self.place.rank == 0:
            describe_run(self.folder, self.job, self.seed, self.device.type)
            self.sinks = open_sinks(self.folder, self.job.config, after=self.step)

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
            decayed=sum(item.decays for item in self.optimized),
            exempt=sum(not item.decays for item in self.optimized),
            optimizer_bytes=optimizer_bytes(self.optimized, self.job.config),
            implementation=implementation(self.job.config.optimizer),
        )

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Run to the target step."""
        config = self.job.config
        if self.step >= config.training.steps:
            self.log.info(f"already at step {self.step} of {config.training.steps}: raise --training.steps")
            for sink in self.sinks:
                sink.close()
            return
        gc.disable()  # or ranks would collect at different times, and wait for each other
        gc.collect()
        gc.freeze()  # what was built stays: looking through it again costs 0.1 s a time
        loader = build_loader(self.data, self.share, self.consumed, None, config.training.dataloader)
        if isinstance(loader, StreamLoader) and self.consumed:
            assert self.resumed
            streams = self.resumed.streams  # another rank's will do to be told that they don't fit
            loader.load_state_dict(streams.get(str(self.share.coordinate)) or next(iter(streams.values())))
        self.batches = BatchPrefetcher(loader, self.device)
        self.clock = StepClock()
        try:
            self._run_steps()
        except BaseException:
            self.checkpoints.wait_ignoring_errors()
            raise
        self.finite.settle()
        self.checkpoints.finish()
        self._log_saves()
        if config.checkpoint.last_save_in_hf:
            self.checkpoints.export(self.step, self.state, self.tokenizer)
        if config.generate.at_end:
            self.show_sample()
        self.close()

    def _run_steps(self) -> None:
        config, steps, first = self.job.config, self.job.config.training.steps, self.step + 1
        with Profiler(config.profiling, self.folder, self.place.rank, self.device, self.step) as profiler:
            while self.step < steps:
                self.step += 1
                self.train_step()
                if self.step == first:
                    set_collective_timeout(config.comm.train_timeout_seconds, spared=self.checkpoints.group)
                if self.step % config.training.gc_freq == 0:
                    gc.collect()
                if config.validation.enable and (self.step % config.validation.freq == 0 or self.step == steps):
                    self.validate()
                if self.checkpoints.due(self.step, self._is_logged()):
                    self.save()
                self._log_saves()
                with self.clock.paused("profiling"):  # writing a trace is no step's time
                    profiler.step(self.step)

    def train_step(self) -> None:
        """One optimizer step."""
        config = self.job.config
        micro_batches = self.next_micro_batches()
        valid_tokens = self.finite.share(count_valid(torch.stack([b.labels for b in micro_batches])))
        if isinstance(self.data, Stream) and not self.data.repeat and not valid_tokens.item():
            raise self._data_ended()  # all ranks are out; the wait for the device is the price of an unknown length
        loss = self.forward_backward(micro_batches, valid_tokens)
        with record_function("gradient norm"):
            norm = clip_grad_norm(self.trained, config.training.max_norm)
        self.finite.record(self.step, loss, norm.to(self.device))  # offloaded gradients have theirs on the CPU
        with record_function("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"], group["training_step"] = learning_rate(config, self.step), self.step
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self._tell_converters()
        self.tokens += self.job.batch.total * config.training.seq_len
        self.consumed += self.share.per_step
        if self._is_logged():
            self._log_step(loss, norm, micro_batches)
        else:
            self.clock.step_done()

    def _tell_converters(self) -> None:
        """The weights are new."""
        for converter in self.converters:
            converter.after_optimizer_step(self.parts)

    @record_function("data")
    def next_micro_batches(self) -> list[MicroBatch]:
        """This rank's part of the global batch, on the device."""
        with self.clock.waiting_for_data():
            found = [batch.to(self.device) for batch in islice(self.batches, self.share.accumulation)]
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
        (model,), chunks = self.parts, self.job.config.training.loss_chunks
        coordinates = self.job.layout.coordinates(self.place.rank)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(micro_batches):
            if self.defers_sync and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            reseed(self.seed, self.step, number, self.share.coordinate, coordinates["tp"])
            with record_function("forward"):
                loss = model_loss(model, batch, chunks, self.loss) / valid_tokens.clamp(min=1)
            with record_function("backward"):
                loss.backward()
            total += loss.detach()
        tensor.sum_gradients(self.trained)
        reduction = getattr(torch, self.job.config.training.mixed_precision_reduce)
        replicated.sum_gradients(self.kept_whole, self.mesh.loss, reduction)
        return total

    @record_function("validation")
    def validate(self) -> None:
        """Log the loss on held-out data."""
        with self.clock.paused("validation"):
            chunks = self.job.config.training.loss_chunks
            loss = validation_loss(self.parts[0], self.validation_loader, self.device, self.mesh.loss, chunks)
            self.log.info(f"validation at step {self.step}: loss {loss:.5f}")
            for sink in self.sinks:
                sink.validation(self.step, loss)

    def save(self) -> None:
        """Save the state as it is after this step."""
        with self.clock.paused("checkpoint"):
            self.finite.settle()  # nothing of a step that was not finite is kept
            epoch = self.consumed // self.data.samples if self.data.samples else 0
            position = Position(self.step, self.tokens, self.consumed, epoch, self.seed, self.data.fingerprint)
            self.checkpoints.save(position, self.state, self.batches.state)

    def show_sample(self) -> None:
        """Print what the model writes."""
        settings = self.job.config.generate
        text = generate(
            self.parts[0],
            self.tokenizer,
            settings,
            self.job.positions,
            self.seed,
            self.device,
            multiple=self.job.layout.tp,
        )
        self.log.info(f"a sample, at temperature {settings.temperature:g}:\n")
        self.log.info("\n".join(f"    {line}" for line in text.splitlines()) + "\n")

    def close(self) -> None:
        """End the readers and the sinks."""
        gc.unfreeze()
        gc.enable()
        self.batches.close()
        for sink in self.sinks:
            sink.close()

    # ---------------------------------------------------------------- measuring

    def _is_logged(self) -> bool:
        config = self.job.config
        return self.step == 1 or self.step % config.metrics.log_freq == 0 or self.step == config.training.steps

    def _log_saves(self) -> None:
        while self.checkpoints.records:
            record = self.checkpoints.records.pop(0)
            for sink in self.sinks:
                sink.checkpoint(record.step, record.costs)

    def _log_step(self, loss: torch.Tensor, norm: torch.Tensor, micro_batches: Sequence[MicroBatch]) -> None:
        """The one place where the host waits for the device."""
        job = self.job
        labels = torch.stack([batch.labels for batch in micro_batches])
        total, largest = self._loss_over_ranks(loss, count_valid(labels))
        self.clock.step_done()
        per_second = job.batch.total * job.config.training.seq_len / self.clock.seconds / job.layout.world
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
            step_seconds=self.clock.seconds,
            step_seconds_p50=self.clock.percentile(50),
            step_seconds_p95=self.clock.percentile(95),
            data_seconds=self.clock.data_seconds,
            memory_gib=memory.gib,
            recompiles=self.clock.recompiles,
        )
        self.log.info(record.line(job.config.training.steps, memory.percent))
        tags = allocator_tags(self.device)
        if news := self.retries.news(tags):
            self.log.warning(news)
        for sink in self.sinks:
            sink.step(record, tags)
        self.clock.restart()

    def _loss_over_ranks(self, loss: torch.Tensor, valid_tokens: torch.Tensor) -> tuple[float, float]:
        """The global loss, and the largest mean loss of a rank that had valid tokens."""
        sums = torch.stack([loss, valid_tokens.double()])
        dist.all_reduce(sums, group=self.mesh.loss)
        mean = torch.where(valid_tokens > 0, loss * sums[1] / valid_tokens, -torch.inf)
        dist.all_reduce(mean, op=dist.ReduceOp.MAX, group=self.mesh.loss)
        return sums[0].item(), mean.item()


def _identity(config: JobConfig) -> str:
    """A hash of the config without the places that may be called otherwise on another node."""
    text = re.sub(r"^(dump_folder|hf_assets_path|dataset_path) = .*$", "", to_toml(config), flags=re.MULTILINE)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
