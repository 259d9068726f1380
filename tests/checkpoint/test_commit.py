"""Committing in one process: nothing incomplete gets its final name, and what has it is on the
disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import content
from tests.failpoints import calling
from tests.messages import refused
from titanlite.checkpoint import commit
from titanlite.checkpoint.load import load_tensors
from titanlite.errors import RunFailed

TENSORS = {"model.a": torch.arange(1000.0), "model.b": torch.ones(3, 4)}


def save(root: Path, planned: Mapping[str, torch.Tensor] = TENSORS, **values: torch.Tensor) -> None:
    """Commit step 1, with other values than planned, by the last part of their names."""
    changed = {f"model.{name}": value for name, value in values.items()}
    commit.commit(root, content(planned, {**planned, **changed}), group=None)


@pytest.mark.parametrize(
    ("point", "file", "size", "named"),
    [
        ("file written", "rank-0.safetensors", 40, ["4,048 bytes", "planned"]),
        ("tensors stored", "rank-0.safetensors", 40, ["rank-0.safetensors", "40 bytes"]),
        ("after the manifest", "state.json", 1, ["state.json", "1 bytes"]),
    ],
    ids=["short write", "later", "document"],
)
def test_a_file_that_lost_bytes_is_never_published(tmp_path, point, file, size, named):
    def failpoint(name: str) -> None:
        if name == point:
            (path,) = tmp_path.glob(f".step-1.*/{file}")
            os.truncate(path, size)

    with calling(failpoint), refused("step 1", *named, kind=RunFailed):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_part_that_no_rank_wrote_is_found(tmp_path, monkeypatch):
    write = commit._write_tensors

    def lose_a_tensor(*args):
        file, nbytes = write(*args)
        return file, nbytes - 48

    monkeypatch.setattr(commit, "_write_tensors", lose_a_tensor)
    with refused("4,048 bytes", "4,000", kind=RunFailed):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("wrong", [torch.ones(3, 4).int(), torch.ones(4, 3), torch.ones(2, 4)])
def test_values_of_another_type_or_shape_than_planned_are_refused(tmp_path, wrong):
    with refused("model.b: ", "planned", kind=RunFailed):
        save(tmp_path, b=wrong)
    assert [*tmp_path.iterdir()] == []


def test_a_type_that_no_checkpoint_holds_is_named(tmp_path):
    with refused("model.a", "complex128", kind=RunFailed):
        save(tmp_path, {"model.a": torch.ones(2, dtype=torch.complex128)})


def test_a_committed_folder_is_never_written_into(tmp_path):
    save(tmp_path)
    with refused(f"{tmp_path}/step-1", kind=RunFailed):
        save(tmp_path, a=torch.ones(1000))
    assert torch.equal(load_tensors(tmp_path / "step-1")["model.a"], TENSORS["model.a"])


def test_every_file_and_folder_is_on_the_disk_before_a_name_says_so(tmp_path, monkeypatch):
    events, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with calling(events.append):
        save(tmp_path)
    renamed = events.index("before the rename")
    *files, staging = events[events.index("file written") + 1 : renamed]
    written = {f"{staging}/{path.name}" for path in (tmp_path / "step-1").iterdir()}
    assert {event for event in files if event.startswith("/")} == written and ".step-1." in staging
    assert events[renamed:] == [
        *("before the rename", f"{tmp_path}", "after the rename"),
        *("before latest", f"{tmp_path}/.latest.new", f"{tmp_path}", "after latest"),
    ]
    assert torch.equal(load_tensors(tmp_path / "step-1")["model.a"], TENSORS["model.a"])
