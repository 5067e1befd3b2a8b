"""Show a verb's events, ask its questions, print its result.

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
from awsddp.util.formatting import duration, optional_utc

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

R = TypeVar("R")

PLAIN_INTERVAL_S = 10.0
"""The interval between progress lines for a transfer if stderr is not a terminal."""
JSON_INTERVAL_S = 1.0
"""The interval between events about a node's transfer, with --json."""
SILENT_S = 0.4
"""If the verb has shown nothing for this time after its start, a terminal shows a live line."""
LULL_S = 5.0
"""If a followed job writes no log line for this time, a live line shows that it still runs."""
LONG_S = 2.0
"""An activity's live line shows the activity's age once the activity has lasted this long."""
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Screen:
    """Shows a verb's output: live lines, messages, questions and the result. A screen must be closed."""

    def __init__(self, options: Globals) -> None:
        self.options = options
        self.live = (
            sys.stderr.isatty() and not (options.quiet or options.json) and os.environ.get("TERM") != "dumb"
        )
        self._region: Live | None = None
        self._rows: dict[str, Event] = {}  # maps `who` to its current activity
        self._began: dict[str, tuple[str, float]] = {}  # maps `who` to its activity's text and start time
        self._last_output = time.monotonic()
        self._activity = (
            "connecting to the local cloud" if options.local else f"looking up cluster {options.name}"
        )
        self._printed: dict[str, str] = {}  # maps `who` to its last text that was printed without a terminal
        self._reported: dict[str, float] = {}  # maps a key to the time of its last report
        self._unfinished: dict[tuple[int, bool], bytes] = {}  # output that does not end with a newline yet
        self._lock = threading.RLock()
        self._silence: threading.Timer | None = None
        self._lull: threading.Timer | None = None

    def begin(self) -> None:
        """After SILENT_S, show a live line on a terminal, even if the verb has reported no event."""
        if self.live:
            self._silence = threading.Timer(SILENT_S, self._break_silence)
            self._silence.daemon = True
            self._silence.start()

    def close(self) -> None:
        """Remove the live lines, and write the unfinished last lines that commands on nodes have printed."""
        self.pause()
        for (node, error), line in self._unfinished.items():
            if line:
                self._write(b"[node%d] %s\n" % (node, line), error)

    def say(self, text: str) -> None:
        """Show a message from the verb itself."""
        self.show_event(Event(text))

    def show_event(self, event: Event) -> None:
        """Show one event; ignore a closed stderr."""
        with contextlib.suppress(OSError):
            if not self.options.quiet:
                self._show_event(dataclasses.replace(event, text=terminal_safe.escape_line(event.text)))

    def _show_event(self, event: Event) -> None:
        who = event.who or ""
        self._track(who, event)
        if self.options.json:
            self._print_json(who, event)
        elif not self.live:
            self._print_plain(who, event)
        else:
            with self._lock:
                if event.who is None or who not in self._rows:
                    self._print_line(who, event)
                self._start_live().refresh()

    def _track(self, who: str, event: Event) -> None:
        """Record the current activities and their start times. Every event ends the verb's own activity."""
        self._last_output, self._activity = (now := time.monotonic()), "working"
        began = self._began.pop(who, ("", now))
        for ended in {who, ""}:
            self._rows.pop(ended, None)
            self._began.pop(ended, None)
        is_over = (event.fraction or 0.0) >= 1 and event.size is None  # another event ends a transfer
        if event.who is not None and not is_over:
            self._rows[who] = event
            self._began[who] = began if began[0] == event.text else (event.text, now)

    def _suffix(self, who: str, event: Event) -> str:
        """Return the end of a live line: a transfer's progress, or another activity's age."""
        elapsed_s = time.monotonic() - self._began.get(who, ("", self._last_output))[1]
        if event.fraction is not None:
            return f": {table.progress_text(event, elapsed_s)}"
        return f" ({duration(int(elapsed_s)).replace('.0', '')})" if elapsed_s >= LONG_S else ""

    def _transfers(self) -> dict[str, Event]:
        return {who: event for who, event in self._rows.items() if event.fraction is not None}

    def _print_json(self, who: str, event: Event) -> None:
        if who not in self._transfers() or self._is_due(who, JSON_INTERVAL_S):
            row = {"schema": SCHEMA, "time": optional_utc(datetime.now(UTC)), **dataclasses.asdict(event)}
            print(json.dumps(row), file=sys.stderr, flush=True)

    def _print_plain(self, who: str, event: Event) -> None:
        if self._printed.get(who) != event.text:
            self._printed[who] = event.text
            print(f"{who}: " * bool(who) + event.text, file=sys.stderr, flush=True)
            self._is_due("", PLAIN_INTERVAL_S)
        elif (transfers := self._transfers()) and self._is_due("", PLAIN_INTERVAL_S):
            slowest = min(transfers, key=lambda who: transfers[who].fraction or 0.0)
            count = f" (the slowest of {len(transfers)})" if len(transfers) > 1 else ""
            suffix = self._suffix(slowest, transfers[slowest])
            print(f"{slowest}: {transfers[slowest].text}{suffix}{count}", file=sys.stderr, flush=True)

    def _is_due(self, key: str, every_s: float) -> bool:
        """Return True and record the time, unless `key` was reported less than `every_s` seconds ago."""
        now = time.monotonic()
        is_due = now - self._reported.get(key, -every_s) >= every_s
        if is_due:
            self._reported[key] = now
        return is_due

    def _print_line(self, who: str, event: Event) -> None:
        """Print a permanent line: a message from the verb, or a completed activity."""
        from rich.text import Text

        label = "" if event.who is None else f"✓ {who} ".replace("  ", " ")
        text = Text("\n".join(table.wrap(event.text, table.width(stderr=True), label=label)))
        text.stylize("bold", 0, len(label))
        text.stylize("green", 0, min(1, len(label)))
        self._start_live().console.print(text, soft_wrap=True)

    def _start_live(self) -> "Live":
        """Return the display of live lines, which stays below all other output. Start it if necessary."""
        if self._region is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)  # a Console honours NO_COLOR
            self._region = Live(
                console=console,
                get_renderable=lambda: self._render(console.width, console.height),
                refresh_per_second=10,
                transient=True,
            )
            self._region.start()
        return self._region

    def _render(self, columns: int, height: int) -> "Text":
        """Return as many live lines as fit on the terminal. Long texts are truncated, but `who` is not."""
        from rich.text import Text

        activities = [*self._rows.items()] or [("", Event(self._activity))]
        rows = sorted(activities, key=lambda row: (len(row[0]), row))
        if len(rows) > (most := max(1, height - 2)):
            rows[most - 1 :] = [("", Event(f"and {len(rows) - most + 1} more"))]
        frame, lines = _FRAMES[int(time.monotonic() * 10) % len(_FRAMES)], []
        for who, event in rows:
            suffix, text = self._suffix(who, event), Text(event.text)
            text.truncate(max(1, columns - len(who) - len(suffix) - 3), overflow="ellipsis")
            lines.append(Text.assemble((f"{frame} ", "green"), (who, "bold"), " " * bool(who), text, suffix))
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)

    def _break_silence(self) -> None:
        with self._lock:
            if self._silence is not None:
                self._start_live()

    def pause(self) -> None:
        """Remove all live lines, even for unfinished activities, so that other output can follow."""
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
        """Write a followed job's log lines to stdout (with --json, to stderr).

        After LULL_S without a new log line, a live line shows that the job still runs.
        """
        self._clear()
        self._last_output = time.monotonic()
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
            if self._lull is None:  # `pause` has already cancelled this timer
                return
            self._lull = None
            remaining_s = self._last_output + LULL_S - time.monotonic()
            if remaining_s > 0:
                self._wait_for_lull(remaining_s)
            elif self._region is None:
                self._activity = "the job runs; no new line"
                self._start_live()

    def output(self, node: int, data: bytes, error: bool) -> None:
        """Write a node's command output, with a label, to stdout or stderr; with --json, do nothing."""
        if self.options.json:
            return
        self.pause()
        label = f"[node{node}] ".encode()
        unfinished = self._unfinished.get((node, error), b"")
        *lines, self._unfinished[node, error] = (unfinished + data).split(b"\n")
        self._write(b"".join(label + line + b"\n" for line in lines), error)

    def _write(self, data: bytes, error: bool) -> None:
        stream = sys.stderr if error else sys.stdout
        if stream.isatty():
            data = terminal_safe.keep_colours(data, none=table.is_color_disabled())
        stream.buffer.write(data)
        stream.buffer.flush()

    def result(self, result: R, page: Callable[[R], None]) -> None:
        """Print a verb's result: with --json as a document, otherwise by calling `page`."""
        self.pause()
        if self.options.json:
            table.print_document(result)
        else:
            page(result)

    def page(self, result: R, page: Callable[[R], None]) -> None:
        """Print a page before the result. With --json, print nothing."""
        if not self.options.json:
            self.result(result, page)

    @contextlib.contextmanager
    def partial_result(self, page: Callable[[Any], None]) -> Iterator[None]:
        """Print the partial result of an error that the block raises, if the error has one.

        With --json, print nothing, because the error's document includes the partial result.
        """
        try:
            yield
        except AwsddpError as error:
            if error.result is not None:
                self.page(error.result, page)
            raise

    def question(self, ask: str, refused: str) -> Callable[[str], None]:
        """Return a function that asks for consent; its argument describes what the verb is about to do.

        The function raises Interrupted (`refused`) if the answer is no, and UsageError if there is neither a
        terminal nor -y.
        """

        def require_consent(description: str) -> None:
            if not self.confirm("\n".join(filter(None, (description, ask)))):
                raise Interrupted(refused, "the answer was no")

        return require_consent

    @functools.cache  # noqa: B019  # a screen lives as long as its process
    def agree(self, question: str) -> bool:
        """Ask a question once and return the answer, or False if there is neither a terminal nor -y."""
        return (self.options.yes or sys.stdin.isatty()) and self.confirm(question)

    def ask(self, question: str) -> bool | None:
        """Return the answer to a question that -y does not answer, or None if no user can answer it.

        Users cannot answer if -y or --json is given, or if there is no terminal.
        """
        is_unattended = self.options.yes or self.options.json or not sys.stdin.isatty()
        return None if is_unattended else self.confirm(question)

    def confirm_loss(self, error: NodeError) -> bool:
        """Return True if the user agrees to let `down` delete the results that could not be fetched."""
        return bool(self.ask(f"{error.message}: {error.why}\nTerminate the nodes and lose these results?"))

    def confirm(self, question: str) -> bool:
        """Return the user's answer, or True with -y.

        Raises UsageError if there is neither a terminal nor -y.
        """
        import click

        self.pause()
        if self.options.yes:
            return True
        if not sys.stdin.isatty():
            why = " ".join(("the question is:", *terminal_safe.escape_lines(question).splitlines()))
            raise UsageError(
                "a question needs an answer, but stdin is not a terminal: nothing was done", why, "pass --yes"
            )
        columns = table.width(stderr=True)
        text_columns = None if columns is None else columns - len(" [y/N]: ")
        return click.confirm(
            "\n".join(table.wrap_lines(question, columns=text_columns)), default=False, err=True
        )
