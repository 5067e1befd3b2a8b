"""`awsddp stop`: machines off, disks kept."""

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import cluster_page


@click.command("stop", cls=Verb)
def command(options: Globals) -> None:
    """Stop the instances and keep their disks; `awsddp up` starts them again.

    Stopped instances cost nothing, their disks do, until `awsddp down`.
    """
    from awsddp.verbs.stop import stop

    with session.opened(options) as (ctx, show):
        confirm = show.question("Stop?", "nothing was stopped")
        show.result(stop(ctx, confirm=confirm), cluster_page)
