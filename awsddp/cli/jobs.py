"""`awsddp jobs`: what runs and what ran."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("jobs", cls=Verb)
def command(options: Globals) -> None:
    """List the cluster's jobs, as its nodes know them; -v: with what they run and each rank's progress."""
    from awsddp.cli.pages import jobs_page
    from awsddp.verbs.jobs import jobs

    with session.opened(options) as (ctx, show):
        result = jobs(ctx)
        show.pause()
        screen.document(result) if options.json else jobs_page(result, verbose=options.verbose > 0)
