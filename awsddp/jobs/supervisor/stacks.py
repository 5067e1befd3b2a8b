"""What the processes of a job do at this moment on this node: their stacks, and what torch recorded.

Each process is asked through its helper (helper.py), all at once; what does not answer gets SIGUSR2, where it
handles that signal. A stopped process is only named.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from awsddp.jobs.supervisor.folder import JobFolder

ANSWER_SECONDS = 1.5
_SIGNAL_SECONDS = 0.5
_MOST_PROCESSES = 256
_MOST_TEXT = 24_000  # characters of the stacks of one process
_MOST_RECORDS = 60  # of one process group, the last ones


def stacks(folder: JobFolder, *, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Return the job's `processes` on this node; takes at most `seconds`, and half a second for SIGUSR2.

    Each has `pid`, `parent`, `rank` (None: in no process group, and the environment has none), `joined`
    (whether it is in torch's default group), `state` (of proc(5); T is stopped), `stacks` (faulthandler's
    text, "" without an answer) and `records` by process group: [number, operation, sizes, whether it is over]
    with `age`, the seconds since the last began.
    """
    found = [process for process in _processes(folder.run) if process["rank"] is not None][:_MOST_PROCESSES]
    silent = {process["pid"]: process for process in found if process["state"] not in "Tt"}
    for pid in silent:
        _ask(folder.stacks / str(pid))
    _wait(silent, lambda pid: _take_answer(silent[pid], folder.stacks / str(pid)), seconds)
    before = {pid: _length(folder.stacks / f"{pid}.signal") for pid in silent if _handles(pid)}
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    signalled = {pid: silent[pid] for pid in before}
    _wait(signalled, lambda pid: _take_dump(silent[pid], folder.stacks / str(pid), before[pid]), _SIGNAL_SECONDS)
    return {"processes": found}


def _processes(run: Path) -> list[dict[str, Any]]:
    """Return the living processes that have the job's run folder in their environment."""
    mark = b"AWSDDP_RUN_DIR=" + os.fsencode(str(run))
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            state, parent = (path / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if mark in environment and state not in (b"Z", b"X"):
            rank = next((one[5:] for one in environment if one.startswith(b"RANK=")), b"")
            process = {"pid": int(path.name), "parent": int(parent), "state": state.decode()}
            blank = {"joined": False, "stacks": "", "records": {}}
            found.append({**process, **blank, "rank": int(rank) if rank.isdigit() else None})
    return sorted(found, key=lambda process: process["pid"])


def _ask(name: Path) -> None:
    """Send a request to a helper. Where none listens there is none, or it is busy with another request."""
    with contextlib.suppress(OSError):
        name.with_suffix(".answer").unlink()
    with contextlib.suppress(OSError):
        os.close(os.open(f"{name}.request", os.O_WRONLY | os.O_NONBLOCK))


def _wait(silent: dict[int, dict[str, Any]], take: Any, seconds: float) -> None:
    """Take the answers of processes as they come; those that gave one leave `silent`."""
    end = time.monotonic() + seconds
    while silent and time.monotonic() < end:
        for pid in [pid for pid in silent if take(pid)]:
            del silent[pid]
        if silent:
            time.sleep(0.02)


def _take_answer(process: dict[str, Any], name: Path) -> bool:
    try:
        text = name.with_suffix(".answer").read_text("utf-8", "replace")
    except OSError:
        return not os.path.exists(f"/proc/{name.name}")
    written, _, rest = text.partition("\n--\n")
    rank, *traces = rest.splitlines()
    process.update(stacks=written[:_MOST_TEXT], records=_records(traces))
    if rank:
        process.update(rank=int(rank), joined=True)
    return True


def _take_dump(process: dict[str, Any], name: Path, before: int) -> bool:
    with contextlib.suppress(OSError), name.with_suffix(".signal").open("rb") as file:
        file.seek(before)
        process["stacks"] = file.read(_MOST_TEXT).decode("utf-8", "replace")
    return False  # it may still be writing


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _handles(pid: int) -> bool:
    """Tell whether a process has a handler for SIGUSR2, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


def _records(traces: list[str]) -> dict[str, Any]:
    """Return, by process group, the last collectives in torch's flight recorder (JSON)."""
    groups: dict[str, Any] = {}
    for trace in traces:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for entry in json.loads(trace)["entries"]:
                if not entry["is_p2p"]:
                    name, use = map(str, entry["process_group"])
                    group = groups.setdefault(use if use == "default_pg" else name, {"records": []})
                    group["records"].append(_record(entry))
                    group["age"] = round(time.time() - entry["time_created_ns"] / 1e9, 3)
    return {name: {**group, "records": group["records"][-_MOST_RECORDS:]} for name, group in groups.items()}


def _record(entry: dict[str, Any]) -> list[Any]:
    """Return number, operation, sizes, and whether it is over; gloo's `state` stays "scheduled"."""
    operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    over = bool(entry["retired"]) or entry["state"] == "completed"
    return [entry["collective_seq_id"], operation, json.dumps(entry["input_sizes"])[:200], over]
