"""`awsddp run`: up, train, home, down in one."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals
from awsddp.cli.train import Launch, job_overrides


@click.command("run", cls=Launch)
@click.argument("script", required=False)
@session.options_of(session.PLAN_OPTIONS, session.JOB_OPTIONS)
@click.option("--detach", is_flag=True, help="Leave once the ranks run; the nodes end themselves afterwards.")
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """up, train and down in one: whatever happens, nothing is left on the way out.

    With --detach the nodes end 10 minutes (--idle) after the job: stopped while they hold results, which
    `awsddp fetch` starts again, else terminated.
    """
    from awsddp.cli.pages import run_page
    from awsddp.cli.questions import launch_question
    from awsddp.verbs.run import run

    with session.opened(options, job_overrides(given)) as (context, show):
        confirm = launch_question(options, show, context.spec)
        result = run(context, confirm=confirm, on_lines=show.lines, detach=detach)
        show.pause()
        if not options.json:
            run_page(result)
        elif result.error is None:
            screen.document(result.document())
    if result.error is not None:
        result.error.result = result.document()
        raise result.error
    ctx.exit(0 if detach or result.succeeded else 1)
