"""`titanlite train` as a person meets it: exit codes, what is printed, what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.jobs import PARROT, TINY
from tests.launch.run import ROOT, environment, finish, records, start, train
from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.launch.launcher import _report
from titanlite.observe.console import LAUNCHED

FAULTY = [*PARROT, "--model.package=faulty", "--model.name=faulty"]


def test_a_run_leaves_its_files_and_says_where(tmp_path):
    argv = [*TINY, "--metrics.enable_tensorboard", "--generate.at_end", "--generate.tokens=3", "--validation.enable"]
    argv += ["--validation.steps=1", "--validation.freq=2"]
    code, out = train(argv, tmp_path, NGPU="2")
    assert code == 0, out
    lines = records(tmp_path)
    assert [r["step"] for r in lines] == [1, 2, 2, 3, 3]
    assert lines[0].keys() == set(
        "step loss max_loss grad_norm lr tokens tps tflops mfu step_seconds step_seconds_p50 step_seconds_p95 "
        "data_seconds memory_gib recompiles".split()
    )
    assert lines[0]["mfu"] is None and "mfu: n/a" in out
    assert lines[2].keys() == {"step", "validation_loss"}
    assert re.search(r"^step:  1  loss:  \d\.\d{5}  grad_norm:  \d\.\d{4}  memory:  ", out, re.MULTILINE)
    assert "2 processes on the CPU (from NGPU)" in out and "mesh       dp_shard 2" in out
    assert "titanlite: step 3 reached" in out and "--logdir" in out and "Traceback" not in out
    assert (tmp_path / "logs/rank-0.log").exists() and (tmp_path / "logs/rank-1.log").exists()
    assert any((tmp_path / "tb").iterdir())
    kept = json.loads((tmp_path / "environment.json").read_text())
    assert kept["world_size"] == 2 and kept["mesh"]["dp_shard"] == 2 and kept["versions"]["torch"]
    again = job_from(parse_command_line(["--config", str(tmp_path / "config.toml")], {}), world=2, training=True)
    assert again.config.training.seq_len == 16 and again.config.job.dump_folder == str(tmp_path)

    code, out = train([*TINY, "--job.print_config"], tmp_path, NGPU="1", **{LAUNCHED: "1"})
    assert code == 0 and "an earlier run's files are now in" in out
    assert "[lr_scheduler]\nwarmup_steps = 20\n" in out, "the resolved config, as it was asked for"
    assert [r["step"] for r in records(tmp_path)] == [1, 2, 3]
    (previous,) = (tmp_path / "previous").iterdir()
    assert {p.name for p in previous.iterdir()} == {"metrics.jsonl", "tb", "logs", "config.toml", "environment.json"}


def test_faults_are_told_at_once_and_nothing_is_started(tmp_path):
    argv = ["--training.stepz", "5", "--optimizer.lr", "x", "--parallelism.tensor_parallel_degree", "3"]
    code, out = train(argv, tmp_path)
    assert code == 2 and "3 faults" in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


def test_a_config_that_this_machine_cannot_run_says_what_could(tmp_path):
    code, out = train(["--config", "llama_8b.toml", "--job.device=cpu"], tmp_path)
    assert code == 2 and "Traceback" not in out
    assert "cannot read tokenizer.json" in out and "no such folder or file" in out
    assert (
        "119.7 GiB" in out and "what could:" in out and "here: --model.flavor debugmodel" in out and "405B" not in out
    )
    assert not list(tmp_path.iterdir())


def test_a_gpu_that_is_not_there_is_refused(tmp_path):
    code, out = finish(start([*TINY, "--job.device=cuda"], tmp_path, NGPU="1", CUDA_VISIBLE_DEVICES=""))
    assert code == 2 and "NGPU=1, but this node has 0 GPUs; on the CPU: --job.device cpu" in out


def test_a_dump_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    code, out = train(TINY, tmp_path / "file" / "folder")
    assert code == 2 and "is not a folder that can be written to" in out


def test_the_first_failing_rank_is_named_and_its_traceback_comes_last(tmp_path):
    code, out = train(FAULTY, tmp_path, NGPU="2", FAULT="1:2:raise")
    assert code == 1
    assert out.rstrip().endswith("ValueError: a fault was put in here")
    tail = out[out.index("failed first") - 80 :]
    assert "rank 1 on " in tail and "rank-1.log" in tail and tail.count("Traceback") == 1


def test_the_first_failure_is_told_from_those_that_follow(tmp_path, capsys):
    """A rank that the agent terminated is no cause, one that was killed is, and times decide between the others."""
    (tmp_path / "logs").mkdir()
    for rank in range(3):
        (tmp_path / "logs" / f"rank-{rank}.log").write_text(f"the log of rank {rank}\n")

    def failure(exitcode: int, raised: float | None = None):
        found = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="none")
        if raised is not None:
            details = {"py_callstack": f"a traceback of {raised}", "timestamp": "0", "time": raised}
            found.message = {"message": "ValueError: x", "extraInfo": details}  # type: ignore[assignment]
        return found

    for failures, says in (
        ({0: failure(-15), 1: failure(1, raised=5.0)}, "rank 1 on"),
        ({0: failure(1, raised=5.1), 1: failure(1, raised=5.0), 2: failure(-15)}, "rank 1 on"),
        ({0: failure(1, raised=5.0), 2: failure(-9)}, "rank 2 on"),
        ({0: failure(-15)}, "rank 0 on"),
    ):
        _report(failures, tmp_path)
        assert says in capsys.readouterr().err


def descendants(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left_over(family: set[int], until: float | None = None) -> list[int]:
    """Who of them is there still after 5 seconds."""
    until = until or time.monotonic() + 5
    while any(map(alive, family)) and time.monotonic() < until:
        time.sleep(0.1)
    return [pid for pid in family if alive(pid)]


def started(folder: Path) -> tuple[subprocess.Popen, set[int]]:
    """A launcher of two ranks with a loader each, well on their way, and all that it started."""
    argv = [*TINY, "--training.steps=100000", "--metrics.log_freq=1", "--training.dataloader.num_workers=1"]
    process = start(argv, folder, NGPU="2")
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 20):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    family = set(descendants(process.pid))
    assert len(family) > 4
    return process, family


def test_a_killed_rank_is_named_and_its_loader_leaves_with_it(tmp_path):
    argv = [*FAULTY, "--training.dataloader.num_workers=1", "--metrics.log_freq=1"]
    process = start(argv, tmp_path, NGPU="2", FAULT="1:3:kill")
    family: set[int] = set()
    while process.poll() is None:
        family.update(descendants(process.pid))
        time.sleep(0.2)
    code, out = finish(process)
    assert code == 1 and "rank 1 on " in out and "SIGKILL" in out
    assert len(family) > 4, "two ranks, and what reads for them"
    assert left_over(family) == []


def test_data_that_ends_early_is_a_failure_without_a_traceback(tmp_path):
    (tmp_path / "short.txt").write_text("abcdefgh" * 12)
    argv = [*TINY, "--training.no_repeat", "--training.dataset=text", f"--training.dataset_path={tmp_path}/short.txt"]
    code, out = train(argv, tmp_path / "out", NGPU="2")
    assert code == 1 and "Traceback" not in out
    assert "the data ended after step 2 of 3: it has 6 windows" in out


def test_ctrl_c_ends_everything_in_five_seconds_with_one_line(tmp_path):
    process, family = started(tmp_path)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and time.monotonic() - began < 5
    others = [line for line in out.splitlines() if not line.startswith("step:")]
    last = others[-1]
    assert "seed " in others[-3] and others[-2] == "", "one line after what the start printed"
    assert re.fullmatch(r"titanlite: stopped at step \d+ of 100000; metrics and logs are in .*", last)
    assert left_over(family, until=began + 5) == []


def test_a_killed_launcher_takes_its_ranks_and_their_loaders_with_it(tmp_path):
    process, family = started(tmp_path)
    process.kill()
    assert left_over(family) == []
    ends = [(tmp_path / f"logs/rank-{rank}.log").read_text().splitlines()[-1] for rank in range(2)]
    assert "titanlite: the launcher is gone, and this rank leaves with it" in ends  # the other may only have lost it
    finish(process)


def test_torchrun_and_srun_start_workers_as_well(tmp_path):
    """A worker needs nothing but the usual variables."""
    words = ["--standalone", "--nproc-per-node=2", "-m", "titanlite.train", *TINY]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, f"--job.dump_folder={tmp_path / 'torchrun'}"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step:  3") == 1, "LOG_RANK alone speaks"

    common = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    common |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", LAUNCHED: "1"}  # inherited from another run
    tasks = [
        start(TINY, tmp_path / "srun", "titanlite.train", SLURM_PROCID=r, SLURM_LOCALID=r, **common) for r in "01"
    ]
    results = [finish(task) for task in tasks]
    assert [code for code, _ in results] == [0, 0], results
    for how in ("torchrun", "srun"):
        assert [r["step"] for r in records(tmp_path / how)] == [1, 2, 3]
        assert {p.name for p in (tmp_path / how / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    same = [[r["loss"] for r in records(tmp_path / how)] for how in ("torchrun", "srun")]
    assert same[0] == same[1]


def test_help_and_versions_answer_without_torch():
    for argv, says in (
        (["--help"], "titanlite train"),
        (["train", "--help"], "--training.seq_len = 2048"),
        (["--version"], "titanlite 0"),
    ):
        code = f"import sys, titanlite.cli as c; assert c.main({argv}) == 0; sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
        assert done.returncode == 0 and says in done.stdout


def test_output_that_is_cut_off_by_a_pager_ends_quietly():
    command = f"{sys.executable} -m titanlite train --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.startswith("titanlite") and done.stderr == ""


def test_a_console_that_goes_away_does_not_end_the_run(tmp_path):
    command = f"{sys.executable} -m titanlite train {' '.join(TINY)} --job.dump_folder={tmp_path} | head -1"
    done = subprocess.run(
        command, shell=True, env=environment(NGPU="1"), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stderr == "" and [r["step"] for r in records(tmp_path)] == [1, 2, 3]


def test_an_unknown_verb_is_told_the_nearest():
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", "trian"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and "did you mean train?" in done.stderr
