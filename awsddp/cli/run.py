"""`awsddp run`: up, train, home, down in one."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals
from awsddp.cli.train import Launch, job_overrides


@click.command("run", cls=Launch)
@click.argument("script", required=False)
@session.options_of(session.PLAN_OPTIONS, session.JOB_OPTIONS)
@click.pass_context
def command(ctx: click.Context, /, options: Globals, **given: Any) -> None:
    """up, train and down in one: whatever happens, nothing is left on the way out."""
    from awsddp.cli.pages import run_page
    from awsddp.cli.questions import launch_question
    from awsddp.verbs.run import run

    with session.opened(options, job_overrides(given)) as (context, show):
        result = run(context, confirm=launch_question(options, show, context.spec), on_lines=show.lines)
        show.pause()
        if not options.json:
            run_page(result)
        elif result.error is None:
            screen.document(result.document())
    if result.error is not None:
        result.error.result = result.document()
        raise result.error
    ctx.exit(0 if result.succeeded else 1)
