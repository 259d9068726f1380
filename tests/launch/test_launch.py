"""`titanlite train` as a person meets it: exit codes, what is printed, what is left behind."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import empty_step
from tests.jobs import TEXT, TINY, job
from tests.launch.nodes import outputs, rendezvous, start_tasks, trained
from tests.messages import refused, says
from tests.runs import (
    ROOT,
    Run,
    descendants,
    environment,
    finish,
    left_over,
    python,
    records,
    run,
    signal_all,
    start,
)
from tests.tools.conftest import record, write
from titanlite.checkpoint.status import take_folder
from titanlite.cli import COMMANDS, main
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.config.toml import to_toml
from titanlite.errors import FAILED, REFUSED, STOPPED, RunFailed
from titanlite.fault.inspection import wait_until
from titanlite.launch import preflight
from titanlite.launch.failure import Exit, first_failure
from titanlite.launch.launcher import Launch, _end_early, _of_another_run, _put_back
from titanlite.launch.stopping import CTRL_C
from titanlite.observe.events import read_events
from titanlite.runtime import lock
from titanlite.runtime.page import EarlyExit
from titanlite.runtime.rank_files import LAUNCHED, rank_file
from titanlite.tools import config as config_command
from titanlite.train.ending import describe_end

SAVING = [word for word in TINY if word != "--checkpoint.no_enable"]
INJURED = [*TINY, "--model.package=injured"]
MOVED = "an earlier run's files"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch) -> None:
    """In this process `titanlite train` starts one, and leaves the signals alone."""
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    """Return a run of 3 steps on 2 ranks."""
    argv = [
        *TINY,
        "--metrics.enable_tensorboard",
        "--generate.at_end",
        "--generate.tokens=3",
        "--validation.enable",
        "--validation.steps=1",
        "--validation.freq=2",
        "--job.device=auto",
        "--fault.rejoin_seconds=60",
    ]
    return run(argv, tmp_path_factory.mktemp("a finished run"), 2)


def test_a_run_leaves_its_files_and_says_where(finished):
    folder, out = finished.folder, finished.out
    lines = finished.records
    assert [r["step"] for r in lines] == [1, 2, 2, 3, 3]
    assert lines[0].keys() == set(
        "step loss max_loss grad_norm lr tokens tps tflops mfu step_seconds step_seconds_p50 "
        "step_seconds_p95 data_seconds memory_gib recompiles eta_seconds time".split()
    )
    assert lines[0]["mfu"] is None and lines[2].keys() == {"step", "validation_loss", "time"}
    says(out, "2 processes", "NGPU", "fault.rejoin_seconds", "dp_shard 2", "--logdir")
    assert "Traceback" not in out
    assert {path.name for path in (folder / "logs").iterdir()} >= {"rank-0.log", "rank-1.log"}
    assert any((folder / "tb").iterdir())
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["world_size"] == facts["mesh"]["dp_shard"] == 2 and facts["versions"]["torch"]
    assert facts["command"][:2] == ["titanlite", "train"]
    assert "--fault.rejoin_seconds=60" in facts["command"]
    line = parse_command_line(["--config", str(folder / "config.toml")], {})
    again = job_from(line, world=2, training=True).config
    assert again.training.seq_len == 16 and again.job.dump_folder == str(folder)
    assert again.job.device == "auto"  # so that the file also trains on a machine with GPUs


@pytest.mark.long
def test_a_resumed_run_counts_the_tokens_that_it_had(tmp_path):
    """Those of the checkpoint, then steps of another batch."""
    run([*SAVING, "--training.global_batch_size=8", "--training.steps=2"], tmp_path)
    argv = [*SAVING, "--training.global_batch_size=4", "--training.steps=5"]
    resumed = run(argv, tmp_path)
    says(resumed.out, "step 2, the only", f"64 tokens a step, {2 * 128 + 3 * 64} in all")
    tokens = [record["tokens"] for record in resumed.records if "tokens" in record]
    assert tokens[-1] == 2 * 128 + 3 * 64


# ---------------------------------------------------------------- refused before anything starts


def start_refused(argv: list[str], folder: Path, capsys) -> str:
    """Return what is printed in the place of a run; nothing is started."""
    assert main(["train", *TINY, f"--job.dump_folder={folder}", *argv]) == REFUSED
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err and not (folder / "logs").exists()
    return said.err


@pytest.mark.parametrize("kind", ["text", "tokens", "chat"])
def test_a_data_set_that_is_not_there_is_told_in_one_form_whatever_else_is_wrong(
    kind, tmp_path, capsys
):
    data, forms = [f"--training.dataset={kind}", "--training.dataset_path=/nope"], set()
    for more, errors in (([], 1), (["--optimizer.lr=x"], 2), (["--job.dump_folder=/proc/x"], 1)):
        err = start_refused([*data, *more], tmp_path, capsys)
        says(err, f"titanlite: {errors} configuration error")
        lines = err.splitlines()
        (at,) = [number for number, line in enumerate(lines) if "dataset_path" in line]
        says(lines[at], 'training.dataset_path = "/nope"', "(command line)")
        forms.add((lines[at], lines[at + 1]))
    assert len(forms) == 1


def test_a_config_too_large_for_this_machine_names_what_would_fit(tmp_path, capsys):
    argv = ["train", "--config", "llama_8b.toml", "--job.device=cpu"]
    assert main([*argv, f"--job.dump_folder={tmp_path}"]) == REFUSED
    err = capsys.readouterr().err
    says(err, "tokenizer.json", "119.7 GiB", "fit on ≥ ", "--model.flavor debugmodel")
    assert "405B" not in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "variables", "names"),
    [
        (
            "--job.device=cuda",
            "CUDA_VISIBLE_DEVICES=",
            'job.device = "cuda"|CUDA_VISIBLE_DEVICES=""',
        ),
        ("", "NNODES=2 NODE_RANK=0", "MASTER_ADDR"),
        (
            "--checkpoint.enable --fault.spare_nodes=2",
            "NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1",
            "fault.spare_nodes = 2|NNODES",
        ),
        ("", "MAX_RESTARTS=abc", "MAX_RESTARTS=abc"),
        ("", "OMP_NUM_THREADS=abc", "OMP_NUM_THREADS=abc"),
    ],
)
def test_an_option_or_a_variable_that_cannot_be_is_refused_before_anything_starts(
    argv, variables, names, tmp_path, capsys, monkeypatch
):
    for word in variables.split():
        monkeypatch.setenv(*word.split("="))
    folder = tmp_path / "run"
    says(start_refused(argv.split(), folder, capsys), *names.split("|"))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--checkpoint.initial_load_path={}/nowhere"], "nowhere is not"),
        (
            ["--checkpoint.initial_load_path={}/nowhere", "--checkpoint.initial_load_in_hf"],
            "Hugging Face model folder",
        ),
        (["--checkpoint.initial_load_path={}/hf"], "--model.flavor hf"),
        (["--checkpoint.initial_load_path={}/checkpoint"], "step-4/manifest.json: damaged"),
        (["--checkpoint.initial_load_path={}"], "step-4/manifest.json: damaged"),
        (["--checkpoint.enable", "--checkpoint.load_step=4"], "checkpoint.load_step: "),
        (["--checkpoint.enable", "--checkpoint.load_step=33"], "checkpoint.load_step = 33: "),
    ],
)
def test_what_a_run_would_start_from_is_refused_before_a_worker_starts(
    options, names, tmp_path, capsys
):
    for name in ("checkpoint/step-4/manifest.json", "hf/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    argv = [option.format(tmp_path) for option in options]
    err = start_refused([*argv, "--lr_scheduler.warmup_steps=0"], tmp_path, capsys)
    says(err, names, "there are: 4\n" if "33" in names else "nothing was started")
    if "initial_load_path" in options[0]:  # one of several errors, at once
        err = start_refused([*argv, "--training.stepz=3"], tmp_path, capsys)
        says(err, "training.stepz", "checkpoint.initial_load_path   (command line)")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint", "hf"}
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert not held, "as before, for what this process starts next"


def test_a_damaged_checkpoint_of_torchtitan_is_refused_before_a_worker_starts(tmp_path, capsys):
    (tmp_path / ".metadata").write_text("damaged")
    err = start_refused([f"--checkpoint.initial_load_path={tmp_path}"], tmp_path / "run", capsys)
    says(err, "nothing was started", f"{tmp_path}/.metadata: damaged")


def test_a_step_beside_the_folder_that_a_run_looks_in_is_refused_with_both(tmp_path, capsys):
    empty_step(tmp_path / "step-4", 4)
    err = start_refused(["--checkpoint.enable"], tmp_path, capsys)
    says(err, "job.dump_folder: ", f"{tmp_path}/step-4 ", f"{tmp_path}/checkpoint: move it there")


# ---------------------------------------------------------------- what failed first


def ends(private: Path, **ranks: tuple[Exit, dict[str, Any]]) -> dict[int, Exit]:
    """Leave what workers leave that end: their error files; return how they ended."""
    for path in private.glob("*.json"):
        path.unlink()
    for name, (_, error) in ranks.items():
        if error:
            words = error.get("message", "ValueError: x")
            details = {"py_callstack": f"a traceback of {error['time']}", "step": 7, **error}
            text = json.dumps({"message": {"message": words, "extraInfo": details}})
            rank_file(private, int(name[1:]), "json").write_text(text)
    return {int(name[1:]): exit for name, (exit, _) in ranks.items()}


KILLED, RAISED, ENDED = Exit(-9, 5.2), Exit(1, 5.2), Exit(-15, 5.2, ended=True)
FROZEN = Exit(-9, 5.2, ended=True, stopped=True)
FIRST, LATER = {"time": 5.0}, {"time": 5.1}


@pytest.mark.parametrize(
    ("first", "exits"),
    [
        (1, {"r0": (ENDED, {}), "r1": (RAISED, FIRST)}),
        (1, {"r0": (RAISED, LATER), "r1": (RAISED, FIRST), "r2": (ENDED, {})}),
        (2, {"r0": (RAISED, FIRST), "r2": (KILLED, {})}),
        (0, {"r0": (Exit(-15, 5.2), {})}),
        (1, {"r0": (FROZEN, {}), "r1": (RAISED, FIRST), "r2": (Exit(-9, 5.2, ended=True), {})}),
        (None, {"r0": (ENDED, {}), "r1": (Exit(0, 5.2), {})}),
    ],
)
def test_the_first_failure_is_distinguished_from_its_consequences(tmp_path, first, exits):
    """A killed rank is a cause, a rank that the launcher ended is not; the earliest of the others
    failed first.
    """
    (tmp_path / "logs").mkdir()
    for rank in range(3):
        (tmp_path / "logs" / f"rank-{rank}.log").write_text(f"the log of rank {rank}\n")
    failure = first_failure(ends(tmp_path, **exits), tmp_path, tmp_path, "here")
    assert (failure and failure.rank) == first
    if not failure:
        return
    text = failure.describe(tmp_path / "rank.log")
    says(text, f"rank {first} on here", f"{tmp_path}/rank.log")
    assert ("rank 0 hung" in text) == (exits["r0"][0] is FROZEN)
    assert failure.step == (7 if first == 1 else None)


def test_what_a_user_can_correct_is_one_message_with_the_ranks_that_said_it(tmp_path):
    """The launcher may have ended a rank before it could exit with its own code."""
    told = {"message": "UserError: x", "is_user_error": True}
    early, late = (Exit(-15, 6, ended=True), told | {"time": 5}), (Exit(2, 6), told | {"time": 6})
    failure = first_failure(ends(tmp_path, r0=early, r1=late), tmp_path, tmp_path, "here")
    assert failure and (failure.code, failure.text, failure.told_by) == (REFUSED, "x", (0, 1))
    assert failure.describe(tmp_path) == "\ntitanlite: x"
    told |= {"message": "RunFailed: the data ended", "time": 6}
    failure = first_failure(ends(tmp_path, r1=(RAISED, told)), tmp_path, tmp_path, "here")
    assert failure and (failure.code, failure.is_user_error, failure.told_by) == (1, True, (1,))


# ---------------------------------------------------------------- the folder of a run


def given(folder: Path, *argv: str) -> Any:
    return job([*TINY, f"--job.dump_folder={folder}", *argv], world=1)


def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path):
    names = ["config.toml", "environment.json", "logs", "metrics.jsonl"]
    (tmp_path / "logs").mkdir()
    for name in (*names[:2], names[3], "logs/rank-0.log"):
        (tmp_path / name).write_text("earlier")
    says(take_folder(given(tmp_path).given), MOVED)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").write_text("of the start that failed")
    assert _put_back(tmp_path, {*tmp_path.glob("previous/*")})
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock.RUN_LOCK, *names]
    assert (tmp_path / "logs/rank-0.log").read_text() == "earlier"
    assert not _put_back(tmp_path, set()), "a run that began to train keeps what it wrote"
    assert (tmp_path / "logs").exists()


def test_the_last_lines_fit_the_run(tmp_path):
    says(describe_end(given(tmp_path).config), tmp_path, "was removed")
    (tmp_path / "metrics.jsonl").touch()
    for saving in (False, True):
        out = describe_end(given(tmp_path, *["--checkpoint.enable"] * saving).config)
        says(out, f"plot {tmp_path}")
        assert (f"generate {tmp_path}" in out) == saving
        assert ("checkpoint.enable is off" in out) != saving


def test_a_finished_run_of_another_model_or_data_set_is_told(tmp_path):
    saved = tmp_path / "checkpoint/step-3"
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    (saved / "config.toml").write_text(to_toml(given(tmp_path).given))
    data = f"--training.dataset_path={TEXT / 'held_out'}"
    other = given(tmp_path, data, "--training.steps=2")
    assert _of_another_run(other) == ["training.dataset_path"]
    assert _of_another_run(given(tmp_path, "--optimizer.lr=1")) == []


def test_files_that_no_run_wrote_are_neither_moved_nor_overwritten(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("mine")
    (tmp_path / "notes").touch()
    with refused("config.toml", "no run wrote"):
        take_folder(given(tmp_path).given)
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path}"]) == REFUSED
    said = capsys.readouterr()
    assert "no run wrote" in said.err and "removed" not in said.out + said.err
    assert (tmp_path / "config.toml").read_text() == "mine" and not (tmp_path / "previous").exists()
    (tmp_path / "logs").mkdir()
    # Of a run that failed before it wrote its environment.json.
    (tmp_path / "logs/rank-0.log").touch()
    says(take_folder(given(tmp_path).given), MOVED)


def test_ctrl_c_before_anything_is_written_names_no_folder(tmp_path, capsys, monkeypatch):
    def interrupted(launch: Launch, _: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Launch, "_run", interrupted)
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path / 'none'}"]) == 130
    last = capsys.readouterr().out.splitlines()[-1]
    says(last, "step 0 of 3", "nothing was")
    assert "none" not in last and not (tmp_path / "none").exists()


def test_a_stop_after_the_last_step_promises_no_further_one(capsys):
    config = job([], 1)
    steps = config.config.training.steps
    for step, is_last in ((steps, True), (steps - 1, False)):
        assert _end_early(config, EarlyExit(STOPPED, step, CTRL_C, 0)) == 130
        assert ("no step is left" in capsys.readouterr().out) == is_last


# ---------------------------------------------------------------- whole runs that end otherwise


@pytest.mark.long
def test_ctrl_c_while_the_ranks_start_is_one_line(tmp_path):
    process = start([*TINY, "--training.steps=100000"], tmp_path, NGPU="2")
    wait_until(lambda: len(descendants(process.pid)) > 1, 60)
    time.sleep(0.5)
    family = descendants(process.pid)
    signal_all(process, signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and "Traceback" not in out and left_over(family) == []
    assert re.match(r"titanlite: stopped at step \d+ of 100000; ", out.splitlines()[-1]), out


@pytest.mark.long
@pytest.mark.parametrize("kind", ["segv", "core"])
def test_a_rank_that_crashes_in_a_library_leaves_its_stack(tmp_path, kind):
    """Where it also leaves its core, that takes a while, in which its peers lose it."""
    injury = {"INJURY": f"{kind}:backward:1:2", "CORES": str(tmp_path)}
    out = run(INJURED, tmp_path, 2, FAILED, **injury).out
    for core in tmp_path.glob("core*"):  # a gigabyte
        core.unlink()
    last = out.partition("titanlite: rank 1 on ")[2]
    says(last, "Segmentation fault", ", line ")
    assert last.strip().endswith("(SIGSEGV)") and "rank 0 hung" not in out, out


@pytest.mark.long
def test_ranks_and_loaders_of_a_killed_launcher_exit(tmp_path):
    argv = [*TINY, "--training.steps=100000", "--training.dataloader.num_workers=1"]
    process = start([*argv, "--metrics.log_freq=1"], tmp_path, NGPU="2")
    trained(tmp_path, process, 20)
    family = descendants(process.pid)
    assert len(family) >= 4
    process.kill()
    assert left_over(family) == []
    logs = [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in range(2)]
    # The other rank may only have lost its peer.
    assert any("launcher exited" in log.splitlines()[-1] for log in logs)
    finish(process)


@pytest.mark.long
def test_data_that_ends_early_is_a_failure_without_a_traceback_or_a_restart_with_a_used_config(
    finished, tmp_path
):
    text, folder = tmp_path / "short.txt", tmp_path / "used"
    text.write_text("abcdefgh" * 12)
    shutil.copytree(finished.folder, folder)
    argv = ["--config", f"{folder}/config.toml", *TINY, "--training.no_repeat"]
    argv += ["--training.local_batch_size=4", f"--training.dataset_path={text}"]
    argv += ["--checkpoint.enable"]
    ended = run([*argv, "--job.print_config"], folder, 1, FAILED, **{LAUNCHED: "1"})
    assert "Traceback" not in ended.out and "restart 1 of" not in ended.out
    says(ended.out, "after step 2 of 3", "6 windows", MOVED, "[lr_scheduler]\nwarmup_steps = 20\n")
    assert [r["step"] for r in ended.records] == [1, 2]
    (previous,) = (folder / "previous").iterdir()
    moved = {"metrics.jsonl", "tb", "logs", "config.toml", "environment.json"}
    assert {path.name for path in previous.iterdir()} == moved
    story = [each["event"] for each in read_events(folder)]
    assert story == [*story[:3], "start", "begin", "stop"], "an earlier start's stay"
    says(read_events(folder)[-1], "failed", "after step 2 of 3")


@pytest.mark.long
def test_a_closed_console_does_not_end_the_run(tmp_path):
    words = shlex.join([sys.executable, "-m", "titanlite", "train", *TINY])
    done = shell(f"{words} --job.dump_folder={tmp_path} | head -1")
    assert done.stderr == "" and [r["step"] for r in records(tmp_path)] == [1, 2, 3]


# ---------------------------------------------------------------- without the launcher


def test_a_second_run_in_a_folder_is_refused_without_the_launcher_too(tmp_path):
    """Every task exits, not only the one with rank 0."""
    lock.take(tmp_path / lock.RUN_LOCK, "the folder")
    for out in outputs(start_tasks(TINY, tmp_path, **rendezvous()), REFUSED):
        assert "Traceback" not in out
        says(out, f"pid {os.getpid()} on ")
    assert [path.name for path in tmp_path.iterdir()] == [lock.RUN_LOCK]


@pytest.mark.long
def test_torchrun_can_start_workers(tmp_path):
    """A worker needs only the usual variables."""
    module = "torch.distributed.run --standalone --nproc-per-node=2 -m titanlite.train"
    (out,) = outputs([start(TINY, tmp_path, module)])
    assert out.count("step:  3") == 1, "only LOG_RANK is shown"
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert [each["event"] for each in read_events(tmp_path)] == ["start", "begin", "stop"]


@pytest.mark.long
def test_srun_can_start_workers(tmp_path):
    variables = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "1",
        LAUNCHED: "1",  # inherited from another run
    }
    argv = [*TINY, "--lr_scheduler.warmup_steps=5"]
    names = "SLURM_PROCID", "SLURM_LOCALID"
    out, second = outputs(start_tasks(argv, tmp_path, names, **variables))
    assert second == ""
    says(out, "lr_scheduler.warmup_steps = 5", "step 3 reached")
    assert out.endswith(f"report {tmp_path}\n"), "all that the launcher says"


@pytest.mark.long
def test_a_rank_whose_launcher_was_killed_at_once_does_not_wait_for_the_others(tmp_path):
    others = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    words = [sys.executable, "-m", "titanlite.train", *TINY, f"--job.dump_folder={tmp_path}"]
    line = f"{shlex.join(words)} > /dev/null 2>&1 & echo $!"
    pid = int(shell(line, **others, **{LAUNCHED: "12345"}).stdout)
    assert left_over([pid], time.monotonic() + 200) == [], "it waits"


# ---------------------------------------------------------------- commands


def shell(line: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = environment(NGPU="1", **environ)
    return subprocess.run(
        line, shell=True, env=variables, capture_output=True, text=True, cwd=ROOT, check=False
    )


def test_help_config_models_plots_and_the_import_of_load_need_no_torch(tmp_path):
    write(tmp_path, [record(1, 4.0), record(2, 3.0)])
    rows: list[tuple[str, str]] = [
        ("--help", "titanlite train"),
        ("train --help", "--training.seq_len = 2048"),
        ("train --help warmup", "[lr_scheduler]"),
        ("data prepare --help", "example: "),
        ("checkpoint export --help", "example: "),
        ("--version", "titanlite 0"),
        ("config", "[optimizer]"),
        ("models", "llama3"),
        (f"plot {tmp_path} --out {tmp_path}/out.svg", "wrote"),
    ]
    groups = {"train", "data", "checkpoint"}
    rows += [(f"{name} --help", "example") for name in COMMANDS if name not in groups]
    code = (
        "import sys, titanlite\n"
        "assert titanlite.load and not {'torch', 'numpy'} & {*sys.modules}\n"
        "import contextlib, io, titanlite.cli\n"
        f"for line, part in {rows}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        assert titanlite.cli.main(line.split()) == 0, line\n"
        "    assert part in out.getvalue(), line\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_ends_a_command_quietly():
    done = shell(f"{sys.executable} -m titanlite train --help | head -1")
    assert done.stdout.startswith("usage: titanlite train") and done.stderr == ""


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("trian", "'trian'; did you mean 'train'?"),
        ("hlep", "did you mean 'help'?"),
        ("zzz", "'zzz'; commands are: train, config"),
        ("data perpare", "'perpare'; did you mean 'prepare'?"),
        ("data", "prepare|show (see titanlite data --help)\nusage: titanlite data [-h] "),
        ("checkpoint", "(see titanlite checkpoint --help)\nusage: titanlite checkpoint [-h] ls|"),
        ("data prepare x", "--out"),
        (f"checkpoint ls {'x' * 256}", f"too long: {'x' * 256}"),
        (f"data prepare {'x' * 256} --out out", "too long"),
        ("profile --training.stepz 5", "training.stepz = 5   (command line)"),
        ("doctor --training.stepz 5", "training.stepz = 5   (command line)"),
        ("generate --steps 5", "did you mean --training.steps"),
        ("generate --promt x", "--promt; did you mean --prompt?"),
        ("config --world 0", "--world: "),
        ("checkpoint diff a", "B"),
        ("checkpoint ls .", "no checkpoint"),
        ("checkpoint ls step-9", "step-9 does not exist\n"),
        (f"checkpoint verify {__file__}", f"{__file__} is a file"),
        ("checkpoint export . x --fromat=hf", "--format?"),
        ("checkpoint export . s3://bucket/model", "s3://bucket/model: legal: a folder here"),
        ("checkpoint import nowhere out", "nowhere"),
        ("checkpoint import . out", "config.json"),
        ("generate --checkpoint", "--checkpoint: "),
        ("evaluate --checkpoint nowhere", "nowhere does not exist\n"),
        ("checkpoint show a b", "arguments: b"),
        ("train --help optimzer", "'optimzer'; did you mean 'optimizer'?"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(line, names, capsys):
    assert main(line.split()) == REFUSED
    out, err = capsys.readouterr()
    assert err.startswith("titanlite: ") and names in err
    assert "environment of" not in out, "the doctor starts nothing"


@pytest.fixture
def locked() -> Iterator[Path]:
    """Yield a folder that may not be opened; root, who may, is another user meanwhile."""
    for name in COMMANDS:
        main([name, "--help"])  # another user may not import
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()
    (folder / "locked").mkdir(mode=0)
    folder.chmod(0o755)
    if user == 0:
        os.setresuid(65534, 65534, 0)
    yield folder / "locked"
    os.seteuid(user)
    if user == 0:
        os.setresuid(0, 0, 0)
    (folder / "locked").chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "line",
    [
        "checkpoint ls L",
        "plot L/x",
        "data show L",
        "data prepare L --out L/x",
    ],
)
def test_a_folder_without_permission_is_one_line_that_names_it(locked, line, capsys):
    capsys.readouterr()
    assert main(line.replace("L", str(locked)).split()) == REFUSED
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(locked) in err and "permission" in err.lower()


def test_a_dump_folder_where_none_can_be_made_is_refused_whatever_the_permissions_say(locked):
    for folder, why in (
        (locked / "x", f"{locked} (Permission denied)"),
        (locked, f"{locked} (Permission denied)"),
        (Path("/proc/x"), "/proc"),
        (Path(__file__) / "x", f"{__file__} (Not a directory)"),
    ):
        with refused(f'job.dump_folder = "{folder}"', why):
            preflight._check_dump_folder(folder)


def test_metrics_that_cannot_be_written_are_refused_before_a_worker_starts(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with refused(f'job.dump_folder = "{tmp_path}"', f"{tmp_path}/metrics.jsonl", "Is a directory"):
        preflight._check_dump_folder(tmp_path)


def test_a_mistake_of_the_user_and_ctrl_c_are_one_line_and_a_bug_is_raised(monkeypatch, capfd):
    def code_of(error: BaseException) -> int:
        def raise_it(arguments: object, overrides: list[str]) -> int:
            raise error

        monkeypatch.setattr(config_command, "run", raise_it)
        return main(["config"])

    assert code_of(KeyboardInterrupt()) == 130
    assert capfd.readouterr().err == "\ntitanlite: stopped\n"
    assert code_of(RunFailed("a save failed")) == FAILED
    assert capfd.readouterr().err == "titanlite: a save failed\n"
    assert code_of(PermissionError(errno.EACCES, "no access", "a file")) == REFUSED
    says(capfd.readouterr().err, "a file")
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert code_of(BrokenPipeError()) == 141 and capfd.readouterr().err == ""
    for bug in (ZeroDivisionError(), OSError(errno.EIO, "broken")):
        with pytest.raises(type(bug)):
            code_of(bug)
