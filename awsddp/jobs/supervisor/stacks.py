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

DUMP = "hang.json"
"""In the run folder: what `stacks` returned before the job was ended."""
_ANSWER_SECONDS = 1.5
_SIGNAL_SECONDS = 0.5
_MOST_PROCESSES = 256
_MOST_TEXT = 24_000  # characters of the stacks of one process
_MOST_ANSWER = 1_000_000  # characters of the stacks of all
_MOST_RECORDS = 60  # of one process group, the last ones


def stacks(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the `job` of a request does on this node; takes at most 2 s.

    `workdir` is the synced folder without links, `silent_s` how long no rank here has written to its log.
    Each of the `processes` has `pid`, `parent`, `rank`, `joined` (whether it is in torch's default group),
    `state` (of proc(5); T is stopped), `stacks` (faulthandler's text, "" without an answer) and `records` by
    process group: [number, operation, sizes, whether it is over]
    with `age`, the seconds since the last began.
    """
    folder = JobFolder(request["job"])
    found = [process for process in processes(folder.run) if process["rank"] is not None][:_MOST_PROCESSES]
    awake = [process for process in found if process["state"] not in "Tt"]
    names = {process["pid"]: folder.stacks / str(process["pid"]) for process in awake}
    asked = [process for process in awake if _ask(names[process["pid"]])]
    _wait(asked, lambda process: _take_answer(process, names[process["pid"]]), _ANSWER_SECONDS)
    silent = [process for process in awake if not process["stacks"]]
    dumps = {process["pid"]: _Dump(names[process["pid"]]) for process in silent}
    _wait(silent, lambda process: dumps[process["pid"]].take(process), _SIGNAL_SECONDS)
    _shorten(found)
    workdir = os.path.realpath(folder.request()["workdir"])
    return {"workdir": workdir, "silent_s": silence(folder), "processes": found}


def silence(folder: JobFolder) -> float:
    """Return for how many seconds no rank of this node has written to its log."""
    written = [path.stat().st_mtime for path in folder.logs.glob("*.log")]
    return round(max(0.0, time.time() - max(written)), 3) if written else 0.0


def processes(run: Path) -> list[dict[str, Any]]:
    """Return the living processes that have the job's run folder in their environment.

    Those of torch's elastic agent are left out: they wait for the ranks.
    """
    mark = b"AWSDDP_RUN_DIR=" + os.fsencode(str(run))
    agent = os.fsencode(str(run.parent / "worker.py"))
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            state, parent = (path / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            is_agent = mark in environment and agent in (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark in environment and not is_agent and state not in (b"Z", b"X"):
            rank = next((one[5:] for one in environment if one.startswith(b"RANK=")), b"")
            process = {"pid": int(path.name), "parent": int(parent), "state": state.decode(), "joined": False}
            number = int(rank) if rank.isdigit() else None
            found.append({**process, "rank": number, "stacks": "", "records": {}})
    return sorted(found, key=lambda process: process["pid"])


def _ask(name: Path) -> bool:
    """Send a request to a helper; return whether one listens."""
    try:
        with contextlib.suppress(FileNotFoundError):
            name.with_suffix(".answer").unlink()
        os.close(os.open(f"{name}.request", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _wait(processes: list[dict[str, Any]], take: Any, seconds: float) -> None:
    """Take what processes give as it comes."""
    end = time.monotonic() + seconds
    pending = list(processes)
    while pending and time.monotonic() < end:
        pending = [process for process in pending if not take(process)]
        if pending:
            time.sleep(0.02)


def _take_answer(process: dict[str, Any], name: Path) -> bool:
    try:
        text = name.with_suffix(".answer").read_text("utf-8", "replace")
    except OSError:
        return not Path(f"/proc/{name.name}").exists()
    written, _, rest = text.partition("\n--\n")
    rank, *traces = rest.splitlines()
    process.update(stacks=written[:_MOST_TEXT], records=records(traces))
    if rank:
        process.update(rank=int(rank), joined=True)
    return True


class _Dump:
    """What a process writes on SIGUSR2, which it is sent only if it has the helper and handles the signal."""

    def __init__(self, name: Path) -> None:
        self._path = name.with_suffix(".signal")
        self._sent = self._path.exists() and _handles(int(name.name))
        self._start = self._path.stat().st_size if self._sent else 0
        if self._sent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(name.name), signal.SIGUSR2)

    def take(self, process: dict[str, Any]) -> bool:
        """Take the stacks; return whether there is no more to come."""
        text = ""
        if self._sent:
            with self._path.open("rb") as file:
                file.seek(self._start)
                text = file.read(_MOST_TEXT).decode("utf-8", "replace")
        done = not self._sent or (text != "" and text == process["stacks"])
        process["stacks"] = text
        return done


def _shorten(found: list[dict[str, Any]]) -> None:
    """Keep the answer small: a forked child has its parent's records."""
    joined = {process["pid"]: process["rank"] for process in found if process["joined"]}
    for process in found:
        process["stacks"] = process["stacks"][: _MOST_ANSWER // len(found)]
        if joined.get(process["parent"]) == process["rank"]:
            process["records"] = {}


def _handles(pid: int) -> bool:
    """Tell whether a process has a handler for SIGUSR2, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


def records(traces: list[str]) -> dict[str, Any]:
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
