"""A plan as tables for people; below each stands what of it is assumed."""

from collections.abc import Iterable, Iterator

from titanlite.errors import format_table
from titanlite.planner.hardware import GIB, Hardware
from titanlite.planner.plan import Plan, reserve_text
from titanlite.planner.search import Found


def report(plan: Plan) -> str:
    """Return the plan's tables."""
    parts = [_title(plan), _memory(plan), _communication(plan), _speed(plan)]
    if not plan.fits:
        parts.append(_changes(plan))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _title(plan: Plan) -> Iterator[str]:
    config, layout, batch = plan.job.config, plan.job.layout, plan.job.batch
    gpus = f"{layout.world} {plan.hardware.name}{' GPUs' if layout.world > 1 else ' GPU'}"
    yield f"{config.model.name} {config.model.flavor} on {gpus}: {layout}"
    yield (
        f"a step: {plan.speed.tokens:,} tokens, batch {batch.total} = local {batch.local} x data-parallel "
        f"{batch.data_parallel} x accumulation {batch.accumulation}; recompute {config.activation_checkpoint.mode}"
    )


def _memory(plan: Plan) -> Iterator[str]:
    """Say whether it fits, what is alive at the peak, and how much is left."""
    hardware, recording = plan.hardware, plan.recording
    bound = "at most " * plan.at_most
    may_fit = plan.at_most and sum(recording.static.values()) <= hardware.usable_bytes
    yield "It fits" if plan.fits else "It may not fit: the peak is an upper bound" if may_fit else "It does not fit"
    rows = [(kind, _gib(size)) for kind, size in recording.at_peak.items() if size]
    rows.append((f"peak, in {recording.moment}", bound + _gib(recording.peak)))
    usable = f"of {hardware.gpu.memory_gib:g} less a reserve of {hardware.reserve.gib:g}"
    rows.append((usable, _gib(hardware.usable_bytes)))
    left = hardware.usable_bytes - recording.peak
    rows.append(("left" if plan.fits else "missing", _gib(abs(left))))
    yield format_table(rows, ("memory of a rank at the peak", "GiB"), align="<>", indent=2)
    yield from _assumed(plan.assumptions)


def _communication(plan: Plan) -> Iterator[str]:
    """List the collectives of a step of one rank."""
    yield "Communication of a rank in a step"
    if not plan.traffic:
        yield "  none"
        return
    exposed = dict(plan.speed.exposed)
    rows = []
    for row in plan.traffic:
        waits = exposed.pop(row.dimension, None)  # of the dimension: in its first row
        seconds = "" if waits is None else f"{waits:.3f}"
        rows.append((row.dimension, row.kind, row.dtype, f"{row.number:,}", _gib(row.bytes), row.where, seconds))
    header = ("dimension", "collective", "type", "number", "GiB", "ranks", "exposed s")
    yield format_table(rows, header, align="<<<>><>", indent=2)
    yield "  GiB of whole tensors; exposed: seconds in which compute waits for the dimension, in the estimate"
    node = plan.hardware.node
    yield from _assumed([f"{node.gpus} GPUs in a node, neighbors in the mesh ({node.source})"])


def _speed(plan: Plan) -> Iterator[str]:
    """Set the bound beside the estimate."""
    speed = plan.speed
    columns = [plan.rates(speed.bound), plan.rates(speed.estimate)]
    formats = {
        "seconds": ("seconds a step", "{:.3f}"),
        "tokens_per_second_per_gpu": ("tokens/s per GPU", "{:,.0f}"),
        "mfu_percent": ("MFU", "{:.1f}%"),
        "days": (f"days for {plan.tokens:.3g} tokens", "{:,.1f}"),
    }
    rows = [
        (title, *(form.format(column[name]) for column in columns))
        for name, (title, form) in formats.items()
        if columns[0][name] is not None
    ]
    yield "Speed"
    yield format_table(rows, ("", "bound", "estimate"), align="<>>", indent=2)
    terms: dict[str, float] = {}
    for term in speed.terms:
        terms[term.resource] = terms.get(term.resource, 0.0) + term.seconds
    yield f"  bound by {speed.binding}; {', '.join(f'{name} {seconds:.3f} s' for name, seconds in terms.items())}"
    yield from _assumed(speed.assumptions)


def _changes(plan: Plan) -> Iterator[str]:
    """List what would fit."""
    if not plan.changes:
        yield "No single change of recomputation, batch, chunks or mesh that was rehearsed fits; try --search"
        return
    yield "What would fit, each rehearsed"
    rows = [(change.option, _gib(change.peak), f"{change.bound:.3f}") for change in plan.changes]
    yield format_table(rows, ("change", "peak GiB", "bound s"), align="<>>", indent=2)


def search_report(found: Found, hardware: Hardware, world: int) -> str:
    """Return the ranking of a search."""
    seen = f"{found.rehearsed} rehearsed, {found.ruled_out} ruled out, {found.not_reached} not reached in time"
    if not found.best:
        return f"No plan fits on {world} x {hardware.name}: {seen}"
    rows = []
    for number, candidate in enumerate(found.best, 1):
        times = (f"{seconds:.3f}" for seconds in (candidate.speed.estimate, candidate.bound))
        measured = f"{candidate.measured:.3f}" if candidate.measured else ""
        rows.append((f"{number}", _gib(candidate.peak), *times, candidate.speed.binding, measured, candidate.option))
    header = ["", "peak GiB", "estimate s", "bound s", "by", "measured s", "changes"]
    if not any(candidate.measured for candidate in found.best):
        header.remove("measured s")
        rows = [(*row[:5], row[6]) for row in rows]
    assumptions = dict.fromkeys(text for candidate in found.best for text in candidate.speed.assumptions)
    lines = [f"The fastest that fit on {world} x {hardware.name}, of {seen}"]
    lines.append(format_table(rows, header, align=">>>><" + ">" * (len(header) - 6), indent=2))
    return "\n".join([*lines, *_assumed([reserve_text(hardware), *assumptions])])


def _assumed(assumptions: Iterable[str]) -> Iterator[str]:
    for text in assumptions:
        yield f"  assumed: {text}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
