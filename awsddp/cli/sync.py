"""`awsddp sync`: the working folder, to every node."""

from functools import partial

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import sync_page


@click.command("sync", cls=Verb)
def command(options: Globals) -> None:
    """Send the working folder to every node; with -v show what that holds, and what stays here.

    Files made on a node are never deleted. If a job is running, whose files would change under it, a question
    comes first.
    """
    from awsddp.verbs.sync import sync

    with session.opened(options) as (ctx, show):
        confirm = show.question("Send the files anyway?", "nothing was sent")
        show.result(sync(ctx, confirm=confirm), partial(sync_page, verbose=options.verbose > 0))
