"""Search, in a process with the lowest priorities, for results of a job that have changed since a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp.agent.file_tree import resolve_links, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from awsddp.agent.job_folder import JobFolder
    from awsddp.agent.messages import Launch

_SEARCH_SECONDS = 30
_IGNORED = "wandb"
"""The folder in which wandb's own process writes every few seconds, also while all ranks hang:
https://docs.wandb.ai/guides/models/track/log/#automatically-logged-metrics"""


class ChangeSearch:
    """A search for a job's files that were written in the last `seconds`. It ends after at most 30 s."""

    def __init__(self, request: Launch, folder: JobFolder, seconds: float) -> None:
        since_ns = int((time.time() - seconds) * 1e9)
        self._pipe, writer = os.pipe()
        os.set_blocking(self._pipe, False)
        if os.fork() == 0:
            try:
                os.close(self._pipe)
                _lower_priorities()
                os.write(writer, b"%d" % has_changed(request, folder, since_ns))
            finally:
                os._exit(0)
        os.close(writer)
        self.changed: bool | None = None
        """Whether there is such a file. None until the search is over, or if a folder is unreadable."""

    def is_over(self) -> bool:
        """Return True if the search is over."""
        try:
            answer = os.read(self._pipe, 1)
        except BlockingIOError:
            return False
        self.changed = {b"0": False, b"1": True}.get(answer)
        os.close(self._pipe)
        return True


def _lower_priorities() -> None:
    """Give this process the lowest priorities, and let the kernel end it when its time is over."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(_SEARCH_SECONDS)
    os.nice(19)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["ionice", "-c", "3", "-p", str(os.getpid())], check=False)


def has_changed(request: Launch, folder: JobFolder, since_ns: int) -> bool:
    """Return True if a result has changed since a time (ns).

    The change time is compared, because a program cannot set it. Raises OSError if a folder is unreadable.
    """
    return any(changed_ns > since_ns for changed_ns in _change_times(request, folder))


def _change_times(request: Launch, folder: JobFolder) -> Iterator[int]:
    """Yield the change time (ns) of each file in the run folder, the outputs and the project folder."""
    unreadable: list[str] = []
    tops = [folder.run, Path(request.workdir)]
    tops += [Path(request.workdir, os.path.expanduser(output)) for output in request.outputs]  # noqa: PTH111 (a Path drops "./~")
    for top in dict.fromkeys(map(resolve_links, tops)):
        if top.is_file():
            yield top.stat().st_ctime_ns
        for path, info in walk(top, lambda path, _: unreadable.append(path)) if top.is_dir() else ():
            if _IGNORED not in path.split("/")[:-1]:
                yield info.st_ctime_ns
    if unreadable:
        raise OSError(f"{unreadable[0]} cannot be read")
