"""A worker's life: read its job, train, and leave word of what went wrong. `titanlite.train` is its entry."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.checkpoint.resume import finished_message, make_way
from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, parse_command_line, to_toml
from titanlite.errors import UserError
from titanlite.fault.nonfinite import NonFinite
from titanlite.observe.console import LAUNCHED, open_log
from titanlite.runtime.cluster import RankInfo, check_torch, rank_info, shown_ranks
from titanlite.runtime.distributed import pick_device, process_group
from titanlite.train.trainer import Trainer


def main(argv: list[str]) -> int:
    """Train; the exit code. Whatever goes wrong is written where the launcher finds it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, even inside a collective
    environ = dict(os.environ)
    if environ.get(LAUNCHED) != str(os.getppid()):
        environ.pop(LAUNCHED, None)  # inherited: this is torchrun inside of a launched run, say
    if LAUNCHED in environ:
        os.dup2(2, 1)  # one log file for both streams
        _exit_with_launcher(int(environ[LAUNCHED]))
    try:
        if LAUNCHED not in environ:  # the launcher has checked it
            check_torch()
        where = rank_info(environ)
        job = job_from(parse_command_line(argv, environ), world=where.world, training=True)
        run(job, where, environ)
        return 0
    except BaseException as error:
        write_error_file(error, environ)
        if isinstance(error, ConfigError | UserError | NonFinite):
            print(error if isinstance(error, ConfigError) else f"titanlite: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        return 2 if isinstance(error, ConfigError) else 1


def _exit_with_launcher(launcher: int) -> None:
    """End this rank when its launcher is gone: killed, it ends nobody, and the next start would find the GPUs taken
    and a stranger writing into its folder."""

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        print("titanlite: the launcher is gone, and this rank leaves with it", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_error_file(error: BaseException, environ: Mapping[str, str]) -> None:
    """Write what went wrong where an elastic agent looks for it, in its format, with the time to the microsecond:
    its own handler writes seconds, and the ranks that only lost a peer follow within milliseconds."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    details = {"py_callstack": traceback.format_exc(), "timestamp": str(int(now)), "time": now}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": details}}, file)


def run(job: Job, where: RankInfo, environ: dict[str, str]) -> None:
    """Train a sound job on this rank."""
    folder = Path(job.config.job.dump_folder)
    device = pick_device(job.config.job.device, where.local_rank)
    if device.type == "cuda" and job.config.quantize.linear.float8.enable:  # torchrun has no launcher that asked
        from titanlite.parallel import float8

        float8.check_device(job, "cuda", torch.cuda.get_device_capability(device))
    with process_group(where, device, job.config.comm, folder, environ):
        news = ["", ""]
        if LAUNCHED not in environ:
            if where.rank == 0:
                done = finished_message(job.config)
                news = [done, "" if done else make_way(job.config)]
            dist.broadcast_object_list(news)
        log = open_log(folder, where.rank, LAUNCHED in environ, where.rank in shown_ranks(environ))
        for line in filter(None, news):
            log.info(line)
        if news[0]:
            return
        if job.config.job.print_config:
            log.info(to_toml(job.config))
        trainer = Trainer(job, where, device, log)
        for line in trainer.describe():
            log.info(line)
        trainer.train()
