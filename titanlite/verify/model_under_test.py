"""The model under proof: what a command line says of it, and which layouts and variants it allows. No torch.

Of a config only [model] counts; every other key is the table's. Whatever the flavor calls dropout is set to 0, since
masks are another mesh's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from titanlite.config.job import Job, job_from
from titanlite.config.load import ConfigError, Fault, load, parse_command_line
from titanlite.config.schema import Model
from titanlite.config.toml import toml_value
from titanlite.registry import get_model
from titanlite.verify.table import LAYOUTS, SAMPLES, Row

CONFIG_FLAGS = ("--config", "--job.config_file")
SEQ_LEN = 8
ODD_VOCABULARY = 251
"""Divisible by nothing, as real ones are. Of a flavor that was asked for by name, all sizes are its own."""
TOKENS = "tokens.npy"
"""The shard that every job opens; what its steps read is made by the harness."""
FIXED = [
    "--training.dataset=tokens",
    f"--training.seq_len={SEQ_LEN}",
    f"--training.global_batch_size={SAMPLES}",
    "--training.steps=5",  # those of observed.STEPS: after them the rate is zero
    "--optimizer.lr=0.01",
    # AdamW divides by |gradient| + eps. With the usual 1e-8, a gradient that is zero but for rounding, such as a key
    # bias's under softmax, moves its weight by the whole learning rate, in the direction of the rounding; 1e-3, about
    # the size of the gradients here, leaves errors about as large as they were.
    "--optimizer.eps=1e-3",
    "--lr_scheduler.warmup_steps=1",
    "--job.device=cpu",
    "--debug.seed=0",
]


@dataclass(frozen=True)
class ModelUnderTest:
    """A model, with what the table needs to know of it."""

    name: str
    modules: tuple[str, ...]
    """Where its module's class is defined, and what registers it if that was asked for."""
    words: tuple[str, ...]
    """Its [model] section as overrides."""
    variants: Mapping[str, tuple[str, ...]]
    """What each variant that it has adds to them."""
    tied: bool
    """The plain variant's output layer has the embedding's weight already."""
    layouts: tuple[str, ...]
    left_out: Mapping[str, str]
    """Layouts that the config's own rules refuse for it, and why."""

    def command_line(self, row: Row, folder: Path, max_norm: float = 1.0) -> list[str]:
        """The overrides that make the job of a row, over a folder with token shards."""
        extra = [f"--training.dataset_path={folder / TOKENS}", f"--training.max_norm={max_norm}"]
        return [*self.words, *self.variants[row.variant], *row.words(), *extra, f"--job.dump_folder={folder / 'run'}"]


def build_job(words: list[str], world: int) -> Job:
    """The job of such a command line."""
    line = parse_command_line([*FIXED, *words], {})
    line.files = []  # the defaults, and what the words say
    return job_from(line, world=world, training=True)


def read_subject(words: list[str], environ: Mapping[str, str]) -> ModelUnderTest:
    """The subject of a command line; ConfigError or UserError says what is wrong with it."""
    line = parse_command_line(words, environ)
    if not environ.get("CONFIG_FILE") and not any(word.partition("=")[0] in CONFIG_FLAGS for word in words):
        line.files = []  # where training takes the debug config, here the model alone says all
    strangers = [key for key in line.overrides if not key.startswith("model.")]
    line.faults += [Fault(f"--{key}", "is set by the table itself; only [model] is asked for") for key in strangers]
    loaded = load(line)
    if loaded.faults:
        raise ConfigError(loaded.faults)
    model = loaded.config.model
    usual = "model.flavor" not in loaded.entries
    if usual:
        model = model.model_copy(update={"flavor": _usual_flavor(model)})
    spec = get_model(model.name, model.package)
    known = asdict(spec.configure(model.flavor, model.overrides))
    if usual and "vocab_size" in known and "vocab_size" not in model.overrides:
        model = model.model_copy(update={"overrides": {**model.overrides, "vocab_size": ODD_VOCABULARY}})
    still = {field: 0.0 for field in known if "dropout" in field}
    model = model.model_copy(update={"overrides": {**model.overrides, **still}, "hf_assets_path": ""})
    section = tuple(
        f"--model.{key}={toml_value(value)}" for key, value in model if value != Model.model_fields[key].default
    )
    variants = {"plain": (), "frozen": (_freezing(model),)}
    if "tied" in known:
        variants["untied" if known["tied"] else "tied"] = (f"--model.overrides.tied={toml_value(not known['tied'])}",)
    tied = any(rule.tied for rule in spec.rules(spec.configure(model.flavor, model.overrides)))
    left_out = _refused(section)
    layouts = tuple(layout for layout in LAYOUTS if layout not in left_out)
    modules = (spec.build.partition(":")[0], *([model.package] if model.package else []))
    return ModelUnderTest(f"{model.name} {model.flavor}", modules, section, variants, tied, layouts, left_out)


def _usual_flavor(model: Model) -> str:
    """The one for debugging where there is one, else the first that is registered."""
    flavors = list(get_model(model.name, model.package).flavors)
    return "debugmodel" if "debugmodel" in flavors else flavors[0]


def _freezing(model: Model) -> str:
    """The embeddings and the second block without training, or the first of one."""
    spec = get_model(model.name, model.package)
    flavor = spec.configure(model.flavor, model.overrides)
    patterns = [rule.pattern for rule in spec.rules(flavor) if rule.tensor == "embedding"]
    block = f"{spec.blocks}.{min(1, spec.shape(flavor).layers - 1)}.*"
    return f"--model.freeze={toml_value([*model.freeze, *patterns, block])}"


def _refused(words: tuple[str, ...]) -> dict[str, str]:
    """The layouts that the config refuses, and why; what it refuses on one process is the model's own fault."""
    refused = {}
    for layout in LAYOUTS:
        row = Row(layout)
        try:
            build_job([*words, *row.words(), "--training.dataset_path=."], row.mesh.world)
        except ConfigError as error:
            if layout == "1":
                raise
            refused[layout] = f"{error.faults[0].key}: {error.faults[0].why}"
    return refused
