"""`awsddp sync`: the working folder, to every node."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import sync_page


@click.command("sync", cls=Verb)
@session.options_of({key: session.JOB_OPTIONS[key] for key in ("sync.workdir",)})
@click.option("--dry-run", is_flag=True, help="Show what would be sent; send nothing.")
def command(options: Globals, *, dry_run: bool, **given: Any) -> None:
    """Send the working folder to every node. Files made on a node are never deleted.

    If a job is running, whose files would change under it, a question comes first.
    """
    from awsddp.verbs.sync import sync

    with session.opened(options, session.overrides(given)) as (ctx, show):
        confirm = show.question("Send the files anyway?", "nothing was sent")
        show.result(sync(ctx, dry_run=dry_run, confirm=confirm), sync_page)
