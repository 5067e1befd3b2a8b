"""Start, reap and end a job's processes on this node, including all their descendants.

Each rank leads its own session and writes its own log, so that no output is lost when another process dies.
The agent is a child subreaper (prctl(2)): all processes that its ranks start remain the agent's descendants,
even after setsid and a double fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.agent.coordinator import Message
from awsddp.agent.diagnosis.causes import ECHOES, Evidence, explain
from awsddp.agent.diagnosis.evidence import (
    describe_full_disk,
    find_exceptions,
    last_lines,
    read_error_file,
    read_kernel_log,
    read_last_loss,
    read_tail,
)
from awsddp.agent.diagnosis.job_causes import NODE_FAULTS
from awsddp.agent.job_folder import JobFolder, RankReport, rank_search_path, read_counters, read_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from awsddp.agent.messages import Launch
    from awsddp.agent.messages import Process as LaunchProcess

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
STRAY_SECONDS = 1.0
_HARD_KILL_SECONDS = 0.5  # time that a worker has after the grace to kill its rank and write a note
_UNKILLABLE_SECONDS = 20.0


class Process:
    """A launcher's process, and the ranks that end with it. `child` is None if the start failed."""

    def __init__(self, ranks: list[int], log: Path) -> None:
        self.ranks = ranks
        self.log = log
        self.started = time.time()
        self.since = time.monotonic()
        self.child: subprocess.Popen[bytes] | None = None  # kept, because a deleted Popen reaps its child
        self.error = ""  # why the process could not be started
        self.exit_code: int | None = None
        self.seconds = 0.0

    def report(self, rank: int) -> RankReport:
        """Return the report on one of the process's ranks."""
        return RankReport(rank, self.started, self.seconds, self.exit_code)


class Ranks:
    """The ranks on this node, from their start until none of their processes is left."""

    end_kind = "exit"
    """The kind of message that reports the end of a process."""

    def __init__(self, request: Launch, folder: JobFolder) -> None:
        self._request = request
        self._folder = folder
        self._oom_kills = count_oom_kills()
        self._since = time.monotonic()
        self._stopped_at = 0.0  # Unix time; later log output may be due to the stop
        self._kill_at: float | None = None
        self._killed_at = 0.0  # 0: nothing has been killed
        self._has_signalled_strays = False
        self.processes: list[Process] = []

    @property
    def stopping(self) -> bool:
        """True if `stop` was called."""
        return self._kill_at is not None

    @property
    def reports(self) -> dict[int, RankReport]:
        """The report of each rank that has started."""
        return {rank: process.report(rank) for process in self.processes for rank in process.ranks}

    @property
    def alive(self) -> list[Process]:
        """The processes that have not ended."""
        return [process for process in self.processes if process.exit_code is None]

    def start(self) -> None:
        """Start the launcher's processes. If a process cannot start, the error is written to its log."""
        for entry in self._request.processes:
            self.processes.append(self._start(entry))

    def _start(self, launch_process: LaunchProcess) -> Process:
        path = self._folder.logs / launch_process.log
        process = Process(list(launch_process.ranks), path)
        parent = os.getpid()
        log = -1
        try:
            log = os.open(str(path), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            process.child = subprocess.Popen(
                launch_process.argv,
                cwd=self._request.workdir,
                env={
                    **self._request.defaults,
                    **launch_process.defaults,
                    **os.environ,
                    "PATH": rank_search_path(self._request.path),
                    **launch_process.environment,
                    **self._helper_environment(launch_process.environment),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _before_program(parent),  # noqa: PLW1509 (this process has one thread)
            )
        except (OSError, ValueError) as error:
            process.error = f"awsddp could not start this process: {error}\n"
            with contextlib.suppress(OSError):
                os.write(log, process.error.encode("utf-8", "replace"))
        finally:
            if log >= 0:
                os.close(log)
        return process

    def _helper_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables that load the helper before a rank's program."""
        python_path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        helper = str(self._folder.helper)
        return {
            "PYTHONPATH": f"{helper}{os.pathsep}{python_path}" if python_path else helper,
            "AWSDDP_STACKS_DIR": str(self._folder.stacks),
        }

    def reap(self) -> list[Message]:
        """Reap ended processes, and return a message for each rank that has ended with its process."""
        ended = [(process, 127) for process in self.alive if process.child is None]
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for process in self.alive:
                if process.child is not None and process.child.pid == pid:
                    ended.append((process, _exit_code(status)))
        reports = [report for process, code in ended for report in self._end_process(process, code)]
        return [Message(kind=self.end_kind, reports=[report]) for report in reports]

    def _end_process(self, process: Process, code: int) -> list[RankReport]:
        process.exit_code = code
        process.seconds = round(time.monotonic() - process.since, 3)
        log_text = "" if code == 0 else process.error or read_tail(process.log)
        reports = map(process.report, process.ranks)
        return [self._explain(report, log_text, stopped_at=self._stopped_at) for report in reports]

    def _explain(self, report: RankReport, log_text: str, *, stopped_at: float) -> RankReport:
        """Return the report with the cause of the rank's end, which is derived from the rank's log.

        `stopped_at` is the time when the rank was sent the signal to end (0: never). If the rank was already
        ending at that time because of an exception, the failure is its own fault. If its node has failed, the
        failure is an echo, because another rank may have failed first by that.
        """
        code, rank = report.exit_code, report.rank
        if not code:
            return report
        text = log_text + read_error_file(self._folder.path / "errors" / f"rank{rank}.json")
        first = self._request.processes[0].ranks[0]
        evidence = Evidence(
            code,
            text,
            oom_kills=count_oom_kills() - self._oom_kills,
            loss=read_last_loss(self._folder.run / "metrics.jsonl", rank, first=first),
            kernel=lambda: read_kernel_log(self._since),
        )
        cause = explain(evidence)
        disk_text = describe_full_disk(self._folder.path, Path(self._request.workdir), Path("/tmp"))
        fault = "echo" if cause.kind in ECHOES else "own"
        if stopped_at and not (find_exceptions(text) and _modified_at(self._folder.log(rank)) < stopped_at):
            fault = "echo" if cause.kind in NODE_FAULTS else "stopped"
        explained = cause._replace(
            explanation=f"{cause.explanation} {disk_text}".rstrip(),
            rank=rank,
            exit_code=code,
            signal=-code if code < 0 else None,
            tail=last_lines(log_text),
        )
        return report._replace(cause=explained, fault=fault)

    def stop(self, grace: float) -> None:
        """Send TERM to the ranks; after `grace` seconds, kill those that remain and all their descendants.

        Only the ranks are sent TERM, because a checkpoint in progress may fail if a loader worker ends.
        """
        kill_at = time.monotonic() + grace
        if self._kill_at is not None:
            self._kill_at = min(self._kill_at, kill_at)
            return
        self._kill_at, self._stopped_at = kill_at, time.time()
        for process in self.alive:
            if process.child is not None:
                _signal(process.child.pid, signal.SIGTERM)

    def finish_stop(self) -> bool:
        """Continue a stop, and return True once it is over. Call this method often after `stop`."""
        if self._kill_at is None:
            return False
        pids = descendants()
        now = time.monotonic()
        if not (pids or self.alive):
            return True
        if now >= self._kill_at:
            self._killed_at = self._killed_at or now  # not `_kill_at`: this process may have been suspended
            if now > self._killed_at + _UNKILLABLE_SECONDS:
                return True
            for pid in pids:
                _signal(pid, signal.SIGKILL)
        elif not self.alive and not self._has_signalled_strays:
            self._has_signalled_strays = True
            self._kill_at = min(self._kill_at, now + STRAY_SECONDS)
            for pid in pids:
                _signal(pid, signal.SIGTERM)
        return False


class Workers(Ranks):
    """The ranks that torchrun's elastic agent runs on this node, according to its workers' notes."""

    end_kind = "agent"

    def __init__(self, request: Launch, folder: JobFolder) -> None:
        super().__init__(request, folder)
        self._offset = 0  # in workers.jsonl
        self._known_reports: dict[int, RankReport] = {}

    def reap(self) -> list[Message]:
        """Return a message for each worker that has started or ended, and for the elastic agent's end."""
        ended = super().reap()
        return [self._read_note(note) for note in self._notes()] + ended

    @property
    def reports(self) -> dict[int, RankReport]:
        """The report of each rank that has started."""
        return self._known_reports

    def stop(self, grace: float) -> None:
        """Send TERM to the elastic agent, whose workers give their ranks `grace` seconds."""
        (self._folder.path / "grace").write_text(str(grace), encoding="ascii")
        super().stop(grace + _HARD_KILL_SECONDS)

    def _end_process(self, process: Process, code: int) -> list[RankReport]:
        """Return only the elastic agent's report, because its workers write their own notes."""
        process.ranks = process.ranks[:1]
        return super()._end_process(process, code)

    def _notes(self) -> list[Any]:
        """Return the notes that workers have written since the last call (torchrun_worker.py)."""
        try:
            with self._folder.workers.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def _read_note(self, note: Any) -> Message:
        report = read_report(note)
        self._known_reports[report.rank] = report
        if report.exit_code is None:
            return Message(kind="worker", reports=[report], world_size=note["world_size"])
        log_text = read_tail(self._folder.log(report.rank), note["offset"]) if report.exit_code else ""
        return Message(
            kind="exit",
            reports=[self._explain(report, log_text, stopped_at=note["stopped_at"] or 0.0)],
        )


def adopt_orphans(name: str) -> None:
    """Become the parent of orphaned descendants, and set this process's name."""
    if _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def sweep(seconds: float = _UNKILLABLE_SECONDS) -> None:
    """Kill all descendants, and wait for at most `seconds` until none is left."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pids = descendants()
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def descendants() -> list[int]:
    """Return the pids of this process's living descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(path.parent.name))
    pids: list[int] = []
    level = children.get(os.getpid(), [])
    while level:
        pids += level
        level = [child for pid in level for child in children.get(pid, [])]
    return pids


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot (0: unknown)."""
    return read_counters(Path("/proc/vmstat")).get("oom_kill", 0)


def _before_program(parent: int) -> None:
    """Make this process, which becomes a rank, ignore SIGHUP and end with the agent (even after kill -9)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):  # the process has ended, or runs as another user
        return


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
