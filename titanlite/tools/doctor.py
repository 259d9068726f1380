"""`titanlite doctor`: the preflight of a run on its own, for a bug report, and the analysis of
flight recorder dumps.

The workers run this module too.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.config.load import load_config, parse_command_line
from titanlite.config.options import declare
from titanlite.config.schema import with_values
from titanlite.config.toml import to_toml
from titanlite.errors import OK, RunFailed, UserError, first_line, format_bytes, format_table
from titanlite.launch import launcher
from titanlite.launch.nodes import prepare_imports, worker_environment
from titanlite.observe.console import rank_log, untimed
from titanlite.runtime.cluster import RankInfo, cores
from titanlite.runtime.page import OWN_PAGE
from titanlite.runtime.rank_files import ATTEMPT, DEVICE, FAILED_MARK, RESOLVED_CONFIG
from titanlite.train.__main__ import main

if TYPE_CHECKING:
    from titanlite.config.job import Job
    from titanlite.train.rank_facts import RankFacts

_SHOWN = (
    r"(NCCL|GLOO|TORCH|PYTORCH|SLURM|PET|CUDA|OMP|UCX|FI|MASTER)_\w+|NGPU|NNODES|NODE_RANK|LOG_RANK"
)
_SECRET = "TOKEN|KEY|SECRET|PASS|JWT|CREDENTIAL|AUTH"
_DUMP = "rank_"
_SHARED_MEMORY = 256 << 20
"""NCCL's ranks of one host communicate through it; a container has 64 MiB by default."""
_ABOUT = """Start the workers as `titanlite train` would with the same options and environment, \
compare the ranks, time their network, and print everything, with what looks wrong, for a bug \
report. Nothing is trained, nothing is written into the dump folder, and variables that may hold \
a secret are not shown."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    parser.set_defaults(takes_overrides=True)
    parser.description = _ABOUT
    parser.epilog = "example: NGPU=2 titanlite doctor --config llama_8b.toml"
    about = "print torch's verdict on the dumps of NCCL's flight recorder in DIR, "
    declare(parser, {"--traces DIR": (f"{about}such as outputs/comm_traces", Path)})


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run the preflight on all ranks and print rank 0's report."""
    if arguments.traces:
        if overrides:
            raise UserError(f"--traces takes no config: remove {' '.join(overrides)}")
        return _read_traces(arguments.traces)
    environ = dict(os.environ)
    job, nodes, device, processes = launcher.find_job(
        load_config(parse_command_line(overrides, environ)), environ
    )
    only_imports = prepare_imports(processes, os.environ)
    from titanlite.fault.status import Ended
    from titanlite.launch.attempts import Attempt, Attempts, leaving
    from titanlite.launch.failure import first_failure
    from titanlite.launch.node import Node
    from titanlite.launch.workers import Signaled, Workers, fork_server

    forks = fork_server(only_imports, examine)
    environ = {
        DEVICE: device,
        ATTEMPT: "1",
        **worker_environment(nodes, processes, environ),
    }
    with tempfile.TemporaryDirectory(prefix="titanlite-") as name:
        folder = Path(name)
        config = with_values(job.config, {"job.dump_folder": name})
        node = Node(nodes, processes, config, folder)

        def work(attempt: Attempt, watch: Callable[[], None]) -> Ended:
            part = to_toml(job.given), attempt.ranks, attempt.world, node.address
            workers = Workers(overrides, *part, folder, folder, environ, __name__, forks)
            exits, reason = workers.run(watch)
            failure = first_failure(exits, folder, folder, socket.gethostname())
            if 0 in attempt.ranks:
                log = rank_log(folder, 0).read_text(encoding="utf-8", errors="replace")
                print(untimed(log.partition(FAILED_MARK)[0]), end="", flush=True)
            elif not failure and not reason:
                print("titanlite: node 0 prints the result")
            return Ended(failure, over=bool(failure or reason))

        try:
            with leaving(node):
                verdict = Attempts(node, config, folder, work, saves=False).run(node.meet())
        except Signaled as signaled:
            return 128 + signaled.number
        for stacks in folder.glob("logs/hang-*.txt"):
            print(stacks.read_text(encoding="utf-8"))
    assert verdict.code is not None  # there are no restarts
    return verdict.code


def examine(job: Job, rank: RankInfo, environ: Mapping[str, str]) -> None:
    """Run as a worker: on rank 0, print a table of the ranks and the times of their network."""
    import torch

    from titanlite.fault.beat import Heart
    from titanlite.observe.memory import machine_bytes
    from titanlite.parallel.mesh import build_mesh
    from titanlite.runtime.distributed import gather_on_rank_0, pick_device, process_group
    from titanlite.tools.slow_ranks import exchange_in_pairs, slow_ranks
    from titanlite.train.network import check_network
    from titanlite.train.rank_facts import facts_of, notable, require_equal

    device = pick_device(job.config.job.device, rank.local_rank)
    private = Path(environ[RESOLVED_CONFIG]).parent
    with process_group(rank, device, job.config.comm, private, dict(environ)):
        heart = Heart(job.config, rank, environ, on_stop=lambda reason: None)
        heart.start()
        machine = f"{cores()} cores, {format_bytes(machine_bytes())}, {pressure()}"
        facts = gather_on_rank_0(facts_of(job, rank, device, machine))
        hosts = gather_on_rank_0(strain(rank))
        if rank.rank == 0:
            build = torch.__config__.show().strip().splitlines()
            lines = [*shown_variables(environ), "", f"{sys.executable}, {platform.platform()}"]
            lines += [line for line in build if "Build settings" not in line]
            print(f"titanlite doctor, {time.strftime('%F %T %z')}\n\n{facts_table(facts)}\n")
            print("environment of rank 0", *(f"  {line}" for line in lines), sep="\n", end="\n\n")
        require_equal(facts, rank.world)
        mesh = build_mesh(job.layout, device.type).world
        OWN_PAGE.enter("network")
        lines = [f"warning: {line}" for host in hosts for line in host]
        if rank.world == 1:
            lines += [f"warning: {line}" for line in notable(facts)]
        else:
            lines += check_network(mesh, device, facts)
            rounds = exchange_in_pairs(device)
            lines += [f"warning: {line}" for line in slow_ranks(rounds, facts)]
        if not any(line.startswith("warning") for line in lines):
            lines.append("nothing looks wrong")
        if rank.rank == 0:
            print(f"mesh       {job.layout}", *lines, sep="\n")
    heart.end()


def pressure() -> str:
    """Return what may slow or stop ranks: load, shared memory, and the limit of open files."""
    parts = [f"load {os.getloadavg()[0]:.1f} of {os.cpu_count()} CPUs"]
    if os.path.isdir("/dev/shm"):
        parts.append(f"{format_bytes(shutil.disk_usage('/dev/shm').free)} free in /dev/shm")
    parts.append(f"ulimit -n {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}")
    return ", ".join(parts)


def strain(rank: RankInfo) -> list[str]:
    """Return what slows this rank's host; empty on all but its first rank."""
    lines: list[str] = []
    if rank.local_rank > 0:
        return lines
    load = os.getloadavg()[1]
    if load > (os.cpu_count() or 1):
        lines.append(f"{rank.host} is busy: its load was {load:.0f} in the last five minutes")
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").total < _SHARED_MEMORY:
        lines.append(f"/dev/shm of {rank.host} is smaller than {format_bytes(_SHARED_MEMORY)}")
    return lines


def facts_table(facts: Sequence[RankFacts]) -> str:
    """Return a line for each host, or several if its ranks differ."""
    from titanlite.train.rank_facts import by, named

    header = "ranks host device software Python revision config machine disk clock".split()
    rows = []

    def kind(own: RankFacts) -> tuple[str, ...]:
        return own.host, own.gpu, own.device, own.software, own.python, own.config

    for group in by(kind, facts).values():
        first = group[0]
        free = format_bytes(min(own.free_bytes for own in group)) + " free"
        revision = first.revision[:10] + first.revision[40:]
        clock = min(own.clock for own in group) - facts[0].clock
        ranks = named(group).split()[1:-2]
        device = first.gpu or first.device
        what = device, first.software, first.python, revision, first.config_hash, first.machine
        rows.append((" ".join(ranks), first.host, *what, free, f"{clock:+.1f} s"))
    return format_table(rows, header)


def shown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that matter to a run, without possible secrets and without passwords in
    addresses.
    """
    names = []
    for name in sorted(environ):
        if re.fullmatch(_SHOWN, name) and not re.search(_SECRET, name):
            names.append(name)
    return [f"{name}={re.sub('//[^/@]+@', '//…@', environ[name])}" for name in names]


def _read_traces(folder: Path) -> int:
    """Print torch's analysis of a folder of dumps."""
    dumps = [path.name for path in folder.glob(f"{_DUMP}*")]
    if not dumps:
        why = "no dumps there"
        if not folder.is_dir():
            why = "no such folder"
        raise UserError(
            f"--traces {folder}: {why}; expected are files {_DUMP}0, {_DUMP}1, …, which NCCL "
            "writes to comm.save_traces_folder of the dump folder when a collective times out"
        )
    with redirect_stderr(sys.stdout):  # torch's logger would write to stderr
        from torch.distributed.flight_recorder import fr_trace
    options = [str(folder), "--prefix", _DUMP]
    try:
        try:
            fr_trace.main(options)
        except AssertionError as error:
            if "Missing dump files" not in str(error):
                raise
            print(
                f"titanlite: {first_line(error)}: these never reached the timeout, "
                "or could not write"
            )
            fr_trace.main([*options, "--allow-incomplete-ranks"])
    except Exception as error:  # the files are not torch's, or of another version
        raise RunFailed(
            f"--traces {folder}: torch cannot read {', '.join(dumps)}: {error!r}"
        ) from None
    return OK


if __name__ == "__main__":
    main(examine)
