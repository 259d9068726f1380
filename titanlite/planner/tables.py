"""A plan as tables, printed as text or shown on a page with exact numbers."""

from collections.abc import Iterator
from textwrap import fill

from titanlite.observe.page import Number, Table
from titanlite.planner.hardware import GIB, Hardware, with_source
from titanlite.planner.plan import Plan, reserve_text
from titanlite.planner.record import KINDS
from titanlite.planner.search import FLOAT8, Candidate, SearchResult
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
    gpus = f"{layout.world} {hardware.name} GPU"
    if layout.world > 1:
        gpus += "s"
    left = (hardware.usable_bytes - plan.totals.peak) / GIB
    usable = f"{hardware.usable_bytes / GIB:.2f} of {hardware.gpu.memory_gib:g} GiB are usable"
    verdict = "It does not fit"
    rest = f"{abs(left):.2f} missing"
    if plan.fits:
        verdict = "It fits"
        rest = f"{abs(left):.2f} left"
    return (
        f"{config.model.name} {config.model.flavor} on {gpus}: {layout}",
        f"a step: {plan.speed.tokens:,} tokens, batch {batch.total} = local {batch.local} "
        f"x data-parallel {batch.data_parallel} x accumulation {batch.accumulation}; "
        f"recompute {config.activation_checkpoint.mode}",
        f"{verdict}: a step needs {plan.totals.peak / GIB:.2f} GiB, in {plan.totals.moment}; "
        f"{usable}, {rest}{_flushes(plan)}{_resharding(plan)}",
    )


def _flushes(plan: Plan) -> str:
    """Return a line on what torch's allocator needs beyond the peak of a job that fits."""
    if not plan.fits:
        return ""
    none = plan.without_flushes <= plan.hardware.usable_bytes
    expected = "Allocator cache flushes possible"
    if none:
        expected = "No allocator cache flushes expected"
    needs = f"needs up to {plan.without_flushes / GIB:.2f} GiB"
    return f"\n{expected}: PyTorch's caching allocator {needs}"


def _resharding(plan: Plan) -> str:
    return f"\n{plan.resharding}" if plan.resharding else ""


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables in the order in which a reader asks for them."""
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
    sizes: list[tuple[str, int, int]] = []
    for kind in KINDS:
        sizes.append((kind, totals.at_peak.get(kind, 0), totals.static.get(kind, 0)))
    *on_gpu, host = sizes
    total = f"peak, in {totals.moment}", totals.peak, sum(size for *_, size in on_gpu)
    sizes = [*on_gpu, total, host]
    rows = []
    for kind, peak, static in sizes:
        if peak or static:
            rows.append((kind, gib(peak), gib(static)))
    header = ("GiB", "at the peak", "static")
    return Table("memory", "Memory of a rank", header, rows, plan.assumptions)


def _ranks(plan: Plan) -> Table:
    rows = []
    for number in range(len(plan.ranks)):
        rank = plan.rank(number)
        collectives = 0
        sends = 0
        size = 0
        for row in rank["communication"]:
            collectives += row["number"]
            if row["kind"] == "send-receive":
                sends += row["number"]
                size += row["bytes"]
        stages = " ".join(map(str, rank["stages"]))
        place = f"{number}", stages, rank["moment"], gib(rank["peak"])
        rows.append((*place, Number(collectives), Number(sends), gib(size)))
    header = ("rank", "stages", "peak in", "GiB", "collectives", "sends", "GiB sent")
    note = "other tables show the fullest rank"
    return Table("ranks", "Ranks of the pipeline", header, rows, (), note)


def _communication(plan: Plan) -> Table:
    rows = []
    for row in plan.traffic:
        sizes = Number(row.number), gib(row.bytes)
        rows.append((row.dimension, row.kind, row.dtype, row.where, *sizes))
    note = "none"
    if rows:
        note = "GiB of whole tensors"
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
    rates = plan.rates
    rows = []
    for name, (title, digits) in titles.items():
        if rates[name] is not None:
            rows.append((title, Number(rates[name], digits)))
    title = f"Speed, bound by {plan.speed.binding}"
    return Table("speed", title, ("", "bound"), rows, [*plan.hardware.assumptions, *ASSUMED])


def search_table(found: SearchResult, hardware: Hardware, world: int) -> Table:
    """Return the ranking of a search."""
    seen = ", ".join(f"{number} {what}" for what, number in found.counts.items() if number)
    if not found.best:
        size, what = found.needed
        binds = f"{what} needs {size / GIB:.2f} GiB of {hardware.usable_bytes / GIB:.2f}"
        title = f"No plan fits on {world} x {hardware.name}: {seen}; at least {binds}"
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
    """Return a short name of a plan that a search found, in the terms that `_KEYS` explains."""
    layout = one.job.layout
    config = one.job.config
    degrees = {"pp": layout.pp, "rep": layout.dp_replicate, "dp": layout.dp_shard}
    degrees |= {"cp": layout.cp, "tp": layout.tp, "ep": layout.ep}
    mesh = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    stages = one.job.stages
    batch = f"batch {one.job.batch.local}"
    if layout.pp > 1:
        batch += f" by {stages.size}, {stages.schedule}"
    recompute = config.activation_checkpoint.mode.replace("none", "no recompute")
    parts = [mesh, batch, recompute]
    if config.parallelism.fsdp_reshard_after_forward == "never":
        parts.append("kept")
    if one.settings.get(FLOAT8) is False:
        parts.append("bfloat16")
    return ", ".join(filter(None, parts))


_KEYS = """\
dp is parallelism.data_parallel_shard_degree, rep
parallelism.data_parallel_replicate_degree, pp, cp, tp and ep the degrees of pipeline, context,
tensor and expert parallel, batch training.local_batch_size, by the size of a pipeline's
micro-batch; full, selective or no recompute is activation_checkpoint.mode, kept
parallelism.fsdp_reshard_after_forward = "never".
training.global_batch_size does not change. --out writes the first as a config."""


def gib(size: float) -> Number:
    return Number(size, 2, GIB)
