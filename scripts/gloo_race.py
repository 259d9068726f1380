"""Show that the two threads of a gloo group damage the heap: torch alone, one process, no network.

    python scripts/gloo_race.py [THREADS, 2 by default]

ProcessGroupGloo::runLoop assigns the name of the collective that it has run to one string of the
group, after it has released its lock. "ALLGATHER_COALESCED", of _c10d_functional's gathers and so
of DTensor.full_tensor, is too long to lie inside the string: a thread that is preempted between
reading the old pointer and storing the new one puts a zero into memory that the other thread has
freed, and frees it again.

This pauses a thread there (at OFFSET in torch 2.14.1 for x86-64 with CUDA), as a scheduler may.
With two threads glibc ends the process within a few rounds ("unaligned fastbin chunk detected",
"double free or corruption"); with one it takes all rounds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

ROUNDS, MILLISECONDS, OFFSET = 30, 60, 0x202
PAUSE = r"""
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
static uint8_t *where, saved;
static struct timespec pause_time;
volatile int over;
static void handler(int number, siginfo_t *info, void *context) {
  greg_t *rip = &((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
  if ((uint8_t *)*rip != where + 1) return;
  *where = saved;
  *rip = (greg_t)where;
  nanosleep(&pause_time, 0);
  over++;
}
void pause_once(uint8_t *address, long milliseconds) {  /* the first thread that comes there */
  where = address;
  pause_time = (struct timespec){0, milliseconds * 1000000};
  struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGTRAP, &action, 0);
  mprotect((void *)((uintptr_t)where & ~4095UL), 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
  saved = *where;
  *where = 0xcc;
}
"""


class OneThread(dist.ProcessGroupGloo):
    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface="lo")]
        options._threads, options._timeout = 1, timeout
        super().__init__(store, rank, size, options)


def main() -> None:
    print(f"torch {torch.__version__}", flush=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if sys.argv[1:] == ["1"]:
        vars(distributed_c10d)["ProcessGroupGloo"] = OneThread
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD
    name, ones = dist.group.WORLD.group_name, torch.ones(1)
    operations = torch.ops._c10d_functional

    def gather() -> None:
        operations.wait_tensor(operations.all_gather_into_tensor(ones, 1, name))

    gather()
    pause = library()
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    loop = torch_cpu["_ZN4c10d16ProcessGroupGloo7runLoopEi"]
    start = ctypes.cast(loop, ctypes.c_void_p).value or 0
    over = ctypes.c_int.in_dll(pause, "over")
    for number in range(ROUNDS):
        pause.pause_once(start + OFFSET, MILLISECONDS)
        while over.value == number:
            gather()
        for _ in range(20):
            gather()
        print(f"round {number + 1} of {ROUNDS}", flush=True)
        time.sleep(0.01)


def library() -> ctypes.CDLL:
    """Compile and load what pauses a thread."""
    folder = Path(tempfile.mkdtemp())
    (folder / "pause.c").write_text(PAUSE)
    made = folder / "pause.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, folder / "pause.c"], check=True)
    loaded = ctypes.CDLL(str(made))
    loaded.pause_once.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return loaded


if __name__ == "__main__":
    main()
