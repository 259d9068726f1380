"""The model under test, from a command line, with its layouts and variants. Imports no torch.

Only [model] and [lora] are taken from a config; the table sets every other key. All that is called
dropout is set to 0, since masks differ between meshes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, ConfigFault, load_valid, parse_command_line
from titanlite.config.toml import toml_value
from titanlite.registry import ModelSpec, Rule, get_model, get_optimizer
from titanlite.registry.lora import Adapters
from titanlite.verify.table import ALL_LAYOUTS, OVERRIDES, SAMPLES, SPLIT_BY, STEPS, Row

SEQ_LEN = 8
ODD_VOCABULARY = 251
"""A prime, as hard to divide as real vocabularies; a flavor that is given by name keeps its own."""
TOKENS = "tokens"
"""The shards that every job opens; the harness replaces what its steps read."""
IMPORTED = "hf"
"""The Hugging Face folder of a row's reference, in the same folder."""
Split = Mapping[str, Sequence[str]]
"""Choices of the columns of SPLIT_BY."""
FIXED = [
    "--training.dataset=tokens",
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={SAMPLES}",
    "--training.steps=5",  # those of STEPS: after them the learning rate is zero
    "--optimizer.lr=0.01",
    "--lr_scheduler.warmup_steps=1",
    "--job.device=cpu",
    "--debug.seed=0",
    "--fault.no_preflight",  # its collectives are not those of a step
]


@dataclass(frozen=True)
class ModelUnderTest:
    """A model, with its facts for the table."""

    name: str
    modules: tuple[str, ...]
    """Where it and the optimizer are defined, and the package that registers them if model.package
    is set.
    """
    overrides: tuple[str, ...]
    """Its sections [model] and [lora], and the name of an optimizer of the user's own."""
    spec: ModelSpec
    flavor: Any
    frozen: Sequence[str]
    """Patterns of what it freezes itself."""
    layouts: Mapping[str, Split]
    """Allowed layouts, each with its allowed choices for the columns of SPLIT_BY."""
    refused_layouts: Mapping[str, str]
    """Layouts that the config's rules refuse for it, or choices there, and why."""
    device: str = ""
    """Where rows run that are compared with float64 on a CPU; an empty string for the other rows,
    which run on a CPU."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.spec.rules(self.flavor)

    @property
    def tied(self) -> bool:
        """Return whether the plain variant's output layer shares the embedding's weight."""
        return any(rule.tied for rule in self.rules)

    @property
    def variants(self) -> dict[str, list[str]]:
        """Return the further overrides of each variant that it has."""
        shape = self.spec.shape(self.flavor)
        frozen = [
            *self.frozen,
            *(rule.pattern for rule in self.rules if rule.tensor == "embedding"),
        ]
        frozen.append(f"{self.spec.blocks}.{min(1, shape.layers - 1)}.*")
        variants = {"plain": []}
        if not self.spec.adapters:  # which freeze all else
            variants["frozen"] = [f"--model.freeze={toml_value(frozen)}"]
        if hasattr(self.flavor, "tied"):
            other = toml_value(not self.flavor.tied)
            variants["untied" if self.flavor.tied else "tied"] = [f"--model.overrides.tied={other}"]
        if shape.experts and getattr(self.flavor, "balance", "bias") != "bias":
            variants["bias"] = ["--model.overrides.balance=bias"]
        return variants

    @property
    def kept_whole(self) -> list[str]:
        """Return the override that replicates its small parameters, unless its table calls all of
        them so.
        """
        small = [rule.pattern for rule in self.rules if rule.tensor in ("norm", "replicated")]
        return [f"--parallelism.fsdp_keep_whole={toml_value(small)}"] * (
            len(small) < len(self.rules) and not self.spec.unsplit
        )

    @property
    def every_expert(self) -> list[str]:
        """Return the override that sends each token to every expert, if there are any: with
        bfloat16's rounding a router chooses others, and gradients are not comparable."""
        experts = self.spec.shape(self.flavor).experts
        return (
            [f"--model.overrides.top_k={experts}"]
            if experts and hasattr(self.flavor, "top_k")
            else []
        )

    def command_line(self, row: Row, folder: Path, max_norm: float = 1.0) -> list[str]:
        """Return the overrides that make the job of a row; `folder` holds the token shards."""
        line = [*self.overrides, *self.variants[row.variant]]
        if row.extra == "kept whole":
            line += self.kept_whole
        if row.is_narrow:
            line += self.every_expert
        line += [*row.overrides(), f"--training.max_norm={max_norm}"]
        line += [
            f"--training.dataset_path={folder / TOKENS}",
            f"--job.dump_folder={folder / 'run'}",
        ]
        if self.device:
            line.append(f"--job.device={self.device}")
        if row.extra == "imported":
            line.append(f"--checkpoint.initial_load_path={folder / IMPORTED}")
        return line


def build_job(overrides: list[str], world: int) -> Job:
    """Return the job of the defaults, FIXED and these overrides on `world` ranks."""
    line = parse_command_line([*FIXED, *overrides], {})
    line.files = []  # not the debug config
    return job_from(line, world=world, training=True)


def read_model(argv: list[str], environ: Mapping[str, str]) -> ModelUnderTest:
    """Return the model and optimizer that a command line names; ConfigError or UserError if there
    is a mistake.
    """
    line = parse_command_line(argv, environ)
    if not environ.get("CONFIG_FILE") and not line.names_files:
        line.files = []  # not the debug config: without --config the defaults of [model] count
    reason = "is set by the table; legal here: keys of [model] and [lora], and optimizer.name"
    for key in line.overrides:
        if not key.startswith(("model.", "lora.")) and key != "optimizer.name":
            line.faults.append(ConfigFault(f"--{key}", reason))
    loaded = load_valid(line)
    model = loaded.config.model
    flavor_given = "model.flavor" in loaded.entries
    spec = get_model(model.name, model.package)
    if not flavor_given:
        default = "debugmodel" if "debugmodel" in spec.flavors else next(iter(spec.flavors))
        model = model.model_copy(update={"flavor": default})
    fields = vars(spec.configure(model.flavor, model.overrides))
    overrides = model.overrides | {field: 0.0 for field in fields if "dropout" in field}
    if not flavor_given and "vocab_size" in fields:
        overrides = {"vocab_size": ODD_VOCABULARY} | overrides
    model = model.model_copy(update={"overrides": overrides, "hf_assets_path": ""})
    lora = loaded.config.lora.model_copy(update={"dropout": 0.0})
    section = tuple(
        f"--{name}.{key}={toml_value(value)}"
        for name, values in {"model": model, "lora": lora}.items()
        for key, value in values
        if value != type(values).model_fields[key].default
    )
    optimizer = get_optimizer(loaded.config.optimizer.name, model.package)
    name = f"{model.name} {model.flavor}" + f", lora.rank {lora.rank}" * (lora.rank > 0)
    if optimizer.name not in STEPS:
        section += (f"--optimizer.name={optimizer.name}",)
        name += f" with {optimizer.name}"
    modules = [each.build.partition(":")[0] for each in (spec, optimizer)]
    modules += filter(None, [model.package])
    flavor = spec.configure(model.flavor, overrides)
    return ModelUnderTest(
        name,
        (*modules,),
        section,
        replace(spec.of(flavor), adapters=Adapters.of(lora)),
        flavor,
        model.freeze,
        *_allowed_layouts(section),
    )


def _allowed_layouts(overrides: tuple[str, ...]) -> tuple[dict[str, Split], dict[str, str]]:
    """Return the layouts that the config allows, each with the choices of SPLIT_BY there, and why
    it refuses others.

    A model refused on one process is an error of its own.
    """
    allowed, refused = dict[str, Split](), dict[str, str]()
    refusal = cache(partial(_refusal, overrides))
    for layout, degrees in ALL_LAYOUTS.items():
        split, reasons = dict[str, Sequence[str]](), dict[str, str]()
        for column, dimension in SPLIT_BY.items():
            choices = [*OVERRIDES[column]][: None if getattr(degrees, dimension) > 1 else 1]
            reasons |= {choice: refusal(Row(layout, **{column: choice})) for choice in choices}
            split[column] = tuple(choice for choice in choices if not reasons[choice])
        if all(split.values()):
            allowed[layout] = split
            refused |= {
                f"{layout} with {choice}": reason for choice, reason in reasons.items() if reason
            }
        else:
            refused[layout] = next(filter(None, reasons.values()))
    return allowed, refused


def _refusal(overrides: tuple[str, ...], row: Row) -> str:
    """Return why the config refuses a row, or an empty string."""
    line = [*overrides, *row.overrides(), "--training.dataset_path=."]
    try:
        build_job(line, row.mesh.world)
    except ConfigError as error:
        if row.layout == "1":
            raise
        return f"{error.faults[0].key}: {error.faults[0].why}"
    return ""
