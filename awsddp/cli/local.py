"""`awsddp local`: control the local cloud."""

import dataclasses
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb, global_options
from awsddp.cli.pages import faults_page, local_page
from awsddp.cli.screen import Screen
from awsddp.errors import ConfigError, UsageError
from awsddp.spec import seconds
from awsddp.verbs import local
from awsddp.verbs.context import Context


@click.group("local", params=global_options(hidden=True))
def command() -> None:
    """The local cloud: EC2 and real hosts on this machine, for rehearsals and tests.

    `--local` starts it when needed. Started by this command it runs until `awsddp local stop`.
    """


@command.command("start", cls=Verb)
@click.option("--no-hosts", "mode", flag_value="records", help="Records only: nothing boots.")
@click.option("--loopback", "mode", flag_value="loopback", help="Hosts without root: one sshd each.")
@click.option(
    "--share",
    multiple=True,
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Mount this folder read-only on every node that boots from now on (repeatable).",
)
def start(options: Globals, mode: str | None, share: tuple[Path, ...]) -> None:
    """Start the local cloud's daemon unless it is running."""
    with _opened(options) as (ctx, show):
        show.result(local.start(ctx.home, mode=mode, share=share), local_page)


@command.command("status", cls=Verb)
def status(options: Globals) -> None:
    """Endpoint, credentials, mode, instances and faults."""
    with _opened(options) as (ctx, show):
        show.result(local.status(ctx.home), local_page)


@command.command("stop", cls=Verb)
def stop(options: Globals) -> None:
    """Stop the daemon, its instances, and all that it made here."""
    with _opened(options) as (ctx, show):
        existed = local.stop(ctx.home)
        text = "Local cloud stopped, nothing is left." if existed else "No local cloud was running."
        show.result({"stopped": existed}, lambda _: show.say(text))


@command.group("fault", params=global_options(hidden=True))
def fault() -> None:
    """Inject faults into EC2 API calls and nodes."""


@fault.command("add", cls=Verb)
@click.argument("what")
@click.argument("effect")
@click.option("--for", "lasts", metavar="TIME", help="Duration: 30s, 5m.  [default: until cleared]")
@click.option("--times", type=click.IntRange(min=1), metavar="N", help="Only N times.  [default: always]")
@click.option("--seconds", type=float, metavar="S", help="For delay, late and stale.  [default: 5]")
@click.option("--notice", metavar="TIME", help="For reclaim: how long before the end.  [default: 2m]")
@click.option("--only", metavar="WORD", help="Only calls with this value: a zone, a type, an id.")
def fault_add(
    options: Globals, what: str, effect: str, lasts: str | None, notice: str | None, **given: Any
) -> None:
    """Inject a fault into WHAT: an API operation (`*`: any) or a node.

    For an operation, EFFECT is an EC2 error code (InsufficientInstanceCapacity, RequestLimitExceeded),
    or: `delay`, late before it takes effect; `late`, late after it; `cut`, no connection and no effect;
    `lost`, the reply lost after the effect; `stale`, the answer of some seconds ago.

    A node is an instance id, or `node1` of the cluster. EFFECT is `cut`, no packet in or out; `one-way`,
    outgoing packets dropped; `slow-network` and `slow-cpu`; `frozen`, nothing runs; `full-disk`, no space
    left; `oom`, almost no memory left; `clock`, 2 minutes ahead; `hostkey`, another host key; or once:
    `reboot` or `poweroff`, as from inside; `reclaim`, EC2 takes a spot node back, after a notice.
    """
    choices: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with _opened(options) as (ctx, show):
        if lasts is not None:
            choices["for_s"] = _seconds(lasts, "--for")
        if notice is not None:
            choices["notice_s"] = _seconds(notice, "--notice")
        if number := re.fullmatch(r"node(\d{1,4})", what):
            what = local.instance_of(ctx.home, options.name, int(number[1]))
        show.result(local.fault_add(ctx.home, what, effect, **choices), faults_page)


@fault.command("list", cls=Verb)
def fault_list(options: Globals) -> None:
    """List the active faults with their numbers."""
    with _opened(options) as (ctx, show):
        show.result(local.status(ctx.home)["faults"], faults_page)


@fault.command("clear", cls=Verb)
@click.argument("number", type=int, required=False)
def fault_clear(options: Globals, number: int | None) -> None:
    """Remove fault NUMBER; without it all faults."""
    with _opened(options) as (ctx, show):
        show.result(local.fault_clear(ctx.home, number), faults_page)


def _opened(options: Globals) -> AbstractContextManager[tuple[Context, Screen]]:
    """Open a verb that is about the local cloud and no cluster in it."""
    return session.opened(dataclasses.replace(options, local=True))


def _seconds(text: str, option: str) -> float:
    """Return the seconds that an option has. Raises UsageError."""
    try:
        return seconds(text)
    except ConfigError:
        raise UsageError(f"{option}: invalid duration {text!r}", "", "use 30s, 5m or 1h") from None
