"""Build the fake GPU, run the launcher on some, and read what their ranks did."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

import torch

from tests import runs

SOURCE = Path(__file__).with_name("fake_gpu.c")
LIBRARY = "libfake_gpu.so"
LOADED_BY_NAME = ("libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1")
LINKED = (
    "torch_cuda",
    "c10_cuda",
    "torch_python",
    "torch_cpu",
    "torch_cuda_linalg",
    "caffe2_nvrtc",
)
"""torch's libraries whose undefined symbols have to be there."""
FROM_CUDA = re.compile(r"(__)?cuda[A-Z_].*|cu[A-Z](?!ile).*|(cublas|cudnn|nccl).*")
BY_NAME = """
cuCtxPopCurrent cuCtxPushCurrent cuCtxSetLimit cuFuncSetAttribute cuFuncSetCacheConfig
cuLogsRegisterCallback cuLogsUnregisterCallback cuMemExportToShareableHandle cuMemGetAddressRange
cuMemGetAllocationPropertiesFromHandle cuMemImportFromShareableHandle cuMemMap
cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap cuMemsetD32Async cuModuleUnload
cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate cuMulticastUnbind cuPointerGetAttributes
cuStreamWriteValue32 cuStreamWriteValue32_v2 cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
""".split()
"""Functions of the driver that torch and Triton look up when they run."""


class Missing(Exception):
    """What the fake GPU needs and this machine lacks."""


def build() -> Path:
    """Return the folder of the library, compiled once for a version of torch."""
    if not torch.version.cuda:
        raise Missing(f"torch {torch.__version__} is not a CUDA build")
    for tool in ("gcc", "nm"):
        if not shutil.which(tool):
            raise Missing(f"{tool} is not installed")
    packages = Path(torch.__file__).parents[1]
    headers = [path.parent for path in packages.glob("nvidia/*/include/cuda_runtime_api.h")]
    if not headers:
        raise Missing(f"no cuda_runtime_api.h below {packages}/nvidia")
    version = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"titanlite-fake-gpu-{torch.__version__}-{version}")
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=tempfile.gettempdir()))
        _compile(made, [*headers, packages / "triton/backends/nvidia/include"])
        with suppress(OSError):  # another process was faster
            made.rename(folder)
    return folder


def _compile(folder: Path, headers: list[Path]) -> None:
    options = ["gcc", "-fPIC", "-O1", "-w", *(f"-I{each}" for each in headers)]
    own, stubs = folder / "fake_gpu.o", folder / "stubs.c"
    subprocess.run([*options, "-c", str(SOURCE), "-o", str(own)], check=True)
    wanted = {*BY_NAME}
    for linked in LINKED:
        library = Path(torch.__file__).parent / "lib" / f"lib{linked}.so"
        undefined = _symbols("--dynamic", "--undefined-only", library)
        wanted |= {name for name in undefined if FROM_CUDA.fullmatch(name)}
    missing = sorted(wanted - _symbols("--extern-only", "--defined-only", own))
    stubs.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in missing))
    library = folder / LIBRARY
    subprocess.run(
        [*options, "-shared", "-o", library, own, stubs, "-lpthread", "-ldl"], check=True
    )
    for name in LOADED_BY_NAME:
        (folder / name).symlink_to(LIBRARY)


def _symbols(*arguments: str | Path) -> set[str]:
    listing = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip()}


def environment(library: Path, folder: Path, gpus: int) -> dict[str, str]:
    """Return the variables with which a program sees this number of fake GPUs, and writes traces to
    the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "LD_PRELOAD": str(library / LIBRARY),
        "LD_LIBRARY_PATH": os.pathsep.join(
            filter(None, [str(library), os.environ.get("LD_LIBRARY_PATH")])
        ),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "FAKE_GPU_DIR": str(folder),
    }


@dataclass
class Event:
    """A line of a trace."""

    kind: str
    name: str
    facts: dict[str, str]
    mark: str
    """The newest mark before it."""


@dataclass
class Trace:
    """What a rank asked of its GPU."""

    events: list[Event] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]

    def step(self, number: int) -> Trace:
        """Return the part of a step, which the marks number: "STEP SEQUENCE PHASE"."""
        return Trace(
            [event for event in self.events if event.mark.partition(" ")[0] == str(number)]
        )

    def phase(self, name: str) -> Trace:
        return Trace([event for event in self.events if event.mark.split(" ", 2)[-1] == name])

    def waits(self) -> Counter[str]:
        """Count what the host waited for: events, streams, the device, copies of memory that is not
        page-locked.
        """
        copies = [event.facts for event in self.of("copy") if event.facts["waits"] == "1"]
        return Counter(
            [event.facts["for"] for event in self.of("wait")]
            + [f"{copy['way']} of {copy['memory']} memory" for copy in copies]
        )


def read_trace(file: Path) -> Trace:
    events, mark = [], ""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "mark":
            mark = rest
        is_text = kind in ("mark", "launch")
        words = [] if is_text else rest.split()
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        events.append(Event(kind, rest if is_text else rest.split(" ")[0], facts, mark))
    return Trace(events)


def read_traces(folder: Path) -> list[Trace]:
    """Return the newest trace of each rank."""
    newest = {}
    for file in sorted(folder.glob("rank-*.trace"), key=lambda file: file.stat().st_mtime_ns):
        newest[int(file.name.split(".")[0].removeprefix("rank-"))] = read_trace(file)
    return [newest[rank] for rank in sorted(newest)]


def mismatches(traces: list[Trace]) -> list[str]:
    """Return how ranks differ: in the collectives of a communicator, or by a send without its
    receive.
    """
    called: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[str, int] = {}
    open_ended: Counter[tuple[str, ...]] = Counter()
    for rank, trace in enumerate(traces):
        for event in trace.of("collective", "communicator", "send", "receive"):
            facts = event.facts
            if event.kind == "communicator":
                sizes[event.name] = int(facts["ranks"])
            elif event.kind == "collective":
                call = f"{event.name} of {facts['count']}, type {facts['type']}, {facts['more']}"
                called[facts["comm"]][rank].append(call)
            else:
                key = tuple(facts[name] for name in ("comm", "from", "to", "count", "type"))
                open_ended[key] += 1 if event.kind == "send" else -1
    unequal = [(key, number) for key, number in open_ended.items() if number]
    found = [f"{number:+d} sends without a receive: {key}" for key, number in unequal]
    for comm, by_rank in called.items():
        if len(by_rank) != sizes[comm]:
            found.append(f"{comm}: {sizes[comm]} ranks, but only {[*by_rank]} called")
        side_by_side = enumerate(zip_longest(*by_rank.values(), fillvalue="nothing"))
        differing = (each for each in side_by_side if len({*each[1]}) > 1)
        for position, calls in islice(differing, 1):
            found.append(f"{comm}, collective {position}: {dict(zip(by_rank, calls, strict=True))}")
    return found


@dataclass(frozen=True)
class Ran(runs.Run):
    """A run of the launcher on fake GPUs."""

    traces: list[Trace]


OPTIONS = (
    "--model.package=on_fake_gpu --training.mixed_precision_param=bfloat16 --metrics.log_freq=100 "
    "--metrics.no_enable_tensorboard --validation.no_enable --generate.no_at_end "
    "--checkpoint.no_enable "
    "--fault.no_preflight"
).split()


def train(
    library: Path,
    folder: Path,
    gpus: int,
    argv: list[str],
    seconds: int = 240,
    code: int = 0,
    **environ: str,
) -> Ran:
    """Run `titanlite train` and require its exit code; a step is logged if it is the first or the
    last.
    """
    traced = folder / "traces"
    variables = {**environment(library, traced, gpus), **environ}
    started = runs.start(
        [*OPTIONS, *argv], folder / "run", real="a library is preloaded", **variables
    )
    found, out = runs.finish(started, seconds)
    assert found == code, out
    return Ran(folder / "run", found, out, read_traces(traced))


def program(library: Path, folder: Path, gpus: int, *command: object) -> tuple[int, str]:
    """Run a program of Python on fake GPUs; return its exit code and what it printed."""
    variables = environment(library, folder / "traces", gpus)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **runs.environment(), **variables},
        cwd=runs.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout
