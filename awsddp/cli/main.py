"""The entry point of the command line.

A verb's module is imported only when the verb is used, so that `awsddp --help` starts fast.
"""

import gc
import importlib
import os
import sys
from pathlib import Path

import click

from awsddp.cli.command_line import COMMAND, Globals, exit_now
from awsddp.cli.options import global_options, with_dashes
from awsddp.util.version import __version__

VERBS = {
    "init": ("overview", "Write a starter awsddp.toml."),
    "plan": ("cluster", "Show what `up` would do and cost. Changes nothing."),
    "up": ("cluster", "Launch and prepare the nodes; complete, repair or resize an existing cluster."),
    "status": ("cluster", "Show nodes, addresses, jobs, price, cost and time left."),
    "sync": ("node", "Send the project folder to every node."),
    "train": ("job", "Sync the project, start the ranks, stream their logs, fetch the results."),
    "recover": ("job", "Continue a job after a machine's fault, from its newest checkpoint."),
    "jobs": ("job", "List all jobs, with the cost of jobs and clusters."),
    "logs": ("job", "Show a job's logs; -f follows the job to its end and fetches its results."),
    "why": ("node", "Show where a running job hangs, or why one ended."),
    "cancel": ("job", "End a job, after time to save a checkpoint."),
    "fetch": ("job", "Fetch a job's results."),
    "exec": ("node", "Run a command on all nodes."),
    "ssh": ("node", "Open a shell on a node."),
    "doctor": ("node", "Check the requirements of a launch, or the nodes of a cluster."),
    "report": ("job", "Write an HTML page about a job: state, loss, ranks, cost."),
    "stop": ("cluster", "Stop the instances and keep their disks; `up` starts them again."),
    "down": ("cluster", "Fetch results, terminate everything, and show the cost."),
    "run": ("job", "Run up, train and down; the nodes are terminated even after a failure."),
    "local": ("local", "Control the local cloud, for rehearsals without an AWS account."),
}
"""Maps each verb to its module in cli/ and to its help line. The module defines a function with the verb's
name (`exec_` for exec)."""
_GH_RUN_VERBS = (["list"], ["watch"], ["view"])
"""Words that users type after `gh run`. For example, `awsddp run list` must not treat `list` as a script."""


class _Verbs(click.Group):
    """The verbs. A verb's module is imported when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"awsddp.cli.{VERBS[name][0]}")
        command: click.Command = getattr(module, "exec_" if name == "exec" else name)
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
        is_verb = args[0] in VERBS and not (args[0] == "run" and args[1:2] in _GH_RUN_VERBS)
        if not ctx.resilient_parsing and not is_verb and not args[0].startswith("-"):
            ctx.fail(f"Unknown command '{args[0]}'.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(
    cls=_Verbs,
    invoke_without_command=True,
    params=global_options(),
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "token_normalize_func": with_dashes,
    },
)
@click.version_option(__version__, message="awsddp %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a PyTorch model on N EC2 GPU nodes from your laptop, without a forgotten bill.

    \b
      awsddp run --local train.py --nodes 2 --instance-type g6.xlarge --budget 2
      awsddp run train.py --nodes 2 --instance-type g6.xlarge --budget 2

    With --local every command rehearses on this machine, without an AWS account.
    """
    if ctx.invoked_subcommand is None:
        from awsddp.cli.overview import show_overview

        show_overview(ctx.ensure_object(Globals))


def main() -> None:
    """Run the command line and exit with the documented code."""
    from awsddp.cli.failures import run_command, show_error

    _use_utf8()
    _open_streams()
    COMMAND.install_handlers(show_error)
    _start_light()
    exit_now(run_command(cli))


def _use_utf8() -> None:
    """Restart in Python's UTF-8 mode (PEP 540) if the locale's encoding cannot represent every file name."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # for child processes; -X overrides PYTHONUTF8=0
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Open the standard streams that are closed (`>&-`), so that no other file gets their file descriptors.

    A character that the locale or PYTHONIOENCODING cannot encode is printed as its escape.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if sys.flags.utf8_mode and "PYTHONIOENCODING" not in os.environ:
        _keep_encoding_of_terminal()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # as stderr is


def _keep_encoding_of_terminal() -> None:
    """Read and print in the encoding that Python chooses: the locale's, or UTF-8 if the locale's is ASCII."""
    import locale

    if (encoding := locale.getencoding()) not in ("utf-8", "UTF-8", "ANSI_X3.4-1968", "US-ASCII"):
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.reconfigure(encoding=encoding)  # type: ignore[union-attr]


def _start_light() -> None:
    """Save a quarter of the start-up time: collect garbage rarely, and do not import `invoke`."""
    # botocore's description of EC2 has about 100,000 objects, and none of them ever becomes garbage.
    gc.set_threshold(100_000)
    sys.modules["invoke"] = None  # type: ignore[assignment]  # paramiko needs it only for `Match exec`
