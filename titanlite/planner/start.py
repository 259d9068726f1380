"""The two lines about a step that the start of a run prints: its memory, then its communication and speed."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from titanlite.config.job import Job
from titanlite.errors import UserError, format_bytes
from titanlite.planner.depth import plan_step
from titanlite.planner.hardware import GIB, Hardware, load_hardware, recognize
from titanlite.planner.plan import traffic_of
from titanlite.planner.record import Recording
from titanlite.planner.search import changes
from titanlite.planner.speed import is_upper_bound, speed_of_job


def start_lines(job: Job, gpu: str, memory: int | None, processes: int) -> Sequence[str]:
    """Return the lines for a job with so many ranks on a node, each on a GPU of this name, or else on a CPU.

    `memory` is that of a rank in bytes, or None.
    """
    try:
        recording = plan_step(job, as_on_cuda=bool(gpu))
        known = recognize(gpu, memory) if gpu else ""
        hardware = load_hardware(known) if known else None
        speed = f'no speed bound of "{gpu}", which hardware.toml has not' if gpu else "no speed bound on a CPU"
        if hardware:
            found = speed_of_job(job, recording, hardware)
            speed = f"{found.bound:.3g} s or more by {found.binding}, by estimate {found.estimate:.3g} s"
    except UserError as error:
        return [f"titanlite: memory and speed are {error}"]
    sent = _communication(job, recording, processes)
    return [f"titanlite: {_memory(job, recording, hardware, memory)}", f"titanlite: {sent}; {speed}"]


def _memory(job: Job, recording: Recording, hardware: Hardware | None, memory: int | None) -> str:
    at_most = "at most " * is_upper_bound(job)
    line = f"planned peak {at_most}{format_bytes(recording.peak)} a rank, in {recording.moment}"
    if memory is None:
        return line
    of = f"{'a GPU' if hardware else 'a rank'} has {format_bytes(memory)}"
    reserve = hardware.reserve.gib if hardware else 0
    if recording.peak <= memory - reserve * GIB:
        return f"{line}; {of}"
    found = changes(job, hardware, most=1) if hardware else []
    remedy = "".join(f"; {change.option} needs {format_bytes(change.peak)}" for change in found)
    return f"warning: {line}, but {of}{f', {reserve:g} GiB of it to be kept free (assumed)' * bool(reserve)}{remedy}"


def _communication(job: Job, recording: Recording, processes: int) -> str:
    parts = []
    for dimension, group in groupby(traffic_of(job, recording, processes), key=lambda row: row.dimension):
        rows = [*group]
        numbers = Counter[str]()
        for row in rows:
            numbers[row.kind] += row.number
        counts = " + ".join(f"{number} {kind}{'s' * (number > 1)}" for kind, number in numbers.items())
        parts.append(f"{dimension} {counts} of {format_bytes(sum(row.bytes for row in rows))}, {rows[0].where}")
    return f"planned communication of a step: {'; '.join(parts) or 'none'}"
