"""A worker of torchrun's elastic agent: runs one rank, writes its log, and notes its start and end.

The worker is a separate program in the job's folder, run by the ranks' interpreter. It forwards the elastic
agent's signals to the rank. The rank leads its own session, so that its loader workers do not receive these
signals.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESTART_GRACE = 1.0
"""Seconds between TERM and KILL for a rank, if the job's folder has no file `grace` with another number."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)


class Worker:
    """One run of a rank. `folder` is the job's folder, and `first` is the lowest rank on the node."""

    def __init__(self, folder: Path, first: int) -> None:
        self._folder = folder
        self._rank = first + int(os.environ["LOCAL_RANK"])
        self._pid: int | None = None  # the pid of the rank's process
        self._pending: list[int] = []
        self._stopped_at: float | None = None

    def run(self, argv: list[str]) -> int:
        """Run `argv` and return its exit code (-N: signal N).

        If the rank failed or was stopped, all of its processes are killed before the method returns.
        """
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        log = os.open(str(self._folder / "logs" / f"rank{self._rank}.log"), _APPEND, 0o600)
        started, begin = time.time(), os.fstat(log).st_size
        self._note("start", offset=begin, started=started)
        code = self._start(argv, log)
        if code is None:
            code = self._wait()
        self._note(
            "exit",
            offset=begin,
            started=started,
            exit_code=code,
            seconds=round(time.time() - started, 3),
            stopped_at=self._stopped_at,
        )
        if code != 0 or self._stopped_at is not None:
            self._kill_orphans()
        return code

    def _start(self, argv: list[str], log: int) -> int | None:
        error_file = self._folder / "errors" / f"rank{self._rank}.json"
        error_file.unlink(missing_ok=True)
        try:
            child = subprocess.Popen(
                argv,
                env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_before_program,  # noqa: PLW1509 (this process has one thread)
            )
        except (OSError, ValueError) as error:
            os.write(log, f"awsddp could not start this rank: {error}\n".encode("utf-8", "replace"))
            return 127
        self._pid = child.pid
        for number in self._pending:
            self._pass_on(number)
        return None

    def _pass_on(self, number: int, *_: Any) -> None:
        """Forward a signal to the rank. Unless the signal is USR1 or USR2, KILL follows after the grace."""
        if self._pid is None:
            self._pending.append(number)
            return
        if number not in (signal.SIGUSR1, signal.SIGUSR2) and self._stopped_at is None:
            self._stopped_at = time.time()
            signal.setitimer(signal.ITIMER_REAL, max(self._grace(), 0.001))
        self._send(number)

    def _grace(self) -> float:
        try:
            return float((self._folder / "grace").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return RESTART_GRACE

    def _send(self, number: int) -> None:
        """Send a signal to the rank, if the rank still runs."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def _wait(self) -> int:
        """Reap processes until the rank has ended, and return the rank's exit code."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._pid:
                return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _kill_orphans(self) -> None:
        """Kill the rank's other processes, which become children of this process when their parents end."""
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        end = time.monotonic() + RESTART_GRACE
        while time.monotonic() < end:
            for pid in children.read_text(encoding="ascii").split():
                os.kill(int(pid), signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.01)

    def _note(self, event: str, **fields: Any) -> None:
        """Append a line, in one write, to workers.jsonl, which holds the notes of this node's workers."""
        names = {"world_size": "WORLD_SIZE", "restart": "TORCHELASTIC_RESTART_COUNT"}
        numbers = {key: int(os.environ[name]) for key, name in names.items()}
        line = json.dumps({"is": event, "rank": self._rank, **numbers, **fields}) + "\n"
        descriptor = os.open(str(self._folder / "workers.jsonl"), _APPEND, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)


_APPEND = os.O_CREAT | os.O_WRONLY | os.O_APPEND


def _before_program() -> None:
    """Make this process, which becomes a rank, ignore SIGHUP and end with the worker (even after kill -9)."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main(folder: str, first: str, templates: str, defaults: str) -> int:
    """Run a rank.

    `templates` is JSON with a list [literal text, variable, literal text, ...] for each argument. `defaults`
    is JSON with the variables for the rank that torch has made rank 0, where its environment lacks them.
    """
    if os.environ["RANK"] == "0":
        os.environ.update({**json.loads(defaults), **os.environ})
    argv = [
        "".join(os.environ[part] if number % 2 else part for number, part in enumerate(parts))
        for parts in json.loads(templates)
    ]
    code = Worker(Path(folder), int(first)).run(argv)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
