"""The config's sections, one class each: types, ranges, choices, defaults, and what every key means.

`--help`, the JSON schema and docs/config.md are written from the docstrings here. What several fields mean
together is in check.py; where a value comes from is load.py's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
OrNone = BeforeValidator(lambda value: None if value == "none" else value)  # TOML has no null


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys, immutable, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class Job(Section):
    """Where the run writes, and on what it runs."""

    dump_folder: str = "./outputs"
    """Folder for everything the run writes: metrics, logs, TensorBoard, the resolved config, checkpoints."""
    description: str = ""
    """One line about the run, printed at the start."""
    print_config: bool = False
    """Print the resolved config at the start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to train on; auto takes the GPUs where there are any, else the CPU."""


class Model(Section):
    """Which registered model to train."""

    name: str = "llama3"
    """Name of a registered model: a folder in models/, an entry point, or one that `package` registers."""
    flavor: str = "debugmodel"
    """Size of the model, one of the model's own names."""
    hf_assets_path: str = ""
    """Folder with tokenizer.json; empty means the byte tokenizer, whose vocabulary is 256."""
    converters: list[str] = []
    """What changes the model's layers first of all, in this order: converters that `package` registers. "float8" or
    "quantize.linear.float8" switches [quantize.linear.float8] on."""
    package: str = ""
    """Dotted name of a package that registers models when imported."""
    freeze: list[str] = []
    """Patterns of parameters that are not trained, such as "tok_embeddings.*"."""
    overrides: dict[str, Any] = {}
    """Any field of the flavor, such as `--model.overrides.n_layers 4`."""


class Dataloader(Section):
    """How batches are read."""

    num_workers: Natural = 0
    """Processes that read data, per rank; 0 reads in a thread of the trainer."""
    persistent_workers: bool = False
    """Keep the worker processes between validations."""
    pin_memory: bool = False
    """Page-lock batches for the copy to a GPU. There it is always done; on a CPU it is refused."""
    prefetch_factor: Positive = 2
    """Batches that each worker process reads ahead."""
    stall_timeout_seconds: Rate = 10.0
    """A streamed data set from which nothing came for so long is named and opened again, up to five times."""


class Mixture(Section):
    """One source of a mixture."""

    dataset: str
    """Name of the data set."""
    dataset_path: str = ""
    """Its folder or file."""
    weight: Annotated[float, Field(gt=0, le=1)]
    """Share of the samples, in steps of 0.0001; the weights of a mixture add up to 1."""


class Training(Section):
    """Data, batch, length and precision of the training."""

    dataset: str = "python-stdlib"
    """Data set by name: python-stdlib, python-stdlib-validation, text, tokens (shards); streamed: c4, c4_validation,
    c4_test, or OWNER/NAME[:CONFIG][@SPLIT] of the Hugging Face hub."""
    dataset_path: str = ""
    """Folder or file of the data set, where the name alone does not say it."""
    local_batch_size: Positive = 8
    """Sequences in one micro-batch of one data-parallel rank."""
    global_batch_size: Literal[-1] | Positive = -1
    """Sequences in one optimizer step over all ranks; -1 means local_batch_size x data-parallel degree. More
    than that means gradient accumulation."""
    seq_len: Positive = 2048
    """Tokens in a sequence."""
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0
    """Gradients are scaled down to this global norm; inf means never."""
    steps: Positive = 10000
    """The optimizer step at which the run has reached its target."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of the parameters, their gradients and the optimizer state. bfloat16 halves that memory, and loses every
    update below about 1/256 of a weight; float64 is for proofs."""
    mixed_precision_param: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Type in which the forward and backward pass compute (FSDP2's cast of parameters)."""
    mixed_precision_reduce: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type in which gradients are summed over ranks."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, where the optimizer runs."""
    gc_freq: Positive = 50
    """Python's garbage collector runs on all ranks every this many steps, and never in between."""
    packing: Literal["concatenate", "first-fit"] = "concatenate"
    """How documents fill windows: one after the other, or whole ones with as little padding as first-fit leaves."""
    document_mask: bool = False
    """Keep attention inside documents, and begin positions anew in each."""
    repeat: bool = True
    """Begin the next epoch when the data ends; otherwise the run stops there."""
    loss_chunks: Positive = 1
    """Cut each sequence into so many pieces, and hold the logits of one at a time; 1 holds all of them at once."""
    mixture: list[Mixture] = []
    """Several data sets with weights, `[[training.mixture]]`, instead of `dataset`."""
    dataloader: Dataloader = Dataloader()


class Optimizer(Section):
    """The optimizer and its step size."""

    name: str = "AdamW"
    """AdamW, Adam, SGD (plain: no momentum), Muon, or one that model.package registers. Muon orthogonalises the
    momentum of matrices inside of blocks (Nesterov 0.95, five Newton-Schulz steps), its step as long as AdamW's of
    the same lr would be (0.2 sqrt(the longer side)); AdamW takes the rest."""
    lr: Rate = 8e-4
    """Learning rate after warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the squared gradient's running mean."""
    eps: Rate = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of the parameters that `no_decay` does not exempt."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How the step is computed, fastest first. (SGD has no fused form for sharded parameters and takes foreach.)"""
    no_decay: list[str] = ["norms", "biases"]
    """Parameters without weight decay: "norms", "biases", or patterns of names; [] decays all."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the optimizer's running means. float32 keeps them like the parameters (training.dtype); bfloat16 takes
    half the memory, computes in float32, and rounds up or down at random, so that small changes add up."""


class LRScheduler(Section):
    """The learning rate as a function of the step: warm-up, plateau, decay."""

    warmup_steps: Natural = 200
    """Steps of linear warm-up."""
    total_steps: Annotated[Positive | None, OrNone] = None
    """Step at which the decay ends; none means training.steps."""
    decay_ratio: Annotated[Fraction | None, OrNone] = None
    """Part of total_steps that decays; none means all that follows the warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this fraction of the learning rate."""


class Parallelism(Section):
    """Degrees of the mesh (outermost first: pp, dp_replicate, dp_shard, cp, tp) and how each technique runs."""

    data_parallel_replicate_degree: Positive = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: Literal[-1] | Positive = -1
    """Ranks over which FSDP2 shards; -1 means all that the other degrees leave."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each matrix."""
    context_parallel_degree: Positive = 1
    """Ranks that split the sequence."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    expert_parallel_degree: Positive = 1
    """Ranks that split the experts."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] | Annotated[int, Field(ge=2)] = "default"
    """Free gathered parameters after the forward pass: default does so for all but the last group; a number
    keeps them sharded over that many ranks."""
    fsdp_forward_prefetch: Natural = 0
    """Groups to all-gather ahead in the forward pass; 0 is FSDP2's own order."""
    fsdp_backward_prefetch: Natural = 0
    """Groups to all-gather ahead in the backward pass; 0 is FSDP2's own order (one ahead)."""
    fsdp_keep_whole: list[str] = []
    """Patterns of parameters that stay whole on every data-parallel rank, such as small tables: nothing gathers
    them, and their gradients are summed once per step."""
    fsdp_blocks_per_group: Positive = 1
    """Blocks that share one all-gather."""
    disable_loss_parallel: bool = False
    """Gather the logits before the loss under tensor parallel."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor parallel's communication with its matrix products; needs compile and a GPU."""
    defer_gradient_sync: bool = False
    """Under accumulation, sum gradients over ranks once per step instead of once per micro-batch."""
    pipeline_parallel_schedule: str = "1F1B"
    """Order of the micro-batches."""
    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences per pipeline micro-batch."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """How the sequence is cut so that causal attention costs the same everywhere."""


class ActivationCheckpoint(Section):
    """Which activations are recomputed in the backward pass instead of kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """What is recomputed."""
    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$")] = "op"
    """For selective: "op" chooses by operation, "2" takes every second block, and so on."""
    memory_budget: Fraction = 0.5
    """For memory_budget, which needs compile: the part of the activations that may stay."""
    preserve_rng_state: bool = True
    """Recompute with the same random numbers."""
    early_stop: bool = False
    """Stop recomputing as soon as all that is needed exists."""


class Compile(Section):
    """torch.compile."""

    enable: bool = False
    """Compile."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """What is compiled: every block of the model, the loss."""
    backend: str = "inductor"
    """The compiler's backend."""


class Float8(Section):
    """Float8 matrix products, through the package torchao: docs/float8.md."""

    enable: bool = False
    """Compute the linear layers in float8."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of the scales: one a tensor, one a row, one a row with weight gradients in high precision."""
    enable_fsdp_float8_all_gather: bool = False
    """All-gather weights in float8; needs recipe tensorwise."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all weights that are gathered in float8 in one go, after the optimizer step."""
    filter_fqns: list[str] = []
    """Linear layers left in high precision: those whose name has one of these in it, such as "output"."""
    emulate: bool = False
    """Compute in high precision with float8's rounding, for devices that can't multiply float8."""


class QuantizeLinear(Section):
    """Low-precision linear layers."""

    float8: Float8 = Float8()


class Quantize(Section):
    """Low precision."""

    linear: QuantizeLinear = QuantizeLinear()


class Checkpoint(Section):
    """Saving and loading."""

    enable: bool = False
    """Save checkpoints, and resume from them."""
    folder: str = "checkpoint"
    """Folder inside job.dump_folder."""
    interval: Positive = 500
    """Steps between checkpoints."""
    interval_minutes: Annotated[float, Field(ge=0)] = 0
    """Minutes between checkpoints, looked at at logged steps; 0 means by steps alone."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training waits for the write."""
    keep_latest_k: Natural = 10
    """Checkpoints kept; 0 keeps all."""
    keep_every: Natural = 0
    """Steps whose multiples are kept for good; 0 means none."""
    load_step: Literal[-1] | Natural = -1
    """Step to resume from; -1 means the newest sound one."""
    initial_load_path: str = ""
    """Checkpoint to begin from where there is none to resume."""
    initial_load_in_hf: bool = False
    """initial_load_path is a folder in Hugging Face's format."""
    initial_load_model_only: bool = True
    """Take only the weights from initial_load_path."""
    exclude_from_loading: list[str] = []
    """What may differ from the checkpoint, by patterns of names ("optimizer", "model.output.*"), or "data" for the
    position in the data."""
    last_save_model_only: bool = False
    """The last checkpoint holds the weights alone."""
    last_save_in_hf: bool = False
    """Write the last weights in Hugging Face's format as well, to hf-step-N beside the checkpoints."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of exported weights, by last_save_in_hf or by `titanlite checkpoint export`."""
    enable_first_step_checkpoint: bool = False
    """Save after the first step as well."""
    on_failure: Literal["stop", "warn"] = "stop"
    """What a failed save does to the run."""
    verify_on_load: Literal["full", "sizes"] = "full"
    """What is checked before loading: every byte, or only what is small and the files' sizes."""


class Validation(Section):
    """Loss on held-out data."""

    enable: bool = False
    """Validate during training, and at its end."""
    dataset: str = "python-stdlib-validation"
    """Data set by name."""
    dataset_path: str = ""
    """Its folder or file."""
    local_batch_size: Positive = 8
    """Sequences per rank and validation batch."""
    seq_len: Annotated[Positive | None, OrNone] = None
    """Tokens in a sequence; none means training.seq_len."""
    freq: Positive = 10
    """Training steps between validations."""
    steps: Literal[-1] | Positive = -1
    """Batches (of all ranks together) per validation; -1 means the whole set."""


class Generate(Section):
    """Text sampled from the model."""

    prompt: str = ""
    """What the text begins with."""
    tokens: Positive = 200
    """Tokens to sample."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Sharpness of the sampling; 0 takes the likeliest token."""
    at_end: bool = False
    """Print a sample when training ends."""


class Metrics(Section):
    """What is logged, how often, and where to. metrics.jsonl is always written."""

    log_freq: Positive = 10
    """Step 1, every log_freq-th step and the last one are logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: str = "tb"
    """Folder for them inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases, in the project that WANDB_PROJECT names, or "titanlite"; needs the package wandb."""
    disable_color_printing: bool = False
    """No colors on the terminal."""


class Profiling(Section):
    """Traces and memory snapshots: of every rank, at every profile_freq-th step, in FOLDER/step-N/rank-R."""

    enable_profiling: bool = False
    """Record chrome traces, with the phases of the step by name."""
    save_traces_folder: str = "profile_traces"
    """Folder for them inside job.dump_folder."""
    profile_freq: Positive = 10
    """Steps from one trace or snapshot to the next; at least profiler_warmup + profiler_active for traces."""
    profiler_active: Positive = 1
    """Steps in a trace; the last of them is a multiple of profile_freq."""
    profiler_warmup: Natural = 3
    """Steps for which the profiler runs before, unrecorded: its start is slow."""
    enable_memory_snapshot: bool = False
    """Record the allocator's history, and write it when memory runs out as well; needs a GPU."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder for it inside job.dump_folder."""


class Comm(Section):
    """Timeouts of the communication, and the flight recorder."""

    init_timeout_seconds: Positive = 300
    """Timeout while the job comes up: nodes meeting, and collectives through the first step."""
    train_timeout_seconds: Positive = 100
    """Timeout of a collective after the first step."""
    checkpoint_timeout_seconds: Positive = 1800
    """Timeout of a collective of the checkpointer."""
    trace_buf_size: Natural = 20000
    """Entries in NCCL's flight recorder; 0 switches it off."""
    save_traces_folder: str = "comm_traces"
    """Folder for its dumps inside job.dump_folder."""


class Debug(Section):
    """Reproducibility."""

    seed: Annotated[Natural | None, OrNone] = None
    """Seed of the initial weights, the sample order and dropout; none means rank 0 draws one and logs it."""
    deterministic: bool = False
    """Only deterministic algorithms, where torch has them; an operation that has none is an error."""


class JobConfig(Section):
    """All sections."""

    job: Job = Job()
    model: Model = Model()
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
    debug: Debug = Debug()


def sections(cls: type[Section] = JobConfig, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section by dotted name, outer before inner, those without keys of their own included."""
    for name, field in cls.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield prefix + name, field.annotation
            yield from sections(field.annotation, f"{prefix}{name}.")


def keys() -> dict[str, FieldInfo]:
    """Every key by dotted name."""
    names = dict(sections())
    return {
        f"{section}.{name}": field
        for section, cls in names.items()
        for name, field in cls.model_fields.items()
        if f"{section}.{name}" not in names
    }


def value_of(config: JobConfig, key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def legal(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """What values a type allows, in words."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return legal(inner, [*more, *metadata])
    if get_origin(annotation) is Literal:
        choices = [f'"{c}"' if isinstance(c, str) else str(c) for c in get_args(annotation)]
        return choices[0] if len(choices) == 1 else "one of " + ", ".join(choices)
    if get_origin(annotation) is list:
        return f"a list, each {legal(*get_args(annotation))}"
    if get_origin(annotation) is dict:
        return "a table"
    if get_args(annotation):  # a union
        return " or ".join(legal(arm) for arm in get_args(annotation))
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    bounds = []
    for constraint in metadata:
        for part in [constraint, *getattr(constraint, "metadata", [])]:
            for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
                if getattr(part, name, None) is not None:
                    bounds.append(f"{sign} {getattr(part, name)}")
            if pattern := getattr(part, "pattern", None):
                bounds.append(f"matching {pattern}")
    if annotation is type(None):
        return '"none"'
    return " ".join([words.get(annotation, f"a [{annotation.__name__.lower()}] table"), " and ".join(bounds)]).strip()
