"""A SLURM cluster on hosts of our own: Debian's slurm-wlm and munge, a slurmd on each host,
slurmctld on node0.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.multinode.hosts import Hosts
from tests.runs import ROOT

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
PLUGINS = (
    "ProctrackType=proctrack/linuxproc TaskPlugin=task/none SwitchType=switch/none MpiDefault=none"
)
"""Without cgroups, which a namespace does not have."""


class Slurm:
    """Jobs of the cluster; its files are in `folder`."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder, self._environ = (
            hosts,
            folder,
            {"SLURM_CONF": f"{folder}/slurm.conf"},
        )
        for name in ("state", "node0", "node1"):
            (folder / name).mkdir(parents=True)
        settings = f"""ClusterName=test {PLUGINS}
            SlurmctldHost=node0 SlurmUser=root SlurmdUser=root AuthInfo=socket={folder}/munge.socket
            StateSaveLocation={folder}/state SlurmdSpoolDir={folder}/%n
            SlurmctldPidFile={folder}/slurmctld.pid SlurmdPidFile={folder}/%n.pid
            SlurmctldLogFile={folder}/slurmctld.log SlurmdLogFile={folder}/%n.log
            SchedulerParameters=batch_sched_delay=0,sched_interval=1 SelectType=select/cons_tres"""
        nodes = (
            "NodeName=node[0-1] CPUs=2\n"
            "PartitionName=all Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP\n"
        )
        (folder / "slurm.conf").write_text("\n".join([*settings.split(), nodes]))
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # named, it need not be found
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        munge = [f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items()]
        self._start(0, "munged", "--foreground", "--force", *munge)
        wait_until((folder / "munge.socket").exists, "munged")
        self._start(0, "slurmctld", "-D")
        for node in (0, 1):
            self._start(node, "slurmd", "-D", "-N", f"node{node}")
        self.wait_for_nodes()

    def _start(self, node: int, *command: str) -> None:
        with (self._folder / f"{command[0]}-{node}.out").open("w") as out:
            self._hosts.run(node, [*command], self._environ, stdout=out)

    def ask(self, *command: str, cwd: Path = ROOT) -> str:
        """Return what a command prints on node0."""
        done = self._hosts.run(0, [*command], self._environ, cwd)
        out, _ = done.communicate(timeout=60)
        return out.strip()

    def submit(self, *words: str, folder: Path) -> str:
        return self.ask("sbatch", "--parsable", *words, cwd=folder)

    def state(self, job: str) -> str:
        """Return such as "RUNNING 0", the state and how often it was put back into the queue."""
        shown = self.ask("scontrol", "show", "job", job)
        return " ".join(re.findall(r"(?:JobState|Restarts)=(\S+)", shown))

    def wait_for_nodes(self) -> None:
        """Wait until both nodes are idle."""
        wait_until(
            lambda: self.ask("sinfo", "--noheader", "--states=idle", "--format=%D") == "2",
            "the nodes",
        )

    def wait_for(self, job: str, state: str, seconds: float = 60) -> None:
        try:
            wait_until(lambda: self.state(job) == state, f"job {job} to be {state}", seconds)
        except AssertionError as error:
            log = (self._folder / "slurmctld.log").read_text().splitlines()
            raise AssertionError(
                "\n".join([f"{error}; it is {self.state(job)}", *log[-20:]])
            ) from None


def missing() -> str:
    """Return why there can be no cluster, if so."""
    lacking = [program for program in PROGRAMS if not shutil.which(program)]
    return (
        f"{', '.join(lacking)} missing; Debian: apt-get install slurm-wlm munge" if lacking else ""
    )


def wait_until(true: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.1)
