"""`awsddp status`: what there is, and what it costs."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("status", cls=Verb)
@click.option("--all", "all_", is_flag=True, help="Every cluster in every region, others' and orphans too.")
def command(options: Globals, *, all_: bool) -> None:
    """Nodes, addresses, jobs, price, cost and time left; with -v the idle time left on each node."""
    from awsddp.cli.everywhere_page import all_page
    from awsddp.cli.pages import cluster_page
    from awsddp.verbs.everywhere import status_all
    from awsddp.verbs.status import status

    with session.opened(options) as (ctx, show):
        if all_:
            found = status_all(ctx)
            show.pause()
            screen.document(found) if options.json else all_page(found)
            return
        result = status(ctx, ask_nodes=options.verbose > 0)
        show.pause()
        screen.document(result) if options.json else cluster_page(result)
