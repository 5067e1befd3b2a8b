"""`awsddp plan`: what `up` would do, before it costs anything."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("plan", cls=Verb)
@session.options_of(session.PLAN_OPTIONS)
def command(options: Globals, **given: Any) -> None:
    """Show what `up` would do, and what it would cost. Changes nothing."""
    from awsddp.cli.pages import plan_page
    from awsddp.plan import document
    from awsddp.verbs.plan import plan

    with session.opened(options, session.overrides(given)) as (ctx, show):
        made = plan(ctx)
        show.pause()
        screen.document(document(made)) if options.json else plan_page(made)
