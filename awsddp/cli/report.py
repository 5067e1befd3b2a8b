"""`awsddp report`: a page about a job, or about cost."""

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import cost_page, report_page


@click.command("report", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
@click.option("--cost", is_flag=True, help="Show what every cluster of this machine cost instead.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, cost: bool) -> None:
    """Summarize JOB (default: the newest): its ranks, its cause of failure, its fetched results."""
    from awsddp.verbs.costs import costs
    from awsddp.verbs.report import report

    if cost and job:
        raise click.UsageError("--cost covers all clusters and takes no job.", ctx)
    with session.opened(options) as (context, show):
        if cost:
            show.result(costs(context), cost_page)
        else:
            show.result(report(context, job=job), report_page)
