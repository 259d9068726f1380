"""Goodput: the share of the time that a job trains, by its interval of saves and its restarts.

Every number says where it is from: measured (docs/scale.md), given by the config or on the command
line, or assumed, since only a cluster can say.
"""

from titanlite.config.job import Job
from titanlite.errors import UserError, format_table
from titanlite.planner.bounds import Facts
from titanlite.planner.hardware import Hardware

COPY_RATE = 20e9
"""Bytes a second of a GPU's copy into host memory."""
NODE_RATE, STORAGE_RATE = 2e9, 200e9
"""Bytes a second of the storage for a node, and at most for all."""
SHARE_OF_PEAK = 0.4
LEAST_INTERVAL = 60
"""Of checkpoint.interval = "auto"."""

Term = tuple[str, float, str]
"""A name, seconds, and where they are from."""


def goodput_table(job: Job, hardware: Hardware, mtbf_hours: float) -> str:
    """Return the terms of a job's goodput if a failure comes every so many hours."""
    config, world = job.config, job.layout.world
    saving = config.checkpoint
    if not saving.enable:
        raise UserError("--mtbf: without checkpoint.enable a failure loses the whole run: set it")
    facts = Facts(job, hardware)
    size, peak = facts.saved, SHARE_OF_PEAK * hardware.peak("bfloat16")
    step = job.batch.total * config.training.seq_len * facts.flops / world / peak
    rate = min(STORAGE_RATE, NODE_RATE * max(1, world // hardware.node.gpus))
    write = wait = size / rate
    if saving.async_mode != "disabled":
        wait = size / world / COPY_RATE
    failure = mtbf_hours * 3600
    interval = max((2 * wait * failure) ** 0.5, 2 * write, LEAST_INTERVAL)
    if saving.interval != "auto":
        interval = saving.interval * step
    lost = interval / 2 + write
    reads = 2 if saving.verify_on_load == "full" else 1
    restart: list[Term] = [
        *_restart(job),
        ("the checkpoint is read", reads * write, "given: checkpoint.verify_on_load"),
    ]
    terms: list[Term] = [
        ("a step", step, f"assumed: {SHARE_OF_PEAK:.0%} of the peak"),
        ("from save to save", interval, f"given: checkpoint.interval = {saving.interval}"),
        ("training waits for a save", wait, f"assumed: {size / 1e9:,.0f} GB of all ranks"),
        ("a save is written", write, f"assumed: {rate / 1e9:,.0f} GB/s"),
        ("lost with a failure", lost, "half of an interval, and a save"),
        *restart,
        ("a restart in all", sum(seconds for _, seconds, _ in restart), "the sum of these"),
    ]
    share = max(0.0, failure - lost) / (failure + terms[-1][1]) * interval / (interval + wait)
    rows = [(name, f"{seconds:,.1f} s", source) for name, seconds, source in terms]
    failing = f"with a failure every {mtbf_hours:g} hours on {world:,} GPUs"
    return f"{format_table(rows, align='<><')}\ngoodput {100 * share:.1f} % {failing}"


def _restart(job: Job) -> list[Term]:
    """Return what a restart takes but for reading the checkpoint."""
    config, world = job.config, job.layout.world
    stall = config.fault.stall_seconds or config.comm.train_timeout_seconds
    terms: list[Term] = [
        ("a hang is noticed, half of all", (stall + 2) / 2, "given: fault.stall_seconds"),
        ("verdict, and nodes meet", 2 + 1e-4 * world, "measured: up to 200 nodes on one machine"),
        ("processes and imports", 15, "assumed"),
        ("NCCL's first connection", 2.7e-3 * world, "assumed: reported are 265 s at 98,304"),
        ("NCCL's other groups", 12 * 6e-5 * world, "assumed: 12 splits"),
        ("data is opened", 1, "assumed"),
    ]
    if config.compile.enable:
        terms.append(("compiling", 20, "assumed: with the compiler's cache"))
    return terms
