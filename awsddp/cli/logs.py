"""`awsddp logs`: a job's lines again."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("logs", cls=Verb)
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow to the job's end, then bring its results home.")
@click.option("--rank", "ranks", type=int, multiple=True, metavar="N", help="This rank's lines (repeatable).")
@click.option("--node", "nodes", type=int, multiple=True, metavar="N", help="This node's (repeatable).")
@click.option("--since", metavar="TIME", help="What was said since: 10m, 2h, 14:30, 2026-11-21T14:30.")
@click.option("--grep", metavar="PATTERN", help="Lines that match this regular expression.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, follow: bool, **given: Any) -> None:
    """Show the lines of JOB (the last one by default), from its first line on."""
    from awsddp.cli.pages import job_page
    from awsddp.verbs.logs import Shown, logs

    with session.opened(options) as (context, show):
        with screen.told_first(options, show, job_page):
            result = logs(context, job=job, follow=follow, shown=Shown(**given), on_lines=show.lines)
        show.pause()
        screen.document(result) if options.json else job_page(result)
    ctx.exit(0 if not follow or result["state"] == "succeeded" else 1)
