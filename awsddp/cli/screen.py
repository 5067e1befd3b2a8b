"""What a user sees of a verb: its events, its questions, its result.

Messages and progress go to stderr (with --json as JSON lines), results and a job's log lines to stdout.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from awsddp import harmless
from awsddp.cli import render
from awsddp.cli.command_line import Globals
from awsddp.errors import SCHEMA, AwsddpError, Interrupted, NodeError, UsageError
from awsddp.report import Event, iso

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

R = TypeVar("R")

PLAIN_S = 10.0
"""How often a transfer is reported without a terminal."""
JSON_S = 1.0
"""How often each node's transfer is reported with --json."""


class Screen:
    """Shows a verb's events, asks its questions, prints its result. To be closed."""

    def __init__(self, options: Globals) -> None:
        self.options = options
        self.live = (
            sys.stderr.isatty() and not (options.quiet or options.json) and os.environ.get("TERM") != "dumb"
        )
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, str] = {}
        self._transfers: dict[str, tuple[Event, float]] = {}
        self._reported: dict[str, float] = {}
        self._unfinished: dict[tuple[int, bool], bytes] = {}

    def close(self) -> None:
        """Stop the live lines, and write the lines that a command left without their end."""
        self.pause()
        for (node, error), rest in self._unfinished.items():
            if rest:
                self._write(b"[node%d] %s\n" % (node, rest), error)

    def say(self, text: str) -> None:
        """Show a message of the verb itself."""
        self.event(Event(text))

    def event(self, event: Event) -> None:
        """Show one event; a closed stderr is ignored."""
        with contextlib.suppress(OSError):
            if not self.options.quiet:
                self._event(dataclasses.replace(event, text=harmless.line(event.text)))

    def _event(self, event: Event) -> None:
        who = event.who or ""
        self._track(who, event)
        if self.options.json:
            self._json(who, event)
        elif not self.live:
            self._plain(who, event)
        elif event.who is None:
            text = "\n".join(render.wrapped(event.text, render.width(stderr=True)))
            self._bar().console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._update(who, event)

    def _track(self, who: str, event: Event) -> None:
        """Remember a transfer and when it began, until it is done."""
        known, began = self._transfers.pop(who, (event, time.monotonic()))
        if event.fraction is not None and event.fraction < 1:
            self._transfers[who] = event, began if known.text == event.text else time.monotonic()

    def _rest(self, who: str) -> str:
        """Return how far a transfer is, to stand behind its text; "" for what is none."""
        if who not in self._transfers:
            return ""
        event, began = self._transfers[who]
        return f": {render.progress(event, time.monotonic() - began)}"

    def _json(self, who: str, event: Event) -> None:
        if who not in self._transfers or self._is_due(who, JSON_S):
            row = {"schema": SCHEMA, "time": iso(datetime.now(UTC)), **dataclasses.asdict(event)}
            print(json.dumps(row), file=sys.stderr, flush=True)

    def _plain(self, who: str, event: Event) -> None:
        if self._shown.get(who) != event.text:
            self._shown[who] = event.text
            print(f"{who}: " * bool(who) + event.text, file=sys.stderr, flush=True)
            self._is_due("", PLAIN_S)
        elif self._transfers and self._is_due("", PLAIN_S):
            slowest = min(self._transfers, key=lambda one: self._transfers[one][0].fraction or 0.0)
            of = f" (the slowest of {len(self._transfers)})" if len(self._transfers) > 1 else ""
            text = f"{slowest}: {self._transfers[slowest][0].text}{self._rest(slowest)}{of}"
            print(text, file=sys.stderr, flush=True)

    def _is_due(self, key: str, every_s: float) -> bool:
        now = time.monotonic()
        due = now - self._reported.get(key, -every_s) >= every_s
        if due:
            self._reported[key] = now
        return due

    def _update(self, who: str, event: Event) -> None:
        bar, text = self._bar(), event.text + self._rest(who)
        if who not in self._tasks:
            self._tasks[who] = bar.add_task("", total=None, who=who)
        finished = event.fraction is not None and event.fraction >= 1
        bar.update(self._tasks[who], description=text, completed=finished, total=1 if finished else None)

    def _bar(self) -> "Progress":
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn

            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[who]}", style="bold", markup=False),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True, highlight=False),  # it honours NO_COLOR
                transient=False,
            )
            self._progress.start()
        return self._progress

    def pause(self) -> None:
        """Stop the live lines where they are, so that others may write."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()

    def lines(self, data: bytes) -> None:
        """Write log lines of a followed job to stdout (with --json to stderr)."""
        self.pause()
        self._write(data, self.options.json)

    def output(self, node: int, data: bytes, error: bool) -> None:
        """Write the output of a node's command, labelled, to stdout or stderr; with --json nothing."""
        if self.options.json:
            return
        self.pause()
        label = f"[node{node}] ".encode()
        rest = self._unfinished.get((node, error), b"")
        *lines, self._unfinished[node, error] = (rest + data).split(b"\n")
        self._write(b"".join(label + line + b"\n" for line in lines), error)

    def _write(self, data: bytes, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        if stream.isatty():
            data = harmless.colours_only(data, none=render.no_color())
        stream.buffer.write(data)
        stream.buffer.flush()

    def result(self, result: R, page: Callable[[R], None]) -> None:
        """Print a verb's result: with --json as a document, else its `page`."""
        self.pause()
        if self.options.json:
            render.document(result)
        else:
            page(result)

    def page(self, result: R, page: Callable[[R], None]) -> None:
        """Print a page on the way; with --json nothing."""
        if not self.options.json:
            self.result(result, page)

    @contextlib.contextmanager
    def partial(self, page: Callable[[Any], None]) -> Iterator[None]:
        """Print what a verb has done before the error that stopped it; with --json the error holds both."""
        try:
            yield
        except AwsddpError as error:
            if error.result is not None:
                self.page(error.result, page)
            raise

    def question(self, ask: str, refused: str) -> Callable[[str], None]:
        """Return a verb's question, called with what the verb is about to do.

        It raises Interrupted (`refused`) for a no, UsageError without a terminal and without -y.
        """

        def answered(about: str) -> None:
            if not self.confirm("\n".join(filter(None, (about, ask)))):
                raise Interrupted(refused, "the answer was no")

        return answered

    @functools.cache  # noqa: B019  # a screen lives as long as its process
    def agree(self, question: str) -> bool:
        """Answer a question that comes up on the way; without a terminal and without -y no. Asked once."""
        return (self.options.yes or sys.stdin.isatty()) and self.confirm(question)

    def ask(self, question: str) -> bool | None:
        """Ask what only a person may answer; None with -y, with --json and without a terminal."""
        nobody = self.options.yes or self.options.json or not sys.stdin.isatty()
        return None if nobody else self.confirm(question)

    def loses(self, error: NodeError) -> bool:
        """Ask whether `down` goes on where results cannot be fetched. Only a person may lose them."""
        return bool(self.ask(f"{error.message}: {error.why}\nTerminate the nodes and lose these results?"))

    def confirm(self, question: str) -> bool:
        """Ask on the terminal. Raises UsageError without a terminal and without -y."""
        import click

        self.pause()
        if self.options.yes:
            return True
        if not sys.stdin.isatty():
            *about, last = harmless.lines(question).splitlines()
            why = "\n".join((*about, "stdin is not a terminal"))
            raise UsageError(f"{last} There is no terminal to ask on.", why, "pass --yes")
        columns = render.width(stderr=True)
        room = None if columns is None else columns - len(" [y/N]: ")
        return click.confirm("\n".join(render.lines(question, columns=room)), default=False, err=True)
