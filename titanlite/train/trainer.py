"""The trainer builds everything in order and runs the loop; `train_step` reads top to bottom.

How a step is computed is left to step.py, and what is logged to report.py.
"""

import gc
import logging
import math
from functools import cache, partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.manager import Checkpoints
from titanlite.checkpoint.manifest import Position
from titanlite.checkpoint.state import TrainingState
from titanlite.config.job import Job
from titanlite.data.loader import BatchPrefetcher, MicroBatch, build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.stream import Stream, StreamLoader
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data, validation_data
from titanlite.errors import RunFailed, UserError
from titanlite.fault.bad_step import Spike, build_guard
from titanlite.fault.network import check_network
from titanlite.fault.preflight import facts_of, gather_facts, require_equal
from titanlite.fault.stop import Stop
from titanlite.observe.profiler import Profiler
from titanlite.observe.run_folder import git_revision
from titanlite.observe.throughput import flops_per_token
from titanlite.optim import build_optimizer, check_trained, trained_parameters
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.context import own_places, sequence_multiple
from titanlite.parallel.convert import build_converters
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_parts
from titanlite.parallel.replica_check import check_replicas
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.determinism import agree_on_seed, use_deterministic_algorithms
from titanlite.runtime.distributed import gather_objects, set_collective_timeout
from titanlite.runtime.page import OWN_PAGE, phase
from titanlite.train.generate import generate
from titanlite.train.loss import count_valid
from titanlite.train.report import Report
from titanlite.train.step import StepRunner
from titanlite.train.validate import Abandoned, validation_loss


class Trainer:
    """Train a job on this rank. The process group must exist."""

    def __init__(
        self, job: Job, rank_info: RankInfo, device: torch.device, log: logging.Logger, stop: Stop | None = None
    ) -> None:
        config = job.config
        self.job, self.rank_info, self.device, self.log = job, rank_info, device, log
        self.folder = Path(config.job.dump_folder)
        self.stop, self.stopped = stop or Stop(config, rank_info, {}), False
        if config.debug.deterministic:
            use_deterministic_algorithms()
        revision = git_revision() if rank_info.local_rank == 0 else None
        facts = gather_facts(facts_of(job, rank_info, device, revision), rank_info.world)
        require_equal(facts, rank_info.world)
        self.mesh = build_mesh(job.layout, device.type)
        if config.fault.preflight and rank_info.world > 1:
            for line in check_network(self.mesh.world, device, facts):
                log.info(line)
        self.own_places = cache(partial(own_places, job, rank_info.rank, device))
        self.checkpoints = Checkpoints(job, rank_info, device, log)
        with phase("load"):
            self.resume = self.checkpoints.find()
        self.step, self.tokens = self.resume.position.step, self.resume.position.tokens
        OWN_PAGE.completed = OWN_PAGE.saved = self.step
        self.consumed = self.resume.consumed
        self.seed = agree_on_seed(self.resume.seed if config.debug.seed is None else config.debug.seed)
        self._open_data()
        self._build_model()
        self._restore()
        self.nonfinite = build_guard(config.fault, device, job.layout.tp, self.report.log_bad_step)
        self.nonfinite.load_state_dict(self.resume.guard)
        self.report.open_sinks(self.seed, self.step)

    # ---------------------------------------------------------------- building

    def _open_data(self) -> None:
        job, config = self.job, self.job.config
        self.tokenizer = open_tokenizer(job)
        coordinate = job.layout.batch_coordinate(self.rank_info.rank)
        self.rank_slice = RankSlice(coordinate, job.batch.data_parallel, job.batch.local, job.batch.accumulation)
        self.data = training_data(job, self.tokenizer, self.seed)
        self._require_equal("the data of [training]", self.data.fingerprint)
        self.resume.check_data(self.seed, self.data.fingerprint)
        if config.validation.enable:
            held_out, steps = validation_data(job, self.tokenizer), config.validation.steps
            self._require_equal("the data of [validation]", held_out.fingerprint)
            self.validation_loader = build_loader(
                held_out,
                RankSlice(coordinate, job.batch.data_parallel, config.validation.local_batch_size),
                consumed=0,
                steps=None if steps == -1 else math.ceil(steps / job.batch.data_parallel),
                settings=config.training.dataloader,
            )

    def _require_equal(self, what: str, local_value: str) -> None:
        """Raise if ranks have different values."""
        values = gather_objects(local_value, dist.group.WORLD)
        for rank, value in enumerate(values):
            if value != values[0]:
                raise UserError(f"{what} differs between ranks: rank 0 has {values[0]}, rank {rank} has {value}")

    def _build_model(self) -> None:
        """Build the model's parts on this rank with their optimizer, and what takes and reports a step."""
        job, config = self.job, self.job.config
        self.model, table = build_model(job)  # the whole model, for names and counts; this rank trains its parts
        check_trained(self.model, config.optimizer.no_decay)
        flops = flops_per_token(self.model.named_parameters(), table, job.shape, config.training.seq_len)
        context = Context(job, self.mesh, table, self.device, build_converters(job))
        self.report = Report(context, self.rank_info, self.log, flops)
        self.parts, notes = build_parts(self.model, context, self.seed)
        # The groups of the mesh and of FSDP2 start with torch's own 30 minutes.
        set_collective_timeout(config.comm.init_timeout_seconds, excluded=self.checkpoints.group)
        for note in notes:
            self.log.info(note)
        self.trained = trained_parameters(self.parts, table, job.spec.blocks, config.optimizer.no_decay)
        parameters = [item.parameter for item in self.trained]
        optimizer = build_optimizer(self.trained, config, self.seed, self.mesh.stage)
        self.runner = StepRunner(context, self.parts, parameters, optimizer, self.seed, self.rank_info.rank)

    @phase("load")
    def _restore(self) -> None:
        """Load what the run starts from."""
        stages = self.mesh.world["pp"].get_group() if self.job.layout.pp > 1 else None
        self.state = TrainingState(self.parts, self.runner.optimizer, self.runner.context.table, stages)
        self.checkpoints.restore(self.resume, self.state)
        self.checkpoints.check_space(self.state)
        if self.resume.folder:
            check_replicas(self.parts, "after loading", self.runner.context, self.runner.optimizer)
        self.runner.notify_converters()

    # ---------------------------------------------------------------- running

    def train(self) -> None:
        """Run to the target step, or until `stopped`."""
        config = self.job.config
        if self.step >= config.training.steps:
            self.log.info(f"already at step {self.step} of {config.training.steps}: raise --training.steps")
            self.report.close()
            return
        gc.disable()  # ranks that collect garbage at different times wait for each other
        gc.collect()
        gc.freeze()  # what was built stays; scanning it again would take 0.1 s each time
        loader = build_loader(self.data, self.rank_slice, self.consumed, None, config.training.dataloader)
        if isinstance(loader, StreamLoader) and self.consumed:
            loader.load_state_dict(self.resume.stream_state(self.rank_slice.coordinate))
        self.batches = BatchPrefetcher(loader, self.device)
        self.report.clock.restart()
        try:
            self._run_to_target()
        except BaseException:
            self.checkpoints.wait_ignoring_errors()
            raise
        self.nonfinite.flush()
        self.checkpoints.finish_save()
        self.report.log_saves(self.checkpoints.records)
        if config.checkpoint.last_save_in_hf and not self.stopped:
            self.checkpoints.export(self.step, self.state, self.tokenizer)
        if config.generate.at_end and not self.stopped:
            self.show_sample()
        self.close()

    def _run_to_target(self) -> None:
        while True:
            try:
                return self._run_steps()
            except Spike as spike:
                self.roll_back(spike)

    def _run_steps(self) -> None:
        config, steps, first = self.job.config, self.job.config.training.steps, self.step + 1
        OWN_PAGE.first_step = first
        OWN_PAGE.enter("step")
        with Profiler(config.profiling, self.folder, self.rank_info.rank, self.device, self.step) as profiler:
            while self.step < steps and not self.stopped:
                self.step += 1
                OWN_PAGE.step = self.step
                self.train_step()
                OWN_PAGE.completed = self.step
                self.stopped = self.nonfinite.read() and self.step < steps
                if self.step == first:
                    dist.barrier()  # or a rank would start the shorter clock while another still compiles
                    limit = max(config.comm.train_timeout_seconds, config.fault.stall_seconds)
                    set_collective_timeout(limit, excluded=self.checkpoints.group)
                if self.step % config.training.gc_freq == 0:
                    gc.collect()
                if config.validation.enable and (self.step % config.validation.freq == 0 or self.step == steps):
                    self.stopped = self.stopped or not self.validate()
                if self.stopped:
                    self.stop.ask("a request to another rank")
                if self.checkpoints.due(self.step, self.report.is_logged(self.step)) or self.stopped:
                    self.save()
                self.report.log_saves(self.checkpoints.records)
                with self.report.clock.paused("profiling"):  # the time of writing a trace belongs to no step
                    profiler.step(self.step)

    def train_step(self) -> None:
        """Take one step, and log it if due."""
        micro_batches = self.next_micro_batches()
        local_valid_tokens = count_valid(torch.stack([batch.labels for batch in micro_batches]))
        local_valid_tokens *= self.runner.has_loss  # of the last stage only, which has the losses
        with phase("tokens"):
            valid_tokens = self.nonfinite.all_reduce_tokens(local_valid_tokens, stop=bool(self.stop.reason))
        if isinstance(self.data, Stream) and not self.data.repeat and not valid_tokens.item():
            raise self._data_ended()  # on all ranks; waiting for the device is the price of an unknown length
        loss = self.runner.forward_backward(self.step, micro_batches, valid_tokens)
        norm = self.runner.clip_gradients()
        skipped = self.nonfinite.record(self.step, loss, norm)
        self.checkpoints.before_update()
        self.runner.update(self.step, norm, skipped)
        self.tokens += self.job.batch.total * self.job.config.training.seq_len
        self.consumed += self.rank_slice.per_step
        with phase("log"):
            self.report.end_step(self.step, self.tokens, loss, norm, local_valid_tokens, self.runner.balance)

    @phase("data")
    def next_micro_batches(self) -> list[MicroBatch]:
        """Return this rank's part of the global batch, on the device."""
        count, places = self.rank_slice.accumulation, self.own_places(self.job.config.training.seq_len)
        with self.report.clock.waiting_for_data():
            micro_batches = [batch.to(self.device, places) for batch in islice(self.batches, count)]
        if len(micro_batches) < count:
            raise self._data_ended()
        return micro_batches

    def _data_ended(self) -> RunFailed:
        size = "" if self.data.samples is None else f"it has {self.data.samples:,} windows, and "
        steps = f"step {self.step - 1} of {self.job.config.training.steps}"
        return RunFailed(f"the data ended after {steps}: {size}training.repeat is false")

    @phase("validation")
    def validate(self) -> bool:
        """Log the loss on held-out data; return False if a request to stop came first."""
        with self.report.clock.paused("validation"):
            chunks, places = self.job.config.training.loss_chunks, self.own_places(self.job.validation_seq_len)
            how = self.mesh.loss, chunks, places, self.runner.pipeline
            asked = self._asked_anywhere if self.checkpoints.enabled else None
            try:
                loss = validation_loss(self.parts, self.validation_loader, self.device, *how, asked)
            except Abandoned:
                return False
            self.report.log_validation(self.step, loss)
        return True

    def _asked_anywhere(self) -> bool:
        asked = torch.full((), bool(self.stop.reason), dtype=torch.int64, device=self.device)
        dist.all_reduce(asked)
        return bool(asked.item())

    @phase("save")
    def save(self) -> None:
        """Save the state after this step."""
        with self.report.clock.paused("checkpoint"):
            self.nonfinite.flush()  # a step that was not finite is never saved
            samples = None if self.job.config.training.mixture else self.data.samples
            epoch = self.consumed // samples if samples else None
            position = Position(self.step, self.tokens, self.consumed, epoch, self.seed, self.data.fingerprint)
            self.checkpoints.save(position, self.state, self.batches.state, self.nonfinite.state_dict())

    @phase("load")
    def roll_back(self, spike: Spike) -> None:
        """Go back to before a spike. The data go on: what led to it is not seen again."""
        self.log.warning(str(spike))
        resume = self.checkpoints.find_before(spike.step)
        self.checkpoints.restore(resume, self.state)
        self.runner.notify_converters()
        self.step, self.tokens = resume.position.step, resume.position.tokens
        OWN_PAGE.completed = OWN_PAGE.saved = self.step
        self.nonfinite.load_state_dict(resume.guard)
        self.report.close()
        self.report.open_sinks(self.seed, self.step)  # as a resume does: what is later is dropped
        self.report.clock.restart()

    def show_sample(self) -> None:
        """Log text that the model generates."""
        job, settings = self.job, self.job.config.generate
        text = generate(
            *(self.parts, self.tokenizer, settings, job.positions, self.seed, self.device),
            multiple=sequence_multiple(job),
            own_places=self.own_places,
            group=self.mesh.world["cp"].get_group(),
            pipeline=self.runner.pipeline,
        )
        self.log.info(f"a sample, at temperature {settings.temperature:g}:\n")
        self.log.info("\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines()) + "\n")

    def close(self) -> None:
        """Stop the data readers and close the sinks."""
        gc.unfreeze()
        gc.enable()
        self.batches.close()
        self.report.close()
