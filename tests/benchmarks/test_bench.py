"""The benchmarks run and measure what they say; timings are not checked."""

import json
import sys

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from benchmarks import gpu, overhead, plan_gpu, ratios
from benchmarks.plain import Plain, write_tokens
from benchmarks.scale import table
from tests.lanes import sample
from tests.runs import records
from titanlite.models.llama3 import FLAVORS
from titanlite.observe.run_folder import git_revision


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kept = tmp_path / "gpu.json"

    def run(name):
        gpu.table_of(gpu.models(small=True), 1, kept, tmp_path)[name]()
        return json.loads(kept.read_text())[name]

    return run


@pytest.mark.exhaustive
def test_a_row_of_the_gpu_table_is_measured(rows, tmp_path):
    found = rows("small, eager, recompute op")
    assert "--training.mixed_precision_param=bfloat16" in found["words"] and found["steps"] == 1
    assert found["world_size"] == 1, "the plain loop has one GPU too"
    assert (
        found["tokens_per_second_per_device"] > 0
        and found["mfu_percent"] is None
        and found["device"] == "cpu"
    )
    assert sum(found["shares_of_a_traced_step"].values()) == pytest.approx(1, abs=1e-2)
    assert {"date", "command", "revision", "torch", "machine"} <= found.keys()
    assert "| small, eager, recompute op | " in gpu.table(tmp_path / "gpu.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_the_planners_comparison_with_a_gpu_is_refused_without_one(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan_gpu.py"])
    with pytest.raises(SystemExit, match="torch finds no usable GPU on this machine"):
        plan_gpu.main()


def plain_steps(folder: str, compiler: str) -> tuple[bool, list[float]]:
    """Return whether FSDP2 shards the model, and the losses of two steps."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Plain(
        FLAVORS["debugmodel"], overhead.data(folder), 16, 2, compiler=compiler, mixed=True
    )
    losses = []
    for _ in range(2):
        plain.done = 0  # each step's loss is read, and both have the same batch
        plain.step()
        losses.append(plain.losses[-1])
    return isinstance(plain.model, FSDPModule), losses


@pytest.mark.exhaustive
def test_the_plain_loop_shards_on_one_rank_and_compiles(pool, tmp_path):
    write_tokens(overhead.data(str(tmp_path)), FLAVORS["debugmodel"].vocab_size, 1 << 10)
    (sharded, losses), (_, compiled) = (
        pool.run(plain_steps, str(tmp_path), compiler, world=1)[0] for compiler in ("", "aot_eager")
    )
    assert sharded and losses[1] < losses[0] and compiled == pytest.approx(losses, rel=1e-2)


def test_a_record_is_kept_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    git_revision.cache_clear()
    ratios.keep(tmp_path / "records", "row", {})
    git_revision.cache_clear()
    assert json.loads((tmp_path / "records").read_text())["row"]["revision"] is None


def test_failed_rows_run_again_after_the_remaining_ones(tmp_path, monkeypatch, capsys):
    started, records = [], tmp_path / "gpu.json"

    def table_of(*_):
        def fails(name):
            started.append(name)
            raise RuntimeError("no memory\nat all")

        return {name: lambda name=name: fails(name) for name in ("first", "second")}

    ratios.keep(records, "first", {"failed": "before"})
    monkeypatch.setattr(gpu, "table_of", table_of)
    monkeypatch.setattr("sys.argv", ["gpu.py", "--small", f"--json={records}"])
    gpu.main()
    assert started == ["second", "first"]
    assert "| second | failed: at all |" in capsys.readouterr().out
    started.clear()
    monkeypatch.setattr("sys.argv", ["gpu.py", "--small", f"--json={records}", "--seconds=1"])
    gpu.main()
    assert not started and "not enough time, run again: first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("replicas", "model"),
    sample([(False, "llama3"), (True, "llama3"), (False, "qwen3")], (False, "qwen3")),
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
