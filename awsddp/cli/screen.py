"""What people see while a verb works: live lines for each node on a terminal, plain lines elsewhere.

Talk goes to stderr; stdout is for results and the lines of a followed job.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from awsddp.cli import harmless
from awsddp.cli.options import Globals
from awsddp.errors import AwsddpError
from awsddp.report import Event

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Screen:
    """Shows events as they come. A context manager; `pause` gives the terminal to a job's lines."""

    def __init__(self, options: Globals) -> None:
        self.quiet = options.quiet
        self.json = options.json
        self.live = sys.stderr.isatty() and not options.quiet and os.environ.get("TERM") != "dumb"
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, str] = {}
        self._rests: dict[tuple[int, bool], bytes] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pause()
        self._finish()

    def event(self, event: Event) -> None:
        """Show one event: a node's current step in its own line, anything else as a line of its own.

        Where nobody reads stderr any more, it is not missed.
        """
        with contextlib.suppress(OSError):
            self._event(event)

    def _event(self, event: Event) -> None:
        if self.quiet:
            return
        event = dataclasses.replace(event, text=harmless.line(event.text))
        if not self.live:
            self._plain(event)
        elif event.who is None:
            self._bar().console.print(event.text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._update(event.who, event)

    def lines(self, data: bytes) -> None:
        """Write lines of a followed job to stdout (with --json to stderr, beside the document)."""
        self.pause()
        self._write(data, self.json)

    def output(self, node: int, data: bytes, error: bool) -> None:
        """Write what a node's command said, labelled, where the command said it: on stdout or stderr.

        With --json nothing is written: it stands in the document.
        """
        if self.json:
            return
        self.pause()
        label = f"[node{node}] ".encode()
        rest = self._rests.get((node, error), b"")
        *lines, self._rests[node, error] = (rest + data).split(b"\n")
        self._write(b"".join(label + line + b"\n" for line in lines), error)

    def _write(self, data: bytes, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        stream.buffer.write(harmless.colours_only(data) if stream.isatty() else data)
        stream.buffer.flush()

    def _finish(self) -> None:
        """Write lines that a command left without their end."""
        for (node, error), rest in self._rests.items():
            if rest:
                self._write(b"[node%d] %s\n" % (node, rest), error)
        self._rests.clear()

    def pause(self) -> None:
        """Leave the live lines as they stand and stop drawing, so that others may write."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()

    def _plain(self, event: Event) -> None:
        who = event.who or ""
        if self._said.get(who) != event.text:
            self._said[who] = event.text
            print(f"{who}: {event.text}" if who else event.text, file=sys.stderr, flush=True)

    def _update(self, who: str, event: Event) -> None:
        bar = self._bar()
        if who not in self._tasks:
            self._tasks[who] = bar.add_task("", total=None, who=who)
        done = event.fraction
        bar.update(
            self._tasks[who],
            description=event.text,
            completed=(done or 0) * 100,
            total=100 if done is not None else None,
        )

    def _bar(self) -> "Progress":
        if self._progress is None:
            from rich.progress import Progress, SpinnerColumn, TextColumn

            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[who]}", style="bold", markup=False),
                TextColumn("{task.description}", markup=False),
                console=console(stderr=True),
                transient=False,
            )
            self._progress.start()
        return self._progress


def console(*, stderr: bool = False) -> "Console":
    """Return a rich console; NO_COLOR and a missing terminal are honoured by rich itself."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


@contextlib.contextmanager
def told_first(options: Globals, show: Screen, page: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Show what a verb came to before the error that stopped it; with --json both are one document."""
    try:
        yield
    except AwsddpError as error:
        if error.result is not None and not options.json:
            show.pause()
            page(error.result)
        raise


def width(*, stderr: bool = False) -> int | None:
    """Return the columns of the terminal that results (or talk) go to, None where nobody knows any."""
    stream = sys.stderr if stderr else sys.stdout
    return (os.get_terminal_size(stream.fileno()).columns or None) if stream.isatty() else None


def document(value: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2))


def say(options: Globals, text: str) -> None:
    """Say something on stderr, unless -q."""
    if not options.quiet:
        print(text, file=sys.stderr, flush=True)


def confirm(question: str, options: Globals) -> bool:
    """Ask on the terminal. Without a terminal and without -y this is a usage error (exit 2)."""
    import click

    from awsddp.errors import UsageError

    question = harmless.lines(question)
    if options.yes:
        return True
    if not sys.stdin.isatty():
        *about, last = question.splitlines()
        why = "\n".join((*about, "stdin is no terminal"))
        raise UsageError(f"{last} Nobody is there to answer.", why, "add -y to say yes")
    return click.confirm(question, default=False, err=True)
