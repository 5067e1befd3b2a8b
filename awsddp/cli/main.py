"""The entry point of the command line.

A verb's file is imported only when the verb is used, so that `awsddp --help` costs little more than click.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import click

from awsddp.cli.command_line import WATCH, Globals, leave
from awsddp.cli.options import dashed, global_options
from awsddp.util.version import __version__

VERBS = {
    "init": ("overview", "Write a starter awsddp.toml."),
    "plan": ("cluster", "Show what `up` would do and cost. Changes nothing."),
    "up": ("cluster", "Launch and prepare the nodes. Idempotent: finishes, repairs, resizes."),
    "status": ("cluster", "Show nodes, addresses, jobs, price, cost and time left."),
    "sync": ("node", "Send the working folder to every node."),
    "train": ("job", "Sync, launch the ranks, stream their logs, fetch the results."),
    "jobs": ("job", "List all jobs and what they and their clusters cost."),
    "logs": ("job", "Show a job's logs; -f follows the job to its end and fetches its results."),
    "why": ("node", "Show where a running job hangs, or why one ended."),
    "cancel": ("job", "End a job; it gets time to save a checkpoint."),
    "fetch": ("job", "Fetch a job's results."),
    "exec": ("node", "Run a command on all nodes."),
    "ssh": ("node", "Open a shell on a node."),
    "doctor": ("node", "Check what a launch needs, or the nodes of a cluster."),
    "report": ("job", "Write a page about a job: its state, loss, ranks, cost."),
    "stop": ("cluster", "Stop the instances, keep their disks; `up` starts them again."),
    "down": ("cluster", "Terminate everything, wait until it is gone, and show the cost."),
    "run": ("job", "up, train and down in one: nothing is left, whatever happens."),
    "local": ("local", "The local cloud: a rehearsal without an AWS account."),
}
"""Each verb's file in cli/, where it is a function, and its line on `awsddp --help`."""
_NO_SCRIPTS = (["list"], ["watch"], ["view"])
"""What follows the `run` of gh."""


class _Verbs(click.Group):
    """The verbs, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"awsddp.cli.{VERBS[name][0]}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] == "help":
            args = [*args[1:], "--help"]
        if args[0] == "--help":
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.meta["awsddp.words"] = tuple(args)
        is_known = args[0] in VERBS and not (args[0] == "run" and args[1:2] in _NO_SCRIPTS)
        if not ctx.resilient_parsing and not is_known and not args[0].startswith("-"):
            ctx.fail(f"Unknown command '{args[0]}'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, help) for name, (_, help) in VERBS.items()])


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    params=global_options(),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": dashed,
    },
)
@click.version_option(__version__, message="awsddp %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """From a laptop to a trained model on N GPU nodes of EC2, and never a forgotten bill.

    \b
      awsddp run --local train.py --nodes 2 --instance-type g6.xlarge --budget 2
      awsddp run train.py --nodes 2 --instance-type g6.xlarge --budget 2

    With --local every command rehearses on this machine, without an AWS account.
    """
    if ctx.invoked_subcommand is None:
        from awsddp.cli.overview import show_home

        show_home(ctx.ensure_object(Globals))


def main() -> None:
    """Run the command line and exit with the documented code."""
    from awsddp.cli.failures import run, show

    _use_utf8()
    _open_streams()
    WATCH.install(show)
    _start_light()
    leave(run(cli))


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode where the locale cannot write every file name (PEP 540)."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for programs that we start; -X goes before a PYTHONUTF8=0
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Open what we were started without (`>&-`), so that no file of ours is taken for it.

    A character that the locale or PYTHONIOENCODING cannot write is printed as its escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if sys.flags.utf8_mode and "PYTHONIOENCODING" not in os.environ:
        _keep_encoding_of_terminal()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # as stderr is


def _keep_encoding_of_terminal() -> None:
    """Read and print in the locale's encoding; in UTF-8 where that is ASCII, as Python does by itself."""
    import locale

    if (encoding := locale.getencoding()) not in ("utf-8", "UTF-8", "ANSI_X3.4-1968", "US-ASCII"):
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding=encoding)  # type: ignore[union-attr]


def _start_light() -> None:
    """Spare each command a quarter of its start: what a short-lived process does not need."""
    gc.set_threshold(100_000)  # the description of EC2 alone is that many objects, and none is garbage
    sys.modules["invoke"] = None  # type: ignore[assignment]  # paramiko runs without; we use no `Match exec`
