"""`awsddp stop`: machines off, disks kept."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("stop", cls=Verb)
def command(options: Globals) -> None:
    """Stop the machines and keep their disks; `awsddp up` starts them again.

    Stopped machines cost nothing, their disks do, until `awsddp down`.
    """
    from awsddp.cli.pages import cluster_page
    from awsddp.cli.questions import stop_question
    from awsddp.verbs.stop import stop

    with session.opened(options) as (ctx, show):
        result = stop(ctx, confirm=stop_question(options, show))
        show.pause()
        screen.document(result) if options.json else cluster_page(result)
