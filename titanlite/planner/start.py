"""The two lines about a step that the start of a run prints: its memory, then its communication and speed."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from titanlite.config.job import Job
from titanlite.errors import UserError, format_bytes
from titanlite.planner.depth import plan_step
from titanlite.planner.hardware import Hardware, load_hardware, recognize
from titanlite.planner.plan import is_upper_bound, traffic_of
from titanlite.planner.record import Recording
from titanlite.planner.search import changes
from titanlite.planner.speed import speed_of


def start_lines(job: Job, gpu: str, memory: int | None, processes: int) -> Sequence[str]:
    """Return the lines for a job of which so many ranks share a node, each on a GPU of this name, or else on a CPU.

    `memory` is that of a rank in bytes, if known.
    """
    try:
        recording = plan_step(job, as_on_cuda=bool(gpu))
        known = recognize(gpu, memory) if gpu else ""
        hardware = load_hardware(known) if known else None
        lines = [_memory(job, recording, hardware, memory), _communication(job, recording, processes)]
    except UserError as error:
        return [f"titanlite: no plan: {error}"]
    if hardware:
        tokens = job.batch.total * job.config.training.seq_len
        speed = speed_of(recording, job.layout, hardware, tokens, is_upper_bound(job))
        lines[1] += f"; {speed.bound:.3g} s or more by {speed.binding}, by estimate {speed.estimate:.3g} s"
    else:
        lines[1] += "; no speed bound " + (f'of "{gpu}", which hardware.toml has not' if gpu else "on a CPU")
    return [f"titanlite: {line}" for line in lines]


def _memory(job: Job, recording: Recording, hardware: Hardware | None, memory: int | None) -> str:
    line = (
        f"planned peak {'at most ' * is_upper_bound(job)}{format_bytes(recording.peak)} a rank, in {recording.moment}"
    )
    if memory is None:
        return line
    usable = memory - int((hardware.reserve.gib if hardware else 0) * (1 << 30))
    of = f"{'a GPU' if hardware else 'a rank'} has {format_bytes(memory)}"
    if recording.peak <= usable:
        return f"{line}; {of}"
    less = f", of which {hardware.reserve.gib:g} GiB should stay free (assumed)" if hardware else ""
    found = changes(job, hardware, most=1) if hardware else []
    remedy = "".join(f"; {change.option} needs {format_bytes(change.peak)}" for change in found)
    return f"warning: {line}, but {of}{less}{remedy}"


def _communication(job: Job, recording: Recording, processes: int) -> str:
    numbers, rows = defaultdict(Counter[str]), traffic_of(job, recording, processes)
    for row in rows:
        numbers[row.dimension][row.kind] += row.number
    parts = []
    for dimension, kinds in numbers.items():
        size = sum(row.bytes for row in rows if row.dimension == dimension)
        where = next(row.where for row in rows if row.dimension == dimension)
        counts = " + ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in kinds.items())
        parts.append(f"{dimension} {counts} of {format_bytes(size)}, {where}")
    return f"planned communication of a step: {'; '.join(parts) or 'none'}"
