"""The trainer: builds everything in order, then runs the loop. One step reads top to bottom in `train_step`."""

from __future__ import annotations

import gc
import hashlib
import logging
import re
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from titanlite.checkpoint.manager import Checkpoints
from titanlite.checkpoint.manifest import Position
from titanlite.checkpoint.state import TrainingState
from titanlite.config.job import Job
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml
from titanlite.data.loader import BatchPrefetcher, MicroBatch, build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.errors import RunFailed, UserError
from titanlite.fault.nonfinite import NonFiniteGuard
from titanlite.observe.profiler import Profiler
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import build_optimizer, trained_parameters
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_parts
from titanlite.parallel.replica_check import check_replicas
from titanlite.parallel.replicated import replicated_parameters
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.determinism import agree_on_seed, use_deterministic_algorithms
from titanlite.runtime.distributed import set_collective_timeout
from titanlite.train.generate import generate
from titanlite.train.loss import count_valid
from titanlite.train.report import Report
from titanlite.train.step import StepRunner
from titanlite.train.validate import validation_loss


class Trainer:
    """A job on this rank. The process group must exist."""

    def __init__(self, job: Job, place: RankInfo, device: torch.device, log: logging.Logger) -> None:
        config = job.config
        self.job, self.place, self.device, self.log = job, place, device, log
        self.folder = Path(config.job.dump_folder)
        if config.debug.deterministic:
            use_deterministic_algorithms()
        self._agree("the config", _identity(job.given))
        self._agree("the kind of device", device.type)
        self.mesh = build_mesh(job.layout, device.type)
        self.checkpoints = Checkpoints(job, place, device, log)
        self.resume = self.checkpoints.find()
        self.step, self.tokens = self.resume.position.step, self.resume.position.tokens
        self.consumed = self.resume.consumed
        self.seed = agree_on_seed(self.resume.seed if config.debug.seed is None else config.debug.seed)
        self._open_data()
        self._build_model()
        self._restore()
        self.nonfinite = NonFiniteGuard(device, self.mesh.loss)
        self.report.open_sinks(self.seed, self.step)

    # ---------------------------------------------------------------- building

    def _open_data(self) -> None:
        job, config = self.job, self.job.config
        self.tokenizer = open_tokenizer(job)
        coordinate = job.layout.batch_coordinate(self.place.rank)
        self.share = RankSlice(coordinate, job.batch.data_parallel, job.batch.local, job.batch.accumulation)
        self.data = training_data(job, self.tokenizer, self.seed)
        self._agree("the data of [training]", self.data.fingerprint)
        self.resume.check_data(self.seed, self.data.fingerprint)
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
        """Build the model's parts on this rank, their optimizer, and what runs a step of them."""
        job, config = self.job, self.job.config
        self.model, self.table = build_model(job)  # the whole, for names and counts; this rank trains its parts
        flops = flops_per_token(self.model.named_parameters(), self.table, job.shape, config.training.seq_len)
        all_names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self.report = Report(job, self.place, self.device, self.log, self.mesh.loss, flops)
        converters = build_converters(job)
        context = Context(job, self.mesh, self.table, self.device, converters)
        self.parts, notes = build_parts(self.model, context, self.seed)
        for note in notes:
            self.log.info(note)
        named = [item for part in self.parts for item in part.named_parameters()]
        no_decay = config.optimizer.no_decay
        self.trained = trained_parameters(named, self.table, job.spec.blocks, no_decay, all_names)
        optimizer = build_optimizer(self.trained, config, self.seed)
        self.runner = StepRunner(
            job,
            self.mesh,
            self.parts,
            replicated=[p for part in self.parts for p in replicated_parameters(part, context)],
            trained=self.trained,
            optimizer=optimizer,
            converters=converters,
            seed=self.seed,
            rank=self.place.rank,
            device=self.device,
        )

    def _restore(self) -> None:
        """Load what the run starts from."""
        self.state = TrainingState(self.parts, self.runner.optimizer)
        self.checkpoints.restore(self.resume, self.state)
        if self.resume.folder:
            check_replicas(self.parts, "after loading", self.device, self.runner.optimizer)
        self.runner.notify_converters()

    def describe(self) -> list[str]:
        """Return the lines that the start of the run prints."""
        return self.report.describe_start(self.model, self.parts, self.table, self.trained, self.data, self.seed)

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Run to the target step."""
        config = self.job.config
        if self.step >= config.training.steps:
            self.log.info(f"already at step {self.step} of {config.training.steps}: raise --training.steps")
            self.report.close()
            return
        gc.disable()  # or ranks would collect at different times, and wait for each other
        gc.collect()
        gc.freeze()  # what was built stays: looking through it again costs 0.1 s a time
        loader = build_loader(self.data, self.share, self.consumed, None, config.training.dataloader)
        if isinstance(loader, StreamLoader) and self.consumed:
            loader.load_state_dict(self.resume.stream_state(self.share.coordinate))
        self.batches = BatchPrefetcher(loader, self.device)
        self.report.clock.restart()
        try:
            self._run_steps()
        except BaseException:
            self.checkpoints.wait_ignoring_errors()
            raise
        self.nonfinite.flush()
        self.checkpoints.finish()
        self.report.log_saves(self.checkpoints.records)
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
                    set_collective_timeout(config.comm.train_timeout_seconds, self.mesh.groups)
                if self.step % config.training.gc_freq == 0:
                    gc.collect()
                if config.validation.enable and (self.step % config.validation.freq == 0 or self.step == steps):
                    self.validate()
                if self.checkpoints.due(self.step, self.report.is_logged(self.step)):
                    self.save()
                self.report.log_saves(self.checkpoints.records)
                with self.report.clock.paused("profiling"):  # writing a trace is no step's time
                    profiler.step(self.step)

    def train_step(self) -> None:
        """Take one optimizer step."""
        micro_batches = self.next_micro_batches()
        local_valid_tokens = count_valid(torch.stack([batch.labels for batch in micro_batches]))
        self.nonfinite.raise_if_set()
        valid_tokens = self.nonfinite.all_reduce_tokens(local_valid_tokens)
        if isinstance(self.data, Stream) and not self.data.repeat and not valid_tokens.item():
            raise self._data_ended()  # on all ranks; waiting for the device is the price of an unknown length
        loss = self.runner.forward_backward(self.step, micro_batches, valid_tokens)
        norm = self.runner.clip_gradients()
        self.nonfinite.record(self.step, loss, norm)
        self.runner.update(self.step)
        self.tokens += self.job.batch.total * self.job.config.training.seq_len
        self.consumed += self.share.per_step
        self.report.end_step(self.step, self.tokens, loss, norm, local_valid_tokens)

    @record_function("data")
    def next_micro_batches(self) -> list[MicroBatch]:
        """This rank's part of the global batch, on the device."""
        with self.report.clock.waiting_for_data():
            found = [batch.to(self.device) for batch in islice(self.batches, self.share.accumulation)]
        if len(found) < self.share.accumulation:
            raise self._data_ended()
        return found

    def _data_ended(self) -> RunFailed:
        size = "" if self.data.samples is None else f"it has {self.data.samples} windows, and "
        ended = f"the data ended after step {self.step - 1} of {self.job.config.training.steps}"
        return RunFailed(f"{ended}: {size}training.repeat is false")

    @record_function("validation")
    def validate(self) -> None:
        """Log the loss on held-out data."""
        with self.report.clock.paused("validation"):
            chunks = self.job.config.training.loss_chunks
            loss = validation_loss(self.parts, self.validation_loader, self.device, self.mesh.loss, chunks)
            self.report.log_validation(self.step, loss)

    def save(self) -> None:
        """Save the state as it is after this step."""
        with self.report.clock.paused("checkpoint"):
            self.nonfinite.flush()  # a step that was not finite is never saved
            epoch = self.consumed // self.data.samples if self.data.samples else 0
            position = Position(self.step, self.tokens, self.consumed, epoch, self.seed, self.data.fingerprint)
            self.checkpoints.save(position, self.state, self.batches.state)

    def show_sample(self) -> None:
        """Print what the model writes."""
        settings = self.job.config.generate
        text = generate(
            self.parts,
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
        self.report.close()


def _identity(config: JobConfig) -> str:
    """A hash of the config without the places that may be called otherwise on another node."""
    text = re.sub(r"^(dump_folder|hf_assets_path|dataset_path) = .*$", "", to_toml(config), flags=re.MULTILINE)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
