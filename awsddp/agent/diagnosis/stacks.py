"""Collect the stacks of a job's processes on this node, and the collectives that torch recorded.

A request is sent to all processes at once, to each through its helper (helper.py). A process that does not
respond is sent SIGUSR2, if it handles that signal. For a stopped process, only the state is returned.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from awsddp.agent.job_folder import JobFolder, read_counters
from awsddp.agent.messages import as_json_list, list_reader, make_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from awsddp.agent.messages import Launch, Stacks

DUMP = "hang.json"
"""The file in the run folder that holds the stacks collected before the job ended."""
_RESPONSE_SECONDS = 1.5
_SIGNAL_SECONDS = 0.5
_MAX_PROCESSES = 256
_MAX_TEXT = 24_000  # maximum length of one process's stacks
_MAX_TOTAL_TEXT = 1_000_000  # maximum length of all processes' stacks
_MAX_RECORDS = 60  # how many of a process group's last records are kept
_MAX_SOURCES = 1000  # maximum number of code lines, including those of libraries
_MAX_LINE = 200  # maximum length of a code line
_MAX_FILE = 1 << 20  # maximum size of a source file in bytes
_TICKS = os.sysconf("SC_CLK_TCK")
_FRAME = re.compile(r'^ +File "(.+)", line (\d{1,9}) in ', re.MULTILINE)


@as_json_list
class Collective(NamedTuple):
    """A recorded collective.

    `number` is the collective's number in its process group, and `over` is true if the collective has ended.
    """

    number: int
    operation: str
    sizes: str
    over: bool


class GroupRecords(NamedTuple):
    """A process group's last collectives; `age` is how many seconds ago the last collective began."""

    age: float
    records: list[Collective]


class Process(NamedTuple):
    """One of a rank's processes.

    `state` is the process's state, as in proc(5). `stacks` is faulthandler's text, or "" if the process did
    not respond. `joined` is true if the process is in torch's default group. `records` maps process groups to
    records. `cpu_s` is the CPU time that the process has used. `read_bytes` is how much it has read from
    files and pipes, and `wakeups` is how often its main thread has waited.
    """

    pid: int
    parent: int
    rank: int | None
    state: str
    joined: bool = False
    stacks: str = ""
    records: dict[str, GroupRecords] = {}
    cpu_s: float = 0.0
    read_bytes: int = 0
    wakeups: int = 0

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        return self.state in "Tt"


class NodeStacks(NamedTuple):
    """A job's processes on a node.

    `workdir` is the project folder with links resolved. `silent_s` is how many seconds ago a rank on the node
    last wrote to its log. `sources` maps "file:line" to the line of code, for each line in the stacks that is
    not in a library. `at` is the node's time. `changed` is true if the job's results have changed since the
    job became silent, and None if that is not known.
    """

    workdir: str
    silent_s: float
    processes: list[Process]
    sources: Mapping[str, str] = {}
    at: float = 0.0
    changed: bool | None = None


_read_group = make_reader(GroupRecords, records=lambda records: [Collective(*record) for record in records])
_read_process = make_reader(
    Process, records=lambda groups: {name: _read_group(group) for name, group in groups.items()}
)
read_stacks = make_reader(NodeStacks, processes=list_reader(_read_process))


def stacks(request: Stacks | Launch) -> NodeStacks:
    """Return a job's processes on this node, with their stacks. This takes at most 2 s."""
    folder = JobFolder(request.job)
    rank_processes = [process for process in list_processes(folder.run) if process.rank is not None]
    requests = [_StackRequest(process, folder.stacks) for process in rank_processes[:_MAX_PROCESSES]]
    awake = [pending for pending in requests if not pending.process.is_stopped]
    _wait([pending for pending in awake if pending.send()], _StackRequest.read_response, _RESPONSE_SECONDS)
    silent = [pending for pending in awake if not pending.process.stacks]
    for pending in silent:
        pending.signal()
    _wait(silent, _StackRequest.read_dump, _SIGNAL_SECONDS)
    workdir = os.path.realpath(folder.request().workdir)
    shown = _truncate([_with_counters(pending.process) for pending in requests])
    return NodeStacks(
        workdir,
        seconds_since_output(folder),
        shown,
        read_sources(workdir, "\n".join(process.stacks for process in shown)),
        time.time(),
    )


def _with_counters(process: Process) -> Process:
    return process._replace(
        read_bytes=read_counters(Path(f"/proc/{process.pid}/io")).get("rchar", 0),
        wakeups=int(_read_status(process.pid, "voluntary_ctxt_switches")),
    )


def read_sources(workdir: str, stacks: str) -> dict[str, str]:
    """Return {"file:line": unindented line of code} for the lines in `stacks` that are not in libraries."""
    lines: dict[str, str] = {}
    for file, line in list(dict.fromkeys(_FRAME.findall(stacks)))[:_MAX_SOURCES]:
        path = Path(workdir, file)
        if "/lib/python" not in file and path.is_file() and path.stat().st_size <= _MAX_FILE:
            lines[f"{file}:{line}"] = linecache.getline(str(path), int(line)).strip()[:_MAX_LINE]
    return lines


def seconds_since_output(folder: JobFolder) -> float:
    """Return how many seconds ago a rank on this node last wrote to its log."""
    times = [path.stat().st_mtime for path in folder.logs.glob("*.log")]
    return round(max(0.0, time.time() - max(times)), 3) if times else 0.0


def list_processes(run: Path) -> list[Process]:
    """Return the living processes that have the job's run folder in their environment.

    The workers of torchrun's elastic agent are left out, because they only wait for the ranks.
    """
    run_variable = b"AWSDDP_RUN_DIR=" + os.fsencode(str(run))
    worker = os.fsencode(str(run.parent / "worker.py"))
    matches = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            fields = (path / "stat").read_bytes().rpartition(b")")[2].split()
            is_worker = run_variable in environment and worker in (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        state, parent, user_ticks, system_ticks = (fields[at] for at in (0, 1, 11, 12))
        if run_variable in environment and not is_worker and state not in (b"Z", b"X"):
            rank = next((entry[5:] for entry in environment if entry.startswith(b"RANK=")), b"")
            number = int(rank) if rank.isdigit() else None
            cpu_s = (int(user_ticks) + int(system_ticks)) / _TICKS
            matches.append(Process(int(path.name), int(parent), number, state.decode(), cpu_s=cpu_s))
    return sorted(matches, key=lambda process: process.pid)


class _StackRequest:
    """A request for a process's stacks, sent first through the process's helper, then as SIGUSR2."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self._name = folder / str(process.pid)
        self._dump = self._name.with_suffix(".signal")
        self._dump_start: int | None = None  # None: the signal was not sent

    def send(self) -> bool:
        """Send a request to the helper. Return False if no helper is listening in the process."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._name.with_suffix(".answer").unlink()
            os.close(os.open(f"{self._name}.request", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def read_response(self) -> bool:
        """Read the helper's response. Return True if the response is complete or the process has ended."""
        try:
            text = self._name.with_suffix(".answer").read_text("utf-8", "replace")
        except OSError:
            return not Path(f"/proc/{self.process.pid}").exists()
        stack_text, _, tail = text.partition("\n--\n")
        rank, *traces = tail.splitlines()
        self.process = self.process._replace(
            stacks=stack_text[:_MAX_TEXT], records=parse_flight_records(traces)
        )
        if rank:
            self.process = self.process._replace(rank=int(rank), joined=True)
        return True

    def signal(self) -> None:
        """Send SIGUSR2, so that the process writes its stacks, if it has a helper and handles the signal."""
        if self._dump.exists() and _handles_sigusr2(self.process.pid):
            self._dump_start = self._dump.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR2)

    def read_dump(self) -> bool:
        """Read the stacks that the process writes after SIGUSR2. Return True if the stacks are complete."""
        if self._dump_start is None:
            return True
        with self._dump.open("rb") as file:
            file.seek(self._dump_start)
            text = file.read(_MAX_TEXT).decode("utf-8", "replace")
        done = text != "" and text == self.process.stacks
        self.process = self.process._replace(stacks=text)
        return done


def _wait(requests: list[_StackRequest], take: Callable[[_StackRequest], bool], seconds: float) -> None:
    """Call `take` for each request until `take` returns True, for at most `seconds`."""
    end = time.monotonic() + seconds
    while requests and time.monotonic() < end:
        requests = [pending for pending in requests if not take(pending)]
        if requests:
            time.sleep(0.02)


def _truncate(selected: list[Process]) -> list[Process]:
    """Truncate stacks, and remove the records that a forked child inherited from its parent."""
    joined = {process.pid: process.rank for process in selected if process.joined}
    return [
        process._replace(
            stacks=process.stacks[: _MAX_TOTAL_TEXT // len(selected)],
            records={} if joined.get(process.parent) == process.rank else process.records,
        )
        for process in selected
    ]


def _handles_sigusr2(pid: int) -> bool:
    """Return True if a process has a SIGUSR2 handler. Without a handler, the signal would end the process."""
    return bool(int(_read_status(pid, "SigCgt"), 16) >> (signal.SIGUSR2 - 1) & 1)


def _read_status(pid: int, name: str) -> str:
    """Return a number from /proc/PID/status, or "0" if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return "0"
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")


def parse_flight_records(traces: Iterable[str]) -> dict[str, GroupRecords]:
    """Return {process group: last collectives} from dumps of torch's flight recorder (JSON)."""
    groups: dict[str, GroupRecords] = {}
    for trace in traces:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for entry in json.loads(trace)["entries"]:
                if not entry["is_p2p"]:
                    name, use = map(str, entry["process_group"])
                    group = use if use == "default_pg" else name
                    before = groups[group].records if group in groups else []
                    age = round(time.time() - entry["time_created_ns"] / 1e9, 3)
                    groups[group] = GroupRecords(age, [*before, _read_collective(entry)][-_MAX_RECORDS:])
    return groups


def _read_collective(entry: Any) -> Collective:
    """Return a collective from the flight recorder. With gloo, an entry's `state` stays "scheduled"."""
    operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    over = bool(entry["retired"]) or entry["state"] == "completed"
    return Collective(entry["collective_seq_id"], operation, json.dumps(entry["input_sizes"])[:200], over)
