"""The options that every verb takes, before or after it, and what the shell completes.

Completions are read from this machine's files, AWS is not asked.
"""

import dataclasses
import functools
import shlex
from typing import Any

import click
from click.shell_completion import CompletionItem

from awsddp.cli.command_line import WATCH, Globals


def clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the clusters that this machine knows."""
    from awsddp.state import home

    names = sorted(path.parent.name for path in home().glob("clusters/*/cluster.json"))
    return [name for name in names if name.startswith(incomplete)]


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the jobs of the cluster that have this in their name, as last seen, the newest first."""
    from awsddp.state import Folder, home

    record = Folder(home(), ctx.ensure_object(Globals).name).read(newer=True)
    found = [job.job for job in reversed(record.jobs)] if record is not None else []
    return [job for job in found if incomplete in job]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell itself offer files: scripts, requirements."""
    return [CompletionItem(incomplete, type="file")]


def instance_types(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the instance types with GPUs that awsddp knows."""
    from awsddp.compat.types import GPU_TYPES

    return sorted(name for name in GPU_TYPES if name.startswith(incomplete))


def dashed(name: str) -> str:
    """Return an option's name with dashes: torchrun's `--nproc_per_node` is `--nproc-per-node`."""
    return name.replace("_", "-")


def global_options(*, hidden: bool = False) -> list[click.Parameter]:
    """Return the global options, as parameters of a command; what they have is in `ctx.obj`."""
    option = functools.partial(click.Option, hidden=hidden, expose_value=False, callback=_keep)
    which = "Which cluster.  [default: default]"
    return [
        option(["-c", "--cluster"], metavar="NAME", help=which, shell_complete=clusters),
        option(["--region"], metavar="REGION", help="AWS region."),
        option(["--profile"], metavar="NAME", help="AWS profile."),
        option(["--local"], is_flag=True, help="Rehearse on this machine: no AWS account, no cost."),
        option(
            ["-o", "override"], metavar="SECTION.KEY=VALUE", multiple=True, help="Any key of awsddp.toml."
        ),
        option(["--json"], is_flag=True, help="One JSON document on stdout, events as JSON lines on stderr."),
        option(["-q", "--quiet"], is_flag=True, help="Only results and errors."),
        option(["-v", "--verbose"], count=True, help="More detail; -vv shows tracebacks."),
        option(["-y", "--yes"], is_flag=True, help="Answer yes to every question."),
    ]


def _keep(ctx: click.Context, option: click.Option, value: Any) -> None:
    """Lay an option that is given over those given before the verb; -o and -v add up."""
    options, name = ctx.ensure_object(Globals), str(option.name)
    if option.multiple or option.count:
        value = getattr(options, name) + value
    if value:
        ctx.obj = dataclasses.replace(options, **{name: value})


_GO_ON = ("down", "stop", "fetch", "cancel", "sync")
"""Verbs that, typed again once they were interrupted, do the rest."""


class Verb(click.Command):
    """A verb's command: it takes the global options too and is called with all of them as `options`.

    Its help page lists its own options; the global ones are on `awsddp --help`. On an interrupt a verb that
    `finishes` ends its job first, and one that `ends_cluster` is only left by a second Ctrl-C.
    """

    finishes = False
    ends_cluster = False

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("epilog", "Global options (-c, --local, --json, -y, ...): awsddp --help")
        super().__init__(*args, **settings)
        self.params += global_options(hidden=True)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb with the global options given before and after it."""
        options = ctx.params["options"] = ctx.ensure_object(Globals)
        WATCH.options, WATCH.finishes, WATCH.ends_cluster = options, self.finishes, self.ends_cluster
        words = ["awsddp", str(self.name), *ctx.params.get("names", ())]
        WATCH.again = shlex.join(words) if self.name in _GO_ON else ""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:  # click would forget which one it was
            raise WATCH.interrupted(stop) from None
