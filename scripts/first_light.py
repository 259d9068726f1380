"""First light: check and measure titanlite on a machine with GPUs in ten minutes, and print a
Markdown table.

Each row is a command with its own time limit; the rows after a failed one run, too. A row is "ok"
if its command ends with the expected code and prints the expected output. Complete outputs are kept
in files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
TITANLITE = [sys.executable, "-m", "titanlite"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
PARALLEL = "--parallelism."
QUIET = (
    "--validation.no_enable --generate.no_at_end --checkpoint.no_enable --fault.no_preflight "
    "--metrics.no_enable_tensorboard --training.mixed_precision_param=bfloat16"
).split()
UNPLANNED_GIB = 0.15
"""Most memory that a step may take besides the plan: cuBLAS's workspaces, and rounding."""
FAILED = 1
"""titanlite's exit code for a failed run."""
DOES_NOT_FIT = 2
"""titanlite's exit code for a plan that does not fit its GPU."""
MOST_CHARACTERS = 300
"""Characters of an error in the table; the complete output is in a file."""
END_SECONDS = 10
"""Seconds that a command has to end after a request."""


@dataclass
class Row:
    """A command, and what it must show."""

    name: str
    seconds: float
    argv: list[str]
    find: Callable[[str, Path], str]
    """Returns the result found in the output and the run's folder; raises ValueError if it is
    missing.
    """
    code: int = 0
    environ: dict[str, str] = field(default_factory=dict)


@dataclass
class Machine:
    """What the rows depend on."""

    gpus: int
    package: list[str]
    """The option of a package of models, for tests."""

    @property
    def train(self) -> list[str]:
        return [*TITANLITE, "train", *QUIET, "--job.dump_folder=FOLDER", *self.package]


def shows(*patterns: str) -> Callable[[str, Path], str]:
    """Return a function that finds the patterns in an output, and returns their last groups."""

    def find(out: str, folder: Path) -> str:
        found = []
        for pattern in patterns:
            match = re.search(pattern, out)
            if not match:
                raise ValueError(f"no '{pattern}' in the output")
            found.append(match.group(match.lastindex or 0))
        return "; ".join(found)

    return find


def bandwidths(out: str, folder: Path) -> str:
    """Return the lines of benchmarks/bandwidth.py."""
    lines = re.findall(r"^.* GB/s$", out, re.MULTILINE)
    if not lines:
        raise ValueError("no bandwidth in the output")
    return ", ".join(lines)


def verified(out: str, folder: Path) -> str:
    """Return the largest errors of the rows of `titanlite verify`, by precision."""
    worst: dict[str, float] = {}
    for precision, error in re.findall(r"(float32|bfloat16) +(\S+)  \S+  pass", out):
        worst[precision] = max(worst.get(precision, 0.0), float(error))
    count = shows(r"(all \d+ rows equal|the row equals) one process")(out, folder)
    errors = [f"{precision} {error:.1e}" for precision, error in worst.items()]
    return f"{count} one process; largest error {', '.join(errors)}"


def read_records(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def last_step(folder: Path) -> dict[str, float]:
    """Return the record of a run's last steps."""
    return [record for record in read_records(folder / "metrics.jsonl") if "tps" in record][-1]


def resumed(out: str, folder: Path) -> str:
    """Return the final loss of a run, which must equal that of a resume from its middle."""
    shows("resumed step 3")(out, folder)
    losses = []
    for name in ("whole.jsonl", "metrics.jsonl"):
        found = read_records(folder / name)
        losses.append({each["step"]: each["loss"] for each in found if "loss" in each})
    if losses[0] != losses[1] or len(losses[0]) != 6:
        raise ValueError(f"losses {losses[0]}, and with a resume after step 3 {losses[1]}")
    return f"resumed after step 3: the same losses, at step 6 {losses[0][6]:.6g}"


def memory(out: str, folder: Path) -> str:
    """Return the memory of a step, planned and measured."""
    config = ["--config", str(folder / "config.toml")]
    command = [*TITANLITE, "plan", *config, "--gpu=h100-80g", f"--world={ranks(folder)}", "--json"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if plan.returncode not in (0, DOES_NOT_FIT):
        raise ValueError(f"titanlite plan: {reason(plan.stderr)}")
    expected = json.loads(plan.stdout)["memory"]["peak"] / 2**30
    measured = last_step(folder)["memory_gib"]
    text = f"planned {expected:.2f} GiB, measured {measured:.2f} GiB"
    if abs(measured - expected) > UNPLANNED_GIB + 0.01 * expected:
        raise ValueError(text)
    return text


def ranks(folder: Path) -> int:
    """Return the number of ranks of a run."""
    return len([*(folder / "logs").glob("rank-*.log")])


def speed(out: str, folder: Path) -> str:
    """Return the speed of a run's last steps, and its memory."""
    last = last_step(folder)
    share = f", MFU {last['mfu']:.1f} %" if last["mfu"] is not None else ""
    rate = f"{last['tps']:,.0f} tokens/s a GPU, {last['tflops']:.4g} TFLOP/s{share}"
    return f"{rate}, {last['memory_gib']:.2f} GiB"


def plain_speed(out: str, folder: Path) -> str:
    """Return the speed of the plain loop."""
    record = json.loads((folder / "plain.json").read_text())
    rate = record["tokens_per_second_per_device"]
    return f"{rate:,.0f} tokens/s on one GPU, {record['tflops']:.4g} TFLOP/s"


def recorded(gpus: int) -> Callable[[str, Path], str]:
    """Return a function that finds the report of a hang, and each rank's record of collectives."""

    def find(out: str, folder: Path) -> str:
        report = shows(r"the run hangs: [^\n]+")(out, folder)
        records = len([*folder.glob("comm_traces/rank_*")])
        if gpus == 1:
            return report
        if records != gpus:
            raise ValueError(f"{records} records of collectives, of {gpus} ranks: {report}")
        return f"{report}; {records} records of collectives"

    return find


def checks(machine: Machine) -> Iterator[Row]:
    """Yield the rows that check correctness."""
    network = r"all-reduce over ([^\n]+)|nothing looks wrong|warning: "
    versions = r"torch [^\s,]+", r"NCCL \S+ by \w+", network
    yield Row("versions", 60, [*TITANLITE, "doctor", *machine.package], shows(*versions))
    copies = [*TORCHRUN, f"--nproc-per-node={machine.gpus}", "benchmarks/bandwidth.py"]
    yield Row("bandwidths", 60, copies, bandwidths)
    # If there are fewer GPUs, ranks share them.
    verify = [*TITANLITE, "verify", "--device=cuda", f"--ranks={max(4, machine.gpus)}"]
    verify += machine.package
    yield Row("verify", 240, verify, verified)
    experts = "--model.name=qwen3 --model.flavor=debugmodel_moe --only=ep2".split()
    yield Row("verify experts", 60, [*verify, *experts], verified)
    kept = "--debug.deterministic --training.seq_len=256 --metrics.log_freq=1".split()
    kept += "--checkpoint.enable --checkpoint.interval=3 --training.steps=6".split()
    train = [*machine.train, *kept]
    for name, options in {
        "a resume": ["--checkpoint.async_mode=async_with_pinned_mem"],
        "a resume, offloaded": ["--training.enable_cpu_offload"],
    }.items():
        forget = 'rm -r "$0/checkpoint/step-6" && cp "$0/metrics.jsonl" "$0/whole.jsonl"'
        twice = ["sh", "-c", f'"$@" && {forget} && "$@"', "FOLDER", *train, *options]
        yield Row(name, 60, twice, resumed)
    if find_spec("pytest"):
        # These words select the eager tests on one GPU.
        tests = "tests/train/test_waiting.py -q -p no:cacheprovider -k".split()
        command = [sys.executable, "-m", "pytest", *tests, "synchronizes and False"]
        yield Row("no waits in a step", 90, command, shows(r"\d+ passed|^\.+ "))


def failures(machine: Machine) -> Iterator[Row]:
    """Yield the rows in which the last rank is made to fail."""
    rank = machine.gpus - 1
    quick = "--training.steps=8 --training.seq_len=128 --fault.stall_seconds=10".split()
    command = [*machine.train, *quick]
    if not machine.package:
        command.append("--model.package=injured")
    named = rf"the run hangs: [^\n]+ (rank {rank}: [^\n]+)"
    host = {"INJURY": f"sleep:backward:{rank}:3"}
    yield Row("a hang", 60, command, shows(named), FAILED, host)
    gpu = {"INJURY": f"endless:backward:{rank}:3"}
    yield Row("a kernel without end", 60, command, recorded(machine.gpus), FAILED, gpu)
    saving = "--checkpoint.enable --checkpoint.interval=2 --checkpoint.async_mode=disabled".split()
    killed = {"INJURY": f"kill:backward:{rank}:5"}
    restart = shows(r"restart 1 of 3, from [^\n]*(step-4[^\n]*)")
    yield Row("a killed rank", 90, [*command, *saving], restart, environ=killed)


def timed(machine: Machine) -> Iterator[Row]:
    """Yield the rows that measure memory and speed: the last five of ten steps."""
    model = "--model.flavor=1B --training.seq_len=8192 --training.local_batch_size=1".split()
    plain = "--flavor=1B --seq=8192 --batch=1".split()
    train = [*machine.train, *model, "--metrics.log_freq=5"]
    by_operation = "--activation_checkpoint.mode=selective".split()
    eager = [*train, *by_operation, "--training.steps=5"]
    yield Row("memory, eager", 60, eager, memory)
    loop = [sys.executable, "benchmarks/plain.py", *plain, "--compile", "--steps=5", "--warmup=5"]
    yield Row("plain loop, compiled", 90, [*loop, "--json=FOLDER/plain.json"], plain_speed)
    compiled = [*train, "--training.steps=10", "--compile.enable"]
    for name, options in techniques(machine.gpus).items():
        yield Row(f"titanlite, {name}", 90, [*compiled, *options], speed)


def techniques(gpus: int) -> dict[str, list[str]]:
    """Return the options of each timed row."""
    by_operation = "--activation_checkpoint.mode=selective"
    experts = (
        "--model.name=qwen3 --model.flavor=30B-A3B --model.overrides.n_layers=2 "
        "--training.seq_len=4096 --training.local_batch_size=2"
    )
    found = {
        "compiled": "--activation_checkpoint.mode=none",
        "compiled, recompute by operation": by_operation,
        "float8": f"{by_operation} --quantize.linear.float8.enable",
        "documents": f"{by_operation} --training.document_mask",
        "experts": experts,
    }
    if gpus > 1:
        found |= {
            "experts": f"{experts} {PARALLEL}expert_parallel_degree={gpus}",
            "tensor parallel 2": f"{by_operation} {PARALLEL}tensor_parallel_degree=2",
            f"context parallel {gpus}": f"{PARALLEL}context_parallel_degree={gpus}",
            "pipeline parallel 2": (
                f"{PARALLEL}pipeline_parallel_degree=2 --training.local_batch_size=8 "
                f"{PARALLEL}pipeline_parallel_schedule=Interleaved1F1B"
            ),
        }
    return {name: options.split() for name, options in found.items()}


def torchtitan(machine: Machine) -> Iterator[Row]:
    """Yield the debug model with TorchTitan's own trainer, if it is installed with its configs."""
    found = find_spec("torchtitan")
    if not found or not found.submodule_search_locations:
        return
    checkout = Path(found.submodule_search_locations[0]).parent
    config = checkout / "torchtitan/models/llama3/train_configs/debug_model.toml"
    if config.exists():
        launcher = [*TORCHRUN, f"--nproc-per-node={machine.gpus}"]
        # Its configs name files relative to its checkout.
        words = f"-m torchtitan.train --job.config_file {config} --training.steps=10".split()
        command = ["env", f"--chdir={checkout}", *launcher, *words]
        yield Row("TorchTitan, debug model", 90, command, shows(r"(?s:.*)(tps: [^\n]+)"))


def with_loss(out: str, folder: Path) -> str:
    """Return the speed of a run's last steps, and its last loss."""
    return f"{speed(out, folder)}, loss {last_step(folder)['loss']:.6f}"


def compared(machine: Machine, before: Path | None) -> Iterator[Row]:
    """Yield an earlier checkout, this one and TorchTitan in turn, on one GPU: the last ten of
    twenty steps of two models.
    """
    sys.path.insert(0, str(ROOT))
    from benchmarks.beside_torchtitan import MODELS, options_of, torchtitan_of

    one = {"CUDA_VISIBLE_DEVICES": "0", "NGPU": "1"}
    length = ["--training.steps=20", "--metrics.log_freq=10"]
    checkouts = {"now": ROOT}
    if before:
        checkouts = {"before": before.absolute(), "now": ROOT}
    for name in ("8b6", "1b"):
        model = MODELS[name]
        own = [*machine.train, *options_of(model), *model.ours.split(), *length]
        for turn, checkout in checkouts.items():
            command = ["env", f"--chdir={checkout}", *own]
            yield Row(f"{name}, {turn}", 90, command, with_loss, environ=one)
        if not find_spec("torchtitan"):
            continue
        words, variables = torchtitan_of(model)
        variables |= one
        command = [*TORCHRUN, "--nproc-per-node=1", "-m", *words, *length]
        command += ["--job.dump_folder=FOLDER", "--metrics.disable_color_printing"]
        find = shows(r"(?s:.*)step: 20 [^\n]*(memory: [^\n]+)")
        yield Row(f"{name}, TorchTitan", 90, command, find, environ=variables)


def run(row: Row, limit: float, folder: Path) -> tuple[bool, str]:
    """Run a row in its own folder; return whether it is ok, and what it shows."""
    folder.mkdir(parents=True)
    argv = [word.replace("FOLDER", str(folder)) for word in row.argv]
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={**os.environ, **row.environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        in_time = ends(process, limit)
        out.seek(0)
        text = out.read()
    last = reason(text)
    if not in_time:
        return False, f"not done within {limit:.0f} s: {last}"
    if process.returncode != row.code:
        return False, f"exit {process.returncode}: {last}"
    try:
        return True, row.find(text, folder)
    except (ValueError, OSError, KeyError, IndexError) as error:
        return False, str(error)


def reason(text: str) -> str:
    """Return an output from its last error on, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    errors = [n for n, line in enumerate(lines) if re.search(r"FAILED|Error|error:", line)]
    first = max(errors, default=len(lines) - 1)
    return "; ".join(lines[first:])[:MOST_CHARACTERS]


def ends(process: subprocess.Popen, limit: float) -> bool:
    """Wait for a command; return whether it ended by itself. Its child processes end with it."""
    in_time = True
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        in_time = False
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return in_time


def all_rows(machine: Machine) -> list[Row]:
    return [*checks(machine), *failures(machine), *timed(machine), *torchtitan(machine)]


def table(rows: list[Row], seconds: float, folder: Path) -> tuple[bool, list[str]]:
    """Run the rows; return whether all are ok, and the lines of the table."""
    lines = ["| row | | what it shows | s |", "|---|---|---|---|"]
    passed = True
    until = time.monotonic() + seconds
    for number, row in enumerate(rows):
        start = time.monotonic()
        limit = min(row.seconds, until - start)
        good = False
        text = "not started: no time was left"
        if limit > 0:
            print(f"first light: {row.name} …", file=sys.stderr, flush=True)
            place = f"{number:02}-{re.sub('[^a-z0-9]+', '-', row.name.lower())}"
            good, text = run(row, limit, folder / place)
        passed = passed and good
        mark = "ok" if good else "FAILED"
        cell = text.replace("|", "/").strip()
        lines.append(f"| {row.name} | {mark} | {cell} | {time.monotonic() - start:.0f} |")
    return passed, lines


def main() -> int:
    """Run the rows and print the table; return 0 if all are ok."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600, help="for all rows (default: 600)")
    parser.add_argument("--rows", default="", help="only rows whose name has this expression")
    parser.add_argument(
        "--compare", action="store_true", help="only rows beside TorchTitan 0.2.2, on one GPU"
    )
    parser.add_argument(
        "--before", type=Path, help="with --compare: an earlier checkout, to train the same models"
    )
    parser.add_argument("--patience", type=float, default=1, help="factor of each row's limit")
    parser.add_argument("--package", default="", help="model.package of each command, for tests")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "outputs/first-light",
        help="a folder in it gets the outputs of the rows and the table",
    )
    given = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("first light: torch finds no GPU here", file=sys.stderr)
        return 2
    paths = [str(ROOT), str(ROOT / "tests/outside"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    package = [f"--model.package={given.package}"] if given.package else []
    folder = given.folder.absolute() / time.strftime("%Y-%m-%d-%H-%M-%S")
    folder.mkdir(parents=True)
    machine = Machine(gpus, package)
    rows = all_rows(machine)
    if given.compare:
        rows = [*compared(machine, given.before)]
    rows = [row for row in rows if re.search(given.rows, row.name)]
    for row in rows:
        row.seconds *= given.patience
    passed, lines = table(rows, given.seconds, folder)
    name = torch.cuda.get_device_name(0)  # not earlier, since this process would take GPU memory
    lines = [f"{gpus} x {name}, torch {torch.__version__}", "", *lines]
    for module in ("torchtitan", "pytest"):
        if not find_spec(module):
            lines += ["", f"{module} is not installed here: its row was left out."]
    (folder / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    print(f"first light: whole outputs are in {folder}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
