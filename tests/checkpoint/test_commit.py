"""Committing in one process: nothing incomplete gets its final name, and what has it is on the
disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.failpoints import calling
from titanlite.checkpoint import commit
from titanlite.checkpoint.load import load_tensors
from titanlite.errors import RunFailed

TENSORS = {"model.a": torch.arange(1000.0), "model.b": torch.ones(3, 4)}


def save(root: Path) -> None:
    documents = {"state.json": b"{}\n"}
    content = commit.Content(
        1, TENSORS, TENSORS.__getitem__, None, lambda _: documents, weights_only=True
    )
    commit.commit(root, content, group=None)


@pytest.mark.parametrize(
    ("point", "file", "reason"),
    [
        (
            "file written",
            "rank-0.safetensors",
            "4,048 bytes of tensors were planned, -[0-9]+ are stored",
        ),
        (
            "tensors stored",
            "rank-0.safetensors",
            ".*rank-0.safetensors: 40 bytes, [0-9,]+ were written",
        ),
        ("after the manifest", "state.json", ".*state.json: 1 bytes, 3 were written"),
    ],
    ids=["short write", "later", "document"],
)
def test_a_file_that_lost_bytes_is_never_published(tmp_path, point, file, reason):
    def failpoint(name: str) -> None:
        if name == point:
            (path,) = tmp_path.glob(f".step-1.*/{file}")
            os.truncate(path, 40 if file.startswith("rank") else 1)

    with calling(failpoint), pytest.raises(RunFailed, match=f"of step 1 failed: OSError: {reason}"):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_a_part_that_no_rank_wrote_is_found(tmp_path, monkeypatch):
    write = commit._write_tensors

    def lose_a_tensor(*args):
        file, nbytes = write(*args)
        return file, nbytes - 48

    monkeypatch.setattr(commit, "_write_tensors", lose_a_tensor)
    with pytest.raises(RunFailed, match="4,048 bytes of tensors were planned, 4,000 are stored"):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("wrong", [torch.ones(3, 4).int(), torch.ones(4, 3), torch.ones(2, 4)])
def test_values_of_another_type_or_shape_than_planned_are_refused(tmp_path, wrong):
    values = {**TENSORS, "model.b": wrong}
    content = commit.Content(1, TENSORS, values.__getitem__, None, lambda _: {}, weights_only=True)
    with pytest.raises(RunFailed, match=r"model\.b: .* was planned, and there is"):
        commit.commit(tmp_path, content, group=None)
    assert [*tmp_path.iterdir()] == []


def test_a_type_that_no_checkpoint_holds_is_named(tmp_path):
    tensors = {"model.a": torch.ones(2, dtype=torch.complex128)}
    content = commit.Content(1, tensors, tensors.__getitem__, None, lambda _: {}, weights_only=True)
    with pytest.raises(RunFailed, match="model.a is of the type complex128, which checkpoints do"):
        commit.commit(tmp_path, content, group=None)


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
