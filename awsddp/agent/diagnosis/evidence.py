"""Evidence of why a rank ended: its log, its last exception, its loss, a full disk, the kernel's log."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from awsddp.agent.metrics import rows

LINES = 20
_BYTES = 64 * 1024
_FULL_BYTES = 64 * 1024  # what is left of a disk on which writes fail
_TORCH_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_STAMP = re.compile(r"^\[ *(\d+\.\d+)\] (.*)$", re.MULTILINE)
_SYNTAX = re.compile("(Syntax|Indentation|Tab)Error: ")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_FOLLOWS = re.compile("The above exception was the direct cause of|During handling of the above exception")
_GROUP = "Exception Group Traceback"
_MARGIN = re.compile(r"^ *(?:\| |\+ (?=Exception Group))", re.MULTILINE)
_MEMBER = re.compile(r" *(\+-)?\+-+ (\d+|\.\.\.) -+")
_COLOUR = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
"""What a program writes for a terminal: colours, moves, links."""
_FRAME = (" ", "\t", "│", "╭", "╰")
"""How a line of a traceback begins; rich draws boxes, also for typer."""
_REHEARSED = re.compile(r"rehearsal: \d+ x .+ simulated: ")  # templates/rehearse_gpu
_WIDTH = 2000  # of a line of the tail, in characters


def read_tail(path: Path, begin: int = 0) -> str:
    """Return the end of the log `path`, from byte `begin` on, without colours.

    Bytes that are no UTF-8 are replaced.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(begin, file.tell() - _BYTES))
            return _COLOUR.sub("", file.read().decode("utf-8", "replace"))
    except OSError as error:
        return f"(its log cannot be read: {error})"


def recorded(path: Path) -> str:
    """Return the traceback in the error file that torch's @record has written, "" where there is none.

    https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["message"]["extraInfo"]["py_callstack"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return "\n" + _COLOUR.sub("", str(found)[-_BYTES:])


def last_lines(text: str) -> list[str]:
    """Return the last 20 lines of `text`; of a line that was overwritten by \\r, what was seen last.

    What a rehearsal says first of its GPUs is left out.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    lines = [line for line in lines if not _REHEARSED.match(line)]
    while lines and not lines[-1].strip():
        lines.pop()
    return [line[-_WIDTH:] for line in lines[-LINES:]]


def exceptions(text: str) -> list[str]:
    """Return the line that names the last exception with a traceback in `text`, and those that it follows.

    The newest is first. An exception that Python ignored is left out; one of a thread counts if there is no
    other; so do those that follow it, or that an ExceptionGroup holds, which Python prints after it within a
    margin. Within a process group torch puts "[rank2]: " before each line.
    """
    text = _TORCH_PREFIX.sub("", text)
    before, *blocks = _TRACEBACK.split(_MARGIN.sub("", text) if _GROUP in text else text)
    chains: list[tuple[bool, list[str]]] = []  # whether it is a thread's, its exceptions
    origin = ""
    for block in blocks:
        heading = before.rpartition("\n")[0].rstrip().rpartition("\n")[2]
        before, name, follows = block, _raised(block), _FOLLOWS.match(heading)
        if not (follows or _MEMBER.match(heading)):
            origin = heading
        if name is None or origin.startswith("Exception ignored"):
            continue
        earlier = chains.pop()[1] if chains and follows else []
        chains.append((origin.startswith("Exception in thread"), [name, *earlier]))
    if not chains:  # Python writes no traceback before an error in the script's own syntax
        last = text.rstrip().rpartition("\n")[2].strip()
        return [last[:_WIDTH]] if not blocks and _SYNTAX.match(last) else []
    return next((chain for is_thread, chain in reversed(chains) if not is_thread), chains[-1][1])


def _raised(block: str) -> str | None:
    """Return the line that names the exception after the frames of a traceback."""
    for line in block.split("\n")[1:]:
        if line and not line.startswith(_FRAME):
            return line.strip()[:_WIDTH]
    return None


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


def last_loss(path: Path, rank: int, *, first: int) -> Any:
    """Return the last `loss` of a rank in a file of metrics, None without one.

    A row without `rank` is of the rank `first`.
    """
    found = [row["loss"] for row in rows(path) if "loss" in row and row.get("rank", first) == rank]
    return found[-1] if found else None


def output(command: list[str], *, seconds: float) -> str | None:
    """Return what a command prints, None if it fails or takes longer than `seconds`."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=seconds
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def kernel_log(since: float, *, seconds: float = 1.0) -> str:
    """Return what the kernel has logged since the moment `since` of time.monotonic().

    "" if it cannot be read, or a command takes longer than `seconds`. Ubuntu lets only root read it:
    https://docs.kernel.org/admin-guide/sysctl/kernel.html#dmesg-restrict
    """
    for command in (["dmesg"], ["sudo", "-n", "dmesg"]):
        text = output(command, seconds=seconds)
        if text is not None:
            return "\n".join(line for stamp, line in _STAMP.findall(text) if float(stamp) >= since - 1)
    return ""
