"""The global options, which can precede or follow the verb, and the shell completions.

Completions are read from this machine's files, without calls to AWS.
"""

import dataclasses
import functools
import shlex
from typing import Any

import click
from click.shell_completion import CompletionItem

from awsddp.cli.command_line import COMMAND, Globals


def complete_clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the clusters that have a record on this machine."""
    from awsddp.state import awsddp_home

    names = sorted(path.parent.name for path in awsddp_home().glob("clusters/*/cluster.json"))
    return [name for name in names if name.startswith(incomplete)]


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the cluster's recorded jobs whose names contain `incomplete`, newest first."""
    from awsddp.state import ClusterFolder, awsddp_home

    record = ClusterFolder(awsddp_home(), ctx.ensure_object(Globals).name).read(ignore_newer=True)
    names = [job.job for job in reversed(record.jobs)] if record is not None else []
    return [name for name in names if incomplete in name]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete file names."""
    return [CompletionItem(incomplete, type="file")]


def complete_instance_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the instance types with GPUs that awsddp supports."""
    from awsddp.compat.types import GPU_TYPES

    return sorted(name for name in GPU_TYPES if name.startswith(incomplete))


def with_dashes(name: str) -> str:
    """Return an option's name with dashes: `--nproc-per-node` for torchrun's `--nproc_per_node`."""
    return name.replace("_", "-")


def global_options(*, hidden: bool = False) -> list[click.Parameter]:
    """Return the global options as a command's parameters. click stores the options' values in `ctx.obj`."""
    option = functools.partial(click.Option, hidden=hidden, expose_value=False, callback=_store)
    cluster_help = "Name of the cluster.  [default: default]"
    return [
        option(["-c", "--cluster"], metavar="NAME", help=cluster_help, shell_complete=complete_clusters),
        option(["--region"], metavar="REGION", help="AWS region."),
        option(["--profile"], metavar="NAME", help="AWS profile."),
        option(["--local"], is_flag=True, help="Rehearse on this machine: no AWS account, no cost."),
        option(
            ["-o", "override"], metavar="SECTION.KEY=VALUE", multiple=True, help="Set a key of awsddp.toml."
        ),
        option(
            ["--json"],
            is_flag=True,
            help="Print one JSON document on stdout, and events as JSON lines on stderr.",
        ),
        option(["-q", "--quiet"], is_flag=True, help="Print only results and errors."),
        option(["-v", "--verbose"], count=True, help="Print more details; -vv also prints tracebacks."),
        option(["-y", "--yes"], is_flag=True, help="Answer yes to every question."),
    ]


def _store(ctx: click.Context, option: click.Option, value: Any) -> None:
    """Store an option in `ctx.obj`.

    An option after the verb replaces the same option before the verb, but -o and -v accumulate.
    """
    options, name = ctx.ensure_object(Globals), str(option.name)
    if option.multiple or option.count:
        value = getattr(options, name) + value
    if value:
        ctx.obj = dataclasses.replace(options, **{name: value})


_RESUMABLE = ("down", "stop", "fetch", "cancel", "sync", "recover")
"""Verbs that continue their interrupted work if the user types them again."""


class Verb(click.Command):
    """A verb's command, which also takes the global options and receives them as `options`.

    The verb's help page lists only the verb's own options; `awsddp --help` lists the global options. After an
    interrupt, a verb with `finishes` first ends its job and then exits. A verb with `ends_cluster` exits at
    once after a second Ctrl-C, but not after any other second signal.
    """

    finishes = False
    ends_cluster = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("epilog", "Global options (-c, --local, --json, -y, ...): awsddp --help")
        super().__init__(*args, **settings)
        self.params += global_options(hidden=True)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb with the global options that precede and follow it."""
        options = ctx.params["options"] = ctx.ensure_object(Globals)
        COMMAND.options, COMMAND.finishes, COMMAND.ends_cluster = options, self.finishes, self.ends_cluster
        names = ctx.params.get("names") or filter(None, [ctx.params.get("job")])
        words = ["awsddp", str(self.name), *names]
        COMMAND.rerun_command = shlex.join(words) if self.name in _RESUMABLE else ""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # click would replace it with its own Abort
            raise COMMAND.interrupt_error(stop) from None
