"""A resumed run equals one that was never interrupted: bit for bit on its mesh, with the same state
on any other.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch import nn

from tests.checkpoint.layouts import LAYOUTS, WIDE, save_and_load_everywhere
from tests.checkpoint.saved import SAVING, keeping_log, run_until, steps_in
from tests.checkpoint.test_load import plant
from tests.data.assets import make_assets
from tests.jobs import QUIET, job, trainer
from tests.lanes import sample
from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    Manifest,
    Position,
    read_state,
)
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.rules import batch_changes
from titanlite.checkpoint.source import _has_dropout
from titanlite.checkpoint.state import TrainingState
from titanlite.config.schema import Training
from titanlite.config.toml import to_toml
from titanlite.errors import UserError
from titanlite.layout import Batch
from titanlite.observe.run_folder import describe_environment
from titanlite.parallel import init, parallelize


def logged(folder: Path) -> list[tuple[int, float, float, int]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["grad_norm"], r["tokens"]) for r in lines if "loss" in r]


def test_an_interrupted_run_ends_in_the_same_bits(pool, tmp_path):
    """GPT-2 with dropout and a frozen block, accumulation, 27 windows an epoch, 8 in a step,
    workers once.
    """
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(chr(97 + i * i % 26) for i in range(27 * 16 + 8)))
    argv = [*SAVING, "--model.name=gpt2", "--model.flavor=debugmodel", "--training.dataset=text"]
    argv = [word for word in argv if not word.startswith("--model.overrides")]
    argv += [
        f"--model.overrides.{field}" for field in "dim=16 n_layers=2 n_heads=2 dropout=0.2".split()
    ]
    argv += [
        f"--training.dataset_path={text}",
        "--training.global_batch_size=8",
        "--training.steps=12",
    ]
    argv += [
        "--training.dataloader.num_workers=0",
        "--checkpoint.keep_latest_k=2",
        "--model.freeze=['layers.0.*']",
    ]
    straight = pool.run(run_until, argv, str(tmp_path / "straight"), world=2)
    epoch_edge, again_in_it, right_after = 3, 5, 6  # 27 windows: the 4th step holds the edge
    cuts = [1, epoch_edge, again_in_it, right_after, 10, None]
    begun, data, parts = [], {}, []
    # loader workers take time to start: they read the part that begins at the edge and ends in it
    for cut in cuts:
        reading = ["--training.dataloader.num_workers=1"] if cut == again_in_it else []
        saving = [
            f"--checkpoint.async_mode={'disabled' if cut in (epoch_edge, right_after) else 'async'}"
        ]
        parts = pool.run(run_until, [*argv, *reading, *saving], str(tmp_path / "cut"), cut, world=2)
        begun.append(parts[0]["begun"])
        data |= parts[1]["data"]
    assert begun == [0, *cuts[:-1]]
    assert data == straight[1]["data"]
    assert [part["state"] for part in parts] == [part["state"] for part in straight]
    assert logged(tmp_path / "cut") == logged(tmp_path / "straight")
    assert steps_in(tmp_path / "cut") == ["step-11", "step-12"]
    position = read_state(tmp_path / "cut/checkpoint/step-12")["position"]
    assert (position["consumed"], position["epoch"]) == (12 * 8, 12 * 8 // 27)


@pytest.mark.long
def test_state_saved_on_any_layout_loads_on_any_other(pool, tmp_path):
    layouts = {name: layout for name, layout in LAYOUTS.items() if layout[0] <= 4}
    assert {"tp2", "dp2tp2"} <= layouts.keys() and save_and_load_everywhere(
        pool, tmp_path, layouts
    ) == []


def test_a_run_resumed_on_other_meshes_equals_one_process(pool, tmp_path):
    """Two steps on FSDP 2 x TP 2, three on FSDP 2, the rest on one rank, with another accumulation
    each.
    """
    argv = [
        word
        for word in [*SAVING, *WIDE[len(QUIET) :]]
        if "steps=3" not in word and "batch_size" not in word
    ]
    argv += [
        "--training.steps=8",
        "--training.global_batch_size=4",
        "--training.dataloader.num_workers=0",
    ]
    pool.run(run_until, [*argv, "--training.local_batch_size=4"], str(tmp_path / "one"), world=1)
    stages = [
        (4, 2, ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=1"]),
        (2, 5, ["--training.local_batch_size=2"]),
        (1, None, ["--training.local_batch_size=1"]),
    ]
    parts = []
    for world, stop, layout in stages:
        parts = pool.run(run_until, [*argv, *layout], str(tmp_path / "many"), stop, world=world)
    assert parts[0]["begun"] == 5
    one, many = logged(tmp_path / "one"), logged(tmp_path / "many")
    assert [(r[0], r[3]) for r in many] == [(r[0], r[3]) for r in one]
    assert [r[1] for r in many] == pytest.approx([r[1] for r in one], rel=1e-5)
    assert [r[2] for r in many] == pytest.approx([r[2] for r in one], rel=1e-4)


def test_another_global_batch_continues_with_the_next_sample(pool, tmp_path):
    argv = [word for word in SAVING if "batch_size" not in word]
    pool.run(run_until, [*argv, "--training.local_batch_size=2"], str(tmp_path), 3, world=1)
    (part,) = pool.run(
        run_until,
        [*argv, "--training.local_batch_size=4", "--training.steps=6"],
        str(tmp_path),
        world=1,
    )
    assert part["begun"] == 3
    state = json.loads((tmp_path / "checkpoint/step-6/state.json").read_text())
    assert state["position"]["consumed"] == 3 * 2 + 3 * 4
    changed = next(
        line
        for line in part["log"]
        if line.startswith("config changed since step 3 (new values apply)")
    )
    assert "training.local_batch_size 2 -> 4" in changed


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        (
            (-1, 8, 2),
            (8, 1),
            "is 8 sequences, and was 16; to keep it: --training.global_batch_size 16",
        ),
        (
            (-1, 8, 1),
            (8, 4),
            "and was 8; to keep it: --training.global_batch_size 8 --training.local_batch_size 2",
        ),
        (
            (24, 4, 2),
            (16, 2),
            "and was 24; to keep it: --training.global_batch_size 24 --training.local_batch_size 4",
        ),
        ((-1, 3, 1), (8, 2), "and was 3; 2 data-parallel ranks cannot share 3"),
        ((-1, 4, 2), (8, 1), ""),
        ((16, 8, 2), (8, 2), ""),
    ],
)
def test_a_global_batch_that_follows_from_the_ranks_says_how_to_keep_it(saved, now, says):
    keys = dict(zip(("global_batch_size", "local_batch_size"), saved, strict=False))
    lines = [
        *batch_changes(
            keys, {"dp_replicate": saved[2], "dp_shard": 1}, Training(), Batch(now[0], now[1], 1)
        )
    ]
    assert [line.endswith(says) for line in lines] == [True] * bool(says)
    fixed = Training(global_batch_size=saved[0] if saved[0] > 0 else 64)
    assert not [
        *batch_changes(
            keys, {"dp_replicate": saved[2], "dp_shard": 1}, fixed, Batch(now[0], now[1], 1)
        )
    ]


_CP2, _ULYSSES = (
    f"--parallelism.context_parallel_{key}" for key in ("degree=2", "rotate_method=ulysses")
)


_PP2 = [
    "--parallelism.pipeline_parallel_degree=2",
    "--training.local_batch_size=4",
    "--model.overrides.n_layers=4",
]
_SCHEDULE = "--parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("saved", "now", "world", "differ"),
    [
        ([], [], 2, False),
        ([], [_CP2], 2, True),
        ([_CP2], [_CP2, "--optimizer.lr=1"], 2, False),
        ([_CP2], [_CP2, _ULYSSES], 2, True),
        ([], [_ULYSSES], 2, False),  # without effect
        ([], ["--training.local_batch_size=1"], 2, True),
        ([], ["--training.global_batch_size=8"], 2, True),
        (_PP2, [*_PP2, f"{_SCHEDULE}=GPipe"], 2, False),
        (_PP2, [*_PP2, f"{_SCHEDULE}=Interleaved1F1B"], 2, True),  # which has other stages
        (_PP2, [*_PP2, "--parallelism.pipeline_parallel_microbatch_size=2"], 2, True),
        ([], ["--parallelism.pipeline_parallel_microbatch_size=2"], 2, False),
    ],
)
def test_a_resume_says_whether_dropout_masks_will_differ(saved, now, world, differ, tmp_path):
    before, after = job([*WIDE, *saved], world), job([*WIDE, *now], world)
    (tmp_path / MANIFEST).write_bytes(Manifest(0, False, {}, {}).render())
    (tmp_path / CONFIG).write_text(to_toml(before.given))
    (tmp_path / ENVIRONMENT).write_text(json.dumps(describe_environment(before, 0, "cpu")))
    lines = Resume(tmp_path, continues=True).changes(after, has_dropout=True)
    assert (
        any(
            line.startswith("dropout masks will differ: mesh, stages, batch size") for line in lines
        )
        == differ
    )


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_module_that_drops_nothing_is_no_dropout(p):
    state = TrainingState([nn.Sequential(nn.Linear(1, 1), nn.Dropout(p))], None, table={})
    assert _has_dropout(state) == (p > 0)


def test_a_changed_learning_rate_is_logged_and_applied(pool, tmp_path):
    pool.run(run_until, SAVING, str(tmp_path), 2, world=1)
    changed = ["--optimizer.lr=0.25", "--metrics.log_freq=1", "--checkpoint.keep_latest_k=7"]
    (part,) = pool.run(run_until, [*SAVING, *changed], str(tmp_path), world=1)
    assert (
        "config changed since step 2 (new values apply): optimizer.lr 0.005 -> 0.25" in part["log"]
    )
    rates = [
        json.loads(line)["lr"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
        if '"lr"' in line
    ]
    assert rates[2] > 10 * rates[1]


def drawn_at_start(argv: list[str], folder: str) -> list[str]:
    """Return the parameters that a start gives initial values."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "fill", lambda parameter, name, *_: names.append(name))
        patch.setattr(parallelize, "check_replicas", lambda *_: names.append("compared"))
        trainer(argv, folder)
    return names


def test_no_initial_values_are_drawn_where_a_checkpoint_follows(pool, tmp_path):
    for ranks in pool.run(drawn_at_start, SAVING, str(tmp_path), world=2):
        assert "norm.weight" in ranks and ranks[-1] == "compared"
    pool.run(run_until, SAVING, str(tmp_path), 2, world=2)
    assert pool.run(drawn_at_start, SAVING, str(tmp_path), world=2) == [[], []]
    part = [*SAVING, "--checkpoint.exclude_from_loading=['model.norm.weight']"]
    for ranks in pool.run(drawn_at_start, part, str(tmp_path), world=2):
        assert "norm.weight" in ranks and ranks[-1] == "compared"


def test_without_a_seed_the_checkpoints_seed_is_used(pool, tmp_path):
    (first,) = pool.run(run_until, [*SAVING, "--debug.seed=none"], str(tmp_path), 2, world=1)
    (then,) = pool.run(run_until, [*SAVING, "--debug.seed=none"], str(tmp_path), world=1)
    assert then["begun"] == 2
    seeds = {
        json.loads(p.read_text())["position"]["seed"]
        for p in tmp_path.glob("checkpoint/*/state.json")
    }
    seeds |= {
        json.loads(p.read_text())["seed"] for p in tmp_path.glob("checkpoint/*/environment.json")
    }
    assert len(seeds) == 1 and seeds != {0}


def refused(argv: list[str], folder: str) -> tuple[str, list[str]]:
    log, lines = keeping_log()
    try:
        trainer(argv, folder, log)
    except Exception as error:
        return f"{type(error).__name__}: {error}", lines
    return "nothing", lines


def test_other_data_or_another_seed_is_refused(pool, tmp_path):
    (first,) = pool.run(run_until, SAVING, str(tmp_path), 1, world=1)
    fingerprint = json.loads((tmp_path / "checkpoint/step-1/state.json").read_text())["position"][
        "fingerprint"
    ]
    ((message, _),) = pool.run(
        refused, [*SAVING, "--training.dataset=python-stdlib-validation"], str(tmp_path), world=1
    )
    assert (
        message.startswith("UserError: the data of [training] has the fingerprint")
        and fingerprint in message
    )
    ((message, _),) = pool.run(refused, [*SAVING, "--debug.seed=5"], str(tmp_path), world=1)
    assert "debug.seed = 5" in message and "trained with 0" in message
    argv = [*SAVING, "--debug.seed=5", '--checkpoint.exclude_from_loading=["data"]']
    assert pool.run(refused, argv, str(tmp_path), world=1)[0][0] == "nothing"
    argv = [*SAVING, "--training.steps=2", '--checkpoint.exclude_from_loading=["data"]']
    (over,) = pool.run(run_until, argv, str(tmp_path), world=1)
    assert over["begun"] == 1 and over["data"] == {2: first["data"][1]}, "the data starts over"
    position = json.loads((tmp_path / "checkpoint/step-2/state.json").read_text())["position"]
    assert (position["tokens"], position["consumed"]) == (2 * 2 * 16, 2)


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_text_that_changed_is_refused_although_its_size_did_not(pool, tmp_path, tokenizer):
    text = tmp_path / "text" / "a.txt"
    text.parent.mkdir()
    text.write_text("abc defg " * 300)
    argv = [*SAVING, "--training.dataset=text", f"--training.dataset_path={text.parent}"]
    if tokenizer == "words":
        assets = make_assets(tmp_path, ["abc defg gfed"], 260)
        argv += [f"--model.hf_assets_path={assets}", "--model.overrides.vocab_size=300"]
    pool.run(run_until, argv, str(tmp_path / "run"), 1, world=1)
    text.write_text("abc gfed " * 300)
    ((message, _),) = pool.run(refused, argv, str(tmp_path / "run"), world=1)
    assert message.startswith("UserError: the data of [training] has the fingerprint"), message
    text.write_text("abc defg " * 300)
    assert pool.run(refused, argv, str(tmp_path / "run"), world=1)[0][0] == "nothing"


def test_a_run_saved_under_the_earlier_learning_rates_says_that_they_change(pool, tmp_path):
    pool.run(run_until, SAVING, str(tmp_path), 1, world=1)
    assert "learning rates" not in "".join(pool.run(refused, SAVING, str(tmp_path), world=1)[0][1])
    folder = tmp_path / "checkpoint/step-1"
    environment = json.loads((folder / "environment.json").read_text())
    del environment["lr_formula"]
    plant(folder, "environment.json", json.dumps(environment).encode())
    message, lines = pool.run(refused, SAVING, str(tmp_path), world=1)[0]
    assert (
        message == "nothing"
        and sum("learning rates are TorchTitan's from here on" in line for line in lines) == 1
    )


@pytest.mark.long
def test_a_checkpoint_without_the_content_of_its_shards_still_resumes():
    """Versions before hashed only the names and lengths of shards without a manifest."""
    for saved, accepted in (
        ("aa", True),
        ("aa+11", True),
        ("aa+22", False),
        ("bb", False),
        ("bb+11", False),
    ):
        resume = Resume(continues=True, position=Position(fingerprint=saved))
        with (
            nullcontext()
            if accepted
            else pytest.raises(UserError, match="has the fingerprint aa.11")
        ):
            resume.check_data(0, "aa+11")


TP2 = ["--parallelism.tensor_parallel_degree=2", "--model.overrides.n_kv_heads=2"]


@pytest.mark.parametrize(
    ("world", "options"),
    sample(
        [(2, []), (2, ["--parallelism.pipeline_parallel_degree=2"]), (4, TP2)], (2, []), every=2
    ),
)
def test_a_stream_continues_where_each_reader_was(pool, tmp_path, world, options):
    pytest.importorskip("datasets", reason="streaming needs the extra hf")
    texts = tmp_path / "texts"
    texts.mkdir()
    for file in range(3):
        lines = [json.dumps({"text": f"{file}:{i} " + "xyz" * (i % 7)}) for i in range(40)]
        (texts / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    argv = [
        *SAVING,
        "--training.dataset=c4_test",
        f"--training.dataset_path={texts}",
        "--training.steps=8",
    ]
    argv += options
    straight = pool.run(run_until, argv, str(tmp_path / "straight"), world=world)
    first = pool.run(run_until, argv, str(tmp_path / "cut"), 3, world=world)
    then = pool.run(run_until, argv, str(tmp_path / "cut"), world=world)
    for rank in range(world):
        assert then[rank]["begun"] == 3 and then[rank]["state"] == straight[rank]["state"]
        assert first[rank]["data"] | then[rank]["data"] == straight[rank]["data"]
