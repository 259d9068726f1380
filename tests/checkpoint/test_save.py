"""Saving: the state at the call, a failure that all ranks know of, and no incomplete checkpoint is
ever published.
"""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.saved import SAVING, commit_tensors, rank, steps_in
from tests.failpoints import calling
from tests.jobs import TINY, full, keeping_log, trainer
from tests.lanes import sample
from tests.messages import refused, says
from tests.runs import records
from titanlite.checkpoint import commit, layouts, manifest, shared
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    is_complete,
    latest_complete,
    read_manifest,
    step_folder,
    steps_to_delete,
)
from titanlite.checkpoint.plan import Planner, flat
from titanlite.checkpoint.shared import SEEN_BY_ALL
from titanlite.checkpoint.stager import Stager
from titanlite.checkpoint.state import TrainingState
from titanlite.checkpoint.stored_tensors import Split, StoredTensor
from titanlite.errors import RunFailed, UserError
from titanlite.parallel.dtensor import local_part
from titanlite.runtime import lock
from titanlite.runtime.store import LocalPath
from titanlite.train.trainer import Trainer


def in_step(folder: str, step: int, expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether a checkpoint holds exactly these tensors."""
    found = load_tensors(LocalPath(folder) / f"checkpoint/step-{step}")
    same = all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    return same and found.keys() == expected.keys()


def whole_state(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in run.state.tensors().items()}


def changed_right_after(folder: str) -> bool:
    """Whether the state at the call was saved, although it was overwritten before it was
    written.
    """
    run = trainer([*SAVING, "--training.steps=1"], folder)
    saved: dict[str, torch.Tensor] = {}
    save, write = run.save, run.saver._write

    def late(*args) -> Any:
        time.sleep(0.3)
        return write(*args)

    def save_then_change() -> None:
        saved.update(whole_state(run))
        save()
        for tensor in run.state.tensors().values():
            local_part(tensor).detach().fill_(7)

    run.save = save_then_change  # type: ignore[method-assign]
    run.saver._write = late  # type: ignore[method-assign]
    run.train()
    return in_step(folder, 1, saved)


def test_the_state_at_the_call_is_saved(pool, tmp_path):
    assert pool.run(changed_right_after, str(tmp_path), world=2) == [True, True]


class LateStream(TorchDispatchMode):
    """Stands in for a stream of a GPU: what it is given is done as late as it may, when something
    waits for it. Without waiting for the main stream it would begin before the update has ended.
    """

    waited_for = ""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events, self.work = events, []

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None) -> Any:
        assert self.waited_for == "main"
        self.work.append((func, args))
        return args[0]

    def wait_stream(self, stream: str) -> None:
        self.waited_for = stream

    def record_event(self) -> "LateEvent":
        given, self.work = self.work, []
        return LateEvent(self.events, given)


class LateEvent:
    def __init__(self, events: list[str], work: list[Any]) -> None:
        self.events, self.work, self.done = events, work, threading.Event()

    def wait(self) -> None:
        if not self.done.is_set():
            for func, args in self.work:
                func(*args)
            self.events.append("copied")
            self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(60)


def copied_beside_training(folder: str) -> tuple[list[str], bool]:
    """Save as with pinned memory a model with a buffer that the forward pass changes; return the
    order of what happened, and whether each checkpoint holds the state at the call."""
    run, events, saved = trainer(SAVING, folder), [], {}
    (model,), saver = run.parts, run.saver
    passes = torch.zeros(1)

    def change_buffer(*_) -> None:
        passes.add_(1)

    model.register_buffer("passes", passes)
    model.register_forward_hook(change_buffer)
    saver.settings = saver.settings.model_copy(update={"async_mode": "async_with_pinned_mem"})

    def noted(function, name: str):
        def call(*args):
            result = function(*args)
            events.append(name)
            return result

        return call

    run.runner.forward_backward = noted(run.runner.forward_backward, "forward and backward")  # type: ignore
    run.runner.update = noted(run.runner.update, "update")  # type: ignore[method-assign]
    finish_save, save = saver.finish_save, noted(run.save, "save returned")

    def save_noting_the_state() -> None:
        saved[run.step] = whole_state(run)
        save()

    def finish_save_at_last() -> None:
        saver.before_update()  # no update waits for the copy of the last step
        finish_save()

    run.save, saver.finish_save = save_noting_the_state, finish_save_at_last  # type: ignore[method-assign]
    with patch.multiple(
        torch.cuda,
        Stream=lambda: LateStream(events),
        stream=lambda stream: stream,
        current_stream=lambda: "main",
        device=lambda _: nullcontext(),
        cudart=MagicMock(),
        check_error=lambda _: None,
    ):
        run.train()
    return events, all(in_step(folder, step, state) for step, state in saved.items())


def test_a_copy_into_pinned_memory_runs_beside_training_until_the_optimizer_changes_the_state(
    pool, tmp_path
):
    ((events, same),) = pool.run(copied_beside_training, str(tmp_path), world=1)
    step = ["forward and backward", "copied", "update", "save returned"]
    assert events == [*(word for word in step if word != "copied"), *step, *step, "copied"]
    assert same, (
        "the state is as it was when it was saved, buffers that the forward pass changes too"
    )


def test_staged_copies_lie_in_one_block_that_each_save_uses_again():
    values = torch.arange(5.0)
    state = {"model": {"a": values, "b": torch.ones(3, 2).bfloat16(), "c": torch.tensor(2)}}
    stager, blocks = Stager(), set()
    for change in (0, 1):
        values += change
        copies = flat(stager.stage(state))
        assert all(torch.equal(copies[name], value) for name, value in flat(state).items())
        blocks |= {copy.untyped_storage().data_ptr() for copy in copies.values()}
        assert copies["model.a"].untyped_storage().nbytes() == 3 * 64
    assert len(blocks) == 1


def fails_to_copy(folder: str) -> str:
    run = trainer(SAVING, folder)
    no_room = patch.object(Stager, "stage", side_effect=MemoryError("no room"))
    with no_room, pytest.raises(MemoryError) as error:
        run.train()
    return str(error.value)


def test_a_copy_that_fails_ends_the_run(pool, tmp_path):
    assert pool.run(fails_to_copy, str(tmp_path), world=1) == ["no room"]


def fails_at(point: str, on_rank: int, argv: list[str], folder: str) -> tuple[str, int, str]:
    """Train with a full disk at a failpoint of the save of step 4; return how that ended, at which
    step, and the log.
    """
    log, lines = keeping_log()
    run = trainer([*SAVING, "--checkpoint.interval=2", *argv], folder, log)

    def failpoint(name: str) -> None:
        pending = run.saver._pending
        if name == point and rank() == on_rank and pending and pending.step == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fetch = run.next_micro_batches

    def next_micro_batches() -> list:
        pending = run.saver._pending
        if pending and pending.step == 4:
            pending.join()  # it has failed before the next step starts
        return fetch()

    run.next_micro_batches = next_micro_batches  # type: ignore[method-assign]
    message = "nothing"
    try:
        with calling(failpoint):
            run.train()
    except RunFailed as error:
        message = str(error)
    return message, run.step, "\n".join(lines)


WARN = "--checkpoint.on_failure=warn"
FAILS = [("async", "half a file", 1), ("disabled", "before the manifest", 0)]


@pytest.mark.parametrize(("mode", "point", "culprit"), sample(FAILS, FAILS[0]))
def test_on_failure_warn_continues_and_saves_again(pool, tmp_path, mode, point, culprit):
    argv = ["--training.steps=8", WARN, f"--checkpoint.async_mode={mode}"]
    for message, step, log in pool.run(fails_at, point, culprit, argv, str(tmp_path), world=2):
        assert (message, step) == ("nothing", 8)
        says(log, "step 4 failed", f"on rank {culprit}", "No space left", "training continues")
    assert steps_in(tmp_path) == ["step-2", "step-6", "step-8"]


@pytest.mark.parametrize("mode", sample(["async", "disabled"], "async"))
def test_a_failed_last_save_ends_the_run_with_an_error_although_on_failure_is_warn(
    pool, tmp_path, mode
):
    argv = ["--training.steps=4", WARN, f"--checkpoint.async_mode={mode}"]
    ((message, step, _),) = pool.run(fails_at, "half a file", 0, argv, str(tmp_path), world=1)
    says(message, "step 4", "rank 0", "step-2")
    assert step == 4


def test_a_checkpoint_records_its_tensors_and_costs(train, tmp_path):
    argv = [*SAVING, "--checkpoint.interval=2", "--training.steps=5"]
    argv.append("--checkpoint.enable_first_step_checkpoint")
    train(argv, tmp_path, ranks=2)
    assert steps_in(tmp_path) == ["step-1", "step-2", "step-4", "step-5"]
    folder = tmp_path / "checkpoint/step-4"
    manifest = read_manifest(folder)
    assert manifest.step == 4 and not manifest.weights_only
    weight = manifest.tensors["optimizer.layers.1.attention.wq.weight.exp_avg"]
    assert (weight.shape, weight.dtype) == ((16, 16), "float32")
    assert weight.placement == "dim 0 over dp_shard"
    costs = {r["step"]: r for r in records(tmp_path) if "checkpoint_write_seconds" in r}
    assert costs.keys() == {1, 2, 4, 5}
    assert all(
        r["checkpoint_staging_seconds"] <= r["checkpoint_blocked_seconds"] for r in costs.values()
    )


def with_slow_writes(argv: list[str], folder: str) -> list[str]:
    """Train with saves of more than a second; return the log."""
    log, lines = keeping_log()
    run, publish = trainer(argv, folder, log), LocalPath.publish

    def publish_late(*args: Any) -> None:
        time.sleep(1.1)
        publish(*args)

    with patch.object(LocalPath, "publish", publish_late):
        run.train()
    return lines


def test_a_save_that_takes_longer_than_the_grace_of_a_stop_is_warned_of(pool, tmp_path):
    for grace, warned in ((1, 1), (60, 0)):
        argv = [*SAVING, "--training.steps=1", f"--fault.grace_seconds={grace}"]
        (lines,) = pool.run(with_slow_writes, argv, str(tmp_path / str(grace)), world=1)
        assert sum("fault.grace_seconds" in line and "step 1" in line for line in lines) == warned


def test_the_last_checkpoint_may_hold_only_weights(train, tmp_path):
    argv = [*SAVING, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"]
    argv.append("--checkpoint.last_save_model_only")
    train(argv, tmp_path, ranks=2)
    manifest = read_manifest(tmp_path / "checkpoint/step-3")
    assert manifest.weights_only and all(name.startswith("model.") for name in manifest.tensors)
    (part,) = train([*argv, "--training.steps=4"], tmp_path)
    assert part["begun"] == 2, "the last one that can be resumed was kept"
    assert any("step-3" in line and "weights only" in line for line in part["log"])
    assert steps_in(tmp_path) == ["step-2", "step-4"]
    assert [*tmp_path.glob("previous/*/checkpoint/step-3")]


def by_the_clock(argv: list[str], folder: str) -> tuple[list[str], list[str], list[float]]:
    """Save after a minute by the clock of rank 0, then as often as that save's cost says."""
    run = trainer([*SAVING, *argv], folder)
    run.saver._log, log = keeping_log()
    run.saver._last_save -= 61 if rank() == 0 else -1000
    run.train()
    seconds = []
    for waited, took in ((2.0, 3.0), (2.2, 3.0), (2.0, 900.0)):
        run.saver._set_interval(waited, took)
        seconds.append(run.saver._auto_seconds)
    return steps_in(LocalPath(folder)), log, seconds


SAVED = ["step-1", "step-3"]


def test_all_ranks_follow_the_clock_of_rank_0(pool, tmp_path):
    argv = ["--checkpoint.interval=100", "--checkpoint.interval_minutes=1"]
    for saved, *_ in pool.run(by_the_clock, argv, str(tmp_path), world=2):
        assert saved == SAVED


def test_the_interval_follows_from_the_cost_of_a_save_and_the_time_between_failures(pool, tmp_path):
    argv = ["--checkpoint.interval=auto", "--fault.mtbf_hours=10"]
    saved, log, seconds = pool.run(by_the_clock, argv, str(tmp_path), world=2)[0]
    assert saved == SAVED, "the next would come much later; the last one"
    assert seconds == [(2 * 2.0 * 36000) ** 0.5] * 2 + [1800.0], "a change below a tenth is none"
    says(log, "10 hours", "fault.mtbf_hours")


def empty(root: LocalPath, *steps: int, weights_only: bool = False, **more: Any) -> None:
    content: Any = {"tensors": {}, **more}
    for step in steps:
        step_folder(root, step).mkdir()
        manifest = Manifest(step, weights_only, {}, **content)
        (step_folder(root, step) / MANIFEST).write_bytes(manifest.render())


def test_retention_counts_complete_checkpoints_only(tmp_path):
    empty(tmp_path, 10, 20, 30, 40, 50)
    for foreign in ("step-5.backup", "step-05", "my-step-1", "step-"):
        shutil.copytree(tmp_path / "step-10", tmp_path / foreign)
    (tmp_path / "step-50" / MANIFEST).write_bytes(b"{}")  # damaged: counts as nothing
    (tmp_path / "step-7").mkdir()  # never committed
    assert steps_to_delete(tmp_path, 2, 0, set()) == [10, 20]
    assert steps_to_delete(tmp_path, 2, 20, set()) == [10]
    assert steps_to_delete(tmp_path, 0, 0, set()) == []
    (tmp_path / "step-10").withdraw(MANIFEST)
    assert not (tmp_path / "step-10").exists() and is_complete(tmp_path / "step-20")
    empty(tmp_path, 35, 60, weights_only=True)  # they replace none that can be resumed
    assert steps_to_delete(tmp_path, 1, 0, set()) == [20, 30]


def test_retention_parses_no_entry_of_a_tensor_and_looks_once_at_the_files_of_a_step(
    tmp_path, monkeypatch
):
    """Parsing holds the trainer's lock; what a save of this run has seen complete stays so."""
    tensors = {f"model.{each}": StoredTensor((8,), "float32", Split()) for each in range(2000)}
    known, looked, parsed = set[int](), list[str](), list[int]()
    looks, loads = manifest.faults, json.loads

    def looking(folder: LocalPath, *args, **options):
        looked.append(folder.name)
        return looks(folder, *args, **options)

    monkeypatch.setattr(manifest, "faults", looking)
    monkeypatch.setattr(manifest.json, "loads", lambda raw: parsed.append(len(raw)) or loads(raw))
    for steps, old in (((10, 20, 30), [10]), ((40,), [20])):
        empty(tmp_path, *steps, tensors=tensors)
        assert steps_to_delete(tmp_path, 2, 0, known) == old
        step_folder(tmp_path, old[0]).withdraw(MANIFEST)
    assert looked == ["step-10", "step-20", "step-30", "step-40"]
    assert latest_complete(tmp_path) == 40
    assert len(parsed) == 5 and max(parsed) < 200


def test_only_leftovers_are_cleared(tmp_path):
    left = ".step-3.0123abcd.staging .hf-step-3.0123abcd.staging .step-3.staging .step-1.deleted"
    foreign = ".step-3.staging.mine .step-x.deleted step-2 .mine.0123abcd.staging"
    probe, mine = f"{SEEN_BY_ALL}{'0a' * 16}", f"{SEEN_BY_ALL}mine"
    draft = f".{probe}.new"
    for name in [*left.split(), *foreign.split(), mine]:
        (tmp_path / name).mkdir()
    for name in (probe, draft):
        (tmp_path / name).touch()
    assert shared.clear_leftovers(tmp_path) == sorted([*left.split(), probe, draft])
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign.split(), mine])


def leftovers(has_locks: bool, folder: str) -> list[str]:
    """Start on a file system with or without locks where a save is or was in progress; return what
    is still there.
    """
    (LocalPath(folder) / "checkpoint/.step-9.0123abcd.staging").mkdir(parents=True, exist_ok=True)
    with patch.object(lock, "works_on", lambda path: has_locks):
        trainer(SAVING, folder)
    return os.listdir(f"{folder}/checkpoint")


def test_a_save_in_progress_is_deleted_only_under_a_lock(pool, tmp_path):
    assert pool.run(leftovers, False, str(tmp_path), world=1) == [[".step-9.0123abcd.staging"]]
    assert pool.run(leftovers, True, str(tmp_path), world=1) == [[]]


def with_slow_deletions(folder: str) -> list[list[int]]:
    """Train; return what was still to be deleted when each save ended on this rank."""
    keep = ["--checkpoint.keep_latest_k=2", "--checkpoint.keep_every=3"]
    run = trainer([*SAVING, "--training.steps=7", *keep], folder)
    left, withdraw, write = [], LocalPath.withdraw, run.saver._write

    def slow(*args: Any) -> None:
        time.sleep(0.03)
        withdraw(*args)

    def write_and_note(*args) -> Any:
        done = write(*args)
        left.append(steps_to_delete(run.checkpoints.root, 2, 3, set()))
        return done

    run.saver._write = write_and_note  # type: ignore[method-assign]
    with patch.object(LocalPath, "withdraw", slow):
        run.train()
    return left


def test_the_run_keeps_the_latest_and_every_nth_and_no_rank_runs_ahead_of_a_deletion(
    pool, tmp_path
):
    assert pool.run(with_slow_deletions, str(tmp_path), world=2) == [[[]] * 7] * 2
    assert steps_in(tmp_path) == ["step-3", "step-6", "step-7"]
    assert (tmp_path / "checkpoint/latest").read_text() == "step-7\n"


def on_a_disk_of_its_own(folder: str) -> str:
    """Return why a run whose ranks have different disks does not start."""
    clock = SimpleNamespace(monotonic=count().__next__, sleep=lambda seconds: None)
    # A network folder gets five seconds to show a file
    with patch.object(shared, "time", clock), pytest.raises(UserError) as error:
        trainer([*TINY, "--checkpoint.enable"], f"{folder}/{rank()}")
    return str(error.value)


def test_ranks_that_do_not_share_the_folder_are_refused_before_training(pool, tmp_path):
    for number, message in enumerate(pool.run(on_a_disk_of_its_own, str(tmp_path), world=2)):
        folder = f"{tmp_path}/{number}/checkpoint"
        says(message, "checkpoint.folder", folder, "rank 1 on host1", "host0", "job.dump_folder")
    assert [*(tmp_path / "0/checkpoint").iterdir()] == []


def test_a_folder_in_which_nothing_can_be_written_is_named(begun, tmp_path):
    (tmp_path / "checkpoint").touch()
    says(begun(SAVING, tmp_path)["error"], f"checkpoint.folder {tmp_path}/checkpoint: nothing can")


def heard(folder: str) -> tuple[int, list[int]]:
    """Save twice; return the listings of the folders that are written, and how many ranks' values
    this rank got of what only rank 0 gathers.
    """
    received, gather = [], layouts.gather_objects

    def note(value, group, only_rank_0=False):
        values = gather(value, group, only_rank_0)
        if only_rank_0:
            received.append(sum(map(bool, values)) if rank() == 0 else int(bool(value)))
        return values

    with (
        patch.object(layouts, "gather_objects", note),
        patch.object(commit, "gather_objects", note),
        patch.object(LocalPath, "entries", autospec=True, side_effect=LocalPath.entries) as listing,
    ):
        trainer([*SAVING, "--training.steps=2"], folder).train()
    listed = (call.args[0].name for call in listing.call_args_list)
    return sum(name.endswith(".staging") for name in listed), received


def test_rank_0_hears_a_row_of_each_rank_a_save_and_one_table_of_those_alike_a_run(pool, tmp_path):
    assert pool.run(heard, str(tmp_path), world=2) == [(2, [1, 2, 2]), (0, [0, 1, 1])]


class Rows(torch.optim.SGD):
    """Keeps a number per row: neither a tensor of the parameter's shape nor a scalar."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(parameter.shape[:1])


def test_optimizer_state_is_created_without_a_step():
    layer = torch.nn.Linear(3, 2)
    for optimizer, keys, numbers in (
        (torch.optim.AdamW(layer.parameters()), {"exp_avg", "exp_avg_sq"}, {"step"}),
        (torch.optim.SGD(layer.parameters(), momentum=0.9), {"momentum_buffer"}, set()),
        (torch.optim.SGD(layer.parameters()), set(), set()),
        (torch.optim.Adagrad(layer.parameters()), {"sum"}, {"step"}),
        (torch.optim.Muon([layer.weight]), {"momentum_buffer"}, set()),
    ):
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))  # noqa: B023
        state = TrainingState([layer], optimizer, {})
        of_optimizer = state.tensors().keys() - state.weights().keys()
        assert {name.rpartition(".")[2] for name in of_optimizer} == keys
        assert {name.rpartition(".")[2] for name in state.numbers()} == numbers
        assert not steps
    with refused("Rows", "rows", "[2]", "[2, 2]", kind=Exception):
        TrainingState([layer], Rows(layer.parameters()), {}).tensors()


TENSORS = {"model.a": torch.arange(1000.0), "model.b": torch.ones(3, 4)}


@pytest.mark.parametrize(
    ("point", "file", "size", "named"),
    [
        ("tensors stored", "rank-0.safetensors", 40, ["rank-0.safetensors", "40 bytes"]),
        ("after the manifest", "state.json", 1, ["state.json", "1 bytes"]),
    ],
)
def test_a_file_that_lost_bytes_is_never_published(tmp_path, point, file, size, named):
    def failpoint(name: str) -> None:
        if name == point:
            (path,) = tmp_path.glob(f".step-1.*/{file}")
            os.truncate(path, size)

    with calling(failpoint), refused("step 1", *named, kind=RunFailed):
        commit_tensors(tmp_path, TENSORS)
    assert [*tmp_path.iterdir()] == []


def test_a_part_that_no_rank_wrote_is_found(tmp_path, monkeypatch):
    write = commit._write_tensors

    def lose_a_tensor(*args):
        file, nbytes = write(*args)
        return file, nbytes - 48

    monkeypatch.setattr(commit, "_write_tensors", lose_a_tensor)
    with refused("4,048 bytes", "4,000", kind=RunFailed):
        commit_tensors(tmp_path, TENSORS)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("wrong", [torch.ones(3, 4).int(), torch.ones(4, 3)])
def test_values_of_another_type_or_shape_than_planned_are_refused(tmp_path, wrong):
    planner = Planner()
    commit_tensors(tmp_path / "first", TENSORS, planner=planner)
    with refused("model.b: ", "planned", kind=RunFailed):
        commit_tensors(tmp_path / "then", TENSORS | {"model.b": wrong}, planner=planner)
    assert [*(tmp_path / "then").iterdir()] == []


def test_a_type_that_no_checkpoint_holds_is_named(tmp_path):
    with refused("model.a", "complex128", kind=RunFailed):
        commit_tensors(tmp_path, {"model.a": torch.ones(2, dtype=torch.complex128)})


def test_a_committed_folder_is_never_written_into(tmp_path):
    commit_tensors(tmp_path, TENSORS)
    with refused(f"{tmp_path}/step-1", kind=RunFailed):
        commit_tensors(tmp_path, TENSORS | {"model.a": torch.ones(1000)})
    assert torch.equal(load_tensors(tmp_path / "step-1")["model.a"], TENSORS["model.a"])


def test_every_file_and_folder_is_on_the_disk_before_a_name_says_so(tmp_path, monkeypatch):
    events, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with calling(events.append):
        commit_tensors(tmp_path, TENSORS)
    renamed = events.index("before the rename")
    synced = {os.path.basename(each).lstrip(".").removesuffix(".new") for each in events[:renamed]}
    assert {path.name for path in (tmp_path / "step-1").iterdir()} <= synced
    staging = events[renamed + 1]
    assert ".step-1." in staging and events[renamed:] == [
        *("before the rename", staging, f"{tmp_path}", "after the rename"),
        *("before latest", f"{tmp_path}/.latest.new", f"{tmp_path}", "after latest"),
    ]
    assert torch.equal(load_tensors(tmp_path / "step-1")["model.a"], TENSORS["model.a"])
