"""The running command's state: its global options, its signal handlers and the commands that it recommends.

The first signal (Ctrl-C, SIGHUP, SIGTERM) ends the command in an orderly way. A second signal ends the
command at once. Orderly means that `train` ends its job and fetches the results, that `run` also terminates
the nodes, and that every other verb exits within seconds. However, after SIGHUP (a closed terminal) or
SIGTERM, `train` exits and its job continues to run.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from awsddp.errors import AwsddpError, Interrupted, Terminated

if TYPE_CHECKING:
    from awsddp.model.records import JobRecord
    from awsddp.session.context import Session

EXIT_WITHIN_S = 3.0
"""After a signal, a verb that has no job to end exits within this time."""


@dataclass(frozen=True, kw_only=True)
class Globals:
    """The global options' values. `override` holds the values given with -o."""

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
        """The cluster's name, from -c or else $AWSDDP_CLUSTER, or "default" if neither is set."""
        return self.cluster or os.environ.get("AWSDDP_CLUSTER") or "default"

    @property
    def is_named(self) -> bool:
        """True if the user named the cluster, by -c or $AWSDDP_CLUSTER."""
        return bool(self.cluster or os.environ.get("AWSDDP_CLUSTER"))


class CommandState:
    """The running command's state and its signal handlers.

    `session` is set as soon as the verb has opened its session. The other attributes are set as soon as the
    options are parsed. `pause` removes the live lines. `rerun_command` is the command that continues an
    interrupted command's work, or "" if there is none. `unwritten_file` is the file to which the answers to
    the current questions will be written, or "" if there is none.
    """

    def __init__(self) -> None:
        self.options = Globals()
        self.session: Session | None = None
        self.pause: Callable[[], None] = lambda: None
        self.finishes = False
        self.ends_cluster = False
        self.rerun_command = ""
        self.unwritten_file = ""
        self._signals = 0
        self._show_error: Callable[[AwsddpError], object] = lambda error: None

    def install_handlers(self, show_error: Callable[[AwsddpError], object]) -> None:
        """Install the signal handlers; a signal that was ignored at the start stays ignored (nohup).

        `show_error` prints the error when a second signal ends this process.
        """
        self._show_error = show_error
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    @property
    def is_signalled(self) -> bool:
        """True if the command has received a signal."""
        return self._signals > 0

    def interrupt_error(self, stop: BaseException | None = None) -> AwsddpError:
        """Return the error for an interrupted command.

        The error describes what still runs. `stop` is the exception that ended the command. If `stop` has a
        note, the note becomes the message. If `stop` is Terminated, the exit code is 128 plus the signal's
        number.
        """
        error = Interrupted(
            "interrupted before anything was changed",
            "",
            "awsddp status   # the cluster and its cost\nawsddp down     # terminate it",
        )
        if self.unwritten_file:
            error = Interrupted(f"interrupted: no {self.unwritten_file} was written")
        elif self.session is not None:
            from awsddp.session.next_steps import make_interrupted_error

            error = make_interrupted_error(self.session, continue_command=self.rerun_command)
        if notes := getattr(stop, "__notes__", ()):
            error = Interrupted(notes[0])
        if isinstance(stop, Terminated):
            error.exit_code = 128 + stop.signal_number
        return error

    def _on_signal(self, number: int, _: Any) -> None:
        self._signals += 1
        if self._signals > 1:
            if self.ends_cluster and number != signal.SIGINT:
                return  # only a second Ctrl-C ends the process while instances still run
            self._exit(number)
        if not self.finishes:
            timer = threading.Timer(EXIT_WITHIN_S, self._exit, [number])
            timer.daemon = True
            timer.start()
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def _exit(self, number: int) -> None:
        """Print the error for an interrupted command and end this process at once."""
        with contextlib.suppress(Exception):
            self.pause()
            self._show_error(self.interrupt_error())
        exit_now(128 + number)


def exit_now(code: int) -> None:
    """End the process at once, without waiting for other threads and without freeing memory."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a signal during a write: RuntimeError
            stream.flush()
    os._exit(code)


COMMAND = CommandState()


def with_global_options(text: str, *, job: "JobRecord | None" = None) -> str:
    """Return `text` with the global options (-c, --local, ...) added to its commands.

    The options are those of the running verb's session, or those on the command line if there is no session
    yet.
    """
    from awsddp.session import next_steps
    from awsddp.session.advice import parse_message
    from awsddp.state import ClusterFolder, awsddp_home

    if COMMAND.session is not None:
        return next_steps.complete_commands(COMMAND.session, text, job=job)
    options = COMMAND.options
    folder = ClusterFolder(awsddp_home(), options.name)
    words = next_steps.global_options(
        folder, local=options.local, region=options.region, profile=options.profile
    )
    return "\n".join(str(line.with_options(words)) for line in parse_message(text))


def resume_command(job: "JobRecord") -> str:
    """Return the command that continues a job from its checkpoint."""
    from awsddp.session.next_steps import resume_note

    note = resume_note(COMMAND.session, job) if COMMAND.session is not None else ""
    return with_global_options(f"awsddp train --resume {job.job}", job=job) + note
