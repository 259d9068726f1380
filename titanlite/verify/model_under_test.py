"""The model under test, from a command line, with its layouts and variants. Imports no torch.

Only [model] and [lora] are taken from a config; the table sets every other key. Every field called
dropout is set to 0, since masks differ between meshes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, ConfigFault, load_valid, parse_command_line
from titanlite.config.section import Section
from titanlite.config.toml import toml_value
from titanlite.registry import ModelSpec, Rule, get_model, get_optimizer
from titanlite.registry.lora import Adapters
from titanlite.verify.table import ALL_LAYOUTS, OVERRIDES, SAMPLES, SPLIT_BY, STEPS, Choices, Row

SEQ_LEN = 8
ODD_VOCABULARY = 251
"""A prime, as hard to divide as real vocabularies; a flavor that is given by name keeps its own."""
TOKENS = "tokens"
"""The shards that every job opens; the harness replaces what its steps read."""
IMPORTED = "hf"
"""The Hugging Face folder of a row's reference, in the same folder."""
FIXED = [
    "--training.dataset=tokens",
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={SAMPLES}",
    "--training.steps=5",  # as many as in STEPS; afterwards the learning rate is zero
    "--optimizer.lr=0.01",
    "--lr_scheduler.warmup_steps=1",
    "--job.device=cpu",
    "--debug.seed=0",
    "--fault.no_preflight",  # its collectives are not part of a step
]


@dataclass(frozen=True)
class ModelUnderTest:
    """A model, with what the table needs to know about it."""

    name: str
    modules: tuple[str, ...]
    """Where the model and the optimizer are defined, and model.package if it is set."""
    overrides: tuple[str, ...]
    """Its sections [model] and [lora], and the name of a user's optimizer."""
    spec: ModelSpec
    flavor: Any
    frozen: Sequence[str]
    """model.freeze."""
    layouts: Mapping[str, Choices]
    """Allowed layouts, each with its allowed choices for the columns of SPLIT_BY."""
    refused_layouts: Mapping[str, str]
    """Layouts, or choices in them, that the config's rules refuse, and why."""
    device: str = ""
    """The device of a table that is compared with float64 on a CPU; "" for the usual table, which
    runs on a CPU."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self.spec.rules(self.flavor)

    @property
    def tied(self) -> bool:
        """Return whether the plain variant's output layer shares the embedding's weight."""
        return any(rule.tied for rule in self.rules)

    @property
    def variants(self) -> dict[str, list[str]]:
        """Return each variant that the model has, with its overrides."""
        shape = self.spec.shape(self.flavor)
        frozen = [
            *self.frozen,
            *(rule.pattern for rule in self.rules if rule.tensor == "embedding"),
        ]
        frozen.append(f"{self.spec.blocks}.{min(1, shape.layers - 1)}.*")
        variants = {"plain": []}
        if not self.spec.adapters:  # adapters freeze everything else
            variants["frozen"] = [f"--model.freeze={toml_value(frozen)}"]
        tied = getattr(self.flavor, "tied", None)
        if tied:
            variants["untied"] = ["--model.overrides.tied=false"]
        elif tied is not None:
            variants["tied"] = ["--model.overrides.tied=true"]
        if shape.experts and getattr(self.flavor, "balance", "bias") != "bias":
            variants["bias"] = ["--model.overrides.balance=bias"]
        return variants

    @property
    def kept_whole(self) -> list[str]:
        """Return the override that replicates the small parameters, unless all parameters are."""
        small = [rule.pattern for rule in self.rules if rule.tensor in ("norm", "replicated")]
        if len(small) == len(self.rules) or self.spec.unsplit:
            return []
        return [f"--parallelism.fsdp_keep_whole={toml_value(small)}"]

    @property
    def every_expert(self) -> list[str]:
        """Return the override that sends each token to every expert, if there are any: otherwise,
        with bfloat16's rounding, a router chooses differently and gradients are not comparable."""
        experts = self.spec.shape(self.flavor).experts
        if experts and hasattr(self.flavor, "top_k"):
            return [f"--model.overrides.top_k={experts}"]
        return []

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
        if row.extra == "state on disk":
            line.append(f"--optimizer.state_folder={folder}")
        if row.extra == "imported":
            line.append(f"--checkpoint.initial_load_path={folder / IMPORTED}")
        return line


def build_job(overrides: list[str], world: int) -> Job:
    """Return the job of the defaults, FIXED and these overrides on `world` ranks."""
    line = parse_command_line([*FIXED, *overrides], {})
    line.files = []  # without the debug config
    return job_from(line, world=world, training=True)


def read_model(argv: list[str], environ: Mapping[str, str]) -> ModelUnderTest:
    """Return the model and optimizer that a command line names; raise a ConfigError or UserError
    for a mistake.
    """
    line = parse_command_line(argv, environ)
    if not environ.get("CONFIG_FILE") and not line.names_files:
        line.files = []  # without --config the defaults of [model] apply, not the debug config
    reason = "is set by the table; legal here: keys of [model] and [lora], and optimizer.name"
    for key in line.overrides:
        if not key.startswith(("model.", "lora.")) and key != "optimizer.name":
            line.faults.append(ConfigFault(f"--{key}", reason))
    loaded = load_valid(line)
    model = loaded.config.model
    flavor_given = "model.flavor" in loaded.entries
    spec = get_model(model.name, model.package)
    if not flavor_given:
        default = "debugmodel"
        if "debugmodel" not in spec.flavors:
            default = next(iter(spec.flavors))
        model = model.model_copy(update={"flavor": default})
    fields = vars(spec.configure(model.flavor, model.overrides))
    overrides = model.overrides | {field: 0.0 for field in fields if "dropout" in field}
    if not flavor_given and "vocab_size" in fields:
        overrides = {"vocab_size": ODD_VOCABULARY} | overrides
    model = model.model_copy(update={"overrides": overrides, "hf_assets_path": ""})
    lora = loaded.config.lora.model_copy(update={"dropout": 0.0})
    overriding = [*_changed("model", model), *_changed("lora", lora)]
    optimizer = get_optimizer(loaded.config.optimizer.name, model.package)
    name = f"{model.name} {model.flavor}"
    if lora.rank:
        name += f", lora.rank {lora.rank}"
    if optimizer.name not in STEPS:
        overriding.append(f"--optimizer.name={optimizer.name}")
        name += f" with {optimizer.name}"
    section = tuple(overriding)
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


def _changed(name: str, section: Section) -> Iterator[str]:
    """Yield the overrides for a section's keys that differ from their defaults."""
    for key, value in section:
        if value != type(section).model_fields[key].default:
            yield f"--{name}.{key}={toml_value(value)}"


def _allowed_layouts(overrides: tuple[str, ...]) -> tuple[dict[str, Choices], dict[str, str]]:
    """Return the layouts that the config allows, each with its choices of SPLIT_BY, and why it
    refuses others.

    If one process is refused, that is the error.
    """
    allowed = dict[str, Choices]()
    refused = dict[str, str]()
    refusal = cache(partial(_refusal, overrides))
    for layout, degrees in ALL_LAYOUTS.items():
        split = dict[str, Sequence[str]]()
        reasons = dict[str, str]()
        for column, dimension in SPLIT_BY.items():
            choices = [*OVERRIDES[column]]
            if getattr(degrees, dimension) == 1:
                choices = choices[:1]
            reasons |= {choice: refusal(Row(layout, **{column: choice})) for choice in choices}
            split[column] = tuple(choice for choice in choices if not reasons[choice])
        if all(split.values()):
            allowed[layout] = split
            for choice, reason in reasons.items():
                if reason:
                    refused[f"{layout} with {choice}"] = reason
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
