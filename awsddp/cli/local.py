"""`awsddp local`: the local cloud by hand."""

import re
from pathlib import Path
from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb, VerbGroup
from awsddp.errors import ConfigError, NotFoundError, UsageError


@click.group("local", cls=VerbGroup)
def command() -> None:
    """The local cloud: EC2 and real hosts on this machine, for rehearsals and tests.

    `--local` starts it by itself. Started by hand it stays until `awsddp local stop`.
    """


@command.command("start", cls=Verb)
@click.option("--no-hosts", "mode", flag_value="records", help="Records only: nothing boots.")
@click.option("--loopback", "mode", flag_value="loopback", help="Hosts without root: an sshd each.")
@click.option(
    "--share",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Show this folder, read-only, in every node that boots from now on (repeatable).",
)
def start(options: Globals, mode: str | None, share: tuple[Path, ...]) -> None:
    """Start the local cloud's daemon, where it does not run."""
    from awsddp.cli.pages import local_page
    from awsddp.verbs import local

    with session.opened(options) as (ctx, show):
        result = local.start(ctx.home, on_event=ctx.on_event, mode=mode, share=share)
        show.pause()
        screen.document(result) if options.json else local_page(result)


@command.command("status", cls=Verb)
def status(options: Globals) -> None:
    """Endpoint, credentials, mode, instances and faults."""
    from awsddp.cli.pages import local_page
    from awsddp.verbs import local

    with session.opened(options) as (ctx, _):
        result: dict[str, Any] | None = local.status(ctx.home)
        if result is None:
            raise NotFoundError(
                "no local cloud runs", f"{Path(local.home(ctx.home))} has none", "awsddp local start"
            )
        screen.document(result) if options.json else local_page(result)


@command.command("stop", cls=Verb)
def stop(options: Globals) -> None:
    """End the daemon, its instances, and everything it made on this machine."""
    from awsddp.verbs import local

    with session.opened(options) as (ctx, _):
        existed = local.stop(ctx.home)
        if options.json:
            screen.document({"stopped": existed})
        else:
            screen.say(
                options, "The local cloud is stopped, nothing is left." if existed else "No local cloud ran."
            )


@command.group("fault", cls=VerbGroup)
def fault() -> None:
    """Faults on purpose: calls of the EC2 API that go wrong, and nodes that do."""


@fault.command("add", cls=Verb)
@click.argument("what")
@click.argument("effect")
@click.option("--for", "lasts", metavar="TIME", help="Heal by itself: 30s, 5m.  [default: until cleared]")
@click.option("--times", type=click.IntRange(min=1), metavar="N", help="Strike N times.  [default: always]")
@click.option("--seconds", type=float, metavar="S", help="Of delay, late and stale.  [default: 5]")
@click.option("--only", metavar="WORD", help="Strike calls with this value: a zone, a type, an id.")
def fault_add(options: Globals, what: str, effect: str, lasts: str | None, **given: Any) -> None:
    """Let something go wrong with WHAT: an operation of the API (`*`: any), or a node.

    Of an operation, EFFECT is an error code of EC2's (InsufficientInstanceCapacity, RequestLimitExceeded),
    or: `delay`, late before it takes effect; `late`, late after it; `cut`, no connection and no effect;
    `lost`, the reply lost after the effect; `stale`, answered as things were some seconds ago.

    A node is an instance id, or `node1` of the cluster. EFFECT is `cut`, no packet in or out; `one-way`, what
    it sends is dropped; `frozen`, nothing runs in it; `full-disk`, no space left; or `reboot` or `poweroff`,
    once, as from inside.
    """
    from awsddp.verbs import local

    choices: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    with session.opened(options) as (ctx, _):
        if lasts is not None:
            choices["for_s"] = _seconds(lasts)
        if number := re.fullmatch(r"node(\d{1,4})", what):
            what = local.instance_of(ctx.home, options.name, int(number[1]))
        _show(options, local.fault_add(ctx.home, what, effect, **choices))


@fault.command("list", cls=Verb)
def fault_list(options: Globals) -> None:
    """List the faults in force, with their numbers."""
    from awsddp.verbs import local

    with session.opened(options) as (ctx, _):
        _show(options, local.faults(ctx.home))


@fault.command("clear", cls=Verb)
@click.argument("number", type=int, required=False)
def fault_clear(options: Globals, number: int | None) -> None:
    """Take the fault NUMBER away; without it all."""
    from awsddp.verbs import local

    with session.opened(options) as (ctx, _):
        _show(options, local.fault_clear(ctx.home, number))


def _seconds(text: str) -> float:
    """Return the seconds of `--for`. Raises UsageError."""
    from awsddp.spec import seconds

    try:
        return seconds(text)
    except ConfigError:
        raise UsageError(f"--for: {text!r} is no duration", "", "write it as 30s, 5m or 1h") from None


def _show(options: Globals, faults: list[dict[str, Any]]) -> None:
    from awsddp.cli.pages import faults_page

    screen.document(faults) if options.json else faults_page(faults)
