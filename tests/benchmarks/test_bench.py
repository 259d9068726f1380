"""The benchmarks run and measure what they say; timings are not checked."""

import json
import sys
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import gpu, overhead, plan_gpu, ratios
from benchmarks.plain import write_tokens
from benchmarks.scale import table
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import records
from titanlite.observe.run_folder import git_revision


@pytest.mark.long
def test_a_row_of_the_gpu_table_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kept, name = tmp_path / "gpu.json", "small, eager, recompute op"
    gpu.table_of(gpu.models(small=True), 1, kept, tmp_path)[name]()
    found = json.loads(kept.read_text())[name]
    assert "--training.mixed_precision_param=bfloat16" in found["words"]
    assert (found["steps"], found["device"], found["mfu_percent"]) == (1, "cpu", None)
    assert found["world_size"] == 1, "the plain loop has one GPU too"
    assert found["tokens_per_second_per_device"] > 0
    assert sum(found["shares_of_a_traced_step"].values()) == pytest.approx(1, abs=1e-2)
    assert {"date", "command", "revision", "torch", "machine"} <= found.keys()
    assert f"| {name} | " in gpu.table(kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_planners_comparison_with_a_gpu_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan_gpu.py"])
    with refused("plan_gpu.py", "GPU on this machine", kind=SystemExit):
        plan_gpu.main()


def test_a_record_is_kept_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    git_revision.cache_clear()
    ratios.keep(tmp_path / "records", "row", {})
    git_revision.cache_clear()
    assert json.loads((tmp_path / "records").read_text())["row"]["revision"] is None


def test_failed_rows_run_again_after_the_remaining_ones(tmp_path, monkeypatch, capsys):
    started, records = [], tmp_path / "gpu.json"

    def fails(name):
        started.append(name)
        raise RuntimeError("no memory\nat all")

    table = {name: partial(fails, name) for name in ("first", "second")}
    ratios.keep(records, "first", {"failed": "before"})
    monkeypatch.setattr(gpu, "table_of", lambda *_: table)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--small", f"--json={records}"])
    gpu.main()
    assert started == ["second", "first"]
    says(capsys.readouterr().out, "| second | failed: at all |")
    started.clear()
    monkeypatch.setattr("sys.argv", ["gpu.py", "--small", f"--json={records}", "--seconds=1"])
    gpu.main()
    assert not started
    says(capsys.readouterr().out, "run again: first")


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "model"), sample([(True, "llama3"), (False, "qwen3")], (False, "qwen3"))
)
def test_the_plain_loop_and_the_trainer_start_with_the_same_loss(pool, tmp_path, replicas, model):
    """Although the plain loop has a model of the usual form, with nothing of titanlite's."""
    write_tokens(overhead.data(str(tmp_path)), overhead.VOCAB, 1 << 14)
    _, _, losses = pool.run(overhead.in_turn, 1, str(tmp_path), replicas, model, world=2)[0]
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(losses[0], rel=1e-6)


def test_a_ratio_lies_in_its_interval_and_noise_is_not_jitter():
    rng = np.random.default_rng(0)
    ours, theirs = (rng.normal(1.0, 0.1, 300).tolist() for _ in range(2))
    found = ratios.ratio(ours, theirs)
    assert found.low <= found.middle <= found.high and found.low <= 1 <= found.high
    more = ratios.more_jitter(ours, theirs)
    assert more.low <= 0 <= more.high
    assert ratios.more_jitter([2 * seconds - 1 for seconds in ours], theirs).low > 0


def test_the_laws_of_scale_have_points(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table.py", "--quick"])
    table.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["law", "64", "512"] and len(rows) == 12
    operations = next(row for row in rows if "operations" in row)
    assert operations.split()[-2:] == ["3", "3"], "of the store, for each exchange of a launcher"
