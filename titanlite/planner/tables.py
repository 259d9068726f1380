"""A plan as tables, printed as text, and on a page with their exact numbers."""

from collections.abc import Iterator
from textwrap import fill

from titanlite.observe.page import Number, Table
from titanlite.planner.hardware import GIB, Hardware, with_source
from titanlite.planner.plan import Plan, reserve_text
from titanlite.planner.record import KINDS
from titanlite.planner.search import FLOAT8, Candidate, Found
from titanlite.planner.speed import ASSUMED


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
    left = (hardware.usable_bytes - plan.totals.peak) / GIB
    usable = f"{hardware.usable_bytes / GIB:.2f} of {hardware.gpu.memory_gib:g} GiB are usable"
    return (
        f"{config.model.name} {config.model.flavor} on {gpus}: {layout}",
        f"a step: {plan.speed.tokens:,} tokens, batch {batch.total} = local {batch.local} "
        f"x data-parallel {batch.data_parallel} x accumulation {batch.accumulation}; "
        f"recompute {config.activation_checkpoint.mode}",
        f"{'It fits' if plan.fits else 'It does not fit'}: a step needs "
        f"{plan.totals.peak / GIB:.2f} GiB, "
        f"in {plan.totals.moment}; "
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


def _memory(plan: Plan) -> Table:
    totals = plan.totals
    sizes: list[tuple[str, int, int]] = [
        (kind, totals.at_peak.get(kind, 0), totals.static.get(kind, 0)) for kind in KINDS
    ]
    *on_gpu, host = sizes
    total = f"peak, in {totals.moment}", totals.peak, sum(size for *_, size in on_gpu)
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
        stages = " ".join(map(str, rank["stages"]))
        place = f"{number}", stages, rank["moment"], gib(rank["peak"])
        rows.append((*place, *map(Number, counts), size))
    header = ("rank", "stages", "peak in", "GiB", "collectives", "sends", "GiB sent")
    note = "other tables show the fullest rank"
    return Table("ranks", "Ranks of the pipeline", header, rows, (), note)


def _communication(plan: Plan) -> Table:
    rows = []
    for row in plan.traffic:
        sizes = Number(row.number), gib(row.bytes)
        rows.append((row.dimension, row.kind, row.dtype, row.where, *sizes))
    note = "GiB of whole tensors" if rows else "none"
    gpus = plan.hardware.node
    node = with_source(f"{gpus.gpus} GPUs in a node, neighbors in the mesh", gpus.source)
    title = "Communication of a rank in a step"
    header = ("dimension", "collective", "type", "ranks", "number", "GiB")
    return Table("communication", title, header, rows, [node], note)


def _speed(plan: Plan) -> Table:
    titles = {
        "seconds": ("seconds a step", 3),
        "tokens_per_second_per_gpu": ("tokens/s per GPU", 0),
        "mfu_percent": ("MFU %", 1),
        "days": (f"days for {plan.tokens:.3g} tokens", 1),
    }
    rows = [
        (title, Number(plan.rates[name], digits))
        for name, (title, digits) in titles.items()
        if plan.rates[name] is not None
    ]
    title = f"Speed, bound by {plan.speed.binding}"
    return Table("speed", title, ("", "bound"), rows, [*plan.hardware.assumptions, *ASSUMED])


def search_table(found: Found, hardware: Hardware, world: int) -> Table:
    """Return the ranking of a search."""
    seen = ", ".join(f"{number} {what}" for what, number in found.counts.items() if number)
    if not found.best:
        size, what = found.needed
        binds = f"{what} needs {size / GIB:.2f} GiB of {hardware.usable_bytes / GIB:.2f}"
        title = f"No plan fits on {world} x {hardware.name}: {seen}; at the least {binds}"
        return Table("search", title, (), ())

    rows = []
    for number, one in enumerate(found.best, 1):
        bound = Number(one.seconds, 3)
        rows.append((Number(number), gib(one.peak), bound, one.speed.binding, _name(one)))
    header = ("", "GiB", "bound s", "by", "plan")
    title = f"The fastest that fit on {world} x {hardware.name}, of {seen}"
    assumed = [reserve_text(hardware), *hardware.assumptions, *ASSUMED]
    keys = fill(_KEYS, 98, subsequent_indent="  ")
    return Table("search", title, header, rows, assumed, keys)


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
    parts += ["bfloat16"] * (one.settings.get(FLOAT8) is False)
    return ", ".join(filter(None, parts))


_KEYS = """\
dp is parallelism.data_parallel_shard_degree, rep
parallelism.data_parallel_replicate_degree, pp, cp, tp and ep the degrees of pipeline, context,
tensor and expert parallel, batch training.local_batch_size, by the size of a pipeline's
micro-batch; full, selective or no recompute is activation_checkpoint.mode, kept
parallelism.fsdp_reshard_after_forward = "never".
training.global_batch_size stays as it is. --out writes the first as a config."""


def gib(size: float) -> Number:
    return Number(size, 2, GIB)
