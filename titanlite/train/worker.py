"""Run one rank: read its job, train, write what went wrong where the launcher looks for it."""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint import status
from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.config.job import Job, job_from
from titanlite.config.load import load, parse_command_line
from titanlite.config.schema import JobConfig
from titanlite.config.toml import to_toml
from titanlite.errors import FAILED, OK, RunFailed, UserError, first_line, print_notice, remedy
from titanlite.fault.beat import Heart
from titanlite.fault.stop import Stop
from titanlite.observe import events
from titanlite.observe.console import open_log
from titanlite.observe.events import record_event
from titanlite.observe.memory import REMEDY
from titanlite.runtime import lock
from titanlite.runtime.cluster import RankInfo, check_torch, rank_info, shown_ranks
from titanlite.runtime.distributed import pick_device, process_group
from titanlite.runtime.page import OWN_PAGE
from titanlite.runtime.parent import exit_with_parent
from titanlite.runtime.rank_files import DEVICE, FAILED_MARK, LAUNCHED, RESOLVED_CONFIG
from titanlite.runtime.store import LocalPath
from titanlite.train.ending import describe_end, describe_stop
from titanlite.train.prepared import Prepared
from titanlite.train.summary import describe_start
from titanlite.train.trainer import Trainer


def main(
    argv: list[str],
    task: Callable[[Job, RankInfo, dict[str, str]], None] | None = None,
    prepared: Prepared | None = None,
) -> int:
    """Train or do another task; return its exit code: 2 for a user's mistake, 1 for a run that
    failed or a bug, 75 or 76 for one that stopped on request (below a launcher 0 and a file).
    """
    environ = dict(os.environ)
    if environ.get(LAUNCHED) != str(os.getppid()):
        launcher = environ.pop(LAUNCHED, "")  # inherited, such as by torchrun in a launched run
        if launcher and not Path(f"/proc/{launcher}").exists() and Path("/proc/self").exists():
            return FAILED  # it was killed before this rank came so far
    if LAUNCHED in environ:
        os.dup2(2, 1)  # one log file for both streams
        # A killed launcher stops no rank; ranks that stay occupy GPUs and write into the next run's
        # folder.
        notice = "launcher exited; stopping this rank"
        exit_with_parent(pid=int(environ[LAUNCHED]), notice=notice)
    stop: Stop | None = None
    try:
        if LAUNCHED not in environ:  # otherwise the launcher did this
            check_torch()
        rank = rank_info(environ)
        source = ["--config", environ[RESOLVED_CONFIG]] if LAUNCHED in environ else argv
        loaded = load(parse_command_line(source, environ))
        choice = environ[DEVICE] if LAUNCHED in environ else loaded.config.job.device
        device = pick_device(choice, rank.local_rank)
        job = job_from(loaded, world=rank.world, training=True, device=device.type)
        if task:
            task(job, rank, environ)
            return OK
        stop = Stop(job.config, rank, environ)
        return run(job, rank, device, environ, stop, prepared)
    except BaseException as error:
        error = _in_one_line(error)
        if isinstance(error, UserError):
            if LAUNCHED in environ:
                print(FAILED_MARK, file=sys.stderr)
            print_notice(str(error))
            write_error_file(error, environ)
            return error.code
        if stop and stop.others_may_have_left():
            print_notice(f"failed after the request to stop: {first_line(error)}")
            return stop.leave("another rank had left")
        print(FAILED_MARK, file=sys.stderr, flush=True)
        write_error_file(error, environ)
        traceback.print_exc()
        return 1


def _in_one_line(error: BaseException) -> BaseException:
    """Return the error, or one with a message instead of a traceback."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
        return RunFailed(f"{error}{remedy(error)}")
    # In the first step it would happen again.
    is_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    if is_memory and OWN_PAGE.step == OWN_PAGE.first_step:
        where = f"step {OWN_PAGE.step}" if OWN_PAGE.step else "the start"
        return RunFailed(f"{where} does not fit; {REMEDY}: {first_line(error)}")
    return error


def write_error_file(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write the error in the elastic agent's format, with the time to the microsecond: torch's own
    handler writes whole seconds, but the ranks that only lost a peer fail within milliseconds of
    the first.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    details = {
        "py_callstack": traceback.format_exc(),
        "timestamp": str(int(now)),
        "time": now,
        "step": OWN_PAGE.step,
        "is_user_error": isinstance(error, UserError),  # one line is enough, without the traceback
    }
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}
    LocalPath(path).put(json.dumps(content).encode())


def run(
    job: Job,
    rank: RankInfo,
    device: torch.device,
    environ: dict[str, str],
    stop: Stop,
    prepared: Prepared | None,
) -> int:
    """Train a valid job on this rank; return its exit code."""
    config = job.config
    folder = Path(job.config.job.dump_folder)
    # Otherwise nothing can be saved, and a signal ends this rank at once.
    if config.checkpoint.enable:
        stop.listen()
    _check_float8(job, device)  # under torchrun no launcher has checked it
    with process_group(rank, device, config.comm, folder, environ):
        messages = ["", ""]
        if LAUNCHED not in environ:  # otherwise the launcher did this
            look = partial(status.look, config) if rank.rank == 0 else str
            run_on_all_ranks(dist.group.WORLD, "checkpoint.folder", look, UserError)
            finished = status.finished_message(config) if rank.rank == 0 else ""
            take = rank.rank == 0 and not finished
            start = partial(status.take_folder, job.given) if take else str
            messages = [finished, run_on_all_ranks(dist.group.WORLD, "the start", start, UserError)]
            dist.broadcast_object_list(messages)
        elif rank.rank == 0:
            lock.join(folder / lock.RUN_LOCK)
        finished, notice = messages
        log = open_log(folder, rank.rank, LAUNCHED in environ, rank.rank in shown_ranks(environ))
        if finished or notice:
            log.info(finished or notice)
        if finished:
            return OK
        if config.job.print_config:
            log.info(to_toml(job.given))
        heart = Heart(config, rank, environ, on_stop=stop.ask, asked=lambda: stop.reason)
        heart.start()
        trainer = Trainer.start(job, rank, device, log, stop, prepared)
        _record_begin(folder, trainer, LAUNCHED in environ)
        for line in describe_start(trainer):
            log.info(line)
        trainer.train()
        if LAUNCHED not in environ and rank.rank == 0:  # otherwise the launcher does this
            log.info(_recorded_end(config, stop if trainer.stopped else None))
        OWN_PAGE.enter("end")
    heart.end()
    return stop.leave() if trainer.stopped else OK


def _check_float8(job: Job, device: torch.device) -> None:
    """Refuse float8 on a GPU that cannot compute in it."""
    if device.type == "cuda" and job.config.quantize.linear.float8.enable:
        from titanlite.parallel import float8

        float8.check_device(job, "cuda", torch.cuda.get_device_capability(device))


def _record_begin(folder: Path, trainer: Trainer, launched: bool) -> None:
    if trainer.rank_info.rank > 0:
        return
    if not launched:  # otherwise the launcher did this
        record_event(folder, "start", attempt=1)
    record_event(folder, "begin", mesh=str(trainer.job.layout), step=trainer.step)


def _recorded_end(config: JobConfig, stop: Stop | None) -> str:
    """Record how a run without the launcher ended, by its last step or a stop; return its last
    lines.
    """
    end = describe_stop(config, stop.left()) if stop else ""
    how = events.STOPPED if stop else events.DONE
    record_event(Path(config.job.dump_folder), "stop", how=how, why=end)
    return f"\ntitanlite: {end}" if stop else describe_end(config)
