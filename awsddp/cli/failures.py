"""Run the command line, and turn every error into a message and an exit code."""

import contextlib
import errno
import os
import sys

import click

from awsddp.cli.command_line import COMMAND, Globals, with_global_options
from awsddp.errors import AwsddpError, CloudError, ConfigError, Interrupted, UsageError

BROKEN_PIPE_CODE = 141
"""The exit code if the program that reads the pipe has exited: 128 + SIGPIPE."""
_PERMISSION = "awsddp runs as your user: give your user access to this path"
_SPACE = "free disk space, then run the same command again"
_LIMIT = "ulimit -n 4096   # raises the limit of open files; then run the same command again"
_LOCAL_ERRORS = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "the file system is read-only: use another folder, or remount the file system for writing",
    errno.EMFILE: _LIMIT,
    errno.ENFILE: _LIMIT,
    errno.EIO: "the disk reports errors; dmesg shows them",
}
"""Maps the error numbers of file, disk and resource limit errors on this machine to next steps."""


def run_command(command: click.Command) -> int:
    """Run the command line and return its exit code; every error is printed as a message."""
    COMMAND.options, COMMAND.session = Globals(json="--json" in sys.argv), None  # until options are parsed
    COMMAND.unwritten_file = ""
    try:
        result = command.main(args=sys.argv[1:], prog_name="awsddp", standalone_mode=False)
        print(end="", flush=True)  # so that BrokenPipeError is raised in this try, not at exit
    except (click.exceptions.Abort, KeyboardInterrupt):
        return show_error(COMMAND.interrupt_error())
    except click.exceptions.NoArgsIsHelpError as error:  # a group (`awsddp local`) without a subcommand
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        from awsddp.cli.suggestions import suggest

        return show_error(suggest(error, sys.argv[1:]))
    except click.ClickException as error:
        return show_error(UsageError(error.format_message(), "", "awsddp --help"))
    except AwsddpError as error:
        return show_error(error)
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        if not end.code:  # click exits like this after a shell completion
            raise
        return _reader_gone()  # click itself exits if its echo gets a broken pipe
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LOCAL_ERRORS:
            return show_error(_local_error(error))
        return _report_bug(error)
    return result if isinstance(result, int) else 0


def _local_error(error: OSError) -> ConfigError:
    """Return the ConfigError for an unhandled file, disk or resource limit error on this machine."""
    use = "use" if error.filename else "write"
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the output"
    return ConfigError(f"cannot {use} {path}", error.strerror or "", _LOCAL_ERRORS[error.errno or 0])


def show_error(error: AwsddpError) -> int:
    """Print an error (with --json as a document) and return its exit code. A closed terminal is ignored."""
    with contextlib.suppress(OSError):
        _print_error(error)
    return error.exit_code


def _print_error(error: AwsddpError) -> None:
    from awsddp.cli import table
    from awsddp.util import terminal_safe

    if (session := COMMAND.session) is not None:
        from awsddp.session.next_steps import add_running_costs

        if isinstance(error, CloudError) and error.needs_login:
            add_running_costs(session, error)
    error.next = with_global_options(error.next)
    if COMMAND.options.verbose > 1:
        import traceback

        traceback.print_exc()
    if COMMAND.options.json:
        table.print_document(error.document())
        sys.stdout.flush()
        return
    columns = table.width(stderr=True)
    is_notice = isinstance(error, Interrupted) and not (error.why or error.next)
    if (is_notice or COMMAND.is_signalled) and sys.stderr.isatty():  # the terminal has shown ^C on this line
        click.echo(err=True)
    for label, text in (
        ("" if is_notice else "error: ", terminal_safe.escape_line(error.message)),
        ("  why: ", terminal_safe.escape_lines(error.why)),
        (" next: ", terminal_safe.escape_lines(error.next)),
    ):
        for line in text.split("\n") if text else ():
            first, *more = table.wrap(line, columns, label=label)
            if label == "error: " and not table.is_color_disabled():
                first = click.style(label, fg="red", bold=True) + first.removeprefix(label)
            click.echo("\n".join([first, *more]), err=True)
            label = " " * len(label)


def _reader_gone() -> int:
    """Discard further output because the pipe's reader (`| head`) has exited, and return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE_CODE


def _report_bug(error: Exception) -> int:
    """Write an unexpected error's traceback to a file, print the error, and return the exit code."""
    import traceback
    from datetime import datetime

    from awsddp.state import awsddp_home, write_private

    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = awsddp_home() / "debug" / f"{stamp}.log"
    try:
        write_private(path, "".join(traceback.format_exception(error)).encode())
        details = str(path)
    except AwsddpError:
        details = "run it again with -vv"
    return show_error(
        AwsddpError(
            f"unexpected: {type(error).__name__}: {error}",
            "this is a bug in awsddp; your cluster, if any, is unchanged",
            f"details: {details}\nawsddp status   # what still runs\nawsddp down     # terminate it",
        )
    )
