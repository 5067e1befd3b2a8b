"""Why a rank ended: its exit status and the end of its log, read as an experienced person would."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

LINES = 20
_BYTES = 64 * 1024
_FULL_BYTES = 64 * 1024  # what is left of a disk on which writes fail
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_WIDTH = 2000  # of a line of the tail, in characters

# (what the log says, what it means); the first that matches the exception or, failing that, the tail
_KNOWN = (
    (
        r"(?:NotFoundError|python[\d.]*): No module named '?([\w.]+)",
        "{0} is not installed for the python that runs the ranks.",
    ),
    (r"CUDA out of memory|CUDA error: out of memory", "The GPU's memory was too small: try a smaller batch."),
    (r"[Aa]ddress already in use|EADDRINUSE", "A port that the script opens is taken on this node."),
    (r"No space left on device", "The node's disk is full: `awsddp up --disk` makes a larger one."),
    (r"Cannot allocate memory|DefaultCPUAllocator: can't allocate", "The node's memory was too small."),
    (r"invalid device ordinal", "The script asked for a GPU that the node does not have."),
    (r"insufficient shared memory|Bus error", "/dev/shm was too small: use fewer loader workers."),
)

# What a rank says when another one left it alone: it is no cause while another has a reason of its own.
_ECHO = re.compile(
    r"Connection (reset|closed|refused)|[Cc]onnection was (reset|closed|likely)|Broken pipe"
    r"|remote process exited|ncclRemoteError|Socket closed|recvValue failed|sendBytes failed"
    r"|DistNetworkError|DistStoreError|got 0 bytes|Timed out (waiting|after)|TCPStore|peer has exited",
)


def read_tail(path: Path) -> str:
    """Return the end of the log `path` as text; bytes that are no UTF-8 are replaced."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        return f"(its log cannot be read: {error})"


def last_lines(text: str) -> list[str]:
    """Return the last 20 lines of `text`; of a line that was overwritten by \\r, what was seen last."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return [line[-_WIDTH:] for line in lines[-LINES:]]


def exception(text: str) -> str | None:
    """Return the line that names the last exception of which `text` holds the traceback.

    Within a process group torch puts "[rank2]: " before each line of it.
    """
    text = _TORCH_PREFIX.sub("", text)
    _, mark, rest = text.rpartition("Traceback (most recent call last):")
    if not mark:
        return None
    for line in rest.split("\n")[1:]:
        if line and not line.startswith((" ", "\t")):
            return line.strip()[:_WIDTH]
    return None


def is_echo(text: str) -> bool:
    """Tell whether the end of `text` says no more than that another rank had gone."""
    return bool(_ECHO.search(exception(text) or "\n".join(last_lines(text))))


def explain(exit_code: int, text: str, *, oom_kills: int) -> str:
    """Return in a sentence or two why a rank ended with `exit_code` (-N: signal N) after saying `text`.

    `oom_kills` counts the processes that the node's kernel killed for memory while the job ran.
    """
    if exit_code in (-9, 137):
        return _killed(oom_kills)
    raised = exception(text) if exit_code in (1, -6) else None  # python ends with 1; torch may then abort
    if exit_code == -6 and raised is None and "destroy_process_group" in text:
        return (
            "Aborted (SIGABRT) after its work was done, while it took its process group down: torch's gloo "
            "does so now and then. A barrier before destroy_process_group() avoids it."
        )
    hint = _hint(raised or "\n".join(last_lines(text)))
    first = raised or _status(exit_code)
    return " ".join(part for part in (first if first.endswith(".") else first + ".", hint) if part)


def full_disk(*paths: Path) -> str:
    """Return a sentence that names the full file system among those of `paths`, "" where there is none."""
    for path in paths:
        try:
            found = os.statvfs(str(path))
        except OSError:
            continue
        no_files = found.f_files > 0 and found.f_favail == 0
        if found.f_bavail * found.f_frsize < _FULL_BYTES or no_files:
            mount = next(one for one in (path, *path.parents) if os.path.ismount(str(one)))
            size = found.f_blocks * found.f_frsize / 1e9
            return f"No {'files' if no_files else 'space'} left on {mount} ({size:.3g} GB)."
    return ""


def _killed(oom_kills: int) -> str:
    if oom_kills:
        return "Killed (SIGKILL): the node ran out of memory, and its kernel ended the rank."
    return "Killed (SIGKILL) by something outside awsddp: a hand, or a memory limit."


def _status(exit_code: int) -> str:
    if exit_code >= 0:
        return f"It ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"It was ended by {name}"


def _hint(text: str) -> str:
    for pattern, meaning in _KNOWN:
        match = re.search(pattern, text)
        if match:
            return meaning.format(*match.groups())
    return ""
