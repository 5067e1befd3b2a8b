"""What a user sees of a verb: its events, its questions, its result.

Messages and progress go to stderr (with --json as JSON lines), results and a job's log lines to stdout.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from awsddp.cli import table
from awsddp.cli.command_line import Globals
from awsddp.errors import SCHEMA, AwsddpError, Interrupted, NodeError, UsageError
from awsddp.model.events import Event
from awsddp.util import terminal_safe
from awsddp.util.format import duration, iso

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

R = TypeVar("R")

PLAIN_S = 10.0
"""How often a transfer is reported without a terminal."""
JSON_S = 1.0
"""How often each node's transfer is reported with --json."""
SILENT_S = 0.4
"""After how long without a word a terminal shows that the verb works."""
LULL_S = 5.0
"""How long a job that is followed may write no line before a live line says that it runs."""
LONG_S = 2.0
"""From when on a live line shows how long it has been what it is."""
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Screen:
    """Shows a verb's events, asks its questions, prints its result. To be closed."""

    def __init__(self, options: Globals) -> None:
        self.options = options
        self.live = (
            sys.stderr.isatty() and not (options.quiet or options.json) and os.environ.get("TERM") != "dumb"
        )
        self._region: Live | None = None
        self._rows: dict[str, Event] = {}  # what is under way
        self._began: dict[str, tuple[str, float]] = {}
        self._said = time.monotonic()
        self._doing = "asking the local cloud" if options.local else f"looking up cluster {options.name}"
        self._shown: dict[str, str] = {}
        self._reported: dict[str, float] = {}
        self._unfinished: dict[tuple[int, bool], bytes] = {}
        self._lock = threading.RLock()
        self._silence: threading.Timer | None = None
        self._lull: threading.Timer | None = None

    def begin(self) -> None:
        """Have a terminal show soon that the verb works, also where it says nothing."""
        if self.live:
            self._silence = threading.Timer(SILENT_S, self._break_silence)
            self._silence.daemon = True
            self._silence.start()

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
                self._event(dataclasses.replace(event, text=terminal_safe.line(event.text)))

    def _event(self, event: Event) -> None:
        who = event.who or ""
        self._track(who, event)
        if self.options.json:
            self._json(who, event)
        elif not self.live:
            self._plain(who, event)
        else:
            with self._lock:
                if event.who is None or who not in self._rows:
                    self._print(who, event)
                self._draw().refresh()

    def _track(self, who: str, event: Event) -> None:
        """Remember what is under way, and since when; what is said next ends what the verb did."""
        self._said, self._doing = (now := time.monotonic()), "working"
        began = self._began.pop(who, ("", now))
        for ended in {who, ""}:
            self._rows.pop(ended, None)
            self._began.pop(ended, None)
        is_over = (event.fraction or 0.0) >= 1 and event.size is None  # of a transfer another event tells it
        if event.who is not None and not is_over:
            self._rows[who] = event
            self._began[who] = began if began[0] == event.text else (event.text, now)

    def _rest(self, who: str, event: Event) -> str:
        """Return how far a line is, to stand behind its text: of a transfer how much, else how long."""
        elapsed_s = time.monotonic() - self._began.get(who, ("", self._said))[1]
        if event.fraction is not None:
            return f": {table.progress(event, elapsed_s)}"
        return f" ({duration(int(elapsed_s)).replace('.0', '')})" if elapsed_s >= LONG_S else ""

    def _transfers(self) -> dict[str, Event]:
        return {who: event for who, event in self._rows.items() if event.fraction is not None}

    def _json(self, who: str, event: Event) -> None:
        if who not in self._transfers() or self._is_due(who, JSON_S):
            row = {"schema": SCHEMA, "time": iso(datetime.now(UTC)), **dataclasses.asdict(event)}
            print(json.dumps(row), file=sys.stderr, flush=True)

    def _plain(self, who: str, event: Event) -> None:
        if self._shown.get(who) != event.text:
            self._shown[who] = event.text
            print(f"{who}: " * bool(who) + event.text, file=sys.stderr, flush=True)
            self._is_due("", PLAIN_S)
        elif (transfers := self._transfers()) and self._is_due("", PLAIN_S):
            slowest = min(transfers, key=lambda one: transfers[one].fraction or 0.0)
            of = f" (the slowest of {len(transfers)})" if len(transfers) > 1 else ""
            rest = self._rest(slowest, transfers[slowest])
            print(f"{slowest}: {transfers[slowest].text}{rest}{of}", file=sys.stderr, flush=True)

    def _is_due(self, key: str, every_s: float) -> bool:
        now = time.monotonic()
        due = now - self._reported.get(key, -every_s) >= every_s
        if due:
            self._reported[key] = now
        return due

    def _print(self, who: str, event: Event) -> None:
        """Write a line that stays: a message of the verb, or what has reached its end."""
        from rich.text import Text

        label = "" if event.who is None else f"✓ {who} ".replace("  ", " ")
        text = Text("\n".join(table.wrapped(event.text, table.width(stderr=True), label=label)))
        text.stylize("bold", 0, len(label))
        text.stylize("green", 0, min(1, len(label)))
        self._draw().console.print(text, soft_wrap=True)

    def _draw(self) -> "Live":
        """Return the live lines, which are drawn from now on below all others."""
        if self._region is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)  # it honours NO_COLOR
            self._region = Live(
                console=console,
                get_renderable=lambda: self._drawn(console.width, console.height),
                refresh_per_second=10,
                transient=True,
            )
            self._region.start()
        return self._region

    def _drawn(self, columns: int, height: int) -> "Text":
        """Return the live lines, no more than the terminal has: who is whole, the text is cut."""
        from rich.text import Text

        rows = sorted([*self._rows.items()] or [("", Event(self._doing))], key=lambda row: (len(row[0]), row))
        if len(rows) > (most := max(1, height - 2)):
            rows[most - 1 :] = [("", Event(f"and {len(rows) - most + 1} more"))]
        frame, lines = _FRAMES[int(time.monotonic() * 10) % len(_FRAMES)], []
        for who, event in rows:
            rest, text = self._rest(who, event), Text(event.text)
            text.truncate(max(1, columns - len(who) - len(rest) - 3), overflow="ellipsis")
            lines.append(Text.assemble((f"{frame} ", "green"), (who, "bold"), " " * bool(who), text, rest))
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def _break_silence(self) -> None:
        with self._lock:
            if self._silence is not None:
                self._draw()

    def pause(self) -> None:
        """Take the live lines away, so that others may write: what has not ended leaves no line."""
        with self._lock:
            if self._lull is not None:
                self._lull.cancel()
                self._lull = None
            self._clear()

    def _clear(self) -> None:
        with self._lock:
            if self._silence is not None:
                self._silence.cancel()
                self._silence = None
            if self._region is not None:
                self._region.stop()
                self._region = None
                self._rows.clear()

    def lines(self, data: bytes) -> None:
        """Write log lines of a followed job to stdout (with --json to stderr).

        Where none comes for LULL_S, a live line says so.
        """
        self._clear()
        self._said = time.monotonic()
        self._write(data, self.options.json)
        with self._lock:
            if self.live and self._lull is None:
                self._wait_for_lull(LULL_S)

    def _wait_for_lull(self, seconds: float) -> None:
        self._lull = threading.Timer(seconds, self._show_lull)
        self._lull.daemon = True
        self._lull.start()

    def _show_lull(self) -> None:
        with self._lock:
            if self._lull is None:  # another part of the verb writes now
                return
            self._lull = None
            left_s = self._said + LULL_S - time.monotonic()
            if left_s > 0:
                self._wait_for_lull(left_s)
            elif self._region is None:
                self._doing = "the job runs; no new line"
                self._draw()

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
            data = terminal_safe.colours_only(data, none=table.no_color())
        stream.buffer.write(data)
        stream.buffer.flush()

    def result(self, result: R, page: Callable[[R], None]) -> None:
        """Print a verb's result: with --json as a document, else its `page`."""
        self.pause()
        if self.options.json:
            table.document(result)
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
            *about, last = terminal_safe.lines(question).splitlines()
            why = " ".join(("the question is:", *about, last))
            raise UsageError(
                "needs an answer, and stdin is not a terminal: nothing was done", why, "pass --yes"
            )
        columns = table.width(stderr=True)
        room = None if columns is None else columns - len(" [y/N]: ")
        return click.confirm("\n".join(table.lines(question, columns=room)), default=False, err=True)
