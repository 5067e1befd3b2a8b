"""The command line that runs: its global options, the signals that end it, the commands that it recommends.

Ctrl-C, a closed terminal, a request to end: once in good order, a second time at once. In good order means:
`train` ends its job and fetches its results, `run` ends everything too, every other verb leaves within
seconds. A closed terminal (SIGHUP) and SIGTERM leave the job of `train` as it is.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError, Interrupted, LetGo

if TYPE_CHECKING:
    from awsddp.model.records import JobRecord
    from awsddp.session.context import Session

PATIENCE_S = 3.0
"""How long a verb that has nothing to finish may take to leave."""


@dataclass(frozen=True, kw_only=True)
class Globals:
    """The global options as given. `override` holds the texts of -o."""

    cluster: str | None = None
    region: str | None = None
    profile: str | None = None
    local: bool = False
    override: tuple[str, ...] = ()
    json: bool = False
    quiet: bool = False
    verbose: int = 0
    yes: bool = False

    @property
    def name(self) -> str:
        """The cluster's name: -c, else $AWSDDP_CLUSTER, else "default"."""
        return self.cluster or os.environ.get("AWSDDP_CLUSTER") or "default"

    @property
    def named(self) -> bool:
        """Whether the cluster was named explicitly."""
        return bool(self.cluster or os.environ.get("AWSDDP_CLUSTER"))


class Watch:
    """Hears the signals of one command line, and knows how its errors are told.

    `session` is set once the verb knows what it is about, the rest once the options are read; `pause` takes
    the live lines away. `again` is the command that goes on where this one is cut, "" if none does;
    `unwritten` the file for which questions are asked, "" if none is.
    """

    def __init__(self) -> None:
        self.options = Globals()
        self.session: Session | None = None
        self.pause: Callable[[], None] = lambda: None
        self.finishes = False
        self.ends_cluster = False
        self.again = ""
        self.unwritten = ""
        self._heard = 0
        self._show: Callable[[AwsddpError], object] = lambda error: None

    def install(self, show: Callable[[AwsddpError], object]) -> None:
        """Take the signals over; one that was ignored when we were started stays ignored (nohup).

        `show` prints the error with which a second signal ends this process.
        """
        self._show = show
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    @property
    def is_signalled(self) -> bool:
        """Whether a signal came."""
        return self._heard > 0

    def interrupted(self, stop: BaseException | None = None) -> AwsddpError:
        """Return the error that says what is left behind, with the exit code of what stopped us."""
        error = Interrupted(
            "interrupted before anything was changed",
            "",
            "awsddp status   # the cluster and its cost\nawsddp down     # terminate it",
        )
        if self.unwritten:
            error = Interrupted(f"interrupted: no {self.unwritten} was written")
        elif self.session is not None:
            from awsddp.session.next_steps import interruption

            error = interruption(self.session, again=self.again)
        if notes := getattr(stop, "__notes__", ()):
            error = Interrupted(notes[0])
        if isinstance(stop, LetGo):
            error.exit_code = 128 + stop.number
        return error

    def _on_signal(self, number: int, _: Any) -> None:
        self._heard += 1
        if self._heard > 1:
            if self.ends_cluster and number != signal.SIGINT:
                return  # only a person, at a terminal, is let go while machines still run
            self._leave(number)
        if not self.finishes:
            timer = threading.Timer(PATIENCE_S, self._leave, [number])
            timer.daemon = True
            timer.start()
        raise KeyboardInterrupt if number == signal.SIGINT else LetGo(number)

    def _leave(self, number: int) -> None:
        """Say what is left behind and end this process, whatever it is doing."""
        with contextlib.suppress(Exception):
            self.pause()
            self._show(self.interrupted())
        leave(128 + number)


def leave(code: int) -> None:
    """End the process now: no thread that still waits for a network is waited for, no memory given back."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last: a signal came in a write
            stream.flush()
    os._exit(code)


WATCH = Watch()


def named(text: str, *, job: "JobRecord | None" = None) -> str:
    """Return `text` with its commands as `next_steps.advised` does; before a verb begins, its cluster's."""
    from awsddp.session import next_steps
    from awsddp.session.advice import read_advice
    from awsddp.state import Folder, home

    if WATCH.session is not None:
        return next_steps.advised(WATCH.session, text, job=job)
    options = WATCH.options
    folder = Folder(home(), options.name)
    words = next_steps.global_words(
        folder, local=options.local, region=options.region, profile=options.profile
    )
    return "\n".join(str(line.with_options(words)) for line in read_advice(text))


def resuming(job: "JobRecord") -> str:
    """Return the command that continues a job from its checkpoint."""
    from awsddp.session.next_steps import resume_note

    note = resume_note(WATCH.session, job) if WATCH.session is not None else ""
    return named(f"awsddp train --resume {job.job}", job=job) + note
