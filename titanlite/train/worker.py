"""Run one rank: read its job, train, and write errors where the launcher looks for them."""

import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint import status
from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.config.job import Job, job_from
from titanlite.config.load import load_config, parse_command_line
from titanlite.config.resharding import describe_choice, is_to_choose
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
from titanlite.runtime.page import OWN_PAGE, EarlyExit
from titanlite.runtime.parent import exit_with_parent
from titanlite.runtime.rank_files import (
    CHOSEN_RESHARD,
    DEVICE,
    FAILED_MARK,
    LAUNCHED,
    RESOLVED_CONFIG,
)
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
    """Train or do another task, and return the exit code: 2 for a user's mistake, 1 for a failed
    run or a bug, 75 or 76 for a stop on request (under a launcher 0 and a file).
    """
    environ = dict(os.environ)
    if environ.get(LAUNCHED) != str(os.getppid()):
        launcher = environ.pop(LAUNCHED, "")  # inherited, e.g. by torchrun in a launched run
        if launcher and not Path(f"/proc/{launcher}").exists() and Path("/proc/self").exists():
            return FAILED  # the launcher was killed before this rank got here
    if LAUNCHED in environ:
        os.dup2(2, 1)  # one log file for both streams
        # A killed launcher stops no rank, and ranks that stay alive occupy GPUs and write into the
        # next run's folder.
        notice = "launcher exited; stopping this rank"
        exit_with_parent(pid=int(environ[LAUNCHED]), notice=notice)
    stop: Stop | None = None
    try:
        if LAUNCHED in environ:
            argv = ["--config", environ[RESOLVED_CONFIG]]
        else:
            check_torch()  # otherwise the launcher did this
        rank = rank_info(environ)
        job, device = _find_job(argv, environ, rank)
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


def _find_job(
    argv: list[str], environ: Mapping[str, str], rank: RankInfo
) -> tuple[Job, torch.device]:
    """Return the job of a command line and this rank's device; a launcher has chosen what "auto"
    stands for.
    """
    loaded = load_config(parse_command_line(argv, environ))
    choice = loaded.config.job.device
    reshard = ""
    if LAUNCHED in environ:
        choice = environ[DEVICE]
        reshard = environ.get(CHOSEN_RESHARD, "")
    device = pick_device(choice, rank.local_rank)
    job = job_from(loaded, world=rank.world, training=True, device=device.type, reshard=reshard)
    return job, device


def _in_one_line(error: BaseException) -> BaseException:
    """Return the error, or one with a message instead of a traceback."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):
        return RunFailed(f"{error}{remedy(error)}")
    # In the first step it would happen again.
    is_memory = isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
    if is_memory and OWN_PAGE.step == OWN_PAGE.first_step:
        where = "the start"
        if OWN_PAGE.step:
            where = f"step {OWN_PAGE.step}"
        return RunFailed(f"{where} does not fit; {REMEDY}: {first_line(error)}")
    return error


def write_error_file(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write the error in the elastic agent's format, with the time in microseconds: torch's handler
    writes whole seconds, but ranks that merely lost a peer fail within milliseconds of the first.
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
        "is_user_error": isinstance(error, UserError),  # needs one line and no traceback
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
    """Train a valid job on this rank, and return the exit code."""
    config = job.config
    folder = Path(job.config.job.dump_folder)
    # Otherwise nothing can be saved, and a signal ends this rank at once.
    if config.checkpoint.enable:
        stop.listen()
    _check_float8(job, device)  # under torchrun no launcher has checked it
    with process_group(rank, device, config.comm, folder, environ):
        finished = ""
        notice = ""
        if LAUNCHED not in environ:  # otherwise the launcher did this
            finished, notice = _take_folder(job, rank)
        elif rank.rank == 0:
            lock.join(folder / lock.RUN_LOCK)
        log = open_log(folder, rank.rank, LAUNCHED in environ, rank.rank in shown_ranks(environ))
        if finished or notice:
            log.info(finished or notice)
        if finished:
            return OK
        if is_to_choose(job) and LAUNCHED not in environ:
            log.info(
                describe_choice("default", "assumed without titanlite's launcher, which plans")
            )
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
            left = stop.left() if trainer.stopped else None
            log.info(_recorded_end(config, left))
        OWN_PAGE.enter("end")
    heart.end()
    if trainer.stopped:
        return stop.leave()
    return OK


def _take_folder(job: Job, rank: RankInfo) -> list[Any]:
    """Take the dump folder for a run without a launcher.

    Return on all ranks a message if the run is finished already, and one about what was in the
    folder.
    """
    look: Callable[[], object] = str
    start: Callable[[], str] = str
    if rank.rank == 0:
        look = partial(status.look, job.config)
    run_on_all_ranks(dist.group.WORLD, "checkpoint.folder", look, UserError)
    finished = ""
    if rank.rank == 0:
        finished = status.finished_message(job.config)
        if not finished:
            start = partial(status.take_folder, job.given)
    messages = [finished, run_on_all_ranks(dist.group.WORLD, "the start", start, UserError)]
    dist.broadcast_object_list(messages)
    return messages


def _check_float8(job: Job, device: torch.device) -> None:
    """Refuse float8 on a GPU that does not support it."""
    if device.type == "cuda" and job.config.quantize.linear.float8.enable:
        from titanlite.parallel import float8

        float8.check_device(job, "cuda", torch.cuda.get_device_capability(device))


def _record_begin(folder: Path, trainer: Trainer, launched: bool) -> None:
    if trainer.rank_info.rank > 0:
        return
    if not launched:  # otherwise the launcher did this
        record_event(folder, "start", attempt=1)
    record_event(folder, "begin", mesh=str(trainer.job.layout), step=trainer.step)


def _recorded_end(config: JobConfig, left: EarlyExit | None) -> str:
    """Record how a run without a launcher ended, by its last step or a stop; return its last
    lines.
    """
    folder = Path(config.job.dump_folder)
    if left is None:
        record_event(folder, "stop", how=events.DONE, why="")
        return describe_end(config)
    end = describe_stop(config, left)
    record_event(folder, "stop", how=events.STOPPED, why=end)
    return f"\ntitanlite: {end}"
