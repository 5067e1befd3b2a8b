"""`awsddp logs`: a job's log lines."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import job_page


@click.command("logs", cls=Verb)
@click.argument("job", required=False, shell_complete=jobs)
@click.option("-f", "--follow", is_flag=True, help="Follow to the job's end, then fetch its results.")
@click.option(
    "-n",
    "last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the last N lines, and with -f what follows.",
)
@click.option("--rank", "ranks", type=int, multiple=True, metavar="N", help="Only this rank (repeatable).")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, follow: bool, **given: Any) -> None:
    """Show the log lines of JOB (default: the last one).

    The last lines of several ranks are about equally many of each.
    """
    from awsddp.verbs.logs import logs

    with session.opened(options) as (context, show):
        with show.partial(job_page):
            result = logs(context, job=job, follow=follow, on_lines=show.lines, **given)
        show.result(result, job_page)
    ctx.exit(0 if not follow or result["state"] == "succeeded" else 1)
