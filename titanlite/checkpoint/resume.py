"""`Resume`, the starting point of a run; `load.py` finds and reads it. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from titanlite.checkpoint.manifest import (
    CONFIG,
    ENVIRONMENT,
    Manifest,
    Position,
    read_document,
)
from titanlite.checkpoint.rules import DATA, batch_changes, excluded
from titanlite.config.job import Job
from titanlite.config.schema import Lora
from titanlite.config.toml import to_toml, toml_differences, tomllib
from titanlite.errors import UserError
from titanlite.runtime.bucket import Place

if TYPE_CHECKING:
    from titanlite.checkpoint.hf.load import HuggingFaceFolder
    from titanlite.checkpoint.torchtitan.read import TorchTitanCheckpoint

ALPHA = "lora.alpha"
_IGNORED_SECTIONS = ("job.", "checkpoint.", "metrics.", "profiling.", "comm.", "generate.")


@dataclass(frozen=True)
class Resume:
    """Where a run starts, found and verified before anything is built; by default, from scratch."""

    folder: Place | None = None
    """The checkpoint or Hugging Face folder to load."""
    manifest: Manifest | None = None
    """The checkpoint's manifest."""
    hf: "HuggingFaceFolder | None" = None
    foreign: "TorchTitanCheckpoint | None" = None
    continues: bool = False
    """Load the whole state and continue at `position`; otherwise load only weights, for step 0."""
    position: Position = Position()
    streams: dict[str, Any] = field(default_factory=dict)
    """The position of each data-parallel rank in a streamed data set."""
    numbers: dict[str, float | int | bool] = field(default_factory=dict)
    """The optimizer's scalars."""
    guard: dict[str, Any] = field(default_factory=dict)
    """The state of the step guard, which judges steps by the previous ones."""
    exclude: Sequence[str] = ()
    """Patterns of names not to load."""

    @property
    def seed(self) -> int | None:
        return self.position.seed if self.continues and not self.foreign else None

    @property
    def consumed(self) -> int:
        """Samples of the data to skip."""
        return 0 if excluded(DATA, self.exclude) else self.position.consumed

    def check_data(self, seed: int, fingerprint: str) -> None:
        """Refuse to continue with other data, or another order of it."""
        if not self.continues or self.foreign or excluded(DATA, self.exclude):
            return
        saved = self.position
        start_over = f'or start the data over with checkpoint.exclude_from_loading = ["{DATA}"]'
        if saved.fingerprint != fingerprint:
            raise UserError(
                f"the data of [training] has the fingerprint {fingerprint}, but {self.folder} was "
                f"trained on {saved.fingerprint}: use the same text, tokenizer, training.seq_len "
                f"and packing, {start_over}"
            )
        if saved.seed != seed:
            raise UserError(
                f"debug.seed = {seed}, but {self.folder} was trained with {saved.seed}, which "
                f"orders the data: remove the key, {start_over}"
            )

    def stream_state(self, coordinate: int) -> dict[str, Any]:
        """Return a data-parallel rank's position in a streamed data set.

        With another number of ranks, any rank's position will do: the loader refuses it and tells
        why.
        """
        return self.streams.get(str(coordinate)) or next(iter(self.streams.values()))

    def changes(self, job: Job, has_dropout: bool) -> list[str]:
        """Return log lines about differences between this run and the saved one."""
        if not self.continues or self.folder is None:
            return []
        if self.foreign:
            return [self._of_another_program()]
        before = read_document(self.folder, CONFIG).decode()
        changed = toml_differences(before, to_toml(job.given))
        shown = []
        for key, what in changed.items():
            if not key.startswith(_IGNORED_SECTIONS):
                shown.append(f"{key} {what}")
        lines = []
        if shown:
            since = f"config changed since step {self.position.step}"
            lines.append(f"{since} (new values apply): {', '.join(shown)}")
        environment = json.loads(read_document(self.folder, ENVIRONMENT))
        new_stages = [" ".join(names) for names in job.stages.names]
        old_mesh = environment["mesh"]
        is_split_anew = environment["stages"] != new_stages
        new_mesh = dict(zip(old_mesh, job.layout.degrees, strict=True))
        lines += batch_changes(
            tomllib.loads(before)["training"], old_mesh, job.given.training, job.batch
        )
        keys = {"training.local_batch_size", "training.global_batch_size"}
        if job.layout.pp > 1:
            keys.add("parallelism.pipeline_parallel_microbatch_size")
        if job.layout.cp > 1:
            keys.add("parallelism.context_parallel_load_balancer")
            keys.add("parallelism.context_parallel_rotate_method")
        if has_dropout and (old_mesh != new_mesh or is_split_anew or keys & changed.keys()):
            lines.append(
                "dropout masks will differ: mesh, stages, batch size or split of sequences changed"
            )
        return lines

    def _of_another_program(self) -> str:
        """Return the line about what could not be carried over."""
        return (
            "not taken from TorchTitan's checkpoint: the position in the data, since its ranks "
            "read in another order, and the config. Data begins at sample "
            f"{self.consumed:,} (step x global batch) of titanlite's order, a stream at its "
            "beginning; the model's fields and the optimizer's settings are those of this config"
        )


def check_alpha(folder: Place, lora: Lora, exclude: Sequence[str]) -> list[str]:
    """Refuse adapters that were scaled otherwise, which no shape shows; return `exclude` without
    the pattern that allows it.
    """
    given = tomllib.loads(read_document(folder, CONFIG).decode()).get("lora", {})
    saved = Lora(**{key: given[key] for key in ("rank", "alpha") if key in given})
    is_same_kind = lora.rank and saved.rank == lora.rank
    if is_same_kind and saved.alpha != lora.alpha and not excluded(ALPHA, exclude):
        raise UserError(
            f"{ALPHA} = {lora.alpha:g}, but the adapters of {folder} were trained with "
            f'{saved.alpha:g}: set it to that, or list "{ALPHA}" in '
            "checkpoint.exclude_from_loading"
        )
    return [pattern for pattern in exclude if not (lora.rank and pattern == ALPHA)]


def saved_model(folder: Place) -> dict[str, Any]:
    """Return the fields of the model that a checkpoint's weights belong to."""
    return json.loads(read_document(folder, ENVIRONMENT))["model"]
