"""`awsddp plan`: what `up` would do, before it costs anything."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("plan", cls=Verb)
@session.options_of(session.PLAN_OPTIONS)
@click.option("--offers", is_flag=True, help="List every type with GPUs to be had here, with its price.")
def command(options: Globals, *, offers: bool, **given: Any) -> None:
    """Show what `up` would do, and what it would cost. Changes nothing."""
    from awsddp.cli.plan_page import offers_page, plan_page
    from awsddp.plan import document
    from awsddp.verbs import plan as verb

    with session.opened(options, session.overrides(given)) as (ctx, show):
        if offers:
            found = verb.offers(ctx)
            show.pause()
            screen.document(found) if options.json else offers_page(found)
            return
        made = verb.plan(ctx)
        show.pause()
        screen.document(document(made)) if options.json else plan_page(made)
