"""The Job of a valid config; a ConfigError names every fault of any other config. No torch."""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from titanlite.config.load import CommandLine, ConfigError, Loaded, load
from titanlite.config.needs import keys_without_effect
from titanlite.config.rules import data, parallel, pipeline, run
from titanlite.config.rules.facts import Facts
from titanlite.config.schema import KEYS, JobConfig, config_of, value_of, with_values
from titanlite.config.stages import Stages
from titanlite.layout import Batch, Layout
from titanlite.registry import ModelDims, ModelSpec


@dataclass(frozen=True)
class Job:
    """A valid config, with its layout, stages and model."""

    config: JobConfig
    """The effective config: keys that have no effect have their defaults."""
    given: JobConfig
    """The config as it was given: written to files, and compared with other runs."""
    idle: dict[str, str]
    """The keys without effect, each with the reason."""
    layout: Layout
    batch: Batch
    spec: ModelSpec
    model: Any
    """The model's flavor with its overrides."""
    shape: ModelDims
    stages: Stages

    @property
    def remarks(self) -> list[str]:
        """Return lines about legal settings that may surprise."""
        bare = pipeline.bare_stages(self.stages, self.spec.blocks)
        warmup = run.long_warmup(self.config)
        lines = self.no_effect, warmup, run.idle_spikes(self.config), bare
        return [*filter(None, (*lines, self.spec.remark(self.model)))]

    @property
    def no_effect(self) -> str:
        """One line that names the keys without effect and why, or nothing."""
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
        """The longest sequence that the model will see."""
        return max(self.config.training.seq_len, self.validation_seq_len)


def job_from(
    source: CommandLine | Loaded,
    *,
    world: int | None,
    training: bool,
    device: str = "",
) -> Job:
    """Return the job of a command line or of what it loaded; raise ConfigError with all its faults.

    `world` is the number of ranks; None takes the smallest that fits. Without `training`, keys of
    other commands have an effect. `device` is what job.device "auto" was found to be.
    """
    loaded = source if isinstance(source, Loaded) else load(source)
    given = loaded.config
    resolved = with_values(given, {"job.device": device or given.job.device})
    loaded = replace(loaded, config=resolved)
    # find(name, function) calls a function with the facts that its parameters are named after, and
    # keeps what it returns as a fact of that name.
    facts = Facts(loaded, world)
    facts.find("spec", run.find_spec)
    facts.find("model", run.find_model)
    facts.find("spec", lambda spec, model: spec.of(model))
    facts.find("shape", lambda spec, model: spec.shape(model))
    facts.apply(run)
    facts.find("layout", parallel.find_layout)
    facts.apply(parallel)
    facts.find("batch", data.find_batch)
    facts.apply(data)
    facts.find("micro_batch", pipeline.find_micro_batch)
    facts.find("number_of_stages", pipeline.count_stages)
    facts.find("modules", pipeline.find_modules)
    facts.find("stages", pipeline.find_stages)
    facts.apply(pipeline)
    if facts.faults:
        raise ConfigError(facts.faults)
    layout, batch = facts.layout, facts.batch
    on_this_mesh, on_any = keys_without_effect(resolved, layout, batch)
    idle = on_this_mesh | on_any
    if resolved.model.flavor != "hf":  # the folder of hf gives all fields
        for name, why in facts.spec.idle(facts.model).items():
            if f"model.overrides.{name}" in loaded.entries:
                idle[f"model.overrides.{name}"] = why
    # Other commands use keys that are off in a training, as `titanlite generate` uses [generate].
    dropped = idle if training else on_this_mesh
    config = config_of({key: value_of(resolved, key) for key in KEYS if key not in dropped})
    model = (facts.spec, facts.model, facts.shape)
    return Job(config, given, idle, layout, batch, *model, facts.stages)
