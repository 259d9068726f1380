"""The trainer: build everything in order and run the loop; `train_step` reads top to bottom.

step.py computes a step, and report.py logs it.
"""

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import source
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.hf.export import export_step
from titanlite.checkpoint.manifest import Position
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.state import TrainingState
from titanlite.config.job import Job
from titanlite.data.loader import BatchPrefetcher, Loader, MicroBatch, build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.tokenizer import Tokenizer, open_tokenizer
from titanlite.data.windows import Windows, training_data, validation_data
from titanlite.errors import RunFailed
from titanlite.fault.beat import longest_limit
from titanlite.fault.stop import Stop
from titanlite.observe.profiler import Profiler
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import check_trained
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import build_parts
from titanlite.parallel.replica_check import check_replicas
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.determinism import agree_on_seed, use_deterministic_algorithms
from titanlite.runtime.distributed import on_any_rank, set_collective_timeout
from titanlite.runtime.page import OWN_PAGE, phase
from titanlite.train.forward import take
from titanlite.train.generate import generate
from titanlite.train.guard import Spike, StepGuard
from titanlite.train.network import check_network
from titanlite.train.prepared import Prepared
from titanlite.train.rank_facts import RankFacts, compare_ranks, facts_of
from titanlite.train.report import Report
from titanlite.train.step import StepRunner, build_step_runner
from titanlite.train.validate import Cost, validation_loss

T = TypeVar("T", bound="Trainer")


@dataclass(frozen=True)
class RunData:
    """What this rank reads."""

    tokenizer: Tokenizer | None
    rank_slice: RankSlice
    training: Windows | Stream
    held_out: Windows | Stream | None
    """The data of validation, and its loader; None if validation is off."""
    validation_loader: Loader | None

    def add_to(self, facts: RankFacts) -> RankFacts:
        """Return a rank's facts with the fingerprints of its data."""
        if self.held_out is not None:
            facts = replace(facts, validation=self.held_out.fingerprint)
        return replace(facts, training=self.training.fingerprint)


@dataclass(eq=False)
class Trainer:
    """A job's run on this rank: its parts, and the step it has reached."""

    job: Job
    rank_info: RankInfo
    log: logging.Logger
    stop: Stop
    seed: int
    checkpoints: CheckpointFolder
    saver: Saver
    resume: Resume
    """The checkpoint that the run starts from."""
    data: RunData
    model: nn.Module
    """The whole model on the meta device; without a pipeline, the one that this rank trains."""
    notes: list[str]
    """Lines about the techniques applied."""
    runner: StepRunner
    state: TrainingState
    report: Report
    guard: StepGuard
    stopped: bool = False
    step: int = field(init=False)
    tokens: int = field(init=False)
    """Tokens trained on since the beginning of the run."""
    consumed: int = field(init=False)
    """Samples read from the data."""
    batches: BatchPrefetcher = field(init=False)
    """Set when the first step starts to read."""
    thaws: ClassVar[bool] = True
    """Whether to unfreeze the heap at the end; a process of many runs keeps its imports frozen."""

    def __post_init__(self) -> None:
        self.step = self.resume.position.step
        self.tokens = self.resume.position.tokens
        self.consumed = self.resume.consumed

    @classmethod
    def start(
        cls: type[T],
        job: Job,
        rank_info: RankInfo,
        device: torch.device,
        log: logging.Logger,
        stop: Stop | None = None,
        prepared: Prepared | None = None,
    ) -> T:
        """Build a run; the process group must exist. Order matters here; the comments say why."""
        config = job.config
        prepared = prepared or Prepared()
        mesh, own_facts = _connect(job, rank_info, device, log)
        checkpoints = CheckpointFolder(job, rank_info, log)  # refuses an unusable folder
        saver = Saver(checkpoints, device)
        resume, seed = _find_start(checkpoints)
        data = _open_data(job, rank_info.rank, seed, prepared)  # refuses wrong data early
        compare_ranks(data.add_to(own_facts), rank_info.world)
        resume.check_data(seed, data.training.fingerprint)
        model, context = _build_model(job, mesh, device, prepared)
        report = _build_report(context, model, data, rank_info, log)  # counts the unchanged model
        is_filled = resume.continues and not resume.exclude  # by the checkpoint
        initial_seed = None if is_filled else seed
        parts, notes = build_parts(model, context, initial_seed)
        # The groups of the mesh and of FSDP2 start with torch's default of 30 minutes.
        set_collective_timeout(config.comm.init_timeout_seconds, excluded=checkpoints.group)
        runner = build_step_runner(context, parts, seed, rank_info.rank, config)
        # The last change to the weights: it compares replicas afterwards.
        state = _restore(checkpoints, resume, runner)
        guard = StepGuard(config.fault, device, job.layout.tp, report.log_bad_step)
        guard.load_state_dict(resume.guard)
        # Last, since it drops records after this step, which a failing start must not do.
        report.open_sinks(seed, resume.position.step)
        return cls(
            job=job,
            rank_info=rank_info,
            log=log,
            stop=stop or Stop(config, rank_info, {}),
            seed=seed,
            checkpoints=checkpoints,
            saver=saver,
            resume=resume,
            data=data,
            model=model,
            notes=notes,
            runner=runner,
            state=state,
            report=report,
            guard=guard,
        )

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The whole model, or this rank's pipeline stages in their order."""
        return self.runner.model.parts

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
                export_step(self.checkpoints, self.step, self.data.tokenizer)
            if config.generate.at_end:
                self.show_sample()
        self.close()

    def _start_reading(self) -> None:
        """Start to read batches, from the first sample not consumed."""
        settings = self.job.config.training.dataloader
        data = self.data.training
        rank_slice = self.data.rank_slice
        loader = build_loader(data, rank_slice, self.consumed, None, settings)
        if isinstance(loader, StreamLoader) and self.consumed and self.resume.streams:
            loader.load_state_dict(self.resume.stream_state(rank_slice.coordinate))
        self.batches = BatchPrefetcher(loader, self.runner.context.device)

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
        dist.barrier()  # the shorter timeout applies only after all ranks have compiled
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
        local_valid_tokens = self.runner.count_valid(micro_batches)
        with phase("tokens"):
            valid_tokens = self.guard.exchange(local_valid_tokens, stop=bool(self.stop.reason))
        loss = self.runner.forward_backward(self.step, micro_batches, valid_tokens)
        if self.step == 1:
            self.report.name_unused(self.runner.trained)
        norm = self.runner.gradient_norm()
        skipped = self.guard.record(self.step, loss, norm)
        self.saver.before_update()  # an asynchronous save may still be copying the weights
        self.runner.update(self.step, norm, skipped)
        self.tokens += self.job.batch.total * self.job.config.training.seq_len
        self.consumed += self.data.rank_slice.per_step
        balance = self.runner.balance
        with phase("log"):
            self.report.end_step(self.step, self.tokens, loss, norm, local_valid_tokens, balance)

    @phase("data")
    def next_micro_batches(self) -> list[MicroBatch]:
        """Return this rank's part of the global batch, on the device."""
        count = self.data.rank_slice.accumulation
        with self.report.clock.waiting_for_data():
            batches = islice(self.batches, count)
            micro_batches = [take(self.runner.model, batch) for batch in batches]
        if len(micro_batches) < count:
            steps = f"step {self.step - 1} of {self.job.config.training.steps}"
            raise RunFailed(
                f"the data ended after {steps}: it has {self.data.training.samples:,} windows, and "
                "training.repeat is false"
            )
        return micro_batches

    @phase("validation")
    def validate(self) -> bool:
        """Log the loss on held-out data; return False if a stop request came first."""
        should_stop = None
        if self.job.config.checkpoint.enable:
            should_stop = self._any_stop_request
        with self.report.clock.paused("validation"):
            show = self.report.begin_validation()
            assert self.data.validation_loader is not None
            loss = validation_loss(
                self.runner.model,
                self.data.validation_loader,
                self.job.config.training.loss_chunks,
                should_stop,
                show,
            )
            if loss is None:
                return False
            self.report.log_validation(self.step, loss)
        return True

    def _any_stop_request(self) -> bool:
        """Return whether any rank has a stop request."""
        return any(on_any_rank(self.runner.context.device, bool(self.stop.reason)))

    @phase("save")
    def save(self) -> None:
        """Save the state after this step."""
        with self.report.clock.paused("checkpoint"):
            self.guard.flush()  # a step that was not finite is never saved
            data = self.data.training
            epoch = None
            if data.samples and not self.job.config.training.mixture:
                epoch = self.consumed // data.samples
            position = Position(
                self.step, self.tokens, self.consumed, epoch, self.seed, data.fingerprint
            )
            guard = self.guard.state_dict()
            self.saver.save(position, self.state, self.batches.state, guard)

    @phase("load")
    def roll_back(self, spike: Spike) -> None:
        """Restore the checkpoint before a spike.

        The data position stays, so that the samples around the spike are not seen again.
        """
        self.log.warning(str(spike))
        self.saver.finish_save()
        resume = source.find_before(self.checkpoints, spike.step)
        source.restore(self.checkpoints, resume, self.state)
        self.runner.notify_converters()
        self.step = resume.position.step
        self.tokens = resume.position.tokens
        _show_on_page(self.step)
        self.guard.load_state_dict(resume.guard)
        self.report.open_sinks(self.seed, self.step)  # as in a resume, later records are dropped
        self.report.clock.restart()

    def show_sample(self) -> None:
        """Log a sample that the model generates."""
        job = self.job
        settings = job.config.generate
        text = generate(self.runner.model, self.data.tokenizer, settings, job.positions, self.seed)
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


def _connect(
    job: Job, rank_info: RankInfo, device: torch.device, log: logging.Logger
) -> tuple[Mesh, RankFacts]:
    """Return the mesh, whose groups all later communication uses, and the facts of this rank."""
    if job.config.debug.deterministic:  # before the first operation
        use_deterministic_algorithms()
    own_facts = facts_of(job, rank_info, device)
    # Before the groups, since ranks that differ would create different ones.
    facts = compare_ranks(own_facts, rank_info.world)
    mesh = build_mesh(job.layout, device.type)
    if job.config.fault.preflight and rank_info.world > 1:
        # Time these groups now, before a slow one costs hours.
        for line in check_network(mesh.world, device, facts):
            log.info(line)
    return mesh, own_facts


@phase("load")
def _find_start(checkpoints: CheckpointFolder) -> tuple[Resume, int]:
    """Return the checkpoint that the run starts from, and the seed of its data and model."""
    resume = source.find(checkpoints)
    _show_on_page(resume.position.step)
    seed = checkpoints.job.config.debug.seed
    if seed is None:
        seed = resume.seed
    return resume, agree_on_seed(seed)


def _show_on_page(step: int) -> None:
    """Show on this rank's page that the run continues after a step."""
    OWN_PAGE.completed = step
    OWN_PAGE.saved = step


def _open_data(job: Job, rank: int, seed: int, prepared: Prepared) -> RunData:
    """Open a rank's training data, and its validation data if enabled."""
    tokenizer = prepared.tokenizer or open_tokenizer(job)
    rank_slice = RankSlice(
        coordinate=job.layout.batch_coordinate(rank),
        ranks=job.batch.data_parallel,
        local=job.batch.local,
        accumulation=job.batch.accumulation,
    )
    training = training_data(job, tokenizer, seed, prepared.sources)
    settings = job.config.validation
    if not settings.enable:
        return RunData(tokenizer, rank_slice, training, None, None)
    held_out = validation_data(job, tokenizer, prepared.sources)
    steps = None
    if settings.steps != -1:
        steps = math.ceil(settings.steps / rank_slice.ranks)
    slice_held_out = replace(rank_slice, local=settings.local_batch_size, accumulation=1)
    loader = build_loader(held_out, slice_held_out, 0, steps, job.config.training.dataloader)
    return RunData(tokenizer, rank_slice, training, held_out, loader)


def _build_model(
    job: Job, mesh: Mesh, device: torch.device, prepared: Prepared
) -> tuple[nn.Module, Context]:
    """Return the whole model on the meta device, and the context of the techniques."""
    model, table = prepared.model or build_model(job)
    check_trained(model, table, job)
    converters = prepared.converters or build_converters(job)
    return model, Context(job, mesh, table, device, converters)


def _build_report(
    context: Context, model: nn.Module, data: RunData, rank_info: RankInfo, log: logging.Logger
) -> Report:
    """Return the report of a run of the whole model."""
    job = context.job
    flops = flops_per_token(
        model.named_parameters(),
        context.table,
        job.shape,
        job.config.training.seq_len,
        job.spec.blocks,
    )
    cost = Cost()
    if data.validation_loader is not None:
        cost = Cost.of(job, data.validation_loader)
    return Report(context, rank_info, log, flops.total, cost)


@phase("load")
def _restore(checkpoints: CheckpointFolder, resume: Resume, runner: StepRunner) -> TrainingState:
    """Load the checkpoint that the run starts from, if any."""
    context = runner.context
    parts = runner.model.parts
    optimizer = runner.optimizer
    pp = context.mesh.pp
    stages = None
    if pp:
        stages = pp.get_group()
    state = TrainingState(parts, optimizer, context.table, stages)
    source.restore(checkpoints, resume, state)
    checkpoints.check_space(state)
    if resume.folder:
        check_replicas(parts, "after loading", context, optimizer)
    runner.notify_converters()
    return state
