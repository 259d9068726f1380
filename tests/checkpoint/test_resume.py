"""A resumed run equals one that was never interrupted: bit for bit on its mesh, with the same state
on any other.
"""

import json
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import nn

from tests.checkpoint.layouts import WIDE
from tests.checkpoint.saved import SAVING, empty_step, steps_in
from tests.jobs import QUIET, TEXT, TINY, job, trainer
from tests.lanes import sample
from tests.messages import says
from tests.runs import finish, records, run, start, wait_for
from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    Position,
    committed,
    read_state,
)
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.rules import batch_changes
from titanlite.checkpoint.source import _has_dropout
from titanlite.checkpoint.state import TrainingState
from titanlite.config.layout import Batch
from titanlite.config.schema import Training
from titanlite.config.toml import to_toml
from titanlite.observe.run_folder import describe_environment
from titanlite.optim.lr_schedule import learning_rate
from titanlite.parallel import init, parallelize
from titanlite.train.summary import _rate_change


def logged(folder: Path) -> list[tuple[int, float, float, int]]:
    found = (record for record in records(folder) if "loss" in record)
    return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in found]


@pytest.mark.parametrize("workers", sample([0, 1], 0))
def test_an_interrupted_run_ends_in_the_same_bits(train, tmp_path, workers):
    """GPT-2 with dropout and a frozen block, accumulation, 27 windows an epoch, 8 in a step,
    workers once.
    """
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(27 * 16 + 8)))
    argv = [*QUIET, *SAVING[len(TINY) :], "--model.name=gpt2", "--model.freeze=['layers.0.*']"]
    sizes = "dim=16 n_layers=2 n_heads=2 dropout=0.2".split()
    argv += [f"--model.overrides.{size}" for size in sizes]
    argv += [f"--training.dataset_path={text}", "--training.global_batch_size=8"]
    argv += ["--training.steps=8", "--checkpoint.keep_latest_k=2"]
    straight = train(argv, tmp_path / "straight", ranks=2)
    epoch_edge, again_in_it, right_after = 3, 5, 6  # 27 windows: the 4th step holds the edge
    cuts = [epoch_edge, again_in_it, right_after, None]
    begun, data, parts = [], {}, []
    # loader workers take time to start: they read the part that begins at the edge and ends in it
    for cut in cuts:
        mode = "disabled" if cut in (epoch_edge, right_after) else "async"
        how = [f"--training.dataloader.num_workers={workers * (cut == again_in_it)}"]
        how.append(f"--checkpoint.async_mode={mode}")
        parts = train([*argv, *how], tmp_path / "cut", cut, ranks=2)
        begun.append(parts[0]["begun"])
        data |= parts[1]["data"]
    assert begun == [0, *cuts[:-1]]
    assert data == straight[1]["data"]
    assert [part["state"] for part in parts] == [part["state"] for part in straight]
    assert logged(tmp_path / "cut") == logged(tmp_path / "straight")
    assert steps_in(tmp_path / "cut") == ["step-7", "step-8"]
    position = read_state(tmp_path / "cut/checkpoint/step-8")["position"]
    assert (position["consumed"], position["epoch"]) == (8 * 8, 8 * 8 // 27)


@pytest.mark.long
def test_a_run_resumed_on_other_meshes_equals_one_process(train, tmp_path):
    """Two steps on FSDP 2 x TP 2, three on FSDP 2, the rest on one rank, with another accumulation
    each.
    """
    argv = [*WIDE, *SAVING[len(TINY) :], "--training.steps=8", "--training.global_batch_size=4"]
    train([*argv, "--training.local_batch_size=4"], tmp_path / "one")
    stages = [
        (4, 2, ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=1"]),
        (2, 5, ["--training.local_batch_size=2"]),
        (1, None, ["--training.local_batch_size=1"]),
    ]
    parts = []
    for world, stop, layout in stages:
        parts = train([*argv, *layout], tmp_path / "many", stop, ranks=world)
    assert parts[0]["begun"] == 5
    one, many = logged(tmp_path / "one"), logged(tmp_path / "many")
    assert [(r[0], r[3]) for r in many] == [(r[0], r[3]) for r in one]
    assert [r[1] for r in many] == pytest.approx([r[1] for r in one], rel=1e-5)
    assert [r[2] for r in many] == pytest.approx([r[2] for r in one], rel=1e-4)


def test_another_global_batch_continues_with_the_next_sample_and_changes_are_logged(
    train, tmp_path
):
    train(SAVING, tmp_path, 2)
    changed = ["--training.local_batch_size=4", "--optimizer.lr=0.25", "--training.steps=6"]
    (part,) = train([*SAVING, *changed], tmp_path)
    assert part["begun"] == 2
    position = read_state(tmp_path / "checkpoint/step-6")["position"]
    assert position["consumed"] == 2 * 2 + 4 * 4
    (line,) = (line for line in part["log"] if "config changed" in line)
    says(line, "step 2", "training.local_batch_size 2 -> 4", "optimizer.lr 0.005 -> 0.25")
    rates = [record["lr"] for record in records(tmp_path) if "lr" in record]
    assert rates[2] > 10 * rates[1]


_GLOBAL, _LOCAL = "--training.global_batch_size", "--training.local_batch_size"


@pytest.mark.parametrize(
    ("saved", "now", "named"),  # (global, local, ranks), (local, ranks)
    [
        ((-1, 8, 2), (8, 1), ["8 sequences", "16", f"{_GLOBAL} 16"]),
        ((-1, 8, 1), (8, 4), ["32 sequences", "8", f"{_GLOBAL} 8 {_LOCAL} 2"]),
        ((-1, 3, 1), (8, 2), ["16 sequences", "2 data-parallel ranks", "3"]),
        ((-1, 4, 2), (8, 1), []),
        ((16, 8, 2), (8, 2), []),
    ],
)
def test_a_global_batch_that_follows_from_the_ranks_says_how_to_keep_it(saved, now, named):
    keys = {"global_batch_size": saved[0], "local_batch_size": saved[1]}
    mesh = {"dp_replicate": saved[2], "dp_shard": 1}
    local, ranks = now
    batch = Batch(local, ranks, 1)
    lines = [*batch_changes(keys, mesh, Training(), batch)]
    assert len(lines) == bool(named)
    says("".join(lines), *named)
    assert not [*batch_changes(keys, mesh, Training(global_batch_size=max(saved[0], 64)), batch)]


_CP2 = "--parallelism.context_parallel_degree=2"
_ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
_PP2 = ["--parallelism.pipeline_parallel_degree=2", "--model.overrides.n_layers=4"]
_PP2.append("--training.local_batch_size=4")
_SCHEDULE = "--parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("saved", "now", "differ"),
    [
        ([], [_CP2], True),
        ([_CP2], [_CP2, "--optimizer.lr=1"], False),
        ([_CP2], [_CP2, _ULYSSES], True),
        ([], [_ULYSSES], False),  # without effect
        ([], ["--training.local_batch_size=1"], True),
        ([], ["--training.global_batch_size=8"], True),
        (_PP2, [*_PP2, f"{_SCHEDULE}=GPipe"], False),
        (_PP2, [*_PP2, f"{_SCHEDULE}=Interleaved1F1B"], True),  # which has other stages
        (_PP2, [*_PP2, "--parallelism.pipeline_parallel_microbatch_size=2"], True),
    ],
)
def test_a_resume_says_whether_dropout_masks_will_differ(saved, now, differ, tmp_path):
    before, after = job([*WIDE, *saved], world=2), job([*WIDE, *now], world=2)
    empty_step(tmp_path, 0)
    (tmp_path / CONFIG).write_text(to_toml(before.given))
    (tmp_path / ENVIRONMENT).write_text(json.dumps(describe_environment(before, 0, "cpu")))
    lines = Resume(tmp_path, continues=True).changes(after, has_dropout=True)
    assert any("dropout masks" in line for line in lines) == differ


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (["--training.steps=3000"], "training.steps 300 -> 3000"),
        (["--optimizer.lr=1"], "optimizer.lr 0.005 -> 1.0"),
        (["--optimizer.lr=6e-3"], ""),
        ([], ""),  # the rate falls to nothing by itself
    ],
)
def test_a_resume_says_that_the_learning_rate_jumps_and_why(now, named, tmp_path):
    before, after = (job([*WIDE, "--training.steps=300", *more], world=1) for more in ([], now))
    empty_step(tmp_path, 0)
    (tmp_path / CONFIG).write_text(to_toml(before.given))
    line = _rate_change(Resume(tmp_path, continues=True, position=Position(298)), after.config)
    if named:
        rates = [learning_rate(before.config, 298), learning_rate(after.config, 299)]
        says(line, named, *(f"{rate:.3g} in step" for rate in rates))
    else:
        assert not line


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_module_that_drops_nothing_is_no_dropout(p):
    state = TrainingState([nn.Sequential(nn.Linear(1, 1), nn.Dropout(p))], None, table={})
    assert _has_dropout(state) == (p > 0)


def drawn_at_start(argv: list[str], folder: str) -> list[str]:
    """Return the parameters that a start gives initial values."""
    names: list[str] = []
    with (
        patch.object(init, "fill", lambda parameter, name, *_: names.append(name)),
        patch.object(parallelize, "check_replicas", lambda *_: names.append("compared")),
    ):
        trainer(argv, folder)
    return names


@pytest.mark.long
def test_no_initial_values_are_drawn_where_a_checkpoint_follows(train, pool, tmp_path):
    for ranks in pool.run(drawn_at_start, SAVING, str(tmp_path), world=2):
        assert "norm.weight" in ranks and ranks[-1] == "compared"
    train(SAVING, tmp_path, 2, ranks=2)
    assert pool.run(drawn_at_start, SAVING, str(tmp_path), world=2) == [[], []]
    part = [*SAVING, "--checkpoint.exclude_from_loading=['model.norm.weight']"]
    for ranks in pool.run(drawn_at_start, part, str(tmp_path), world=2):
        assert "norm.weight" in ranks and ranks[-1] == "compared"


def test_without_a_seed_the_checkpoints_seed_is_used(train, tmp_path):
    argv = [*SAVING, "--debug.seed=none"]
    train(argv, tmp_path, 2)
    (then,) = train(argv, tmp_path)
    assert then["begun"] == 2
    folders = [*tmp_path.glob("checkpoint/step-*")]
    seeds = {read_state(folder)["position"]["seed"] for folder in folders}
    seeds |= {json.loads((folder / ENVIRONMENT).read_text())["seed"] for folder in folders}
    assert len(seeds) == 1 and seeds != {0}


def test_other_data_or_another_seed_is_refused_unless_the_data_is_to_start_over(
    train, begun, tmp_path
):
    def error(*more: str) -> str:
        return begun([*SAVING, *more], tmp_path)["error"]

    (first,) = train(SAVING, tmp_path, 1)
    fingerprint = read_state(tmp_path / "checkpoint/step-1")["position"]["fingerprint"]
    says(error(f"--training.dataset_path={TEXT / 'held_out'}"), "[training]", fingerprint)
    says(error("--debug.seed=5"), "debug.seed = 5", "with 0")
    over = '--checkpoint.exclude_from_loading=["data"]'
    assert error("--debug.seed=5", over) == ""
    argv = [*SAVING, "--training.steps=2", over]
    (again,) = train(argv, tmp_path)
    assert again["begun"] == 1 and again["data"] == {2: first["data"][1]}
    says(again["log"], "resumed step 1 from", "step-1 without data (checkpoint.exclude")
    position = read_state(tmp_path / "checkpoint/step-2")["position"]
    assert (position["tokens"], position["consumed"]) == (2 * 2 * 16, 2)


TP2 = ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=2"]


@pytest.mark.parametrize(("world", "options"), sample([(2, []), (4, TP2)], nightly=[(4, TP2)]))
def test_a_stream_continues_where_each_reader_was(train, tmp_path, world, options):
    pytest.importorskip("datasets", reason="streaming needs the extra hf")
    texts = tmp_path / "texts"
    texts.mkdir()
    for file in range(3):
        lines = [json.dumps({"text": f"{file}:{i} " + "xyz" * (i % 7)}) for i in range(40)]
        (texts / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    argv = [*SAVING, "--training.dataset=c4_test", f"--training.dataset_path={texts}"]
    argv += ["--training.steps=8", *options]
    straight = train(argv, tmp_path / "straight", ranks=world)
    first = train(argv, tmp_path / "cut", 3, ranks=world)
    then = train(argv, tmp_path / "cut", ranks=world)
    for rank in range(world):
        assert then[rank]["begun"] == 3 and then[rank]["state"] == straight[rank]["state"]
        assert first[rank]["data"] | then[rank]["data"] == straight[rank]["data"]


LONG = [*TINY, "--checkpoint.enable", "--checkpoint.interval=4", "--training.steps=100000"]
LONG.append("--metrics.log_freq=1")


@pytest.mark.long
def test_a_stopped_run_says_what_is_saved_and_resumes_and_a_finished_one_says_so(tmp_path):
    steps = tmp_path / "checkpoint"
    process = start(LONG, tmp_path, NGPU="2")
    wait_for(steps / "step-4", process)
    (refusal,) = run([*LONG, "--debug.seed=7"], tmp_path, code=2).out.splitlines()
    says(refusal, f"pid {process.pid}", tmp_path)  # before anything is started or moved
    wait_for(steps / f"step-{committed(steps)[-1] + 4}", process)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and "Traceback" not in out
    newest = committed(steps)[-1]
    says(out.splitlines()[-1], f"step {newest} of 100000", f"{steps}/step-{newest}")

    target = newest + 3
    argv = [*LONG, f"--training.steps={target}", "--lr_scheduler.total_steps=100000"]
    resumed = run(argv, tmp_path)
    says(resumed.out, f"resumed step {newest}", "--training.global_batch_size 4\n")
    order = ["titanlite: resuming", "resumed step", f"step: {target:2}"]
    places = [resumed.out.index(each) for each in order]
    assert places == sorted(places)
    trained = [record["step"] for record in resumed.records if "loss" in record]
    assert trained == [*range(1, target + 1)], "no step twice"

    (line,) = run(argv, tmp_path, ranks=2).out.splitlines()
    says(line, f"step {target} of {target}", "--training.steps", "--job.dump_folder")
