"""`awsddp report`: a page about a job."""

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import report_page


@click.command("report", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
def command(options: Globals, *, job: str | None) -> None:
    """Write JOB (the last one) as one HTML file: state, cause, loss, ranks, cost, how to run it again."""
    from awsddp.verbs.report import report

    with session.opened(options) as (context, show):
        show.result(report(context, job=job), report_page)
