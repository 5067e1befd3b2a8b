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
@click.option("--rank", "ranks", type=int, multiple=True, metavar="N", help="Only this rank (repeatable).")
@click.option("--node", "nodes", type=int, multiple=True, metavar="N", help="Only this node (repeatable).")
@click.option("--since", metavar="TIME", help="Only lines since: 10m, 2h, 14:30, 2026-11-21T14:30.")
@click.option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, follow: bool, **given: Any) -> None:
    """Show the log lines of JOB (default: the last one)."""
    from awsddp.verbs.logs import Shown, logs

    with session.opened(options) as (context, show):
        with show.partial(job_page):
            result = logs(context, job=job, follow=follow, shown=Shown(**given), on_lines=show.lines)
        show.result(result, job_page)
    ctx.exit(0 if not follow or result["state"] == "succeeded" else 1)
