"""The Job that a sound config describes; a ConfigError names everything that is wrong with any other. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titanlite.config.load import CommandLine, ConfigError, load
from titanlite.config.rules.context import InvalidField, RuleContext
from titanlite.config.rules.parallel import RULES, not_built
from titanlite.config.schema import JobConfig
from titanlite.layout import Batch, Layout
from titanlite.registry import ModelDims, ModelSpec


@dataclass(frozen=True)
class Job:
    """A config that was found sound, and what follows from it."""

    config: JobConfig
    layout: Layout
    batch: Batch
    spec: ModelSpec
    model: Any
    """The model's flavor, overrides applied."""
    shape: ModelDims

    @property
    def positions(self) -> int:
        """The longest sequence that the model will see."""
        return max(self.config.training.seq_len, validation_seq_len(self.config))


def validation_seq_len(config: JobConfig) -> int:
    """validation.seq_len, where it follows training.seq_len unless set."""
    return config.validation.seq_len or config.training.seq_len


def job_from(line: CommandLine, *, world: int | None, training: bool) -> Job:
    """The job that a command line asks for; ConfigError with all its faults.

    `world` None takes the smallest number of ranks that fits. With `training`, techniques that are not built
    yet are refused by name.
    """
    loaded = load(line)
    faults = list(loaded.faults)
    judge = RuleContext(loaded, world)
    for rule in RULES:
        try:
            faults += [judge.fault(key, why) for key, why in rule(judge)]
        except InvalidField:
            continue
    if training:
        faults += [judge.fault(key, why) for key, why in not_built(loaded)]
    if faults:
        raise ConfigError(faults)
    config = loaded.config
    batch = Batch.of(config.training.local_batch_size, config.training.global_batch_size, judge.layout.batch)
    return Job(config, judge.layout, batch, judge.spec, judge.model, judge.shape)
