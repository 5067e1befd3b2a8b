"""`awsddp local`: the local cloud by hand."""

from pathlib import Path
from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb
from awsddp.errors import NotFoundError


@click.group("local")
def command() -> None:
    """The local cloud: EC2 and real hosts on this machine, for rehearsals and tests.

    `--local` starts it by itself. Started by hand it stays until `awsddp local stop`.
    """


@command.command("start", cls=Verb)
def start(options: Globals) -> None:
    """Start the local cloud's daemon, where it does not run."""
    from awsddp.cli.pages import local_page
    from awsddp.verbs import local

    with session.opened(options) as (ctx, show):
        result = local.start(ctx.home, on_event=ctx.on_event)
        show.pause()
        screen.document(result) if options.json else local_page(result)


@command.command("status", cls=Verb)
def status(options: Globals) -> None:
    """Endpoint, credentials, mode and instances."""
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
