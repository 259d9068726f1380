"""The starts, restarts and stops of a run, in events.jsonl in its dump folder. The file is only
appended to, and stays when a start moves earlier files away. Imports no torch.

Node 0's launcher writes "start", "restart" and "stop", and rank 0 "begin"; without the launcher
rank 0 writes all of them, as long as it lives.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from titanlite.observe.page import Table

EVENTS = "events.jsonl"
DONE = "done"
STOPPED = "stopped"
FAILED = "failed"
"""How a run stopped."""
HEADER = "time (UTC)", "start and end"


def record_event(folder: Path, event: str, **values: Any) -> None:
    """Append an event; a missing folder or a full disk does not end the run."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **values})
    with suppress(OSError), (folder / EVENTS).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a folder; none if it has none."""
    events: list[dict[str, Any]] = []
    with suppress(FileNotFoundError), (folder / EVENTS).open(encoding="utf-8") as file:
        for line in file:
            with suppress(ValueError):  # truncated by a full disk
                events.append(json.loads(line))
    return events


def starts(events: list[dict[str, Any]], most: int = 1000) -> Table:
    """Return the last starts: when, on which mesh, from which step, and how each ended."""
    rows: list[list[str]] = []
    runs = False
    for event in events:
        kind = event["event"]
        end = event.get("why") or event.get("how", "")
        if kind == "start" or not runs:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event["time"]))
            rows.append([at, "", "end not recorded: killed, or its host was lost"])
        if kind == "begin":
            rows[-1][1] = f"{event['mesh']} from step {event['step']}"
        elif end:
            rows[-1][2] = end
        runs = kind in ("start", "begin")
    if runs:
        rows[-1][2] = ""
        if not rows[-1][1]:
            rows[-1][2] = "starting"
    told = [(at, "; ".join(filter(None, story))) for at, *story in rows[-most:]]
    return Table("starts", "Starts", HEADER, told)
