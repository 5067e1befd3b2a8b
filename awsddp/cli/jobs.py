"""`awsddp jobs`: the running and ended jobs, and what they cost."""

import functools

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import jobs_page


@click.command("jobs", cls=Verb)
def command(options: Globals) -> None:
    """List the jobs of this machine's clusters, also of ended ones, and what they cost; those of the cluster
    as its nodes report them. -v: with what they run and each rank's progress.
    """
    from awsddp.verbs.jobs import jobs

    page = functools.partial(jobs_page, verbose=options.verbose > 0)
    with session.opened(options) as (ctx, show), show.partial(page):
        show.result(jobs(ctx), page)
