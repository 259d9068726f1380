"""The sections about watching a run: logs, traces, timeouts, failures, debugging."""

from typing import Annotated, Literal

from pydantic import Field

from titanlite.config.needs import (
    AUTO_INTERVAL,
    EXPERTS,
    GOES_BACK,
    GPU,
    JUDGED,
    LOADING,
    ROLLBACKS,
    SKIPS,
    TRACES,
)
from titanlite.config.section import (
    MOST,
    Natural,
    Needs,
    NonNegative,
    OrNone,
    Positive,
    Seconds,
    Section,
)


class Metrics(Section):
    """Logging: frequency and sinks. metrics.jsonl is always written."""

    log_freq: Positive = 10
    """Log step 1, every log_freq-th step and the last step."""
    enable_tensorboard: bool = False
    """Write TensorBoard events."""
    save_tb_folder: Annotated[str, Needs("metrics.enable_tensorboard")] = "tb"
    """Folder for TensorBoard events inside job.dump_folder."""
    enable_wandb: bool = False
    """Log to Weights & Biases; the same as "wandb" in sinks."""
    sinks: list[str] = []
    """Trackers that also get the metrics: "wandb", "mlflow", and those registered by model.package
    or an installed package.
    """
    disable_color_printing: bool = False
    """Print without colors."""


class Profiling(Section):
    """Traces and memory snapshots of every rank, at every profile_freq-th step, in
    FOLDER/step-N/rank-R.
    """

    needs = Needs("profiling.enable_profiling")
    enable_profiling: bool = False
    """Record Chrome traces that name the phases of a step."""
    save_traces_folder: str = "profile_traces"
    """Folder for traces inside job.dump_folder."""
    profile_freq: Annotated[Positive, Needs(TRACES)] = 10
    """Steps between traces or snapshots; at least profiler_warmup + profiler_active for traces."""
    profiler_active: Positive = 1
    """Steps in a trace; the last one is a multiple of profile_freq."""
    profiler_warmup: Natural = 3
    """Steps before a trace in which the profiler runs without recording, since its start is slow.
    """
    enable_memory_snapshot: Annotated[bool, Needs(GPU, why="there is no allocator to record")] = (
        False
    )
    """Record the allocator's history, and also write it when memory runs out."""
    save_memory_snapshot_folder: Annotated[str, Needs("profiling.enable_memory_snapshot")] = (
        "memory_snapshot"
    )
    """Folder for snapshots inside job.dump_folder."""


class Comm(Section):
    """Timeouts of communication, and the flight recorder."""

    init_timeout_seconds: Seconds = 300
    """Timeout of the start: nodes meeting, and each phase through the first step. It also applies
    to each batch of a validation and each token of a sample, since these may compile."""
    train_timeout_seconds: Seconds = 100
    """Limit for any other phase after the first step; a run that exceeds it is reported as hung and
    ended. Collectives time out 15 seconds after their phase's limit, also during the start and in
    checkpoints."""
    checkpoint_timeout_seconds: Annotated[Seconds, Needs(LOADING)] = 1800
    """Timeout of loading and of saving a checkpoint."""
    trace_buf_size: Annotated[Natural, Needs(GPU)] = 20000
    """Entries in NCCL's flight recorder; 0 switches it off."""
    save_traces_folder: Annotated[str, Needs(GPU, "comm.trace_buf_size")] = "comm_traces"
    """Folder for the recorder's dumps inside job.dump_folder."""


class FaultSection(Section):
    """Failures, preemption and hangs."""

    grace_seconds: Annotated[Seconds, Needs("checkpoint.enable")] = 60
    """Seconds from a stop request (SIGTERM, SIGUSR1 or the time limit) until ranks that have not
    saved are killed."""
    stop_after_minutes: Annotated[
        NonNegative, Needs("checkpoint.enable", why="nothing is saved")
    ] = 0.0
    """Time limit of a run in minutes: it saves and stops grace_seconds earlier. 0 means no limit.
    The end of a SLURM job, SLURM_JOB_END_TIME, is always a limit."""
    max_restarts: Annotated[Natural, Needs("checkpoint.enable")] = 3
    """Automatic restarts from the same checkpoint after a rank is lost; each new checkpoint resets
    the count. The variable MAX_RESTARTS sets another default. Failures that would repeat do not
    restart. 0 means never."""
    mtbf_hours: Annotated[float, Field(gt=0), Needs("checkpoint.enable", AUTO_INTERVAL)] = 24.0
    """Mean time between failures of the whole run, for checkpoint.interval = "auto"."""
    rejoin_seconds: Seconds = 120
    """How long a restart waits for missing nodes, and a launcher that has lost node 0 for its
    answer."""
    min_nodes: Annotated[Natural, Needs("checkpoint.enable")] = 0
    """Minimum number of nodes for a restart; 0 means all."""
    spare_nodes: Annotated[Natural, Needs("checkpoint.enable")] = 0
    """Number of spare nodes. They wait, and replace a node that is lost or has failed twice."""
    stall_seconds: Literal[0] | Seconds = 0
    """Seconds without progress on any rank after which a run is ended as hung; 0 means
    comm.train_timeout_seconds. The start, the first step, loading and saving keep their
    timeouts in [comm]."""
    preflight: bool = True
    """Time an all-reduce over each dimension of the mesh before the model is built. That all ranks
    have the same config and software is always checked."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """If a step's gradient norm is NaN or infinite: end the run, or skip the update."""
    skip_budget: Annotated[Natural, Needs(SKIPS)] = 10
    """Steps that may be skipped in any 1,000; one more ends the run with exit code 77."""
    spike_sigma: Annotated[NonNegative, Needs(JUDGED)] = 0.0
    """A gradient norm or loss more than this many standard deviations above its mean is a spike; 0
    is off.
    """
    spike_window: Annotated[int, Field(ge=2, le=MOST), Needs("fault.spike_sigma")] = 128
    """Number of good steps for the mean and the deviation; until there are that many, no step is a
    spike."""
    on_spike: Annotated[
        Literal["warn", "skip", "rollback"],
        Needs("fault.spike_sigma"),
        Needs(GOES_BACK, why="there is nothing to go back to"),
    ] = "warn"
    """Warn, skip the update (a loss only warns, since it arrives a step later), or load the newest
    checkpoint from before the spike."""
    rollback_budget: Annotated[Natural, Needs(ROLLBACKS)] = 2
    """Rollbacks that a run may make; one more ends it with exit code 77."""


class Debug(Section):
    """Reproducibility, and measuring."""

    seed: Annotated[Annotated[int, Field(ge=0)] | None, OrNone] = None
    """Seed of the initial weights, the sample order and dropout; none means that rank 0 draws and
    logs one.
    """
    deterministic: bool = False
    """Use deterministic algorithms only; an operation without one is an error."""
    moe_force_load_balance: Annotated[bool, Needs(EXPERTS)] = False
    """Send tokens to all experts in turn, whatever the router chooses: for measuring speed."""
