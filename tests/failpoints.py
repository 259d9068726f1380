"""The moments of a save at which a kill or an error would hurt most, reached by patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from titanlite.checkpoint import cleanup, commit
from titanlite.checkpoint.manifest import MANIFEST, step_of
from titanlite.runtime import store
from titanlite.runtime.bucket import is_remote

ON_EVERY_RANK = ("file begun", "half a file", "file written", "tensors stored")
FAILPOINTS = (
    "staging begun",
    *ON_EVERY_RANK,
    "before the manifest",
    "half a manifest",
    "after the manifest",
    "before the rename",
    "after the rename",
    "before latest",
    "after latest",
    "before a deletion",
    "half a deletion",
    "after a deletion",
)
"""In their order; those that are not in ON_EVERY_RANK are on rank 0."""
IN_A_BUCKET = tuple(point for point in FAILPOINTS if point != "half a manifest")
"""Those of a bucket, where the rename stands for the creation of the last manifest."""
Failpoint = Callable[[str], object]


@contextmanager
def calling(failpoint: Failpoint) -> Iterator[None]:
    """Call the function with each failpoint's name as this process reaches it."""

    def is_staging(path: Path) -> bool:
        if is_remote(path):
            return step_of(path.parent.name) is not None
        return path.name.startswith(".step-") and path.name.endswith(".staging")

    def make_folder(original: Any, folder: Path) -> None:
        original(folder)
        if is_staging(folder):
            failpoint("staging begun")

    def noted(blocks: Any) -> Iterator[Any]:
        blocks = [*blocks]
        for number, block in enumerate(blocks):
            if number == 1:  # after the header
                failpoint("file begun")
            if number == len(blocks) // 2:
                failpoint("half a file")
            yield block

    def write_blocks(original: Any, path: Path, blocks: Any) -> None:
        original(path, noted(blocks))
        failpoint("file written")

    def write_and_sum(original: Any, path: Path, blocks: Any, expected: int) -> Any:
        if not is_remote(path):  # by write_blocks
            return original(path, blocks, expected)
        written = original(path, noted(blocks), expected)
        failpoint("file written")
        return written

    def write_tensors(original: Any, *args: Any) -> Any:
        result = original(*args)
        failpoint("tensors stored")
        return result

    def write(original: Any, path: Path, content: bytes) -> None:
        if path.name == MANIFEST and is_staging(path.parent):
            failpoint("before the manifest")
            if not is_remote(path):
                path.write_bytes(content[: len(content) // 2])
            failpoint("half a manifest")
            original(path, content)
            failpoint("after the manifest")
        else:
            original(path, content)

    def rename(original: Any, path: Path, target: Path) -> None:
        if is_staging(path):
            failpoint("before the rename")
            original(path, target)
            failpoint("after the rename")
        else:
            original(path, target)

    def publish(original: Any, staging: Path, target: Path, *last: Any) -> None:
        if not is_remote(target):
            original(staging, target, *last)
            return
        failpoint("before the rename")
        original(staging, target, *last)
        failpoint("after the rename")

    def point_latest(original: Any, *args: Any) -> None:
        failpoint("before latest")
        original(*args)
        failpoint("after latest")

    def delete(original: Any, folder: Path) -> None:
        failpoint("before a deletion")
        with _around(store, "delete", delete_in_half):
            original(folder)
        failpoint("after a deletion")

    def delete_in_half(original: Any, path: Path) -> None:
        if path.name.endswith(".deleted") or is_remote(path):
            failpoint("half a deletion")
        original(path)

    with (
        _around(store, "make_folder", make_folder),
        _around(store, "write_blocks", write_blocks),
        _around(store, "write_and_sum", write_and_sum),
        _around(commit, "_write_tensors", write_tensors),
        _around(store, "write", write),
        _around(store, "rename", rename),
        _around(store, "publish", publish),
        _around(commit, "point_latest", point_latest),
        _around(cleanup, "delete", delete),
    ):
        yield


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """Replace owner.name by wrapper(the original, *args)."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args: wrapper(original, *args))
