"""A terminal for commands: what a user sees of them, including live rows."""

import os
import re
import select
import shlex
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyte

from tests.support import quick_start

CTRL_C = "\x03"


@dataclass(frozen=True)
class Shown:
    """The output of a command in the terminal."""

    command: str
    code: int
    lines: list[str]
    """All lines, also those that have scrolled away."""
    visible: list[str]
    """The lines that were on the screen when the last answer was typed, else at the end."""

    @property
    def text(self) -> str:
        """All lines, as one text."""
        return "\n".join(self.lines)


class Terminal:
    """A terminal of `columns` x `lines` in a folder; `awsddp` is that of this checkout."""

    def __init__(self, cwd: Path, environ: Mapping[str, str], *, columns: int = 80, lines: int = 24) -> None:
        self._cwd, self._size = cwd, (lines, columns)
        self._environ = {**environ, "TERM": "xterm-256color"}

    def type(self, command: str, answers: Sequence[tuple[str, str]] = (), *, limit_s: float = 170.0) -> Shown:
        """Type a command, type each answer after its text has appeared, and return the screen at the end.

        Questions without an answer are answered yes. Raises TimeoutExpired, with all lines, if the command
        does not end within `limit_s` seconds.
        """
        lines, columns = self._size
        screen = pyte.HistoryScreen(columns, lines, history=10_000)
        stream = pyte.ByteStream(screen)
        ours, theirs = os.openpty()
        termios.tcsetwinsize(theirs, self._size)
        words = shlex.split(command)
        process = self._start(words, theirs)
        os.close(theirs)
        waiting, visible = list(answers), []
        ends = time.monotonic() + limit_s
        try:
            while data := _read(ours, ends):
                stream.feed(data)
                if waiting and waiting[0][0] in "\n".join(_all_lines(screen)):
                    visible = _stripped(screen.display)
                    os.write(ours, waiting.pop(0)[1].encode())
                elif not waiting and screen.display[screen.cursor.y].rstrip().endswith("[y/N]:"):
                    os.write(ours, b"y\n")
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise subprocess.TimeoutExpired(command, limit_s, output="\n".join(_all_lines(screen))) from None
        finally:
            os.close(ours)
        return Shown(command, process.returncode, _all_lines(screen), visible or _stripped(screen.display))

    def _start(self, words: list[str], end: int) -> "quick_start.Started | subprocess.Popen[bytes]":
        if words[0] == "awsddp":
            if quick_start.has_python_variables_of_tests(self._environ):
                streams = (end, end, end)
                return quick_start.start(
                    words[1:], cwd=self._cwd, env=self._environ, streams=streams, terminal=True
                )
            words[:1] = [sys.executable, "-m", "awsddp"]
        argv = ["setsid", "--ctty", *words]
        return subprocess.Popen(argv, cwd=self._cwd, env=self._environ, stdin=end, stdout=end, stderr=end)


def _read(ours: int, ends: float) -> bytes:
    """Return new output of the command; b"" after it has ended. Raises TimeoutExpired."""
    if not select.select([ours], [], [], max(0.0, ends - time.monotonic()))[0]:
        raise subprocess.TimeoutExpired("", 0.0)
    try:
        return os.read(ours, 1 << 16)
    except OSError:  # the last process that had the terminal open has ended
        return b""


def _all_lines(screen: pyte.HistoryScreen) -> list[str]:
    width = range(screen.columns)
    scrolled = ["".join(line[column].data for column in width) for line in screen.history.top]
    return _stripped([*scrolled, *screen.display])


def _stripped(lines: Sequence[str]) -> list[str]:
    text = "\n".join(line.rstrip() for line in lines).rstrip("\n")
    return text.split("\n")


@dataclass
class Story:
    """The commands of a user at a terminal of 80x24, and their failures."""

    terminal: Terminal
    commands: int = 0
    failed: list[str] = field(default_factory=list)
    stumbles: list[str] = field(default_factory=list)

    def type(
        self,
        command: str,
        answers: Sequence[tuple[str, str]] = (),
        *,
        code: int = 0,
        says: Sequence[str] = (),
        never: Sequence[str] = (),
        order: Sequence[str] = (),
    ) -> str:
        """Type a command. A stumble: `says` is missing, `never` occurs, or `order` is violated (patterns)."""
        shown = self.terminal.type(command, answers)
        self.commands += 1
        if shown.code != code:
            self.failed.append(f"{command}: exit {shown.code}\n{shown.text}")
        flat = re.sub(r"\s+", " ", shown.text)
        wrong = [f"{command}: does not say {pattern}" for pattern in says if not re.search(pattern, flat)]
        wrong += [f"{command}: says {pattern}" for pattern in never if re.search(pattern, flat)]
        offsets = [flat.find(text) for text in order]
        wrong += [f"{command}: not in this order: {order}"] * (offsets != sorted(offsets) or -1 in offsets)
        self.stumbles += [f"{problem}\n{shown.text}" for problem in wrong]
        return shown.text

    def report(self) -> str:
        """Return the count, and each failure and stumble with its screen."""
        count = f"{self.commands} commands, {len(self.failed)} failed, {len(self.stumbles)} stumbles"
        return "\n\n".join([count, *self.failed, *self.stumbles])
