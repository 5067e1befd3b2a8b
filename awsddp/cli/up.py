"""`awsddp up`: plan, ask, do."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import cluster_page
from awsddp.cli.questions import launch_question


@click.command("up", cls=Verb)
@session.options_of("up")
def command(options: Globals, **given: Any) -> None:
    """Launch the nodes and prepare them. Idempotent: finishes, repairs, resizes.

    Omitted options keep their values: `awsddp up --nodes 4` keeps the type, the image and the rest.
    """
    from awsddp.verbs.up import up

    with session.opened(options, session.overrides(given)) as (ctx, show):
        show.result(up(ctx, confirm=launch_question(show, ctx.spec)), cluster_page)
