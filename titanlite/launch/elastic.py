"""Workers under torch's elastic agent: one process per rank, each with its own log file."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titanlite.launch.rendezvous import NodeRendezvous
from titanlite.observe.console import rank_log

SECONDS_TO_STOP = 2


class RankLogs(LogsSpecs):
    """logs/rank-N.log in the dump folder for each rank; what a rank raises goes to a file for the launcher."""

    def __init__(self, folder: Path, errors: Path) -> None:
        super().__init__()
        self._folder, self._errors = folder, errors

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = LogsDest()
        for local_rank, env in envs.items():
            log = rank_log(self._folder, int(env["RANK"]))
            log.parent.mkdir(parents=True, exist_ok=True)
            error = str(self._errors / f"{env['RANK']}.json")
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank] = error
            destination.stdouts[local_rank] = os.devnull  # the worker joins its stdout to its stderr
            destination.stderrs[local_rank] = str(log)
        return destination

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def run_workers(
    argv: list[str],
    roll_call: NodeRendezvous,
    nodes: int,
    processes: int,
    folder: Path,
    extra_environ: dict[str, str],
) -> None:
    """Run this node's workers to their end; ChildFailedError if one fails, SignalException on a signal."""
    _silence("torch.distributed.elastic")  # the launcher tells it in its own words
    rendezvous_handler_registry.register("titanlite", lambda _: roll_call)
    os.environ.update(extra_environ)
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    patience: dict[str, Any] = (
        {"shutdown_timeout": SECONDS_TO_STOP} if "shutdown_timeout" in known else {}
    )  # new in 2.13
    with tempfile.TemporaryDirectory(prefix="titanlite-") as errors:
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=processes,
            logs_specs=RankLogs(folder, Path(errors)),
            run_id=roll_call.get_run_id(),
            rdzv_backend=roll_call.get_backend(),
            max_restarts=0,
            monitor_interval=0.1,
            **patience,
        )
        elastic_launch(config, sys.executable)("-m", "titanlite.train", *argv)


def _silence(package: str) -> None:
    """Each logger of torch's elastic package sets a level of its own, so their parent's alone does nothing."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)
