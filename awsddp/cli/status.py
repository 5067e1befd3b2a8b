"""`awsddp status`: the cluster and its cost."""

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import all_page, cluster_page


@click.command("status", cls=Verb)
@click.option(
    "--all", "all_", is_flag=True, help="Every cluster in every region, other owners' and orphans included."
)
def command(options: Globals, *, all_: bool) -> None:
    """Show nodes, addresses, jobs, price, cost and time left; with -v the idle time left on each node."""
    with session.opened(options) as (ctx, show):
        if all_:
            from awsddp.verbs.everywhere import status_all

            show.result(status_all(ctx), all_page)
        else:
            from awsddp.verbs.status import status

            show.result(status(ctx, ask_nodes=options.verbose > 0), cluster_page)
