"""Committing in one process: nothing incomplete gets its final name, and what has it is on the
disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.failpoints import calling
from titanlite.checkpoint import commit
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import File
from titanlite.errors import RunFailed

TENSORS = {"model.a": torch.arange(1000.0), "model.b": torch.ones(3, 4)}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(root: Path) -> None:
    documents = {"state.json": b"{}\n"}
    content = commit.Content(
        1, TENSORS, TENSORS.__getitem__, None, lambda _: documents, weights_only=True
    )
    commit.commit(root, content, group=None)


@pytest.mark.parametrize(
    ("point", "file", "reason"),
    [
        ("file written", "__0_0.distcp", "model.[ab] at .* was planned, but is not stored"),
        ("tensors stored", "__0_0.distcp", "__0_0.distcp has 40 bytes, [0-9]+ were written"),
        ("after the manifest", "state.json", "state.json has 1 bytes, 3 were written"),
    ],
    ids=["short write", "later", "document"],
)
def test_a_file_that_lost_bytes_is_never_published(tmp_path, point, file, reason):
    def failpoint(name: str) -> None:
        if name == point:
            (path,) = tmp_path.glob(f".step-1.*/{file}")
            os.truncate(path, 40 if file.startswith("__") else 1)

    with calling(failpoint), pytest.raises(RunFailed, match=f"of step 1 failed: OSError: {reason}"):
        save(tmp_path)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 11), (8, 3), (0, None)],
    ids=["too long", "beyond the end", "not stored"],
)
def test_a_chunk_that_is_not_inside_its_file_is_refused(offset, length):
    planned = TensorStorageMetadata(
        TensorProperties(),
        torch.Size([1]),
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))],
    )
    stored = {}
    if length:
        info = torch.distributed.checkpoint.filesystem._StorageInfo("file", offset, length)
        stored[MetadataIndex("model.a", torch.Size([0]))] = info
    metadata = Metadata({"model.a": planned}, storage_data=stored)
    with pytest.raises(OSError, match=r"model.a at \[0\] was planned, but is not stored"):
        commit._tensor_entries(metadata, {"model.a": "replicated"}, {"file": File(10, 0)})


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
