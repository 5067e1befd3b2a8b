"""Evidence for why a rank ended: its log, its last exception, its loss, a full disk, the kernel's log."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from awsddp.agent.metrics import read_rows

LINES = 20
_BYTES = 64 * 1024
_FULL_BYTES = 64 * 1024  # a disk with less free space than this counts as full
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_STAMP = re.compile(r"^\[ *(\d+\.\d+)\] (.*)$", re.MULTILINE)
_SYNTAX = re.compile("(Syntax|Indentation|Tab)Error: ")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_CHAINED = re.compile("The above exception was the direct cause of|During handling of the above exception")
_GROUP = "Exception Group Traceback"
_MARGIN = re.compile(r"^ *(?:\| |\+ (?=Exception Group))", re.MULTILINE)
_MEMBER = re.compile(r" *(\+-)?\+-+ (\d+|\.\.\.) -+")
_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
"""Terminal escape sequences: colours, cursor movements, links."""
_FRAME = (" ", "\t", "│", "╭", "╰")
"""The characters that a traceback's lines can begin with. typer prints tracebacks with rich, in a box."""
_REHEARSED = re.compile(r"rehearsal: \d+ x .+ simulated: ")  # templates/rehearse_gpu
_WIDTH = 2000  # how many characters of a line are kept


def read_tail(path: Path, begin: int = 0) -> str:
    """Return the end of the log at `path`, without colours and without the bytes before `begin`.

    Invalid UTF-8 is replaced.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(begin, file.tell() - _BYTES))
            return _COLOUR.sub("", file.read().decode("utf-8", "replace"))
    except OSError as error:
        return f"(the log cannot be read: {error})"


def read_error_file(path: Path) -> str:
    """Return the traceback in an error file that torch's @record wrote, or "" if there is none.

    https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    try:
        callstack = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return "\n" + _COLOUR.sub("", str(callstack)[-_BYTES:])


def last_lines(text: str) -> list[str]:
    """Return the last 20 lines of `text`. For a line overwritten with \\r, return its last version.

    The line that a rehearsal prints about simulated GPUs is left out.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = [line for line in lines if not _REHEARSED.match(line)]
    while lines and not lines[-1].strip():
        lines.pop()
    return [line[-_WIDTH:] for line in lines[-LINES:]]


def find_exceptions(text: str) -> list[str]:
    """Return the line of the last exception with a traceback, and of each earlier exception in its chain.

    Exceptions that Python ignored are left out. An exception in another thread counts only if the main thread
    has no exception. If one of these rules applies to an exception, it also applies to the exceptions in its
    chain and to the members of its ExceptionGroup. Python prints the members after the group, and marks their
    lines with a margin. In a process group, torch puts "[rank2]: " before each line.
    """
    text = _TORCH_PREFIX.sub("", text)
    before, *blocks = _TRACEBACK.split(_MARGIN.sub("", text) if _GROUP in text else text)
    chains: list[tuple[bool, list[str]]] = []  # (True if not in the main thread, exceptions)
    origin = ""
    for block in blocks:
        heading = before.rpartition("\n")[0].rstrip().rpartition("\n")[2]
        before, name, is_chained = block, _exception_line(block), _CHAINED.match(heading)
        if not (is_chained or _MEMBER.match(heading)):
            origin = heading
        if name is None or origin.startswith("Exception ignored"):
            continue
        earlier = chains.pop()[1] if chains and is_chained else []
        chains.append((origin.startswith("Exception in thread"), [name, *earlier]))
    if not chains:  # Python writes no traceback for a syntax error in the script itself
        last = text.rstrip().rpartition("\n")[2].strip()
        return [last[:_WIDTH]] if not blocks and _SYNTAX.match(last) else []
    return next((chain for is_thread, chain in reversed(chains) if not is_thread), chains[-1][1])


def _exception_line(block: str) -> str | None:
    """Return the line with the exception, which follows a traceback's frames."""
    for line in block.split("\n")[1:]:
        if line and not line.startswith(_FRAME):
            return line.strip()[:_WIDTH]
    return None


def describe_full_disk(*paths: Path) -> str:
    """Return a sentence on the first of `paths` whose file system is full, or "" if none is full."""
    for path in paths:
        try:
            stats = os.statvfs(str(path))
        except OSError:
            continue
        no_files = stats.f_files > 0 and stats.f_favail == 0
        if stats.f_bavail * stats.f_frsize < _FULL_BYTES or no_files:
            mount = next(folder for folder in (path, *path.parents) if os.path.ismount(str(folder)))
            size = stats.f_blocks * stats.f_frsize / 1e9
            return f"No {'files' if no_files else 'space'} left on {mount} ({size:.3g} GB)."
    return ""


def read_last_loss(path: Path, rank: int, *, first: int) -> Any:
    """Return a rank's last `loss` in a metrics file, or None if there is none.

    A row without `rank` belongs to rank `first`.
    """
    losses = [row["loss"] for row in read_rows(path) if "loss" in row and row.get("rank", first) == rank]
    return losses[-1] if losses else None


def run_command(command: list[str], *, seconds: float) -> str | None:
    """Return a command's stdout, or None if the command fails or takes longer than `seconds`."""
    try:
        completed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.decode("utf-8", "replace")


def read_kernel_log(since: float, *, seconds: float = 1.0) -> str:
    """Return the kernel's log since `since` (a value of time.monotonic()), or "" if it cannot be read.

    The function runs up to two commands, each for at most `seconds`. On Ubuntu only root can read the
    kernel's log: https://docs.kernel.org/admin-guide/sysctl/kernel.html#dmesg-restrict
    """
    for command in (["dmesg"], ["sudo", "-n", "dmesg"]):
        text = run_command(command, seconds=seconds)
        if text is not None:
            return "\n".join(line for stamp, line in _STAMP.findall(text) if float(stamp) >= since - 1)
    return ""
