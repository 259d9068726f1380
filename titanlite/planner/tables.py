"""A plan as tables, printed as text, and on the page with their exact numbers."""

from collections.abc import Iterator
from math import nan
from textwrap import fill

from titanlite.observe.page import Number, Table
from titanlite.planner.bounds import FLOAT8
from titanlite.planner.hardware import GIB, Hardware, with_source
from titanlite.planner.plan import Plan, reserve_text
from titanlite.planner.record import KINDS
from titanlite.planner.search import Candidate, Found


def report(plan: Plan) -> str:
    """Return the plan as text."""
    return "\n\n".join(["\n".join(heading(plan)), *map(str, tables(plan))])


def heading(plan: Plan) -> tuple[str, str, str]:
    """Return the job, its step, and whether it fits."""
    config = plan.job.config
    layout = plan.job.layout
    batch = plan.job.batch
    hardware = plan.hardware
    gpus = f"{layout.world} {hardware.name} GPU{'s' * (layout.world > 1)}"
    left = (hardware.usable_bytes - plan.recording.peak) / GIB
    usable = f"{hardware.usable_bytes / GIB:.2f} of {hardware.gpu.memory_gib:g} GiB are usable"
    return (
        f"{config.model.name} {config.model.flavor} on {gpus}: {layout}",
        f"a step: {plan.speed.tokens:,} tokens, batch {batch.total} = local {batch.local} "
        f"x data-parallel {batch.data_parallel} x accumulation {batch.accumulation}; "
        f"recompute {config.activation_checkpoint.mode}",
        f"{'It fits' if plan.fits else 'It does not fit'}: a step needs "
        f"{plan.recording.peak / GIB:.2f} GiB, "
        f"in {plan.recording.moment}; "
        f"{usable}, {abs(left):.2f} {'left' if plan.fits else 'missing'}{_flushes(plan)}",
    )


def _flushes(plan: Plan) -> str:
    """Return a line on what torch's allocator needs beyond the peak of a job that fits."""
    if not plan.fits:
        return ""
    none = plan.without_flushes <= plan.hardware.usable_bytes
    expected = "No allocator cache flushes expected" if none else "Allocator cache flushes possible"
    needs = f"needs up to {plan.without_flushes / GIB:.2f} GiB"
    return f"\n{expected}: PyTorch's caching allocator {needs}"


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables in the order of a reader's questions."""
    if not (plan.fits or plan.ranks):
        yield _changes(plan)
    yield _memory(plan)
    if plan.ranks:
        yield _ranks(plan)
    yield _communication(plan)
    yield _speed(plan)
    units = {"compute": 1e12}
    rows = []
    for term in plan.speed.terms:
        amount = Number(term.amount, 2, units.get(term.resource, 1e9))
        rows.append((term.resource, term.of, amount, Number(term.seconds, 3)))
    yield Table("terms", "Parts of the bound", ("resource", "of", "TFLOP or GB", "seconds"), rows)


def _changes(plan: Plan) -> Table:
    rows = [
        (c.option, gib(c.peak), Number(c.speed.estimate, 3), Number(c.speed.bound, 3))
        for c in plan.changes
    ]
    title = "What would fit, each rehearsed"
    if not rows:
        title = (
            "No single change of recomputation, batch, chunks or mesh "
            "that was rehearsed fits; try --search"
        )
    return Table("changes", title, ("change", "peak GiB", "estimate s", "bound s"), rows)


def _memory(plan: Plan) -> Table:
    recording = plan.recording
    sizes: list[tuple[str, int, int]] = [
        (kind, recording.at_peak.get(kind, 0), recording.static.get(kind, 0)) for kind in KINDS
    ]
    *on_gpu, host = sizes
    total = f"peak, in {recording.moment}", recording.peak, sum(size for *_, size in on_gpu)
    sizes = [*on_gpu, total, host]
    rows = [(kind, gib(peak), gib(static)) for kind, peak, static in sizes if peak or static]
    header = ("GiB", "at the peak", "static")
    return Table("memory", "Memory of a rank", header, rows, plan.assumptions)


def _ranks(plan: Plan) -> Table:
    rows = []
    for number in range(len(plan.ranks)):
        rank = plan.rank(number)
        sent = [row for row in rank["communication"] if row["kind"] == "send-receive"]
        counts = [sum(row["number"] for row in of) for of in (rank["communication"], sent)]
        size = gib(sum(row["bytes"] for row in sent))
        waits = Number(rank["exposed"].get("pp", 0.0), 3)
        stages = " ".join(map(str, rank["stages"]))
        place = f"{number}", stages, rank["moment"], gib(rank["peak"])
        rows.append((*place, *map(Number, counts), size, waits))
    header = ("rank", "stages", "peak in", "GiB", "collectives", "sends", "GiB sent", "waits s")
    note = "waits: for other ranks, in the estimate; other tables show the fullest rank"
    return Table("ranks", "Ranks of the pipeline", header, rows, (), note)


def _communication(plan: Plan) -> Table:
    exposed = {**dict.fromkeys((row.dimension for row in plan.traffic), 0.0), **plan.speed.exposed}
    rows = []
    for row in plan.traffic:
        waits = Number(exposed.pop(row.dimension, nan), 3)  # of the dimension: in its first row
        sizes = (Number(row.number), gib(row.bytes), waits)
        rows.append((row.dimension, row.kind, row.dtype, row.where, *sizes))
    note = "none"
    if rows:
        note = (
            "GiB of whole tensors; "
            "exposed: seconds that compute waits for the dimension, in the estimate"
        )
    gpus = plan.hardware.node
    node = with_source(f"{gpus.gpus} GPUs in a node, neighbors in the mesh", gpus.source)
    title = "Communication of a rank in a step"
    header = ("dimension", "collective", "type", "ranks", "number", "GiB", "exposed s")
    return Table("communication", title, header, rows, [node], note)


def _speed(plan: Plan) -> Table:
    speed = plan.speed
    bound, estimate = plan.rates(speed.bound), plan.rates(speed.estimate)
    titles = {
        "seconds": ("seconds a step", 3),
        "tokens_per_second_per_gpu": ("tokens/s per GPU", 0),
        "mfu_percent": ("MFU %", 1),
        "days": (f"days for {plan.tokens:.3g} tokens", 1),
    }
    rows = [
        (title, Number(bound[name], digits), Number(estimate[name], digits))
        for name, (title, digits) in titles.items()
        if bound[name] is not None
    ]
    title, header = f"Speed, bound by {speed.binding}", ("", "bound", "estimate")
    return Table("speed", title, header, rows, speed.assumptions)


def search_table(found: Found, hardware: Hardware, world: int) -> Table:
    """Return the ranking of a search."""
    seen = ", ".join(f"{number} {what}" for what, number in found.counts.items() if number)
    if not found.best:
        size, what = found.needed
        binds = f"{what} needs {size / GIB:.2f} GiB of {hardware.usable_bytes / GIB:.2f}"
        title = f"No plan fits on {world} x {hardware.name}: {seen}; at the least {binds}"
        return Table("search", title, (), ())

    def row(number: int, one: Candidate) -> list[str | Number]:
        seconds = [one.measured or nan, one.speed.estimate, one.speed.bound][unmeasured:]
        return [
            Number(number),
            gib(one.peak),
            *(Number(time, 3) for time in seconds),
            one.speed.binding,
            _name(one),
        ]

    unmeasured = not any(candidate.measured for candidate in found.best)
    header = ("", "GiB", *("measured s", "estimate s", "bound s")[unmeasured:], "by", "plan")
    rows = [row(number, candidate) for number, candidate in enumerate(found.best, 1)]
    assumed = dict.fromkeys(
        text for candidate in found.best for text in candidate.speed.assumptions
    )
    title = f"The fastest that fit on {world} x {hardware.name}, of {seen}"
    return Table(
        "search",
        title,
        header,
        rows,
        [reserve_text(hardware), *assumed],
        fill(_KEYS, 98, subsequent_indent="  "),
    )


def _name(one: Candidate) -> str:
    """Return a short name of a plan that a search found, in the words that `_KEYS` explains."""
    layout, config = one.job.layout, one.job.config
    degrees = {"pp": layout.pp, "rep": layout.dp_replicate, "dp": layout.dp_shard}
    degrees |= {"cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
    mesh = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    stages = one.job.stages
    pieces = f" by {stages.size}, {stages.schedule}" * (layout.pp > 1)
    parts = [
        mesh,
        f"batch {one.job.batch.local}{pieces}",
        config.activation_checkpoint.mode.replace("none", "no recompute"),
    ]
    parts += ["kept"] if config.parallelism.fsdp_reshard_after_forward == "never" else []
    parts += [f"{config.training.loss_chunks} chunks"] if config.training.loss_chunks > 1 else []
    parts += ["bfloat16"] * (one.settings.get(FLOAT8) is False)
    return ", ".join(filter(None, parts))


_KEYS = """\
dp is parallelism.data_parallel_shard_degree, rep
parallelism.data_parallel_replicate_degree, pp, cp, tp and ep the degrees of pipeline, context,
tensor and expert parallel, batch training.local_batch_size, by the size of a pipeline's
micro-batch; full, selective or no recompute is activation_checkpoint.mode, kept
parallelism.fsdp_reshard_after_forward = "never", chunks training.loss_chunks.
training.global_batch_size stays as it is. --out writes the first as a config."""


def gib(size: float) -> Number:
    return Number(size, 2, GIB)
