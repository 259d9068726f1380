"""The benchmarks run and measure what they say; timings are not checked."""

import json
import sys

import numpy as np
import pytest

from benchmarks import harness, overhead, scale, train
from tests.lanes import sample
from tests.runs import records
from titanlite.observe.run_folder import git_revision


@pytest.mark.nightly
def test_a_config_is_measured(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--training.mixed_precision_param=bfloat16", "--training.seq_len=128"]
    found = train.measure(words, 1, NGPU="1", CUDA_VISIBLE_DEVICES="")
    assert (found["words"], found["steps"], found["mfu_percent"]) == (words, 1, None)
    assert (found["device"], found["world_size"]) == ("cpu", 1)
    assert found["tokens_per_second_per_device"] > 0
    assert sum(found["shares_of_a_traced_step"].values()) == pytest.approx(1, abs=1e-2)


def test_a_record_is_kept_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    git_revision.cache_clear()
    harness.keep(tmp_path / "records/row.json", {"value": 1})
    git_revision.cache_clear()
    kept = json.loads((tmp_path / "records/row.json").read_text())
    assert kept["value"] == 1 and kept["revision"] is None
    assert {"date", "command", "torch", "python", "machine"} <= kept.keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("replicas", "model"), sample([(True, "llama3"), (False, "qwen3")], (False, "qwen3"))
)
def test_the_plain_loop_and_the_trainer_start_with_the_same_loss(pool, tmp_path, replicas, model):
    """Although the plain loop has a model of the usual form, with nothing of titanlite's."""
    overhead.write_data(str(tmp_path), 1 << 14)
    _, _, losses = pool.run(overhead.in_turn, 1, str(tmp_path), replicas, model, world=2)[0]
    assert records(tmp_path / "run")[0]["loss"] == pytest.approx(losses[0], rel=1e-6)


def test_a_ratio_lies_in_its_interval():
    rng = np.random.default_rng(0)
    ours, theirs = (rng.normal(1.0, 0.1, 300).tolist() for _ in range(2))
    found = harness.ratio(ours, theirs)
    assert found.low <= found.middle <= found.high and found.low <= 1 <= found.high
    assert harness.ratio([2 * seconds for seconds in ours], theirs).low > 1


def test_the_laws_of_scale_have_points(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scale.py", "--quick"])
    scale.main()
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["law", "64", "512"] and len(rows) == 10
    operations = next(row for row in rows if "operations" in row)
    assert operations.split()[-2:] == ["3", "3"], "of the store, for each exchange of a launcher"
