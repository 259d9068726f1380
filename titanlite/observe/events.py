"""The starts, restarts and stops of a run: events.jsonl in its dump folder, which is only appended
to and stays where it is when a start moves earlier files away. No torch.

Node 0's launcher writes "start", "restart" and "stop", rank 0 "begin"; without the launcher rank 0
writes them all, as far as it lives.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.observe.page import Table

EVENTS = "events.jsonl"
DONE, STOPPED, FAILED = "done", "stopped", "failed"
"""How a run stopped."""
HEADER = "time (UTC)", "start and end"


def record_event(folder: Path, event: str, **values: Any) -> None:
    """Append an event; a folder that is gone or full does not end a run."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    with suppress(OSError), (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a folder; none if it has none."""
    events: list[dict[str, Any]] = []
    with suppress(FileNotFoundError), (folder / EVENTS).open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # a full disk has cut it off
                events.append(json.loads(line))
    return events


def starts(events: list[dict[str, Any]], most: int = 1000) -> Table:
    """Return the last starts: when, on which mesh from which step, and how each has ended."""
    rows: list[list[str]] = []
    runs = False
    for event in events:
        kind, end = event["event"], event.get("why") or event.get("how", "")
        if kind == "start" or not runs:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event["time"]))
            rows.append([at, "", "end not recorded: killed, or its host was lost"])
        if kind == "begin":
            rows[-1][1] = f"{event['mesh']} from step {event['step']}"
        elif end:
            rows[-1][2] = end
        runs = kind in ("start", "begin")
    if runs:
        rows[-1][2] = "" if rows[-1][1] else "starting"
    told = [(at, "; ".join(filter(None, story))) for at, *story in rows[-most:]]
    return Table("starts", "Starts", HEADER, told)
