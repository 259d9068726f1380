"""Read weights from a Hugging Face folder into a model's shards or a checkpoint.

All names, shapes and config.json are compared before anything is read; then each rank reads the
regions that its shards need.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from titanlite.checkpoint.commit import Content, Writer, alone, to_json
from titanlite.checkpoint.hf.files import SafetensorsReader
from titanlite.checkpoint.hf.names import Translation
from titanlite.checkpoint.manifest import CONFIG, ENVIRONMENT, STATE, Position, step_folder
from titanlite.checkpoint.plan import Planner, nested
from titanlite.checkpoint.rules import check_exclude_patterns, excluded
from titanlite.config.config_json import complete, config_faults, read_config
from titanlite.errors import UserError, some_of
from titanlite.parallel.dtensor import box_of, local_part
from titanlite.registry import Box, ModelSpec
from titanlite.runtime.bucket import Place


class HuggingFaceFolder:
    """An opened Hugging Face folder that fits a model; otherwise an error names all that does not
    fit.
    """

    def __init__(
        self, folder: Path, spec: ModelSpec, flavor: Any, exclude: Sequence[str] = ()
    ) -> None:
        self.folder = folder
        self._reader = SafetensorsReader(folder)
        self.translation = Translation(spec, flavor)
        table = self.translation.table
        check_exclude_patterns(exclude, {f"model.{name}" for name in table})
        self.names = [name for name in table if not excluded(f"model.{name}", exclude)]
        self._config = read_config(folder)
        if self.translation.hf.conversions:
            self._config = self.translation.hf.config(spec.configure("hf", self._config))
        contradictions = config_faults(self._config, self.translation.hf, self.translation.config)
        faults = [*self._reader.faults, *contradictions, *self._differences()]
        if faults:
            remedy = ""
            if contradictions:
                remedy = " (--model.flavor hf takes its sizes from config.json)"
            what = f"{folder} does not fit {spec.name} as configured{remedy}"
            raise UserError(f"{what}; nothing was read:{some_of(faults)}")

    def _differences(self) -> Iterator[str]:
        shapes = self._reader.shapes
        hf = self.translation.hf
        tensors = self.translation.hf_tensors(torch.float32)
        expected = {tensor.name: tensor.shape for tensor in tensors}
        # A model saved without its head class, such as the hub's GPT-2, lacks the first component
        # of every name.
        bare = {name: name.partition(".")[2] for name in expected}
        is_bare = not expected.keys() & shapes and set(bare.values()) & shapes.keys()
        self._name_in_folder = bare if is_bare else {name: name for name in expected}
        needed = set()
        for tensor in tensors:
            if not {*self.names}.isdisjoint(tensor.parameters):
                needed.add(tensor.name)
        for name, shape in expected.items():
            found = shapes.get(self._name_in_folder[name])
            if found is None and name in needed:
                yield f"{self._name_in_folder[name]}: missing"
            elif found is not None and name in needed and found != shape:
                yield (
                    f"{self._name_in_folder[name]}: of shape {list(found)}, "
                    f"but the model has {list(shape)}"
                )
        tied = any(rule.tied for rule in self.translation.table.values())
        tied = tied and complete(self._config, hf).get("tie_word_embeddings")
        for name in sorted(shapes.keys() - set(self._name_in_folder.values())):
            if not (excluded(name, hf.ignored_tensors) or (tied and name == "lm_head.weight")):
                yield f"{name}: unexpected"

    def read(self, name: str, region: Box | None = None) -> torch.Tensor:
        """Read a region of a parameter, or all of it."""
        names = self._name_in_folder
        read = self._reader.read
        return self.translation.read(name, region, lambda hf_name, part: read(names[hf_name], part))

    @torch.no_grad()
    def fill(self, live: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of every parameter into `model.NAME`, if it has that."""
        for name in self.names:
            tensor = live.get(f"model.{name}")
            if tensor is None:
                continue
            local = local_part(tensor)
            if local.numel():
                local.copy_(self.read(name, box_of(tensor)))


def to_checkpoint(
    source: HuggingFaceFolder,
    root: Place,
    dtype: torch.dtype,
    config: str,
    environment: dict[str, Any],
) -> Place:
    """Write a checkpoint of step 0 with only the folder's weights, one tensor at a time, in this
    process.

    Biases of routers, which the folder lacks, are zero.
    """
    shapes = source.translation.shapes
    kept = source.translation.kept
    tensors = dict[str, torch.Tensor]()
    for name in source.names:
        like = torch.empty(shapes[name], dtype=kept.get(name, dtype), device="meta")
        tensors[f"model.{name}"] = like
    buffers = {f"model.{name}": buffer for name, buffer in source.translation.buffers.items()}

    class FolderPlanner(Planner):
        def lookup(self, name: str) -> torch.Tensor:
            if name in buffers:
                return torch.zeros_like(buffers[name], device="cpu")
            weight = source.read(name.removeprefix("model."))
            return weight.to(tensors[name].dtype).contiguous()

    documents = {
        STATE: to_json({"position": asdict(Position()), "numbers": {}, "streams": {}}),
        CONFIG: config.encode(),
        ENVIRONMENT: to_json(environment),
    }
    content = Content(0, None, lambda _: documents, weights_only=True)
    state = nested(tensors | buffers)
    writer = Writer(root, content)
    alone(dcp.save, state, storage_writer=writer, planner=FolderPlanner())
    return step_folder(root, 0)
