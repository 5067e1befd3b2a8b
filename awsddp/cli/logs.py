"""`awsddp logs`: a job's lines again."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("logs", cls=Verb)
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Follow to the job's end, then bring its results home.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, job: str | None, follow: bool) -> None:
    """Show the lines of JOB (the last one by default), from its first line on."""
    from awsddp.cli.pages import job_page
    from awsddp.verbs.logs import logs

    with session.opened(options) as (context, show):
        result = logs(context, job=job, follow=follow, on_lines=show.lines)
        show.pause()
        screen.document(result) if options.json else job_page(result)
    ctx.exit(0 if not follow or result["state"] == "succeeded" else 1)
