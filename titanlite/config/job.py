"""The Job of a valid config; for any other config, a ConfigError lists every fault.

Imports no torch.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.layout import Batch, Layout
from titanlite.config.load import CommandLine, ConfigError, Loaded, load_config
from titanlite.config.rules import data, lacks, parallel, pipeline, run
from titanlite.config.rules.check import Check
from titanlite.config.schema import JobConfig, with_values
from titanlite.config.stages import Stages
from titanlite.registry import ModelDims, ModelSpec


@dataclass(frozen=True)
class Job:
    """A valid config, with its layout, stages and model."""

    config: JobConfig
    """The effective config: keys that have no effect have their defaults, and "auto" is resolved.
    """
    given: JobConfig
    """The config as given: written to files, and compared with other runs."""
    idle: dict[str, str]
    """The keys that have no effect, each with the reason."""
    layout: Layout
    batch: Batch
    spec: ModelSpec
    model_config: Any
    """The model's flavor with its overrides."""
    shape: ModelDims
    stages: Stages

    @property
    def remarks(self) -> list[str]:
        """Lines about legal settings that may be surprising."""
        bare = pipeline.bare_stages(self.stages, self.spec.blocks)
        warmup = run.long_warmup(self.config)
        lines = self.no_effect, warmup, bare
        return [*filter(None, (*lines, self.spec.remark(self.model_config)))]

    @property
    def no_effect(self) -> str:
        """One line that names the keys without effect and why, or an empty string."""
        return self.no_effect_of(self.idle)

    def no_effect_of(self, keys: Container[str]) -> str:
        """Return the line for some of the keys."""
        by_reason = dict[str, list[str]]()
        for key, why in self.idle.items():
            if key in keys:
                by_reason.setdefault(why, []).append(key)
        reasons = [f"{why}: {', '.join(named)}" for why, named in by_reason.items()]
        return "no effect " + "; ".join(reasons) if reasons else ""

    @property
    def validation_seq_len(self) -> int:
        return self.config.validation.seq_len or self.config.training.seq_len

    @property
    def positions(self) -> int:
        """The length of the longest sequence that the model will see."""
        return max(self.config.training.seq_len, self.validation_seq_len)


def job_from(
    source: CommandLine | Loaded,
    *,
    world: int | None,
    training: bool,
    device: str = "",
    reshard: str = "",
) -> Job:
    """Return the job of a command line or a loaded config; raise ConfigError with all its faults.

    `world` is the number of ranks; None means the smallest that fits. With `training`, keys without
    effect in training have their defaults. `device` is what job.device "auto" resolves to, and
    `reshard` what parallelism.fsdp_reshard_after_forward "auto" does ("default" if empty).
    """
    loaded = source if isinstance(source, Loaded) else load_config(source)
    given = loaded.config
    resolved = with_values(given, {"job.device": device or given.job.device})
    check = Check(replace(loaded, config=resolved))
    # What cannot be derived is None, and rules that need it are skipped.
    spec = check.find(run.find_spec, check.config)
    of_flavor = check.find(run.find_model, check.config, spec)
    model = shape = None
    if of_flavor:
        spec, model, shape = of_flavor
    lacks.apply_rules(check)
    run.apply_rules(check, resolved, spec, model)
    ranks = world or 0
    layout = check.find(parallel.find_layout, check.config, ranks, spec=spec, shape=shape)
    parallel.apply_rules(check, ranks, layout, spec, model, shape)
    batch = check.find(data.find_batch, check.config, layout)
    data.apply_rules(check, layout, shape)
    stages = pipeline.check_stages(check, ranks, layout, batch, spec, model, shape)
    if check.faults:
        raise ConfigError(check.faults)
    assert spec and shape and layout and batch and stages
    idle = lacks.idle_keys(resolved, layout, batch)
    if resolved.model.flavor != "hf":  # the folder of hf gives all fields
        for name, why in spec.idle(model).items():
            if f"model.overrides.{name}" in loaded.entries:
                idle[f"model.overrides.{name}"] = why
    unused = dict[str, str]()
    if training:
        unused = idle
    config = lacks.resolve(resolved, unused, reshard)
    return Job(config, given, idle, layout, batch, spec, model, shape, stages)
