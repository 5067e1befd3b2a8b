"""`awsddp run`: up, train, fetch and down in one."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.completion import files
from awsddp.cli.options import Globals
from awsddp.cli.pages import run_page
from awsddp.cli.questions import launch_question
from awsddp.cli.train import Launch, job_overrides

_SHOWN = (
    "nodes instance_type gpus spot budget_usd expires world_size nproc_per_node outputs name timeout detach"
)


class Run(Launch):
    """Takes every option of `up` and `train`; its help page shows the usual ones."""

    ends_cluster = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for param in self.params:
            if isinstance(param, click.Option) and param.name not in _SHOWN.split():
                param.hidden = True


@click.command("run", cls=Run)
@click.argument("script", required=False, shell_complete=files)
@session.options_of("run")
@click.option(
    "--detach", is_flag=True, help="Return once the ranks run; the nodes end themselves afterwards."
)
@click.pass_context
def command(ctx: click.Context, /, options: Globals, *, detach: bool, **given: Any) -> None:
    """up, train and down in one: nothing is left, whatever happens.

    Takes every option of `awsddp up` and `awsddp train`; see their --help for the rest.
    With --detach the nodes end 10 minutes (--idle) after the job: stopped while they hold results, which
    `awsddp fetch` starts again, else terminated.
    """
    from awsddp.verbs.run import RunResult, run

    with session.opened(options, job_overrides(given), verb="run") as (context, show):
        confirm = launch_question(show, context.spec)
        result = run(context, confirm=confirm, on_lines=show.lines, detach=detach)
        if not options.json or result.error is None:
            show.result(result, run_page, document=RunResult.document)
    if result.error is not None:
        result.error.result = result.document()
        raise result.error
    ctx.exit(0 if detach or result.succeeded else 1)
