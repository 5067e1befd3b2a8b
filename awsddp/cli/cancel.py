"""`awsddp cancel`: end a job."""

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import job_page


@click.command("cancel", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
def command(options: Globals, *, job: str | None) -> None:
    """End JOB (default: the last one running): SIGTERM, then SIGKILL after `job.grace`.

    Its results stay on the nodes until `awsddp fetch`; a client that follows the job fetches them.
    """
    from awsddp.verbs.cancel import cancel

    with session.opened(options) as (ctx, show):
        show.result(cancel(ctx, job=job), job_page)
