"""`awsddp report`: a page about a job or all jobs, or about cost."""

from pathlib import Path

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import cost_page, report_page, reports_page


@click.command("report", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
@click.option("--cost", is_flag=True, help="Show what every cluster of this machine cost instead.")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the page there.  [default: runs/JOB/report.html]",
)
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, cost: bool, to: Path | None) -> None:
    """Summarize JOB, also as one HTML file: its timeline, metrics, cause of failure, cost, last lines.

    Without JOB: a table of all jobs of all clusters of this machine, and a page that links to theirs.
    """
    from awsddp.verbs.costs import costs
    from awsddp.verbs.report import report, reports

    if cost and (job or to):
        raise click.UsageError("--cost covers all clusters; it takes no job and writes no page.", ctx)
    with session.opened(options) as (context, show):
        if cost:
            show.result(costs(context), cost_page)
        elif job:
            show.result(report(context, job=job, to=to), report_page)
        else:
            rows, page = reports(context, to=to)
            show.result(rows, reports_page)
            show.say(f"page: {page}")
