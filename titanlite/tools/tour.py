"""`titanlite tour`: check the main promises on this machine, without network, in under three
minutes on two cores.

Every step is a command that a user could type, and prints what it shows; the first failed check
ends the tour."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from titanlite.checkpoint.manifest import latest_complete
from titanlite.config.options import declare
from titanlite.errors import UserError, install_command
from titanlite.runtime.store import LocalPath
from titanlite.tools.record import read_run

STEPS = 24
INTERVAL = 6
KILL_AFTER = 14
RUN = f"""
    --training.steps {STEPS} --training.seq_len 64
    --training.global_batch_size 8 --training.local_batch_size 2
    --lr_scheduler.warmup_steps 5 --checkpoint.interval {INTERVAL}
    --job.device cpu --generate.no_at_end
    --validation.freq {STEPS} --validation.steps 5
    --metrics.no_enable_tensorboard --job.dump_folder"""
SECONDS_TO_START = 300
_COMPARE = """
import sys, torch
from transformers import AutoModelForCausalLM
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.runtime.store import LocalPath
from titanlite.tools.load import find_checkpoint, load_model
dump, exported = sys.argv[1:]
job = job_from(parse_command_line(["--config", f"{dump}/config.toml"], {}), \
world=None, training=False)
model = load_model(job, find_checkpoint(LocalPath(dump)), torch.device("cpu"))
exported_model = AutoModelForCausalLM.from_pretrained(exported)
tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    print((model(tokens) - exported_model(tokens).logits).abs().max().item())
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the command's options."""
    declare(parser, {"--to FOLDER": ("an empty folder (default: a temporary one)", Path)})
    parser.epilog = "example: titanlite tour --to tour"


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Take every step of the tour."""
    folder = arguments.to or Path(tempfile.mkdtemp(prefix="titanlite-tour-"))
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--to {folder}: the folder must be empty")
    start = time.monotonic()
    dump = folder / "run"
    _kill_and_resume(dump)
    _compare_with_one_process(dump, folder / "single")
    _export(dump, folder / "exported")
    _print("6  Generate text with the model after so few steps:")
    print(_titanlite("generate --tokens 60 --prompt def --config", dump / "config.toml").rstrip())
    print(f"\n{time.monotonic() - start:.0f} seconds; everything is in {folder}")
    return 0


def _kill_and_resume(dump: Path) -> None:
    _print(
        "1  Train a Llama with a million parameters on 4 processes, "
        "FSDP 2 x tensor parallel 2; kill -9 all."
    )
    _train_and_kill(dump)
    killed_at = read_run(dump).steps[-1]
    saved = latest_complete(LocalPath(dump, "checkpoint"))
    newest = f"checkpoint step-{saved} is complete" if saved else "no checkpoint is complete"
    _check(
        saved is not None and killed_at - saved <= 2 * INTERVAL,
        f"killed at step {killed_at}, and {newest}",
        f"killed at step {killed_at}, but {newest}: more than {2 * INTERVAL} steps would be lost",
    )
    _print("2  Resume the run on 2 processes, FSDP 2 without tensor parallel, and validate.")
    out = _titanlite(f"train {RUN}", dump, NGPU="2")
    _check(
        f"resumed step {saved}" in out,
        f"it resumed step {saved} on the other mesh without any option",
        f"it did not resume step {saved} on the other mesh:\n{out}",
    )
    steps = read_run(dump).steps
    _check(
        steps == list(range(1, STEPS + 1)),
        f"metrics.jsonl has each of the {STEPS} steps once",
        f"metrics.jsonl should have each of the {STEPS} steps once, and has {steps}",
    )


def _compare_with_one_process(dump: Path, single: Path) -> None:
    _print("3  Run the same training uninterrupted in one process.")
    _titanlite(f"train {RUN}", single, NGPU="1")
    runs = read_run(dump), read_run(single)
    losses = []
    for run in runs:
        losses.append(np.append(run.values("loss"), run.values("validation_loss")))
    worst = np.abs(losses[0] - losses[1]).max()
    _check(
        worst < 1e-4,
        f"training and validation losses differ by at most {worst:.1e}",
        f"training or validation losses differ by {worst:.1e}, and may differ by 1e-04: "
        f"compare {dump}/metrics.jsonl with {single}/metrics.jsonl",
    )


def _export(dump: Path, exported: Path) -> None:
    _print("4  List and verify the checkpoints, and export the last one to Hugging Face's format.")
    print(_titanlite("checkpoint ls --full", dump), end="")
    _titanlite("checkpoint verify", dump)
    print("   checked: every byte matches its checksum", flush=True)
    _titanlite("checkpoint export", dump, exported)
    names = ", ".join(sorted(path.name for path in exported.iterdir())) or "nothing"
    _check("config.json" in names, f"exported {names}", f"no config.json in {exported}: {names}")
    _print("5  Load it with transformers, which shares no code with titanlite.")
    if not find_spec("transformers"):
        print(f"   skipped: transformers is not installed: {install_command('transformers')}")
        return
    worst = float(_python("-c", _COMPARE, str(dump), str(exported)))
    _check(
        worst < 1e-5,
        f"its logits are within {worst:.1e} of titanlite's",
        f"its logits differ from titanlite's by {worst:.1e}, and may differ by 1e-05",
    )


def _print(heading: str) -> None:
    print(f"\n{heading}", flush=True)


def _check(holds: bool, checked: str, failed: str) -> None:
    if not holds:
        raise UserError(f"FAILED: {failed}")
    print(f"   checked: {checked}", flush=True)


def _titanlite(command: str, *paths: Path, **environ: str) -> str:
    """Return the output of a command with these paths, which may have blanks, at its end."""
    arguments = [*command.split(), *map(str, paths)]
    variables = [f"{name}={value}" for name, value in environ.items()]
    print(f"   {shlex.join([*variables, 'titanlite', *arguments])}", flush=True)
    return _python("-m", "titanlite", *arguments, **environ)


def _python(*arguments: str, **environ: str) -> str:
    """Return the output of a command; raise a UserError with all of it if the command fails."""
    command = [sys.executable, *arguments]
    variables = {**os.environ, **environ}
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _train_and_kill(run: Path) -> None:
    """Start a run on 4 ranks, and kill all its processes at once after step KILL_AFTER."""
    arguments = [*f"train --parallelism.tensor_parallel_degree 2 {RUN}".split(), str(run)]
    print(f"   NGPU=4 titanlite {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "titanlite", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env={**os.environ, "NGPU": "4"}, stdout=log, stderr=log)
        deadline = time.monotonic() + SECONDS_TO_START
        try:
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(UserError):  # there is no record yet, or an incomplete one
                    if KILL_AFTER in read_run(run).steps:
                        return
                time.sleep(0.02)
        finally:
            _kill_all(process)
        log.seek(0)
        raise UserError(
            f"the run ended before step {KILL_AFTER}, at which to kill it:\n{log.read()}"
        )


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and all its descendants, which have their own process groups."""
    listing = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], text=True)
    parents = [tuple(map(int, line.split())) for line in listing.splitlines()]
    family = [process.pid]
    for ancestor in family:  # grows during the loop
        family += [pid for pid, parent in parents if parent == ancestor]
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
