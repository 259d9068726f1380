"""Facts about each rank, compared before the model is built, and warnings about their hosts.

Facts go to rank 0 in one gather; if any differ that must not, all ranks raise the same UserError.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from titanlite.config.job import Job
from titanlite.config.resharding import RESHARD
from titanlite.config.schema import with_values
from titanlite.config.toml import to_toml, toml_differences
from titanlite.data.fingerprint import fingerprint
from titanlite.errors import UserError, counted, format_bytes
from titanlite.observe.run_folder import git_revision, versions
from titanlite.runtime.cluster import RankInfo
from titanlite.runtime.distributed import gather_on_rank_0
from titanlite.runtime.torch_private import nccl_implementation

K = TypeVar("K")
CLOCK_SECONDS = 1.0
FREE_BYTES = 1 << 30
"""A warning is given if hosts' clocks are further apart, or the dump folder has less space."""


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank."""

    rank: int
    host: str
    config: str
    """The config without the paths that may differ between nodes."""
    device: str
    gpu: str
    software: str
    python: str
    revision: str
    """The checkout's revision; empty if unknown, and on all but a host's first rank."""
    machine: str
    free_bytes: int
    folder: str
    """Identifies the dump folder: hosts that share it have the same."""
    clock: float
    training: str = ""
    """The fingerprint of the data, once it is open."""
    validation: str = ""

    @property
    def commit(self) -> str:
        return self.revision.partition(" ")[0]  # the changed file may be a log

    @property
    def config_hash(self) -> str:
        return fingerprint(self.config)[:8]


MUST_BE_EQUAL = {
    "the config": "config",
    "the kind of device": "device",
    "the software": "software",
    "the code's revision": "commit",
    "the data of [training]": "training",
    "the data of [validation]": "validation",
}


def facts_of(job: Job, rank: RankInfo, device: torch.device, machine: str = "") -> RankFacts:
    """Return the facts of this rank.

    Call it on all ranks, so that they read their clocks at the same time.
    """
    software = f"titanlite {versions()['titanlite']}, torch {torch.__version__}"
    gpu = ""
    revision = None
    if rank.local_rank == 0:
        revision = git_revision()
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        software += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        software += f" by {nccl_implementation()}"
    folder = Path(job.config.job.dump_folder).absolute()
    folder = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    system = os.statvfs(folder)
    paths = r"^(dump_folder|hf_assets_path|dataset_path) = .*$"
    chosen = job.config.parallelism.fsdp_reshard_after_forward  # "auto" by each node's GPUs
    config = to_toml(with_values(job.given, {RESHARD: chosen}))
    config = re.sub(paths, "", config, flags=re.MULTILINE)
    if rank.world > 1:
        dist.barrier()
    return RankFacts(
        rank.rank,
        rank.host,
        config,
        device.type,
        gpu,
        software,
        platform.python_version(),
        revision or "",
        machine,
        system.f_bavail * system.f_frsize,
        f"{folder.stat().st_ino} {system.f_blocks} {system.f_files}",
        time.time(),
    )


def compare_ranks(own: RankFacts, world: int) -> list[RankFacts]:
    """Raise the same UserError on all ranks if they cannot train together.

    Return all facts on rank 0.
    """
    facts = gather_on_rank_0(own)
    require_equal(facts, world)
    return facts


def require_equal(facts: Sequence[RankFacts], world: int) -> None:
    """Raise the same UserError on all ranks if they cannot train together; rank 0 has the facts."""
    verdict = ["\n".join(differences(facts))]
    if world > 1:
        dist.broadcast_object_list(verdict)
    if verdict[0]:
        raise UserError(verdict[0])


def differences(facts: Sequence[RankFacts]) -> list[str]:
    """Return the facts that differ but must not, each value with its ranks and hosts."""
    lines = []
    for what, name in MUST_BE_EQUAL.items():
        groups = by(attrgetter(name), facts)
        groups.pop("", None)
        (first, *_), *others = groups.values() or [facts]
        found = [f"rank {first.rank} has {_value(what, first, first)}"]
        for group in others:
            verb = "have"
            if len(group) == 1:
                verb = "has"
            found.append(f"{named(group)} {verb} {_value(what, group[0], first)}")
        if others:
            lines.append(f"{what} differs between ranks: {', '.join(found)}")
    return lines


def _value(what: str, own: RankFacts, first: RankFacts) -> str:
    """Return a fact's value; for the config, its hash and the keys that differ."""
    if what != "the config":
        return getattr(own, MUST_BE_EQUAL[what])
    changed = []
    for key, change in toml_differences(first.config, own.config).items():
        changed.append(f"{key}: {change}")
    if not changed:
        return own.config_hash
    shown = changed[:4]
    if len(changed) > 4:
        shown.append(f"and {len(changed) - 4} more")
    return f"{own.config_hash} ({', '.join(shown)})"


def by(value_of: Callable[[RankFacts], K], facts: Iterable[RankFacts]) -> dict[K, list[RankFacts]]:
    """Group ranks by a value."""
    groups: dict[K, list[RankFacts]] = {}
    for own in facts:
        groups.setdefault(value_of(own), []).append(own)
    return groups


def named(facts: Sequence[RankFacts]) -> str:
    """Return a phrase such as "ranks 0-3, 6 on a, b"."""
    runs = []
    for _, run in groupby(enumerate(facts), lambda item: item[1].rank - item[0]):
        ranks = [own.rank for _, own in run]
        span = f"{ranks[0]}"
        if len(ranks) > 1:
            span += f"-{ranks[-1]}"
        runs.append(span)
    noun = "ranks"
    if len(facts) == 1:
        noun = "rank"
    hosts = dict.fromkeys(own.host for own in facts)
    return f"{noun} {', '.join(runs)} on {', '.join(hosts)}"


def agreement(facts: Sequence[RankFacts]) -> str:
    """Return a line with the facts that all ranks agree on."""
    first = facts[0]
    hosts = len({own.host for own in facts})
    ranks = f"{counted(len(facts), 'rank')} on {counted(hosts, 'host')}"
    revision = ""
    if first.revision:
        revision = f", revision {first.revision[:10]}{first.revision[40:]}"
    return (
        f"{ranks} agree: config {first.config_hash}, {first.software}, "
        f"Python {first.python}{revision}"
    )


def notable(facts: Sequence[RankFacts]) -> list[str]:
    """Return facts that are allowed but worth a warning."""
    hosts = by(lambda own: own.host, facts)
    lines = []
    for what, groups in (
        ("GPUs", by(lambda own: own.gpu, facts)),
        ("Pythons", by(lambda own: own.python, facts)),
    ):
        if len(groups) > 1:
            having = "; ".join(
                f"{named(group)}: {value or 'none'}" for value, group in groups.items()
            )
            lines.append(f"ranks have different {what}: {having}")
    clocks = {min(own.clock for own in group): host for host, group in hosts.items()}
    apart = max(clocks) - min(clocks)
    if apart > CLOCK_SECONDS:
        late = clocks[max(clocks)]
        early = clocks[min(clocks)]
        lines.append(
            f"the clock of {late} is {apart:.1f} s ahead of that of {early}, "
            "and so are the times in its logs"
        )
    folders = by(lambda own: own.folder, facts)
    if len(folders) > 1:
        each = "; ".join(named(group) for group in folders.values())
        lines.append(f"job.dump_folder is not shared: each of these has its own: {each}")
    for host, group in hosts.items():
        free = min(own.free_bytes for own in group)
        if free < FREE_BYTES:
            lines.append(f"job.dump_folder has only {format_bytes(free)} free on {host}")
    return lines
