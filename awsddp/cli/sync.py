"""`awsddp sync`: the working folder, to every node."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("sync", cls=Verb)
@session.options_of({key: session.JOB_OPTIONS[key] for key in ("sync.workdir",)})
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
def command(options: Globals, *, dry_run: bool, **given: Any) -> None:
    """Send the working folder to every node. What a node made itself is never deleted.

    Where a job runs, whose files would change under it, it asks first.
    """
    from awsddp.cli.pages import sync_page
    from awsddp.cli.questions import sync_question
    from awsddp.verbs.sync import sync

    with session.opened(options, session.overrides(given)) as (ctx, show):
        result = sync(ctx, dry_run=dry_run, confirm=sync_question(options, show))
        show.pause()
        screen.document(result) if options.json else sync_page(result)
