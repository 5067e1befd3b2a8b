"""`awsddp jobs`: the running and ended jobs."""

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import jobs_page


@click.command("jobs", cls=Verb)
def command(options: Globals) -> None:
    """List the cluster's jobs, as its nodes report them."""
    from awsddp.verbs.jobs import jobs

    with session.opened(options) as (ctx, show):
        show.result(jobs(ctx), jobs_page)
