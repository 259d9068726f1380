"""`titanlite train` as a person meets it: exit codes, what is printed, what is left behind."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import PARROT, TINY, job
from tests.lanes import sample
from tests.launch.test_nodes import free_port
from tests.runs import (
    ROOT,
    descendants,
    environment,
    finish,
    left_over,
    records,
    start,
    train,
)
from titanlite.checkpoint.status import take_folder
from titanlite.cli import COMMANDS, main
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.config.toml import to_toml
from titanlite.errors import STOPPED, RunFailed, UserError
from titanlite.fault.status import Ended, Status, dump, parse
from titanlite.launch import preflight
from titanlite.launch.failure import Exit, first_failure
from titanlite.launch.launcher import Launch, _end_early, _of_another_run, _put_back
from titanlite.launch.stopping import CTRL_C
from titanlite.runtime import lock
from titanlite.runtime.page import EarlyExit
from titanlite.runtime.rank_files import LAUNCHED, rank_file
from titanlite.tools import config as config_command
from titanlite.train.ending import describe_end

FAULTY = [*PARROT, "--model.package=faulty", "--model.name=faulty"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """Return the dump folder and the console of a run of 3 steps on 2 ranks."""
    folder = tmp_path_factory.mktemp("a finished run")
    argv = [
        *TINY,
        "--metrics.enable_tensorboard",
        "--generate.at_end",
        "--generate.tokens=3",
        "--validation.enable",
    ]
    argv += [
        "--validation.steps=1",
        "--validation.freq=2",
        "--job.device=auto",
        "--fault.rejoin_seconds=60",
    ]
    code, out = train(argv, folder, NGPU="2", CUDA_VISIBLE_DEVICES="")
    assert code == 0, out
    return folder, out


def test_a_run_leaves_its_files_and_says_where(finished):
    folder, out = finished
    lines = records(folder)
    assert [r["step"] for r in lines] == [1, 2, 2, 3, 3]
    assert lines[0].keys() == set(
        "step loss max_loss grad_norm lr tokens tps tflops mfu step_seconds step_seconds_p50 "
        "step_seconds_p95 data_seconds memory_gib recompiles".split()
    )
    assert lines[0]["mfu"] is None and "mfu: n/a" in out
    assert lines[2].keys() == {"step", "validation_loss"}
    assert re.search(
        r"^step:  1  loss:  \d\.\d{5}  grad_norm:  \d\.\d{4}  memory:  ", out, re.MULTILINE
    )
    assert "no effect on 1 node: fault.rejoin_seconds" in out
    assert "2 processes on the CPU (from NGPU), config debug.toml\n" in out
    assert "mesh       dp_shard 2" in out
    assert "titanlite: step 3 reached" in out and "--logdir" in out and "Traceback" not in out
    assert (folder / "logs/rank-0.log").exists() and (folder / "logs/rank-1.log").exists()
    assert any((folder / "tb").iterdir())
    environment_json = json.loads((folder / "environment.json").read_text())
    assert (
        environment_json["world_size"] == 2
        and environment_json["mesh"]["dp_shard"] == 2
        and environment_json["versions"]["torch"]
    )
    assert environment_json["command"][:2] == ["titanlite", "train"]
    assert "--fault.rejoin_seconds=60" in environment_json["command"]
    again = job_from(
        parse_command_line(["--config", str(folder / "config.toml")], {}), world=2, training=True
    )
    assert again.config.training.seq_len == 16 and again.config.job.dump_folder == str(folder)
    assert again.config.job.device == "auto"  # so that the file also trains on a machine with GPUs


@pytest.mark.exhaustive
def test_a_resumed_run_counts_the_tokens_that_it_had(tmp_path):
    """Those of the checkpoint, then steps of another batch."""
    argv = [word for word in TINY if word != "--checkpoint.no_enable"]
    argv += ["--training.global_batch_size=8", "--training.seq_len=16"]
    assert train([*argv, "--training.steps=2"], tmp_path, NGPU="1")[0] == 0
    argv += ["--training.global_batch_size=4", "--training.steps=5"]
    code, out = train(argv, tmp_path, NGPU="1")
    assert code == 0 and "resuming from step 2, the only one, in " in out, out
    assert f"; 64 tokens a step, {2 * 128 + 3 * 64} in all" in out
    logged = [record["tokens"] for record in records(tmp_path) if "tokens" in record]
    assert logged[-1] == 2 * 128 + 3 * 64


def test_all_config_errors_are_named_at_once_and_nothing_is_started(tmp_path):
    argv = [
        "--training.stepz",
        "5",
        "--optimizer.lr",
        "x",
        "--parallelism.tensor_parallel_degree",
        "3",
    ]
    code, out = train([*argv, "--training.dataset=txt"], tmp_path)
    assert code == 2 and "4 configuration errors" in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["text", "tokens", "chat"])
def test_a_data_set_that_is_not_there_is_told_in_one_form_whatever_else_is_wrong(
    kind, tmp_path, capsys
):
    fault = (
        'training.dataset_path = "/nope"   (command line)\n      there is no such folder or file'
    )
    data = [f"--training.dataset={kind}", "--training.dataset_path=/nope"]
    for more, head, rest in (
        ([], "1 configuration error;", ""),
        (["--optimizer.lr=x"], "2 configuration errors;", ""),
        (["--job.dump_folder=/proc/x"], "1 configuration error;", "can't train "),
    ):
        argv = ["train", *TINY, "--job.device=cpu", f"--job.dump_folder={tmp_path}", *data, *more]
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"titanlite: {head}") and err.count("dataset_path") == 1
        assert f"\n  {fault}\n{rest}" in err


def test_a_config_too_large_for_this_machine_names_what_would_fit(tmp_path, capsys):
    argv = [
        "train",
        "--config",
        "llama_8b.toml",
        "--job.device=cpu",
        f"--job.dump_folder={tmp_path}",
    ]
    assert main(argv) == 2
    out = capsys.readouterr().err
    assert "cannot read tokenizer.json" in out and "no such folder or file" in out
    assert (
        "119.7 GiB" in out and "would fit on ≥ " in out and "with --model.flavor debugmodel" in out
    )
    assert "405B" not in out
    assert not list(tmp_path.iterdir())


def test_a_missing_gpu_is_refused(tmp_path):
    code, out = finish(start([*TINY, "--job.device=cuda"], tmp_path, CUDA_VISIBLE_DEVICES=""))
    assert (
        code == 2
        and 'job.device = "cuda", but this node has no GPU (CUDA_VISIBLE_DEVICES="")' in out
    )


def test_the_first_failing_rank_is_named_and_its_traceback_comes_last(tmp_path):
    code, out = train(FAULTY, tmp_path, NGPU="2", FAULT="1:2:raise")
    assert code == 1
    assert out.rstrip().endswith("ValueError: a fault was put in here")
    tail = out[out.index("failed first") - 80 :]
    assert "rank 1 on " in tail and "rank-1.log" in tail and tail.count("Traceback") == 1


def ends(private: Path, **ranks: tuple[Exit, dict[str, Any]]) -> dict[int, Exit]:
    """Leave what workers leave that end: their error files; return how they ended."""
    for path in private.glob("*.json"):
        path.unlink()
    for name, (_, error) in ranks.items():
        if error:
            details = {"py_callstack": f"a traceback of {error['time']}", "step": 7, **error}
            text = json.dumps(
                {
                    "message": {
                        "message": error.get("message", "ValueError: x"),
                        "extraInfo": details,
                    }
                }
            )
            rank_file(private, int(name[1:]), "json").write_text(text)
    return {int(name[1:]): exit for name, (exit, _) in ranks.items()}


def test_the_first_failure_is_distinguished_from_its_consequences(tmp_path):
    """A killed rank is a cause, a rank that the launcher ended is not; the earliest of the others
    failed first.
    """
    (tmp_path / "logs").mkdir()
    for rank in range(3):
        (tmp_path / "logs" / f"rank-{rank}.log").write_text(f"the log of rank {rank}\n")
    killed, raised, ended = Exit(-9, 5.2), Exit(1, 5.2), Exit(-15, 5.2, ended=True)
    stopped = Exit(-9, 5.2, ended=True, stopped=True)
    for first, exits in (
        (1, {"r0": (ended, {}), "r1": (raised, {"time": 5.0})}),
        (1, {"r0": (raised, {"time": 5.1}), "r1": (raised, {"time": 5.0}), "r2": (ended, {})}),
        (2, {"r0": (raised, {"time": 5.0}), "r2": (killed, {})}),
        (0, {"r0": (Exit(-15, 5.2), {})}),
        (
            1,
            {
                "r0": (stopped, {}),
                "r1": (raised, {"time": 5.0}),
                "r2": (Exit(-9, 5.2, ended=True), {}),
            },
        ),
    ):
        failure = first_failure(ends(tmp_path, **exits), tmp_path, tmp_path, "here")
        assert failure and failure.rank == first
        status = Status(ended=Ended(failure))
        assert parse(Status, dump(status).encode()) == status, "other launchers get the same"
        text = failure.describe(tmp_path / "rank.log")
        assert f"rank {first} on here failed first; its log: {tmp_path}/rank.log\n" in text
        assert ("rank 0 hung or was stopped: it had to be killed" in text) == (
            exits["r0"][0] is stopped
        )
        assert failure.step == (None if first in (0, 2) else 7)
    assert (
        first_failure(
            ends(tmp_path, r0=(ended, {}), r1=(Exit(0, 5.2), {})), tmp_path, tmp_path, "here"
        )
        is None
    )


def test_what_a_user_can_correct_is_one_message_with_the_ranks_that_said_it(tmp_path):
    """The launcher may have ended a rank before it could exit with its own code."""
    says = {"message": "UserError: x", "is_user_error": True}
    both = ends(
        tmp_path,
        r0=(Exit(-15, 6, ended=True), {**says, "time": 5}),
        r1=(Exit(2, 6), {**says, "time": 6}),
    )
    failure = first_failure(both, tmp_path, tmp_path, "here")
    assert failure and (failure.code, failure.text, failure.told_by) == (2, "x", (0, 1))
    assert failure.describe(tmp_path) == "\ntitanlite: x"
    says["message"] = "RunFailed: the data ended"
    failure = first_failure(
        ends(tmp_path, r1=(Exit(1, 6), {**says, "time": 6})), tmp_path, tmp_path, "here"
    )
    assert failure and (failure.code, failure.is_user_error, failure.told_by) == (1, True, (1,))


def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path):
    names = ["config.toml", "environment.json", "logs", "metrics.jsonl"]
    given = job([*TINY, f"--job.dump_folder={tmp_path}"], world=1).given
    (tmp_path / "logs").mkdir()
    for name in (*names[:2], names[3], "logs/rank-0.log"):
        (tmp_path / name).write_text("earlier")
    assert "an earlier run's files are now in" in take_folder(given)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").write_text("of the start that failed")
    assert _put_back(tmp_path, {*tmp_path.glob("previous/*")})
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock.RUN_LOCK, *names]
    assert (tmp_path / "logs/rank-0.log").read_text() == "earlier"
    assert not _put_back(tmp_path, set()), "a run that began to train keeps what it wrote"
    assert (tmp_path / "logs").exists()


def test_the_last_lines_fit_the_run(tmp_path):
    removed = describe_end(job([*TINY, f"--job.dump_folder={tmp_path}"], world=1).config)
    assert removed.endswith(f"reached; {tmp_path}, which had its files, was removed")
    (tmp_path / "metrics.jsonl").touch()
    for saving in ([], ["--checkpoint.enable"]):
        out = describe_end(job([*TINY, f"--job.dump_folder={tmp_path}", *saving], world=1).config)
        assert f"plot {tmp_path}" in out and (
            f"generate --config {tmp_path}/config.toml" in out
        ) == bool(saving)
        assert ("nothing was saved: checkpoint.enable is off" in out) != bool(saving)


def test_a_finished_run_of_another_model_or_data_set_is_told(tmp_path):
    saved, tiny = tmp_path / "checkpoint/step-3", [*TINY, f"--job.dump_folder={tmp_path}"]
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
    (saved / "config.toml").write_text(to_toml(job(tiny, world=1).given))
    other = job(
        [*tiny, "--training.dataset=python-stdlib-validation", "--training.steps=2"], world=1
    )
    assert _of_another_run(other) == ["training.dataset"]
    assert _of_another_run(job([*tiny, "--optimizer.lr=1"], world=2)) == []


def test_a_step_to_load_that_is_not_there_is_refused_before_anything_is_moved(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "checkpoint/step-4").mkdir(parents=True)
    (tmp_path / "checkpoint/step-4/manifest.json").touch()
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    argv = [
        *TINY,
        "--checkpoint.enable",
        "--checkpoint.load_step=33",
        f"--job.dump_folder={tmp_path}",
    ]
    argv += ["--lr_scheduler.warmup_steps=0"]
    assert main(["train", *argv]) == 2
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []), (
        "as before, for what this process starts next"
    )
    out = capsys.readouterr()
    assert "checkpoint.load_step = 33: no such checkpoint in " in out.err and out.err.endswith(
        "; there are: 4\n"
    )
    assert out.out == "" and [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--checkpoint.initial_load_path={}/nowhere"],
            "nowhere is not a complete checkpoint: there is no such folder",
        ),
        (
            ["--checkpoint.initial_load_path={}/nowhere", "--checkpoint.initial_load_in_hf"],
            "is not a Hugging Face model folder",
        ),
        (
            ["--checkpoint.initial_load_path={}/hf"],
            "no manifest.json; --model.flavor hf starts from a Hugging Face folder",
        ),
        (["--checkpoint.initial_load_path={}/checkpoint"], "step-4/manifest.json: damaged"),
        (["--checkpoint.initial_load_path={}"], "step-4/manifest.json: damaged"),
        (["--checkpoint.enable", "--checkpoint.load_step=4"], "checkpoint.load_step: "),
    ],
)
def test_what_a_run_would_start_from_is_refused_before_a_worker_starts(
    options, says, tmp_path, capsys, monkeypatch
):
    for folder, name in (("checkpoint/step-4", "manifest.json"), ("hf", "config.json")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text("{}")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    argv = [*TINY, f"--job.dump_folder={tmp_path}", "--lr_scheduler.warmup_steps=0"]
    assert main(["train", *argv, *(option.format(tmp_path) for option in options)]) == 2
    out = capsys.readouterr()
    assert says in out.err and "nothing was started" in out.err, out.err
    assert out.out == "" and not (tmp_path / "logs").exists()


@pytest.mark.long
def test_ctrl_c_while_the_ranks_import_torch_is_one_line(tmp_path):
    process = start(TINY, tmp_path, NGPU="2")
    deadline = time.monotonic() + 60
    while len(family := descendants(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    for pid in (process.pid, *family):
        with suppress(ProcessLookupError):  # a helper of the start that is done
            os.kill(pid, signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and "Traceback" not in out and left_over(family) == []
    assert (
        out.splitlines()[-1].startswith("titanlite: stopped at step 0 of 3; ")
        and "metrics and" not in out
    )


def start_two_ranks(folder: Path, *more: str) -> tuple[subprocess.Popen, set[int]]:
    """Start two ranks with a loader process each; return the launcher after 20 steps, and all its
    descendants.
    """
    argv = [
        *TINY,
        "--training.steps=100000",
        "--metrics.log_freq=1",
        "--training.dataloader.num_workers=1",
    ]
    process = start([*argv, *more], folder, NGPU="2")
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = set(descendants(process.pid))
    assert len(family) > 4
    return process, family


@pytest.mark.exhaustive
def test_a_killed_rank_is_named_and_its_loader_exits(tmp_path):
    argv = [*FAULTY, "--training.dataloader.num_workers=1", "--metrics.log_freq=1"]
    process = start(argv, tmp_path, NGPU="2", FAULT="1:3:kill")
    family: set[int] = set()
    while process.poll() is None:
        family.update(descendants(process.pid))
        time.sleep(0.2)
    code, out = finish(process)
    assert code == 1 and "rank 1 on " in out and "SIGKILL" in out
    assert len(family) > 4, "two ranks and their loaders"
    assert left_over(family) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["segv", "core"])
def test_a_rank_that_crashes_in_a_library_leaves_its_stack(tmp_path, kind):
    """Where it also leaves its core, that takes a while, in which its peers lose it."""
    argv = [*TINY, "--model.package=injured"]
    code, out = finish(
        start(argv, tmp_path, NGPU="2", CORES=str(tmp_path), INJURY=f"{kind}:backward:1:2")
    )
    for core in tmp_path.glob("core*"):  # a gigabyte
        core.unlink()
    last = out.partition("titanlite: rank 1 on ")[2]
    assert code == 1 and "Fatal Python error: Segmentation fault" in last and ", line " in last, out
    assert last.strip().endswith("(SIGSEGV)") and "hung or was stopped" not in out, out


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_is_named_before_the_collective_of_another_times_out(tmp_path):
    process, family = start_two_ranks(tmp_path, "--comm.train_timeout_seconds=6")
    of_rank_1 = [
        pid
        for pid in descendants(process.pid)
        if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()
    ]
    os.kill(of_rank_1[0], signal.SIGSTOP)  # the worker: its parent is the launcher
    code, out = finish(process)
    assert code == 1 and left_over(family) == []
    assert (
        "the run hangs: no rank moved for 6 s (comm.train_timeout_seconds). rank 1: stopped\n"
        in out
    )
    assert "Timed out" not in out and "SIGKILL" not in out


@pytest.mark.long
def test_data_that_ends_early_is_a_failure_without_a_traceback_with_the_config_of_a_used_folder(
    finished, tmp_path
):
    (tmp_path / "short.txt").write_text("abcdefgh" * 12)
    folder = tmp_path / "used"
    shutil.copytree(finished[0], folder)
    argv = [
        "--config",
        f"{folder}/config.toml",
        *TINY,
        "--training.no_repeat",
        "--training.local_batch_size=4",
    ]
    argv += [
        "--training.dataset=text",
        f"--training.dataset_path={tmp_path}/short.txt",
        "--job.print_config",
    ]
    code, out = train(argv, folder, NGPU="1", **{LAUNCHED: "1"})
    assert code == 1 and "Traceback" not in out
    assert "the data ended after step 2 of 3: it has 6 windows" in out

    assert "an earlier run's files are now in" in out
    assert "[lr_scheduler]\nwarmup_steps = 20\n" in out, "the resolved config"
    assert [r["step"] for r in records(folder)] == [1, 2]
    (previous,) = (folder / "previous").iterdir()
    assert {p.name for p in previous.iterdir()} == {
        "metrics.jsonl",
        "tb",
        "logs",
        "config.toml",
        "environment.json",
    }


@pytest.mark.long
def test_ctrl_c_ends_everything_in_five_seconds_with_one_line(tmp_path):
    process, family = start_two_ranks(tmp_path)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and time.monotonic() - began < 5
    lines = [line for line in out.splitlines() if not line.startswith("step:")]
    last = lines[-1]
    assert "seed " in "".join(lines[-4:-2]) and lines[-2] == "", (
        "one line after what the start printed"
    )
    assert re.fullmatch(
        r"titanlite: stopped at step \d+ of 100000; metrics and logs are in .*", last
    )
    assert left_over(family, until=began + 5) == []


@pytest.mark.exhaustive
def test_ranks_and_loaders_of_a_killed_launcher_exit(tmp_path):
    process, family = start_two_ranks(tmp_path)
    process.kill()
    assert left_over(family) == []
    last_lines = [
        (tmp_path / f"logs/rank-{rank}.log").read_text().splitlines()[-1] for rank in range(2)
    ]
    assert (
        "titanlite: launcher exited; stopping this rank" in last_lines
    )  # the other rank may only have lost its peer
    finish(process)


def test_files_that_no_run_wrote_are_neither_moved_nor_overwritten(tmp_path):
    given = job_from(
        parse_command_line([*TINY, f"--job.dump_folder={tmp_path}"], {}), world=1, training=True
    ).given
    (tmp_path / "config.toml").write_text("mine")
    (tmp_path / "logs").mkdir()
    with pytest.raises(
        UserError, match=r"has logs, config\.toml, which no run wrote and a run would move"
    ):
        take_folder(given)
    assert (tmp_path / "config.toml").read_text() == "mine" and not (tmp_path / "previous").exists()
    (
        tmp_path / "logs/rank-0.log"
    ).touch()  # of a run that failed before it wrote its environment.json
    assert "an earlier run's files are now in" in take_folder(given)


def test_a_refused_folder_is_the_only_line_about_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("NGPU", "1")
    (tmp_path / "config.toml").write_text("mine")
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path}"]) == 2
    said = capsys.readouterr()
    assert "which no run wrote" in said.err and "removed" not in said.out + said.err


def test_ctrl_c_before_anything_is_written_names_no_folder(tmp_path, capsys, monkeypatch):
    def interrupted(launch: Launch, _: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("NGPU", "1")
    monkeypatch.setattr(Launch, "_run", interrupted)
    assert main(["train", *TINY, f"--job.dump_folder={tmp_path / 'none'}"]) == 130
    line = "titanlite: stopped at step 0 of 3; nothing was written\n"
    assert capsys.readouterr().out.endswith(line) and not (tmp_path / "none").exists()


def test_a_stop_after_the_last_step_promises_no_further_one(tmp_path, capsys):
    job = job_from(parse_command_line(["--config", "debug.toml"], {}), world=1, training=True)
    steps = job.config.training.steps
    for step, is_last in ((steps, True), (steps - 1, False)):
        assert _end_early(job, EarlyExit(STOPPED, step, CTRL_C, 0)) == 130
        assert ("; no step is left, but" in capsys.readouterr().out) == is_last


@pytest.mark.parametrize("world", sample(["1", "2"], long=["2"]))
def test_a_second_run_in_a_folder_is_refused_without_the_launcher_too(tmp_path, world):
    """Every task exits, not only the one with rank 0."""
    lock.take(tmp_path / lock.RUN_LOCK, "the folder")
    variables = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    tasks = [
        start(TINY, tmp_path, "titanlite.train", RANK=r, LOCAL_RANK=r, **variables)
        for r in "01"[: int(world)]
    ]
    for code, out in map(finish, tasks):
        assert (
            code == 2
            and f"is in use by another run: pid {os.getpid()} on " in out
            and "Traceback" not in out
        )
    assert [path.name for path in tmp_path.iterdir()] == [lock.RUN_LOCK]


@pytest.mark.exhaustive
def test_a_folder_is_in_use_while_rank_0_of_a_killed_launcher_hangs(tmp_path):
    process, family = start_two_ranks(tmp_path)
    rank_0 = int(re.search(r"its rank 0 is pid (\d+)", (tmp_path / lock.RUN_LOCK).read_text())[1])  # type: ignore
    assert rank_0 in family
    os.kill(rank_0, signal.SIGSTOP)
    process.kill()
    process.wait()
    code, out = train(TINY, tmp_path, NGPU="1")
    assert code == 2 and f"pid {process.pid} on " in out and f"its rank 0 is pid {rank_0};" in out
    os.kill(rank_0, signal.SIGKILL)
    code, out = train(TINY, tmp_path, NGPU="1")
    assert code == 0 and "an earlier run's files are now in" in out
    finish(process)


@pytest.mark.long
def test_torchrun_can_start_workers(tmp_path):
    """A worker needs only the usual variables."""
    command = [
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "titanlite.train",
        *TINY,
        f"--job.dump_folder={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step:  3") == 1, "only LOG_RANK is shown"
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}


@pytest.mark.long
def test_srun_can_start_workers(tmp_path):
    variables = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
    }
    variables |= {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NNODES": "1",
        LAUNCHED: "1",
    }  # inherited from another run
    argv = [*TINY, "--lr_scheduler.warmup_steps=5"]
    tasks = [
        start(argv, tmp_path, "titanlite.train", SLURM_PROCID=r, SLURM_LOCALID=r, **variables)
        for r in "01"
    ]
    results = [finish(task) for task in tasks]
    assert [code for code, _ in results] == [0, 0], results
    out = results[0][1]
    assert "lr_scheduler.warmup_steps = 5 is longer than the run" in out, (
        "all that the launcher says"
    )
    assert (
        out.endswith(f"report {tmp_path}\n")
        and "\ntitanlite: step 3 reached\n" in out
        and results[1][1] == ""
    )
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}


@pytest.mark.long
def test_a_rank_whose_launcher_was_killed_at_once_does_not_wait_for_the_others(tmp_path):
    others = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    argv = [*TINY, f"--job.dump_folder={tmp_path}"]
    started = subprocess.run(
        ["sh", "-c", '"$@" > /dev/null 2>&1 & echo $!', "sh"]
        + [sys.executable, "-m", "titanlite.train", *argv],
        env={**os.environ, **others, LAUNCHED: "12345"},
        capture_output=True,
        text=True,
    )
    rank, deadline = Path(f"/proc/{started.stdout.strip()}"), time.monotonic() + 60
    while rank.exists():
        assert time.monotonic() < deadline, "it waits"
        time.sleep(0.1)


def test_every_help_answers_without_torch():
    for argv, says in (
        (["--help"], "titanlite train"),
        (["train", "--help"], "--training.seq_len = 2048"),
        (["train", "--help", "warmup"], "[lr_scheduler]"),
        *(
            ([name, "--help"], "example")
            for name in COMMANDS
            if name not in ("train", "data", "checkpoint")
        ),
        (["data", "prepare", "--help"], "example: "),
        (["checkpoint", "export", "--help"], "example: "),
        (["--version"], "titanlite 0"),
    ):
        code = (
            f"import sys, titanlite.cli as c; assert c.main({argv}) == 0; "
            "sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0 and says in done.stdout


@pytest.mark.parametrize("code", [errno.EPIPE, errno.EACCES, errno.EIO])
def test_only_a_mistake_of_the_user_hides_the_traceback_of_a_failed_call(monkeypatch, code):
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "a file")

    monkeypatch.setattr(config_command, "run", fail)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    with pytest.raises(OSError) if code == errno.EIO else nullcontext():
        assert main(["config"]) == (2 if code == errno.EACCES else 141)


def test_a_closed_pipe_ends_a_command_quietly():
    command = f"{sys.executable} -m titanlite train --help | head -1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.startswith("usage: titanlite train") and done.stderr == ""


@pytest.mark.exhaustive
def test_a_closed_console_does_not_end_the_run(tmp_path):
    command = (
        f"{sys.executable} -m titanlite train {' '.join(TINY)} --job.dump_folder={tmp_path} "
        "| head -1"
    )
    done = subprocess.run(
        command,
        shell=True,
        env=environment(NGPU="1"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stderr == "" and [r["step"] for r in records(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["zzz"], "unknown command 'zzz'; commands are: train, config"),
        (["download", "gpt2"], 'hf download REPO --include "tokenizer*" --local-dir DIR'),
        (["data", "perpare"], "unknown command 'perpare'; did you mean 'prepare'?"),
        (
            ["data"],
            "are required: prepare|show (see titanlite data --help)\n"
            "usage: titanlite data [-h] prepare|show",
        ),
        (
            ["checkpoint"],
            "(see titanlite checkpoint --help)\nusage: titanlite checkpoint [-h] ls|verify|show",
        ),
        (["data", "prepare", "x"], "the following arguments are required: --out"),
        (["plot", "--ot", "x"], "unknown option --ot; did you mean --out?"),
        (["plot", "/nonexistent"], "/nonexistent"),
        (["checkpoint", "ls", "x" * 256], f"titanlite: File name too long: {'x' * 256}"),
        (["data", "prepare", "x" * 256, "--out", "out"], "File name too long"),
        (["profile", "--training.stepz", "5"], "training.stepz = 5   (command line)"),
        (["generate", "--steps", "5"], "did you mean --training.steps"),
        (["generate", "--promt", "x"], "unknown option --promt; did you mean --prompt?"),
        (["config", "--world", "0"], "--world: must be a whole number >= 1, not '0'"),
        (["checkpoint", "show", "a", "b"], "unexpected arguments: b"),
        (
            ["train", "--help", "optimzer"],
            "no config key mentions 'optimzer'; did you mean 'optimizer'?",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("titanlite: ") and message in err


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
    "command",
    [
        "checkpoint ls L",
        "checkpoint rm L/step-1",
        "plot L/x",
        "data show L",
        "data prepare L --out L/x",
    ],
)
def test_a_folder_without_permission_is_one_line_that_names_it(locked, command, capsys):
    capsys.readouterr()
    assert main(command.replace("L", str(locked)).split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(locked) in err and "permission" in err.lower()


def test_a_dump_folder_where_none_can_be_made_is_refused_whatever_the_permissions_say(locked):
    for folder, why in (
        (locked / "x", f"{locked} (Permission denied)"),
        (locked, f"{locked} (Permission denied)"),
        (Path("/proc/x"), "/proc"),
        (Path(__file__) / "x", f"{__file__} (Not a directory)"),
    ):
        with pytest.raises(UserError) as caught:
            preflight._check_dump_folder(folder)
        line = f'job.dump_folder = "{folder}": nothing can be written in {why}'
        assert str(caught.value) == line


def test_ctrl_c_is_one_line_and_a_bug_is_raised(monkeypatch, capsys):
    def run(error: BaseException) -> int:
        def raise_it(arguments: object, overrides: list[str]) -> int:
            raise error

        monkeypatch.setattr(config_command, "run", raise_it)
        return main(["config"])

    assert run(KeyboardInterrupt()) == 130 and capsys.readouterr().err == "\ntitanlite: stopped\n"
    assert (
        run(RunFailed("a save failed")) == 1
        and capsys.readouterr().err == "titanlite: a save failed\n"
    )
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
