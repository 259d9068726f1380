"""Find the checkpoint that a run starts from, verify it, and load it. Everything is compared before
any tensor is changed.
"""

import logging
import math
import re
from collections.abc import Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from titanlite.checkpoint import transfer
from titanlite.checkpoint.commit import run_on_all_ranks
from titanlite.checkpoint.manifest import (
    MISSING,
    CorruptCheckpoint,
    Manifest,
    Position,
    Unreadable,
    faults,
    is_foreign,
    read_manifest,
    read_state,
    step_folder,
)
from titanlite.checkpoint.read import dtype_of, read
from titanlite.checkpoint.resume import Resume
from titanlite.checkpoint.root import newest_of
from titanlite.checkpoint.rules import (
    DATA,
    check_exclude_patterns,
    differences,
    excluded,
    require_step,
)
from titanlite.checkpoint.state import TrainingState
from titanlite.errors import UserError, few_of, some_of
from titanlite.registry.lora import is_adapter
from titanlite.runtime.bucket import Place, place
from titanlite.runtime.distributed import gather_objects, rank_in

_FLOAT = re.compile("^(b?float(16|32|64))")


def latest_verified(
    root: Place, full: bool, group: dist.ProcessGroup, log: logging.Logger, before: float = math.inf
) -> Resume | None:
    """Return the newest resumable checkpoint from before a step, logging why newer ones are
    skipped; None if there are none.

    With `full`, every byte is verified; otherwise only small files and the sizes of the others.
    """
    steps = [step for step in _committed(root, group) if step < before]
    for step in reversed(steps):
        resume, problems = _verify(step_folder(root, step), full, group)
        if resume:
            return resume
        log.warning(f"skipping checkpoint: {few_of(problems, 4, '; ')}")
    if steps:
        raise UserError(
            f"none of the {len(steps)} checkpoints in {root} can be resumed (the log names the "
            "faults of each): start a new run in another job.dump_folder, or name one of them in "
            "checkpoint.initial_load_path"
        )
    return None


def at_step(root: Place, step: int, full: bool, group: dist.ProcessGroup) -> Resume:
    """Return the checkpoint of this step, to be resumed."""
    require_step(root, step, _committed(root, group))
    return _verified(
        "checkpoint.load_step", step_folder(root, step), full, group, weights_only=False
    )


def newest(path: Place, group: dist.ProcessGroup) -> tuple[Place, bool]:
    """Return the newest checkpoint in a folder of them or of a run, or the place itself, and
    whether it is of another program, as rank 0 sees them.
    """
    found = newest_of(path) if rank_in(group) == 0 else None
    name, is_others = gather_objects((f"{found}", bool(found and is_foreign(found))), group)[0]
    return place(name), is_others


def at_path(path: Place, full: bool, group: dist.ProcessGroup, weights_only: bool) -> Resume:
    """Return a checkpoint anywhere, or the newest one in a folder of them or of a run."""
    folder, _ = newest(path, group)
    return _verified("checkpoint.initial_load_path", folder, full, group, weights_only)


def _committed(root: Place, group: dist.ProcessGroup) -> list[int]:
    """Return the committed steps that rank 0 sees; the other ranks do not list the folder."""
    steps: list[int] = []
    if rank_in(group) == 0:
        steps = transfer.steps(root)
    return gather_objects(steps, group)[0]


def _verified(
    key: str, folder: Place, full: bool, group: dist.ProcessGroup, weights_only: bool
) -> Resume:
    resume, problems = _verify(folder, full, group, weights_only)
    if resume is None:
        raise UserError(f"{key}: {few_of(problems, 4, '; ')}")
    return resume


def _verify(
    folder: Place, full: bool, group: dist.ProcessGroup, weights_only: bool = False
) -> tuple[Resume | None, list[str]]:
    """Return a checkpoint, or its faults on any rank.

    Each rank checks an equal share of the files; with `full`, also their bytes.
    """
    manifest = None
    failure = ""
    try:
        manifest = read_manifest(folder)
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        share = slice(rank, None, ranks)
        documents = manifest.files.keys() - set(transfer.share_of(manifest, 0, 1))
        problems = faults(folder, manifest, documents, not weights_only, itemgetter(share))
        if full and not problems:
            names = transfer.share_of(manifest, rank, ranks)
            problems = transfer.mismatches(folder, manifest, names)
    except (CorruptCheckpoint, *MISSING) as error:
        problems = [str(error)]
    except Unreadable as error:
        problems = []
        failure = str(error)
    except OSError as error:
        problems = []
        failure = str(Unreadable(folder, error))
    found = gather_objects((problems, failure), group)
    failures = [failure for _, failure in found if failure]
    if failures:
        raise UserError(failures[0])
    problems = sorted({problem for part, _ in found for problem in part})
    if problems or weights_only:
        return (None if problems else Resume(folder, manifest)), problems
    state = read_state(folder)
    resume = Resume(
        folder,
        manifest,
        continues=True,
        position=Position(**state["position"]),
        streams=state["streams"],
        numbers=state["numbers"],
        guard=state["guard"],
    )
    return resume, problems


def restore(resume: Resume, state: TrainingState, group: dist.ProcessGroup | None) -> None:
    """Load a checkpoint into the live tensors: everything or nothing."""
    manifest = resume.foreign or resume.manifest
    folder = resume.folder
    assert manifest and folder
    tensors = state.chosen(not resume.continues, manifest.base is None)
    saved = {name: _describe(tensor) for name, tensor in manifest.tensors.items()}
    own = {name: _describe(tensor) for name, tensor in tensors.items()}
    wanted = state.of_all_stages(own)
    if resume.continues:
        saved |= dict.fromkeys(resume.numbers, "a number")
        wanted |= dict.fromkeys(state.numbers(), "a number")
    else:
        saved = {name: what for name, what in saved.items() if name.startswith("model.")}
    names = {*saved, *wanted}
    if resume.continues:
        names.add(DATA)
    check_exclude_patterns(resume.exclude, names)
    if resume.foreign and not resume.continues:  # weights are cast when they are read
        saved, wanted = (
            {name: _FLOAT.sub("floating-point", what) for name, what in side.items()}
            for side in (saved, wanted)
        )
    if not any(map(is_adapter, saved)):  # a base has no adapters, which then start fresh
        wanted = {name: what for name, what in wanted.items() if not is_adapter(name)}
    loaded = {name for name in {*saved, *wanted} if not excluded(name, resume.exclude)}
    both = manifest.tensors, tensors
    for name in loaded & manifest.tensors.keys() & tensors.keys():
        if name.endswith("lora_A"):
            saved["lora.rank"], wanted["lora.rank"] = (str(each[name].shape[0]) for each in both)
            loaded.add("lora.rank")
    found = list(differences(saved, wanted, loaded))
    if found:
        raise UserError(
            f"{folder} does not fit this run; nothing was loaded. For a new run, give another "
            "job.dump_folder, and checkpoint.initial_load_path to start from weights that fit. "
            "For this run, list the exceptions in checkpoint.exclude_from_loading:"
            f"{some_of(found, 4)}"
        )
    tensors = {name: tensor for name, tensor in tensors.items() if name in loaded}
    if resume.foreign:
        fill = partial(resume.foreign.fill, tensors)
        run_on_all_ranks(group, f"reading {folder}", fill, UserError)
    else:
        assert resume.manifest
        read(folder, resume.manifest, tensors, group)
    if resume.continues:
        state.set_numbers({name: value for name, value in resume.numbers.items() if name in loaded})


def _describe(tensor: Any) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}".removeprefix("torch.")


def load_tensors(
    folder: Place, names: Iterable[str] | None = None, manifest: Manifest | None = None
) -> dict[str, torch.Tensor]:
    """Return whole tensors, by default all, of a checkpoint from any mesh; no process group is
    needed.
    """
    manifest = manifest or read_manifest(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in manifest.tensors if names is None else names:
        entry = manifest.tensors[name]
        tensors[name] = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
    read(folder, manifest, tensors, group=None)
    return tensors
