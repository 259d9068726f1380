"""The sections about parallelism: the mesh, recompute, compile, float8."""

from typing import Annotated, Literal

from pydantic import Field

from titanlite.config.needs import (
    ACCUMULATION,
    AUTO_CHOOSES,
    BUDGET,
    CONTEXT,
    EVEN_STAGES,
    GATHERS_AGAIN,
    GATHERS_BY_GROUP,
    GPU,
    INDUCTOR,
    NO_OFFLOAD,
    NO_PIPELINE,
    NO_ULYSSES,
    PIPELINE,
    RECOMPUTED,
    REPLICAS,
    RESHARDS,
    SELECTIVE,
    SHARDING,
    TENSOR,
)
from titanlite.config.section import (
    MOST,
    AnyCase,
    Fraction,
    Natural,
    Needs,
    OrEmpty,
    OrNone,
    Positive,
    Section,
)
from titanlite.config.stages import Schedule


class Parallelism(Section):
    """Degrees of the mesh (outermost first: pp, dp_replicate, dp_shard, cp, tp) and how each
    technique runs.
    """

    data_parallel_replicate_degree: Positive = 1
    """Replicas of the sharded model (HSDP)."""
    data_parallel_shard_degree: Literal[-1] | Positive = -1
    """Number of ranks that FSDP2 shards over; -1 means all ranks that the other degrees leave."""
    tensor_parallel_degree: Positive = 1
    """Ranks that split each matrix."""
    context_parallel_degree: Positive = 1
    """Ranks that split the sequence."""
    pipeline_parallel_degree: Positive = 1
    """Ranks that split the layers."""
    expert_parallel_degree: Positive = 1
    """Ranks that split the experts: some of those of dp_shard x cp x tp, the innermost first."""
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never", "auto"] | Annotated[int, Field(ge=2, le=MOST)],
        Needs(SHARDING, AUTO_CHOOSES, RESHARDS),
    ] = "default"
    """Free gathered parameters after the forward pass: default frees all but the last group's; a
    number keeps them sharded over that many ranks; auto is never where the plan of a step then fits
    the GPU, and otherwise default."""
    fsdp_forward_prefetch: Annotated[Natural, Needs(SHARDING, GATHERS_BY_GROUP)] = 0
    """Groups to all-gather ahead in the forward pass; 0 is FSDP2's own order."""
    fsdp_backward_prefetch: Annotated[Natural, Needs(SHARDING, GATHERS_BY_GROUP, GATHERS_AGAIN)] = 0
    """Groups to all-gather ahead in the backward pass; 0 is FSDP2's own order (one ahead)."""
    fsdp_keep_whole: Annotated[list[str], Needs(SHARDING)] = []
    """Patterns of parameters that are replicated instead of sharded, such as small tables: they are
    not gathered, and their gradients are summed once per step."""
    fsdp_separate_reduce_scatter_group: Annotated[bool, Needs(SHARDING, GPU)] = False
    """Give reduce-scatters a communicator of their own, so that they need not wait for all-gathers;
    costs the communicator's memory (torch 2.14)."""
    enable_fsdp_symm_mem: Annotated[bool, Needs(SHARDING, GPU)] = False
    """Let NCCL gather through symmetric memory, with fewer or none of the GPU's cores (torch 2.14;
    see NCCL_CTA_POLICY)."""
    fsdp_blocks_per_group: Annotated[Positive, Needs(SHARDING)] = 1
    """Blocks that share one all-gather."""
    disable_loss_parallel: Annotated[bool, Needs(TENSOR)] = False
    """Gather the logits before the loss under tensor parallel."""
    enable_async_tensor_parallel: Annotated[bool, Needs(TENSOR, INDUCTOR, GPU)] = False
    """Overlap tensor parallel's communication with its matrix products."""
    defer_gradient_sync: Annotated[
        bool | Literal["replicas"],
        Needs(SHARDING, NO_PIPELINE, ACCUMULATION, REPLICAS),
    ] = False
    """Under gradient accumulation, sum gradients over ranks once per step instead of once per
    micro-batch; "replicas" defers only the sum over replicas (HSDP), so that no unsharded gradients
    are kept."""
    pipeline_parallel_schedule: Annotated[Schedule, AnyCase, Needs(PIPELINE)] = "1F1B"
    """Order of the stages' micro-batches, by torch's names, in any case. GPipe and 1F1B have one
    stage per rank, ZBVZeroBubble and DualPipeV two, the others two, or as many as layers_per_stage
    gives."""
    pipeline_parallel_microbatch_size: Annotated[Positive, Needs(PIPELINE)] = 1
    """Sequences of a pipeline micro-batch; the whole step, accumulation included, is one run of the
    schedule.
    """
    module_fqns_per_model_part: Annotated[list[list[str]], OrEmpty, Needs(PIPELINE)] = []
    """Names of each stage's modules, such as [["tok_embeddings", "layers.0"], ["layers.1", "norm",
    "output"]]; [] splits the layers evenly."""
    pipeline_parallel_layers_per_stage: Annotated[
        Positive | None, OrNone, Needs(PIPELINE, EVEN_STAGES)
    ] = None
    """Layers per stage; none lets the schedule decide (one or two stages per rank)."""
    pipeline_parallel_first_stage_less_layers: Annotated[Natural, Needs(PIPELINE, EVEN_STAGES)] = 1
    """Weight of the embedding in the layer split, in layers."""
    pipeline_parallel_last_stage_less_layers: Annotated[Natural, Needs(PIPELINE, EVEN_STAGES)] = 1
    """Weight of the norm and the output layer in the layer split, in layers."""
    context_parallel_load_balancer: Annotated[
        Literal["headtail", "none"], Needs(CONTEXT, NO_ULYSSES)
    ] = "headtail"
    """How the sequence is split: headtail gives each rank a chunk of its head and one of its tail,
    so that causal attention costs every rank the same; none gives each one chunk."""
    context_parallel_rotate_method: Annotated[Literal["allgather", "ulysses"], Needs(CONTEXT)] = (
        "allgather"
    )
    """How attention sees the whole sequence: allgather gathers keys and values; ulysses exchanges
    tokens for heads by all-to-all (the degree must divide the heads), and splits the sequence
    without balancing."""


class ActivationCheckpoint(Section):
    """Which activations are recomputed in the backward pass instead of kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """Recompute nothing, whole blocks, what selective_ac_option chooses, or what the compiler
    chooses."""
    selective_ac_option: Annotated[str, Field(pattern=r"^(op|[1-9][0-9]*)$"), Needs(SELECTIVE)] = (
        "op"
    )
    """For selective: "op" chooses by operation, "2" recomputes every second block, and so on."""
    memory_budget: Annotated[Fraction, Needs(BUDGET)] = 0.5
    """For memory_budget, which needs compile: fraction of the activations to keep."""
    preserve_rng_state: Annotated[bool, Needs(RECOMPUTED)] = True
    """Recompute with the same random numbers."""
    early_stop: Annotated[bool, Needs(RECOMPUTED)] = False
    """Stop recomputing as soon as everything needed exists."""


class Compile(Section):
    """torch.compile."""

    needs = Needs("compile.enable", "compile.components")
    enable: bool = False
    """Enable torch.compile."""
    components: list[Literal["model", "loss"]] = ["model", "loss"]
    """Parts to compile: every block of the model, the loss."""
    backend: str = "inductor"
    """Backend of the compiler."""
    mode: Annotated[Literal["default", "max-autotune-no-cudagraphs"], Needs(INDUCTOR)] = "default"
    """How hard inductor looks for fast kernels in blocks: max-autotune-no-cudagraphs times several
    for each matrix product."""
    cache_folder: Annotated[str, Needs(INDUCTOR)] = ""
    """Folder where compiled kernels are kept for later starts; empty leaves it to
    TORCHINDUCTOR_CACHE_DIR, by default a folder of this machine's /tmp. Ranks and nodes may share
    it."""


class Float8Section(Section):
    """Float8 matrix products with torchao: docs/float8.md."""

    needs = Needs("quantize.linear.float8.enable")
    enable: bool = False
    """Compute the linear layers in float8."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Granularity of the scales: per tensor, per row, or per row with weight gradients in high
    precision.
    """
    enable_fsdp_float8_all_gather: Annotated[
        bool, Needs("quantize.linear.float8.enable", SHARDING)
    ] = False
    """All-gather weights in float8; needs recipe tensorwise."""
    precompute_float8_dynamic_scale_for_fsdp: Annotated[
        bool,
        Needs(
            "quantize.linear.float8.enable",
            SHARDING,
            "quantize.linear.float8.enable_fsdp_float8_all_gather",
            NO_OFFLOAD,
        ),
    ] = False
    """Compute the scales of all weights that are gathered in float8 at once, after the optimizer
    step.
    """
    filter_fqns: list[str] = ["output"]
    """Linear layers to leave in high precision: those with one of these in their names; [] converts
    all.
    """
    emulate: bool = False
    """Compute in high precision with float8's rounding, for devices that cannot multiply float8."""


class QuantizeLinear(Section):
    """Low-precision linear layers."""

    float8: Float8Section = Float8Section()


class Quantize(Section):
    """Low precision."""

    linear: QuantizeLinear = QuantizeLinear()
