"""`awsddp plan`: what `up` would do, before it costs anything."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.plan_page import offers_page, plan_page, settings_page


@click.command("plan", cls=Verb)
@session.options_of("plan")
@click.option("--offers", is_flag=True, help="List every GPU type offered in the region, with prices.")
def command(options: Globals, *, offers: bool, **given: Any) -> None:
    """Show what `up` would do and cost; with -v where each setting comes from. Changes nothing."""
    from awsddp.plan.document import document
    from awsddp.verbs import plan as verb

    with session.opened(options, session.overrides(given)) as (ctx, show):
        if offers:
            show.result(verb.offers(ctx), offers_page)
        else:
            show.result(verb.plan(ctx), plan_page, document=document)
            if options.verbose:
                show.page(verb.settings_of(ctx), settings_page)
