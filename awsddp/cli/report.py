"""`awsddp report`: a page about a job, or about money."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("report", cls=Verb)
@click.argument("job", required=False)
@click.option("--cost", is_flag=True, help="What every cluster of this machine cost, instead.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, cost: bool) -> None:
    """Show how JOB (the newest) went: its ranks, its cause of failure, its results at home."""
    from awsddp.cli.pages import cost_page, report_page
    from awsddp.verbs.costs import costs
    from awsddp.verbs.report import report

    if cost and job:
        raise click.UsageError("--cost is about all clusters, not about one job.", ctx)
    with session.opened(options) as (context, show):
        result = costs(context) if cost else report(context, job=job)
        show.pause()
        if options.json:
            screen.document(result)
        else:
            cost_page(result) if cost else report_page(result)
