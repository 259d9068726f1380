"""Put faults into a rank: INJURY="KIND:PHASE:RANK:STEP[:ATTEMPT], …", for a run with
--model.package=injured.

The rank meets the fault when it enters the phase in that step, once, in the first attempt, the one
that is named, or every one ("*"). Kinds: raise, kill, segv, core (segv, with a core in the folder
CORES), stop (SIGSTOP), sleep, spin (without giving up the GIL), deaf (sleep; SIGUSR2, the request
for a stack, ends it), endless (a kernel on the GPU), term and usr1 (which ask the run to stop), nan
and spike (of a gradient, in any phase). The start has step 0 and the phase "start"; "end" is after
all steps, whatever STEP says."""

import ctypes
import faulthandler
import os
import resource
import signal
import time
from typing import Any
from unittest import mock

ENDS = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "core": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "usr1": signal.SIGUSR1,
}


def injuries() -> list[tuple[str, str, int]]:
    """Return kind, phase and step of this rank's faults in this attempt."""
    mine = []
    for text in filter(None, os.environ.get("INJURY", "").split(",")):
        kind, phase, rank, step, *attempt = text.strip().split(":")
        if rank == os.environ.get("RANK") and (attempt or ["1"])[0] in (
            "*",
            os.environ.get("TITANLITE_ATTEMPT", "1"),
        ):
            mine.append((kind, phase, int(step)))
    return mine


def suffer(kind: str) -> None:
    print(f"injured: {kind}", flush=True)
    if kind == "core":
        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (most, most))
        os.chdir(os.environ["CORES"])
    if kind in ENDS:
        os.kill(os.getpid(), ENDS[kind])
    elif kind == "raise":
        raise ValueError("a fault was put in here")
    elif kind == "deaf":
        faulthandler.unregister(signal.SIGUSR2)
        time.sleep(1000)
    elif kind == "sleep":
        time.sleep(1000)
    elif kind == "endless":
        import torch

        torch.cuda._sleep(1 << 62)
    elif kind == "spin":
        ctypes.PyDLL(None).usleep(1_000_000_000)  # PyDLL holds the GIL while it waits


def prepare() -> None:
    import torch.distributed as dist

    from titanlite.runtime.page import OWN_PAGE, OwnPage
    from titanlite.train.step import StepRunner

    planned, enter, norm = list[tuple[str, str, int]](), OwnPage.enter, StepRunner.gradient_norm
    destroy, share = dist.destroy_process_group, OwnPage.share

    def begin() -> None:
        planned[:] = injuries()
        for kind, phase, _ in planned:
            if phase == "start":
                suffer(kind)

    def injured_share(self: Any, *arguments: Any) -> None:
        share(self, *arguments)
        begin()  # a rank that is forked from its launcher, which has imported this

    def injured_enter(self: Any, phase: str) -> None:
        enter(self, phase)
        for injury in [*planned]:
            kind, where, step = injury
            if (where, step) == (phase, self.step) and kind not in ("nan", "spike"):
                planned.remove(injury)
                suffer(kind)

    def injured_norm(self: Any, *arguments: Any) -> Any:
        for injury in [*planned]:
            if injury[0] in ("nan", "spike") and injury[2] == OWN_PAGE.step:
                planned.remove(injury)
                gradient = next(p.grad for p in self.parameters if p.grad is not None)
                gradient.mul_(float("nan") if injury[0] == "nan" else 1e4)
        return norm(self, *arguments)

    def injured_destroy() -> None:
        destroy()
        for kind, phase, _ in planned:
            if phase == "end":
                suffer(kind)

    mock.patch.object(OwnPage, "share", injured_share).start()
    mock.patch.object(dist, "destroy_process_group", injured_destroy).start()
    mock.patch.object(OwnPage, "enter", injured_enter).start()
    mock.patch.object(StepRunner, "gradient_norm", injured_norm).start()
    begin()


if os.environ.get("INJURY"):  # also in the launcher, which has no rank, but from which ranks fork
    prepare()
