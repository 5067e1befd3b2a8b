"""`awsddp cancel`: end a job."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("cancel", cls=Verb)
@click.argument("job", required=False)
def command(options: Globals, *, job: str | None) -> None:
    """End JOB (the last one that runs): a TERM, `job.grace` to save what it has, then a KILL.

    What it made stays on the nodes until `awsddp fetch`; a client that follows it brings it home.
    """
    from awsddp.cli.pages import job_page
    from awsddp.verbs.cancel import cancel

    with session.opened(options) as (ctx, show):
        result = cancel(ctx, job=job)
        show.pause()
        screen.document(result) if options.json else job_page(result)
