"""`awsddp status`: what there is, and what it costs."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("status", cls=Verb)
def command(options: Globals) -> None:
    """Nodes, addresses, jobs, price, cost and time left."""
    from awsddp.cli.pages import cluster_page
    from awsddp.verbs.status import status

    with session.opened(options) as (ctx, show):
        result = status(ctx)
        show.pause()
        screen.document(result) if options.json else cluster_page(result)
