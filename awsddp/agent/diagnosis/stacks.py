"""What the processes of a job do at this moment on this node: their stacks, and what torch recorded.

Each process is asked through its helper (helper.py), all at once; what does not answer gets SIGUSR2, where it
handles that signal. A stopped process is only named.
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

from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import each, reader, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from awsddp.agent.messages import Launch, Stacks

DUMP = "hang.json"
"""In the run folder: what `stacks` returned before the job was ended."""
_ANSWER_SECONDS = 1.5
_SIGNAL_SECONDS = 0.5
_MOST_PROCESSES = 256
_MOST_TEXT = 24_000  # characters of the stacks of one process
_MOST_ANSWER = 1_000_000  # characters of the stacks of all
_MOST_RECORDS = 60  # of one process group, the last ones
_MOST_SOURCES = 1000  # lines, of libraries too
_MOST_LINE = 200  # characters of one
_MOST_FILE = 1 << 20  # bytes of a program
_FRAME = re.compile(r'^ +File "(.+)", line (\d{1,9}) in ', re.MULTILINE)


@row
class Collective(NamedTuple):
    """A call that torch recorded: its number in the group, its operation, its sizes, whether it is over."""

    number: int
    operation: str
    sizes: str
    over: bool


class Group(NamedTuple):
    """The last collectives of a process group, and for how many seconds the last one has run or is over."""

    age: float
    records: list[Collective]


class Process(NamedTuple):
    """A process of a rank.

    `state` is that of proc(5), `stacks` faulthandler's text ("" without an answer), `joined` whether it is in
    torch's default group, `records` are by process group.
    """

    pid: int
    parent: int
    rank: int | None
    state: str
    joined: bool = False
    stacks: str = ""
    records: dict[str, Group] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


class Answer(NamedTuple):
    """What a job does on a node.

    `workdir` is the synced folder without links, `silent_s` how long no rank there has written to its log,
    `sources` the lines of the stacks that are of no library, by "file:line".
    """

    workdir: str
    silent_s: float
    processes: list[Process]
    sources: Mapping[str, str] = {}


_read_group = reader(Group, records=lambda records: [Collective(*record) for record in records])
_read_process = reader(
    Process, records=lambda groups: {name: _read_group(group) for name, group in groups.items()}
)
read_stacks = reader(Answer, processes=each(_read_process))


def stacks(request: Stacks | Launch) -> Answer:
    """Return what a job does on this node; takes at most 2 s."""
    folder = JobFolder(request.job)
    found = [process for process in processes(folder.run) if process.rank is not None]
    asked = [_Asked(process, folder.stacks) for process in found[:_MOST_PROCESSES]]
    awake = [one for one in asked if not one.process.is_stopped]
    _wait([one for one in awake if one.ask()], _Asked.take_answer, _ANSWER_SECONDS)
    silent = [one for one in awake if not one.process.stacks]
    for one in silent:
        one.signal()
    _wait(silent, _Asked.take_dump, _SIGNAL_SECONDS)
    workdir = os.path.realpath(folder.request().workdir)
    shown = _shortened([one.process for one in asked])
    return Answer(workdir, silence(folder), shown, sources(workdir, "\n".join(one.stacks for one in shown)))


def sources(workdir: str, stacks: str) -> dict[str, str]:
    """Return the lines of programs that `stacks` name, not of libraries, by "file:line", without indent."""
    found: dict[str, str] = {}
    for file, line in list(dict.fromkeys(_FRAME.findall(stacks)))[:_MOST_SOURCES]:
        path = Path(workdir, file)
        if "/lib/python" not in file and path.is_file() and path.stat().st_size <= _MOST_FILE:
            found[f"{file}:{line}"] = linecache.getline(str(path), int(line)).strip()[:_MOST_LINE]
    return found


def silence(folder: JobFolder) -> float:
    """Return for how many seconds no rank of this node has written to its log."""
    written = [path.stat().st_mtime for path in folder.logs.glob("*.log")]
    return round(max(0.0, time.time() - max(written)), 3) if written else 0.0


def processes(run: Path) -> list[Process]:
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
            number = int(rank) if rank.isdigit() else None
            found.append(Process(int(path.name), int(parent), number, state.decode()))
    return sorted(found, key=lambda process: process.pid)


class _Asked:
    """A process that is asked for its stacks: through its helper, then by SIGUSR2."""

    def __init__(self, process: Process, folder: Path) -> None:
        self.process = process
        self._name = folder / str(process.pid)
        self._dump = self._name.with_suffix(".signal")
        self._dump_start: int | None = None  # None: it was not sent the signal

    def ask(self) -> bool:
        """Send a request to the helper; return whether one listens."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._name.with_suffix(".answer").unlink()
            os.close(os.open(f"{self._name}.request", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    def take_answer(self) -> bool:
        """Take the helper's answer; return whether there is no more to come."""
        try:
            text = self._name.with_suffix(".answer").read_text("utf-8", "replace")
        except OSError:
            return not Path(f"/proc/{self.process.pid}").exists()
        written, _, rest = text.partition("\n--\n")
        rank, *traces = rest.splitlines()
        self.process = self.process._replace(stacks=written[:_MOST_TEXT], records=records(traces))
        if rank:
            self.process = self.process._replace(rank=int(rank), joined=True)
        return True

    def signal(self) -> None:
        """Have the process write its stacks by SIGUSR2, if it has the helper and handles the signal."""
        if self._dump.exists() and _handles(self.process.pid):
            self._dump_start = self._dump.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR2)

    def take_dump(self) -> bool:
        """Take the stacks; return whether there is no more to come."""
        if self._dump_start is None:
            return True
        with self._dump.open("rb") as file:
            file.seek(self._dump_start)
            text = file.read(_MOST_TEXT).decode("utf-8", "replace")
        done = text != "" and text == self.process.stacks
        self.process = self.process._replace(stacks=text)
        return done


def _wait(asked: list[_Asked], take: Callable[[_Asked], bool], seconds: float) -> None:
    """Take what processes give as it comes."""
    end = time.monotonic() + seconds
    while asked and time.monotonic() < end:
        asked = [one for one in asked if not take(one)]
        if asked:
            time.sleep(0.02)


def _shortened(found: list[Process]) -> list[Process]:
    """Keep the answer small: a forked child has its parent's records."""
    joined = {process.pid: process.rank for process in found if process.joined}
    return [
        process._replace(
            stacks=process.stacks[: _MOST_ANSWER // len(found)],
            records={} if joined.get(process.parent) == process.rank else process.records,
        )
        for process in found
    ]


def _handles(pid: int) -> bool:
    """Tell whether a process has a handler for SIGUSR2, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


def records(traces: Iterable[str]) -> dict[str, Group]:
    """Return, by process group, the last collectives in torch's flight recorder (JSON)."""
    groups: dict[str, Group] = {}
    for trace in traces:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            for entry in json.loads(trace)["entries"]:
                if not entry["is_p2p"]:
                    name, use = map(str, entry["process_group"])
                    group = use if use == "default_pg" else name
                    before = groups[group].records if group in groups else []
                    age = round(time.time() - entry["time_created_ns"] / 1e9, 3)
                    groups[group] = Group(age, [*before, _record(entry)][-_MOST_RECORDS:])
    return groups


def _record(entry: Any) -> Collective:
    """Return a collective of the recorder; gloo's `state` stays "scheduled"."""
    operation = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    over = bool(entry["retired"]) or entry["state"] == "completed"
    return Collective(entry["collective_seq_id"], operation, json.dumps(entry["input_sizes"])[:200], over)
