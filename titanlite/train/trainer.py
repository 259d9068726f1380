"""The trainer builds everything in order and runs the loop; `train_step` reads top to bottom.

The computation of a step is left to step.py, and the log to report.py.
"""

import gc
import logging
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint import source
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.export import export_step
from titanlite.checkpoint.manifest import Position
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import TrainingState
from titanlite.config.job import Job
from titanlite.data.loader import BatchPrefetcher, MicroBatch, build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import Windows, training_data, validation_data
from titanlite.errors import RunFailed
from titanlite.fault.beat import longest_limit
from titanlite.fault.stop import Stop
from titanlite.observe.profiler import Profiler
from titanlite.observe.run_folder import git_revision
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import build_optimizer, check_trained, trained_parameters
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_parts
from titanlite.parallel.replica_check import check_replicas
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.determinism import agree_on_seed, use_deterministic_algorithms
from titanlite.runtime.distributed import set_collective_timeout
from titanlite.runtime.page import OWN_PAGE, phase
from titanlite.train.bad_steps import Spike
from titanlite.train.forward import build_runner
from titanlite.train.generate import generate
from titanlite.train.guard import StepGuard
from titanlite.train.loss import count_valid
from titanlite.train.network import check_network
from titanlite.train.prepared import Prepared
from titanlite.train.rank_facts import Facts, compare, facts_of
from titanlite.train.report import Report
from titanlite.train.step import StepRunner
from titanlite.train.validate import Cost, validation_loss


class Trainer:
    """Train a job on this rank. The process group must exist."""

    thaws = True  # the heap, at a run's end; a process of many runs has frozen its imports

    def __init__(
        self,
        job: Job,
        rank_info: RankInfo,
        device: torch.device,
        log: logging.Logger,
        stop: Stop | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        self.job = job
        self.rank_info = rank_info
        self.device = device
        self.log = log
        self.stop = stop or Stop(job.config, rank_info, {})
        self.stopped = False
        prepared = prepared or Prepared()

        # THE fixed order of a start, each step with the reason for its place.
        self._choose_algorithms()  # before the first operation
        facts = self._compare_ranks()  # before groups: ranks that differ would make different ones
        self.mesh = build_mesh(job.layout, device.type)  # its groups connect all that follows
        self._check_network(facts)  # over these groups, before a slow one costs hours
        self.checkpoints = CheckpointFolder(job, rank_info, log)  # refuses an unusable folder
        self.saver = Saver(self.checkpoints, device)
        self._find_start()  # before data and model: it has the seed of both
        self._open_data(prepared)  # before the model: wrong data is refused at once
        self._build_model(prepared)  # before loading, which fills its shards
        self._restore()  # the last change of the weights: replicas are compared after it
        self._build_guard()  # after the report, which takes its notes
        # Last: it drops records after this step, which a start that fails must not do.
        self.report.open_sinks(self.seed, self.step)

    # ---------------------------------------------------------------- building

    def _choose_algorithms(self) -> None:
        if self.job.config.debug.deterministic:
            use_deterministic_algorithms()

    def _compare_ranks(self) -> list[Facts]:
        """Raise if ranks have different configs, software or code; return the facts on rank 0."""
        rank_info = self.rank_info
        revision = git_revision() if rank_info.local_rank == 0 else None
        self.facts = facts_of(self.job, rank_info, self.device, revision)
        return compare(self.facts, rank_info.world)

    def _check_network(self, facts: list[Facts]) -> None:
        if self.job.config.fault.preflight and self.rank_info.world > 1:
            for line in check_network(self.mesh.world, self.device, facts):
                self.log.info(line)

    def _find_start(self) -> None:
        """Find the checkpoint that the run starts from, its position and the seed."""
        with phase("load"):
            self.resume = source.find(self.checkpoints)
        self._set_position(self.resume.position)
        self.consumed = self.resume.consumed
        seed = self.job.config.debug.seed
        self.seed = agree_on_seed(self.resume.seed if seed is None else seed)

    def _set_position(self, position: Position) -> None:
        self.step = position.step
        self.tokens = position.tokens
        OWN_PAGE.completed = self.step
        OWN_PAGE.saved = self.step

    def _open_data(self, prepared: Prepared) -> None:
        """Open the data of this rank: of training, and of validation if enabled."""
        job = self.job
        self.tokenizer = prepared.tokenizer or open_tokenizer(job)
        self.rank_slice = RankSlice(
            coordinate=job.layout.batch_coordinate(self.rank_info.rank),
            ranks=job.batch.data_parallel,
            local=job.batch.local,
            accumulation=job.batch.accumulation,
        )
        self.data = training_data(job, self.tokenizer, self.seed, prepared.sources)
        own_facts = replace(self.facts, training=self.data.fingerprint)
        if job.config.validation.enable:
            held_out = validation_data(job, self.tokenizer, prepared.sources)
            self._build_validation_loader(held_out)
            own_facts = replace(own_facts, validation=held_out.fingerprint)
        compare(own_facts, self.rank_info.world)
        self.resume.check_data(self.seed, self.data.fingerprint)

    def _build_validation_loader(self, held_out: Windows | Stream) -> None:
        config = self.job.config
        local = config.validation.local_batch_size
        rank_slice = replace(self.rank_slice, local=local, accumulation=1)
        given, settings = config.validation.steps, config.training.dataloader
        steps = None if given == -1 else math.ceil(given / rank_slice.ranks)
        self.validation_loader = build_loader(held_out, rank_slice, 0, steps, settings)

    def _build_model(self, prepared: Prepared) -> None:
        """Build this rank's parts of the model, their optimizer, the step runner and the report."""
        job = self.job
        config = job.config
        # The whole model, on the meta device. With one pipeline stage build_parts makes it this
        # rank's only part.
        self.model, table = prepared.model or build_model(job)
        check_trained(self.model, config.optimizer.no_decay)
        named = self.model.named_parameters()
        flops = flops_per_token(named, table, job.shape, config.training.seq_len, job.spec.blocks)
        converters = prepared.converters or build_converters(job)
        context = Context(job, self.mesh, table, self.device, converters)
        self.report = Report(context, self.rank_info, self.log, flops.total)
        if config.validation.enable:
            self.report.validation = Cost.of(job, self.validation_loader)
        is_filled = self.resume.continues and not self.resume.exclude
        self.parts, self.notes = build_parts(self.model, context, None if is_filled else self.seed)
        # The groups of the mesh and of FSDP2 start with torch's own 30 minutes.
        timeout = config.comm.init_timeout_seconds
        set_collective_timeout(timeout, excluded=self.checkpoints.group)
        blocks = job.spec.blocks
        self.trained = trained_parameters(self.parts, table, blocks, config.optimizer.no_decay)
        parameters = [item.parameter for item in self.trained]
        optimizer = build_optimizer(self.trained, config, self.seed, self.mesh.stage)
        model = build_runner(context, self.parts, self.seed, self.rank_info.rank)
        self.runner = StepRunner(context, model, parameters, optimizer)

    @phase("load")
    def _restore(self) -> None:
        """Load the checkpoint that the run starts from, if any."""
        context = self.runner.context
        stages = self.mesh.pp.get_group() if self.mesh.pp else None
        self.state = TrainingState(self.parts, self.runner.optimizer, context.table, stages)
        source.restore(self.checkpoints, self.resume, self.state)
        self.checkpoints.check_space(self.state)
        if self.resume.folder:
            check_replicas(self.parts, "after loading", context, self.runner.optimizer)
        self.runner.notify_converters()

    def _build_guard(self) -> None:
        job = self.job
        note = self.report.log_bad_step
        self.guard = StepGuard(job.config.fault, self.device, job.layout.tp, note)
        self.guard.load_state_dict(self.resume.guard)

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Run to the target step, or until `stopped`."""
        config = self.job.config
        target = config.training.steps
        if self.step >= target:
            self.log.info(f"already at step {self.step} of {target}: raise --training.steps")
            self.report.close()
            return
        gc.disable()  # ranks that collect garbage at different times wait for each other
        gc.collect()
        gc.freeze()  # existing objects stay; scanning them again would take 0.1 s each time
        self._start_reading()
        self.report.clock.restart()
        try:
            self._run_to_target()
        except BaseException:
            self.saver.wait_ignoring_errors()
            self.report.close("failed")
            raise
        self.guard.flush()
        self.saver.finish_save()
        self.report.log_saves(self.saver.records)
        if not self.stopped:
            if config.checkpoint.last_save_in_hf:
                export_step(self.checkpoints, self.step, self.tokenizer)
            if config.generate.at_end:
                self.show_sample()
        self.close()

    def _start_reading(self) -> None:
        """Start to read batches, from the sample after those consumed."""
        settings = self.job.config.training.dataloader
        loader = build_loader(self.data, self.rank_slice, self.consumed, None, settings)
        if isinstance(loader, StreamLoader) and self.consumed and self.resume.streams:
            loader.load_state_dict(self.resume.stream_state(self.rank_slice.coordinate))
        self.batches = BatchPrefetcher(loader, self.device)

    def _run_to_target(self) -> None:
        while True:
            try:
                return self._run_steps()
            except Spike as spike:
                self.roll_back(spike)

    def _run_steps(self) -> None:
        config = self.job.config
        target = config.training.steps
        first = self.step + 1
        OWN_PAGE.first_step = first
        OWN_PAGE.enter("step")
        rank = self.rank_info.rank
        folder = Path(config.job.dump_folder)
        with Profiler(config.profiling, folder, rank, self.step) as profiler:
            while self.step < target and not self.stopped:
                self.step += 1
                OWN_PAGE.step = self.step
                self.train_step()
                OWN_PAGE.completed = self.step
                self.stopped = self.guard.read() and self.step < target
                if self.step == first:
                    self._shorten_timeouts()
                self._finish_step()
                with self.report.clock.paused("profiling"):  # a step's time excludes the trace's
                    profiler.step(self.step)

    def _shorten_timeouts(self) -> None:
        """Set the collectives' timeout for running, after the first step."""
        dist.barrier()  # all ranks must finish compiling before the shorter timeout applies
        limit = longest_limit(self.job.config)
        set_collective_timeout(limit, excluded=self.checkpoints.group)

    def _finish_step(self) -> None:
        """Collect garbage, validate and save if due."""
        config = self.job.config
        if self.step % config.training.gc_freq == 0:
            gc.collect()
        if self._validation_is_due() and not self.stopped:
            self.stopped = not self.validate()
        if self.stopped:
            self.stop.ask("a request to another rank")
        if self.saver.due(self.step, self.report.is_logged(self.step)) or self.stopped:
            self.save()
        self.report.log_saves(self.saver.records)

    def _validation_is_due(self) -> bool:
        settings = self.job.config.validation
        if not settings.enable:
            return False
        return self.step % settings.freq == 0 or self.step == self.job.config.training.steps

    def train_step(self) -> None:
        """Take one step, and log it if due."""
        micro_batches = self.next_micro_batches()
        local_valid_tokens = count_valid(torch.stack([batch.labels for batch in micro_batches]))
        local_valid_tokens *= self.runner.model.has_loss  # only the last stage has losses
        with phase("tokens"):
            valid_tokens = self.guard.exchange(local_valid_tokens, stop=bool(self.stop.reason))
        if isinstance(self.data, Stream) and not self.data.repeat and not valid_tokens.item():
            # On all ranks; waiting for the device is the price of an unknown length.
            raise self._data_ended()
        loss = self.runner.forward_backward(self.step, micro_batches, valid_tokens)
        self.report.name_unused(self.step, self.trained)
        norm = self.runner.clip_gradients()
        skipped = self.guard.record(self.step, loss, norm)
        self.saver.before_update()  # an asynchronous save may still be copying the weights
        self.runner.update(self.step, norm, skipped)
        self.tokens += self.job.batch.total * self.job.config.training.seq_len
        self.consumed += self.rank_slice.per_step
        balance = self.runner.balance
        with phase("log"):
            self.report.end_step(self.step, self.tokens, loss, norm, local_valid_tokens, balance)

    @phase("data")
    def next_micro_batches(self) -> list[MicroBatch]:
        """Return this rank's part of the global batch, on the device."""
        count = self.rank_slice.accumulation
        with self.report.clock.waiting_for_data():
            batches = islice(self.batches, count)
            micro_batches = [self.runner.take(batch) for batch in batches]
        if len(micro_batches) < count:
            raise self._data_ended()
        return micro_batches

    def _data_ended(self) -> RunFailed:
        size = ""
        if self.data.samples is not None:
            size = f"it has {self.data.samples:,} windows, and "
        steps = f"step {self.step - 1} of {self.job.config.training.steps}"
        return RunFailed(f"the data ended after {steps}: {size}training.repeat is false")

    @phase("validation")
    def validate(self) -> bool:
        """Log the loss on held-out data; return False if a request to stop came first."""
        should_stop = self._any_stop_request if self.job.config.checkpoint.enable else None
        with self.report.clock.paused("validation"):
            show = self.report.begin_validation()
            loss = validation_loss(
                self.runner.model,
                self.validation_loader,
                self.job.config.training.loss_chunks,
                should_stop,
                show,
            )
            if loss is None:
                return False
            self.report.log_validation(self.step, loss)
        return True

    def _any_stop_request(self) -> bool:
        """Return whether any rank has a request to stop."""
        requested = bool(self.stop.reason)
        requests = torch.full((), requested, dtype=torch.int64, device=self.device)
        dist.all_reduce(requests)
        return bool(requests.item())

    @phase("save")
    def save(self) -> None:
        """Save the state after this step."""
        with self.report.clock.paused("checkpoint"):
            self.guard.flush()  # a step that was not finite is never saved
            epoch = None
            if self.data.samples and not self.job.config.training.mixture:
                epoch = self.consumed // self.data.samples
            fingerprint = self.data.fingerprint
            position = Position(
                self.step, self.tokens, self.consumed, epoch, self.seed, fingerprint
            )
            guard = self.guard.state_dict()
            self.saver.save(position, self.state, self.batches.state, guard)

    @phase("load")
    def roll_back(self, spike: Spike) -> None:
        """Restore the checkpoint before a spike.

        The data position is kept, so that the samples before the spike are not seen again.
        """
        self.log.warning(str(spike))
        self.saver.finish_save()
        resume = source.find_before(self.checkpoints, spike.step)
        source.restore(self.checkpoints, resume, self.state)
        self.runner.notify_converters()
        self._set_position(resume.position)
        self.guard.load_state_dict(resume.guard)
        self.report.open_sinks(self.seed, self.step)  # as in a resume, later records are dropped
        self.report.clock.restart()

    def show_sample(self) -> None:
        """Log text that the model generates."""
        job = self.job
        settings = job.config.generate
        text = generate(self.runner.model, self.tokenizer, settings, job.positions, self.seed)
        lines = [f"    {line}".rstrip() for line in text.rstrip().splitlines()]
        self.log.info(f"a sample, at temperature {settings.temperature:g}:\n")
        self.log.info("\n".join(lines) + "\n")

    def close(self) -> None:
        """Stop the data readers and close the sinks."""
        if self.thaws:
            gc.unfreeze()
        gc.enable()
        self.batches.close()
        self.report.close()
