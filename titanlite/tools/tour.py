"""`titanlite tour`: the promises on this machine, in under three minutes on two cores, without network.

Every step is a command that a person could type, and says what it proves; the first that does not hold ends the tour.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titanlite.checkpoint.manifest import latest_complete
from titanlite.errors import UserError
from titanlite.tools.arguments import run_verb, split_options

USAGE = """  titanlite tour [--to FOLDER]
      Trains the debug model on a mesh, kills it, resumes it on another, and takes it to transformers. FOLDER, by
      default a temporary one, must be empty; what was made stays there.
"""
STEPS, INTERVAL, KILL_AFTER = 24, 6, 14
RUN = f"--training.steps {STEPS} --training.seq_len 64 --training.global_batch_size 8 --training.local_batch_size 2"
RUN += f" --lr_scheduler.warmup_steps 5 --checkpoint.interval {INTERVAL} --job.device cpu --generate.no_at_end"
RUN += f" --validation.freq {STEPS} --validation.steps 5 --metrics.no_enable_tensorboard"
SECONDS_TO_START = 300
_PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.tools.generate import chosen, load_model
from pathlib import Path
config, checkpoints, exported = sys.argv[1:]
ours = load_model(job_from(parse_command_line(["--config", config], {}), world=None, training=False),
                  chosen(Path(checkpoints)), torch.device("cpu"))
theirs = AutoModelForCausalLM.from_pretrained(exported)
tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    print((ours(tokens) - theirs(tokens).logits).abs().max().item())
"""


def tour(words: list[str]) -> int:
    """Run the verb; the exit code."""
    if {"--help", "-h"} & set(words):
        print(USAGE, end="")
        return 0
    return run_verb(lambda: _tour(words))


def _tour(words: list[str]) -> int:
    others, options = split_options("tour", words, {"--to": ""})
    if others:
        raise UserError(f"tour has no use for {' '.join(others)}")
    folder = Path(options["--to"] or tempfile.mkdtemp(prefix="titanlite-tour-"))
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--to {folder}: the folder must be empty")
    began, run, alone, exported = time.monotonic(), folder / "run", folder / "alone", folder / "exported"
    checkpoints = run / "checkpoint"

    _say("1", "4 processes train a Llama of a million parameters: FSDP 2 x tensor parallel 2. Then kill -9 for all.")
    _train_and_kill(run)
    at, saved = _records(run)[-1]["step"], latest_complete(checkpoints)
    _proved(saved is not None and at - saved <= 2 * INTERVAL, f"killed at step {at}, and step-{saved} is whole")

    _say("2", "The same run goes on with 2 processes, FSDP 2 and no tensor parallel, then validates.")
    out = _titanlite(f"train {RUN} --job.dump_folder {run}", NGPU="2")
    _proved(f"resumed step {saved}" in out, f"it resumed step {saved} on the other mesh, without being told")
    steps = [record["step"] for record in _records(run) if "loss" in record]
    _proved(steps == list(range(1, STEPS + 1)), f"metrics.jsonl has every step of {STEPS} once")

    _say("3", "The same training in one process that nobody kills.")
    _titanlite(f"train {RUN} --job.dump_folder {alone}", NGPU="1")
    pairs = zip(_records(run), _records(alone), strict=True)
    worst = max(abs(a[key] - b[key]) for a, b in pairs for key in ("loss", "validation_loss") if key in a)
    _proved(worst < 1e-4, f"no loss, of training or validation, is further than {worst:.1e} from it")

    _say("4", "Look at the checkpoints, and export the last one to Hugging Face's format.")
    print(_titanlite(f"checkpoint ls {run} --full"), end="")
    _titanlite(f"checkpoint verify {run}")
    _proved(True, "every byte is as it was written")
    _titanlite(f"checkpoint export {run} {exported}")
    _proved(
        (exported / "config.json").is_file(), f"exported: {', '.join(sorted(p.name for p in exported.iterdir()))}"
    )

    _say("5", "Read it with transformers, which shares no code with titanlite.")
    if find_spec("transformers"):
        apart = float(_run([sys.executable, "-c", _PROGRAM, f"{run}/config.toml", f"{checkpoints}", f"{exported}"]))
        _proved(apart < 1e-5, f"its logits are within {apart:.1e} of titanlite's")
    else:
        print("   left out: transformers is not installed here")

    _say("6", "What a model writes after so few steps:")
    print(_titanlite(f"generate --config {run}/config.toml --tokens 60 --prompt def").rstrip())
    print(f"\n{time.monotonic() - began:.0f} seconds; everything is in {folder}")
    return 0


def _say(number: str, text: str) -> None:
    print(f"\n{number}  {text}", flush=True)


def _proved(holds: bool, what: str) -> None:
    if not holds:
        raise UserError(f"this does not hold: {what}")
    print(f"   proved: {what}", flush=True)


def _titanlite(words: str, **environ: str) -> str:
    return _run([sys.executable, "-m", "titanlite", *words.split()], **environ)


def _run(command: list[str], **environ: str) -> str:
    """What a command printed; an error with all of it where it fails."""
    shown = " ".join(["titanlite", *command[3:]]) if command[1] == "-m" else "python …"
    print("   " + " ".join([*(f"{k}={v}" for k, v in environ.items()), shown]), flush=True)
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _records(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl about steps and validations; of a run that was killed the last may be cut."""
    path, found = run / "metrics.jsonl", []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n") and {"loss", "validation_loss"} & (record := json.loads(line)).keys():
            found.append(record)
    return found


def _train_and_kill(run: Path) -> None:
    """Start a run on 4 ranks, and kill all its processes at once after some steps."""
    words = f"train {RUN} --parallelism.tensor_parallel_degree 2 --job.dump_folder {run}"
    print(f"   NGPU=4 titanlite {words}", flush=True)
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "titanlite", *words.split()]
        process = subprocess.Popen(command, env={**os.environ, "NGPU": "4"}, stdout=log, stderr=log)
        deadline = time.monotonic() + SECONDS_TO_START
        try:
            while process.poll() is None and time.monotonic() < deadline:
                if (records := _records(run)) and records[-1]["step"] >= KILL_AFTER:
                    return
                time.sleep(0.02)
        finally:
            _kill_all(process)
        log.seek(0)
        raise UserError(f"the run was to be killed at step {KILL_AFTER}, and did not come that far:\n{log.read()}")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and all that it started, which have process groups of their own."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for pid, parent in (map(int, line.split()) for line in listed.splitlines()):
        children.setdefault(parent, []).append(pid)
    doomed = [process.pid]
    for pid in doomed:
        doomed += children.get(pid, [])
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
