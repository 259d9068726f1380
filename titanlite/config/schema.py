"""The config's sections, one class each: types, ranges, choices, defaults, and what every key
means.

`--help`, the JSON schema and docs/config.md are generated from the docstrings here. Rules between
keys are in rules/."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo

from titanlite.config.checkpoint_schema import Checkpoint
from titanlite.config.needs import (
    DECAY,
    GPU,
    GRADIENT_SUMS,
    NO_MIXTURE,
    STATE_ELSEWHERE,
    STATE_ON_DISK,
)
from titanlite.config.parallel_schema import ActivationCheckpoint, Compile, Parallelism, Quantize
from titanlite.config.section import (
    BatchSize,
    Decay,
    Fraction,
    Natural,
    Needs,
    NonNegative,
    OrNone,
    Positive,
    Section,
    value_of,
)
from titanlite.config.watch_schema import Comm, Debug, FaultSection, Metrics, Profiling

_NOT_MIXED = Needs(NO_MIXTURE, why="every source has its own")


class JobSection(Section):
    """Where the run writes, and the device it runs on."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes: metrics, logs, TensorBoard, the resolved config,
    checkpoints.
    """
    description: str = ""
    """One line about the run, printed at the start."""
    print_config: bool = False
    """Print the resolved config at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses the GPUs if the node has any, else the CPU."""


class Model(Section):
    """Which registered model to train."""

    name: str = "llama3"
    """Name of a registered model: a folder in models/, an entry point, or one that `package`
    registers.
    """
    flavor: str = "debugmodel"
    """Size of the model, one of the names that it defines, or hf: that of config.json in a Hugging
    Face folder.
    """
    hf_assets_path: str = ""
    """Folder with tokenizer.json; empty: the token shards' tokenizer, else raw bytes (256 ids)."""
    converters: list[str] = []
    """Names of converters that `package` registers; they change the model's layers first, in this
    order. "float8" or "quantize.linear.float8" switches [quantize.linear.float8] on."""
    package: str = ""
    """Dotted name of a package that registers models when imported."""
    freeze: list[str] = []
    """Patterns of parameters to leave untrained, such as "tok_embeddings.*"."""
    overrides: dict[str, Any] = {}
    """Any field of the flavor, such as `--model.overrides.dim 64` or
    `--model.overrides.rope_scaling.factor 4`.
    """


class Lora(Section):
    """LoRA: train the product of two narrow matrices next to a matrix, and freeze all else."""

    needs = Needs("lora.rank")
    rank: Natural = 0
    """Width of the narrow matrices; 0 trains the model itself."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The product is scaled by alpha / rank."""
    patterns: list[str] = ["*"]
    """Patterns of matrices with an adapter, by the model's table: "layers.*.attention.w[qv]"."""
    dropout: Decay = 0.0
    """Fraction of an adapter's inputs that are dropped in training."""


class Dataloader(Section):
    """How batches are read."""

    num_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Processes per rank that read data; 0 reads in a thread of the trainer."""
    persistent_workers: Annotated[
        bool, Needs("training.dataloader.num_workers", "validation.enable")
    ] = False
    """Keep the worker processes between validations."""
    pin_memory: Annotated[bool, Needs(GPU)] = False
    """Page-lock batches for the copy to a GPU; with a GPU this is always done."""
    prefetch_factor: Annotated[
        int, Field(ge=1, le=1024), Needs("training.dataloader.num_workers")
    ] = 2
    """Batches that each worker process reads ahead."""


class MixtureEntry(Section):
    """One source of a mixture."""

    dataset: str
    """Name of the data set."""
    dataset_path: str = ""
    """Its folder or file."""
    weight: Annotated[float, Field(gt=0)]
    """Fraction of the samples, a multiple of 0.0001; the weights of a mixture add up to 1."""


class Training(Section):
    """Data, batch size, sequence length and precision of the training."""

    dataset: Annotated[str, _NOT_MIXED] = "python-stdlib"
    """Data set by name: python-stdlib, python-stdlib-validation, text, tokens, chat; streamed: c4,
    c4_test, c4_validation, or OWNER/NAME[:CONFIG][@SPLIT] of the Hugging Face hub."""
    dataset_path: Annotated[str, _NOT_MIXED] = ""
    """Folder or file of text, tokens or chats; for tokens also a URL (s3://, gs://, az://)."""
    text_key: str = "text"
    """Field of a line, or column, with a document's text; for chats, messages if unset."""
    local_batch_size: BatchSize = 8
    """Sequences in one micro-batch of one data-parallel rank."""
    global_batch_size: Literal[-1] | BatchSize = -1
    """Sequences in one optimizer step over all ranks; -1 means local_batch_size x data-parallel
    degree, and more means gradient accumulation."""
    seq_len: Positive = 2048
    """Tokens in a sequence."""
    max_norm: Annotated[float, Field(ge=1e-6, allow_inf_nan=True)] = 1.0
    """Clip gradients to this global norm; inf never clips."""
    steps: Positive = 10000
    """Last optimizer step of the run."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters, their gradients and the optimizer state. bfloat16 halves their memory
    but drops every update below about 1/256 of a weight; float64 is for comparing meshes."""
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type of the forward and backward pass (FSDP2's cast of parameters)."""
    mixed_precision_reduce: Annotated[
        Literal["float32", "bfloat16", "float64"], Needs(GRADIENT_SUMS)
    ] = "float32"
    """Type of the sums of gradients over ranks."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; the optimizer runs there."""
    gc_freq: Positive = 50
    """Steps between runs of Python's garbage collector, on all ranks and at no other time."""
    packing: Literal["concatenate", "first-fit"] = "concatenate"
    """How documents fill windows: concatenate cuts them where a window ends; first-fit keeps them
    whole and pads.
    """
    document_mask: bool = False
    """Restrict attention to the token's own document, and count positions from its start."""
    repeat: Annotated[bool, Needs(NO_MIXTURE, why="its sources repeat without end")] = True
    """Start the next epoch when the data ends; false stops the run then."""
    loss_chunks: Positive = 1
    """Pieces of each sequence in the loss, so that only the logits of one are in memory; 1 is off.
    """
    mixture: list[MixtureEntry] = []
    """Several data sets with weights, `[[training.mixture]]`, instead of `dataset`."""
    dataloader: Dataloader = Dataloader()

    @property
    def sources(self) -> list[MixtureEntry]:
        """The data sets to read: those of the mixture, or just `dataset`."""
        return [part for _, part in self.named_sources]

    @property
    def named_sources(self) -> list[tuple[str, MixtureEntry]]:
        """The same, each with the name that errors use for it."""
        if self.mixture:
            found = list[tuple[str, MixtureEntry]]()
            for n, part in enumerate(self.mixture, 1):
                found.append((f"training.mixture entry {n}", part))
            return found
        alone = MixtureEntry(dataset=self.dataset, dataset_path=self.dataset_path, weight=1.0)
        return [("training", alone)]


class Optimizer(Section):
    """The optimizer and its hyperparameters."""

    name: str = "AdamW"
    """AdamW, Adam, SGD (without momentum), Muon, or one that model.package registers. Muon
    orthogonalizes the momentum of matrices inside blocks (Nesterov 0.95, five Newton-Schulz steps)
    and scales the step to the length of AdamW's (0.2 sqrt(longer side)); AdamW takes all other
    parameters."""
    lr: Annotated[float, Field(gt=0)] = 8e-4
    """Learning rate after warm-up."""
    beta1: Decay = 0.9
    """Decay of the running mean of gradients."""
    beta2: Decay = 0.95
    """Decay of the running mean of squared gradients."""
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.1
    """Weight decay of the parameters that `no_decay` does not exempt."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How the step is computed, fastest first. SGD, which has no fused version for sharded
    parameters, uses foreach instead.
    """
    no_decay: Annotated[list[str], Needs("optimizer.weight_decay")] = ["norms", "biases"]
    """Parameters without weight decay: "norms", "biases", or patterns of names; [] decays all."""
    state_dtype: Literal["like_parameters", "float32", "bfloat16"] = "like_parameters"
    """Type of the optimizer's running means. like_parameters is training.dtype. float32, with
    parameters in bfloat16, also computes the update in float32. bfloat16 halves their memory,
    computes in float32 and rounds stochastically, so that small changes add up."""
    state_on: Annotated[Literal["device", "host", "disk"], Needs(STATE_ELSEWHERE)] = "device"
    """Where the running means are: with the parameters, in the host's memory, or on each node's
    own disk. From there AdamW and Adam stream them through the device in every step."""
    state_folder: Annotated[str, Needs(STATE_ON_DISK)] = ""
    """Folder on each node's own disk (NVMe)."""


class LRScheduler(Section):
    """The learning rate as a function of the step: warm-up, plateau, decay."""

    warmup_steps: Natural = 200
    """Steps of linear warm-up."""
    total_steps: Annotated[Positive | None, OrNone] = None
    """Last step of the decay; none means training.steps."""
    decay_ratio: Annotated[Fraction | None, OrNone] = None
    """Fraction of total_steps that decays; none means all steps after the warm-up."""
    decay_type: Annotated[Literal["linear", "sqrt", "cosine"], Needs(DECAY)] = "linear"
    """Shape of the decay."""
    min_lr_factor: Annotated[Fraction, Needs(DECAY)] = 0.0
    """Fraction of the learning rate at the end of the decay."""


class Validation(Section):
    """Loss on held-out data."""

    needs = Needs("validation.enable")
    enable: bool = False
    """Validate during training, and at its end."""
    dataset: str = "python-stdlib-validation"
    """Data set by name."""
    dataset_path: str = ""
    """Its folder or file."""
    local_batch_size: BatchSize = 8
    """Sequences per rank in a validation batch."""
    seq_len: Annotated[Positive | None, OrNone] = None
    """Tokens in a sequence; none means training.seq_len."""
    freq: Positive = 10
    """Training steps between validations."""
    steps: Literal[-1] | Positive = -1
    """Batches of local_batch_size from the start of the set, the same windows on any mesh; -1 means
    the whole set.
    """


class Generate(Section):
    """Text sampled from the model."""

    needs = Needs("generate.at_end")
    prompt: str = ""
    """Text to continue."""
    tokens: Positive = 200
    """Tokens to sample."""
    temperature: NonNegative = 0.8
    """Sampling temperature; 0 = greedy."""
    at_end: bool = False
    """Print a sample when training ends."""


class JobConfig(Section):
    """All sections."""

    job: JobSection = JobSection()
    model: Model = Model()
    lora: Lora = Lora()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    generate: Generate = Generate()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    fault: FaultSection = FaultSection()
    debug: Debug = Debug()


def _fields(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every section and key by dotted name, outer before inner."""
    for name, field in cls.model_fields.items():
        yield prefix + name, field
        if isinstance(field.default, Section):
            yield from _fields(type(field.default), f"{prefix}{name}.")


SECTIONS = {
    name: type(field.default)
    for name, field in _fields(JobConfig)
    if isinstance(field.default, Section)
}
KEYS = {name: field for name, field in _fields(JobConfig) if name not in SECTIONS}


def _needs_of(key: str, field: FieldInfo) -> list[Needs]:
    own = [part for part in field.metadata if isinstance(part, Needs)]
    return own or [SECTIONS[key.rpartition(".")[0]].needs]


NEEDS = {key: _needs_of(key, field) for key, field in KEYS.items()}
"""What each key needs; the first condition that is not met is named."""


def is_set(config: JobConfig, key: str) -> bool:
    """Return whether a key differs from its default."""
    return value_of(config, key) != KEYS[key].default


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of dotted keys as nested tables."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *names, last = key.split(".")
        reduce(lambda table, name: table.setdefault(name, {}), names, tables)[last] = value
    return tables


def with_values(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """Return the config with other, legal, values for some dotted keys."""
    return _changed(config, nested(values))


def _changed(section: Any, values: Mapping[str, Any]) -> Any:
    update = dict(values)
    for name, value in values.items():
        old = getattr(section, name)
        if isinstance(old, Section):
            update[name] = _changed(old, value)
    return section.model_copy(update=update)


def config_of(values: Mapping[str, Any]) -> JobConfig:
    """Return the config with these values for dotted keys and defaults for all others, or raise
    ValidationError.
    """
    return JobConfig.model_validate(nested(values))
