"""`awsddp jobs`: the running and ended jobs."""

import functools

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import jobs_page


@click.command("jobs", cls=Verb)
def command(options: Globals) -> None:
    """List the cluster's jobs, as its nodes report them; -v: with what they run and each rank's progress."""
    from awsddp.verbs.jobs import jobs

    with session.opened(options) as (ctx, show):
        show.result(jobs(ctx), functools.partial(jobs_page, verbose=options.verbose > 0))
