"""From an error to what the user reads and the process's exit code. The one place that maps them."""

import contextlib
import errno
import os
import sys

import click

from awsddp.cli.command_line import WATCH, Globals, named
from awsddp.errors import AwsddpError, CloudError, ConfigError, Interrupted, UsageError

READER_GONE = 141
_RIGHTS = "awsddp runs as you: give your user the right to use it"
_SPACE = "free disk space, then the same command again"
_LIMIT = "ulimit -n 4096   # files that a process may open; then the same command again"
_OWN_FAULTS = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "its file system is read-only: another folder, or mount it for writing",
    errno.EMFILE: _LIMIT,
    errno.ENFILE: _LIMIT,
    errno.EIO: "its disk fails: dmesg",
}
"""What to do about an error of this machine's files."""


def run(command: click.Command) -> int:
    """Run the command line and return its exit code; every error ends as a message."""
    WATCH.options, WATCH.session = Globals(json="--json" in sys.argv), None  # until the options are read
    WATCH.unwritten = ""
    try:
        result = command.main(args=sys.argv[1:], prog_name="awsddp", standalone_mode=False)
        print(end="", flush=True)  # here, where it can still be told that nobody got it
    except (click.exceptions.Abort, KeyboardInterrupt):
        return show(WATCH.interrupted())
    except click.exceptions.NoArgsIsHelpError as error:  # a verb that has verbs of its own, alone
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        from awsddp.cli.suggestions import meant

        return show(meant(error, sys.argv[1:]))
    except click.ClickException as error:
        return show(UsageError(error.format_message(), "", "awsddp --help"))
    except AwsddpError as error:
        return show(error)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        if not end.code:  # the end of a completion
            raise
        return _reader_gone()  # click exits itself where its echo meets a broken pipe
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
            return show(_own_fault(error))
        return _unexpected(error)
    return result if isinstance(result, int) else 0


def _own_fault(error: OSError) -> ConfigError:
    """Return the error for a file, disk or limit of this machine that a verb met where none was expected."""
    use = "use" if error.filename else "write"
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the output"
    return ConfigError(f"cannot {use} {path}", error.strerror or "", _OWN_FAULTS[error.errno or 0])


def show(error: AwsddpError) -> int:
    """Print an error, as a document with --json, and return its exit code. A closed terminal is ignored."""
    with contextlib.suppress(OSError):
        _show(error)
    return error.exit_code


def _show(error: AwsddpError) -> None:
    from awsddp.cli import table
    from awsddp.util import terminal_safe

    if (session := WATCH.session) is not None:
        from awsddp.session.next_steps import what_runs_on

        if isinstance(error, CloudError) and error.needs_login:
            what_runs_on(session, error)
    error.next = named(error.next)
    if WATCH.options.verbose > 1:
        import traceback

        traceback.print_exc()
    if WATCH.options.json:
        table.document(error.document())
        sys.stdout.flush()
        return
    columns = table.width(stderr=True)
    is_calm = isinstance(error, Interrupted) and not (error.why or error.next)
    if (is_calm or WATCH.is_signalled) and sys.stderr.isatty():  # behind the terminal's ^C
        click.echo(err=True)
    for label, text in (
        ("" if is_calm else "error: ", terminal_safe.line(error.message)),
        ("  why: ", terminal_safe.lines(error.why)),
        (" next: ", terminal_safe.lines(error.next)),
    ):
        for line in text.split("\n") if text else ():
            first, *more = table.wrapped(line, columns, label=label)
            if label == "error: " and not table.no_color():
                first = click.style(label, fg="red", bold=True) + first.removeprefix(label)
            click.echo("\n".join([first, *more]), err=True)
            label = " " * len(label)


def _reader_gone() -> int:
    """The reader of our output went away (`| head`): end quietly, as a program in a pipe does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _unexpected(error: Exception) -> int:
    import traceback
    from datetime import datetime

    from awsddp.state import home, write_private

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = home() / "debug" / f"{stamp}.log"
    try:
        write_private(path, "".join(traceback.format_exception(error)).encode())
        where = str(path)
    except AwsddpError:
        where = "run it again with -vv"
    return show(
        AwsddpError(
            f"unexpected: {type(error).__name__}: {error}",
            "this is a bug in awsddp; your cluster, if any, is unchanged",
            f"details: {where}\nawsddp status   # what still runs\nawsddp down     # terminate it",
        )
    )
