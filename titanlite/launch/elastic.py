"""Workers under torch's elastic agent: one process per rank, each with its own log file."""

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titanlite.launch.rendezvous import NodeRendezvous
from titanlite.observe.console import RESOLVED_CONFIG, rank_log


class RankLogs(LogsSpecs):
    """One logs/rank-N.log in the dump folder per rank, and one file per rank for the error it raises."""

    def __init__(self, folder: Path, errors: Path) -> None:
        super().__init__()
        self._folder, self._errors = folder, errors

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = LogsDest()
        for local_rank, env in envs.items():
            log = rank_log(self._folder, int(env["RANK"]))
            log.parent.mkdir(parents=True, exist_ok=True)
            destination.error_files[local_rank] = str(self._errors / f"{env['RANK']}.json")
            env["TORCHELASTIC_ERROR_FILE"] = destination.error_files[local_rank]
            destination.stdouts[local_rank] = os.devnull  # the worker joins its stdout to its stderr
            destination.stderrs[local_rank] = str(log)
        return destination

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)


def run_workers(
    argv: list[str],
    config: str,
    rendezvous: NodeRendezvous,
    processes: int,
    folder: Path,
    extra_environ: dict[str, str],
) -> None:
    """Run this node's workers until they exit; ChildFailedError if one fails, SignalException on a signal.

    They read the resolved `config`, since the files that `argv` names may change; `argv` is for people.
    """
    for name in list(logging.root.manager.loggerDict):  # the launcher prints its own messages
        if name.startswith("torch.distributed.elastic"):  # each logger: they ignore their parent's level
            logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register("titanlite", lambda _: rendezvous)
    stop: dict[str, Any] = {"shutdown_timeout": 2} if hasattr(LaunchConfig, "shutdown_timeout") else {}  # torch 2.13
    signals = ["SIGTERM", "SIGINT", "SIGQUIT"]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it, and a handler would undo that
        signals.append("SIGHUP")
    with tempfile.TemporaryDirectory(prefix="titanlite-") as private:
        resolved = Path(private, "config.toml")
        resolved.write_text(config, encoding="utf-8")
        os.environ.update({**extra_environ, RESOLVED_CONFIG: str(resolved)})
        launch = LaunchConfig(
            min_nodes=rendezvous.world_size,
            max_nodes=rendezvous.world_size,
            nproc_per_node=processes,
            logs_specs=RankLogs(folder, Path(private)),
            run_id=rendezvous.run_id,
            rdzv_backend=rendezvous.get_backend(),
            max_restarts=0,
            monitor_interval=0.1,
            signals_to_handle=",".join(signals),
            **stop,
        )
        elastic_launch(launch, sys.executable)("-m", "titanlite.train", *argv)
