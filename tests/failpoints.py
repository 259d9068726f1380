"""The moments of a save at which a kill or an error would hurt most, reached by patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from titanlite.checkpoint import commit
from titanlite.checkpoint.manifest import MANIFEST, step_of
from titanlite.runtime.bucket import BucketPath, Place
from titanlite.runtime.store import LocalPath

ON_EVERY_RANK = ("file begun", "half a file", "file written", "tensors stored")
FAILPOINTS = (
    "staging begun",
    *ON_EVERY_RANK,
    "before the manifest",
    "after the manifest",
    "before the rename",
    "after the rename",
    "before latest",
    "after latest",
    "before a deletion",
    "half a deletion",
    "after a deletion",
)
"""In their order; those that are not in ON_EVERY_RANK are on rank 0. In a bucket the rename stands
for the creation of the last manifest."""
Failpoint = Callable[[str], object]


@contextmanager
def calling(failpoint: Failpoint) -> Iterator[None]:
    """Call the function with each failpoint's name as this process reaches it."""

    def is_staging(path: Place) -> bool:
        return path.name.endswith(".staging") or step_of(path.parent.name) is not None

    def make(original: Any, folder: Place) -> None:
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

    def put_blocks(original: Any, path: Place, blocks: Any, size: int) -> Any:
        if not is_staging(path.parent):
            return original(path, blocks, size)
        written = original(path, noted(blocks), size)
        failpoint("file written")
        return written

    def write_tensors(original: Any, *args: Any) -> Any:
        result = original(*args)
        failpoint("tensors stored")
        return result

    def put(original: Any, path: Place, content: bytes) -> None:
        if path.name == MANIFEST and is_staging(path.parent):
            failpoint("before the manifest")
            original(path, content)
            failpoint("after the manifest")
        else:
            original(path, content)

    def publish(original: Any, target: Place, *args: Any) -> None:
        failpoint("before the rename")
        original(target, *args)
        failpoint("after the rename")

    def point_latest(original: Any, *args: Any) -> None:
        failpoint("before latest")
        original(*args)
        failpoint("after latest")

    def withdraw(original: Any, folder: Place, last: str) -> None:
        failpoint("before a deletion")
        with _around(type(folder), "remove", remove_in_half):
            original(folder, last)
        failpoint("after a deletion")

    def remove_in_half(original: Any, path: Place) -> None:
        if path.name != MANIFEST:
            failpoint("half a deletion")
        original(path)

    with ExitStack() as patches:
        for kind in (LocalPath, BucketPath):
            for wrapper in (make, put, put_blocks, publish, withdraw):
                patches.enter_context(_around(kind, wrapper.__name__, wrapper))
        patches.enter_context(_around(commit, "_write_tensors", write_tensors))
        patches.enter_context(_around(commit, "point_latest", point_latest))
        yield


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """Replace owner.name by wrapper(the original, *args)."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *args: wrapper(original, *args))
