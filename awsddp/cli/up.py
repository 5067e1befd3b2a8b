"""`awsddp up`: plan, ask, do."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("up", cls=Verb)
@session.options_of(session.PLAN_OPTIONS)
def command(options: Globals, **given: Any) -> None:
    """Launch the nodes and prepare them. Run again, it finishes what was interrupted, or changes nothing."""
    from awsddp.cli.pages import cluster_page
    from awsddp.cli.questions import launch_question
    from awsddp.verbs.up import up

    with session.opened(options, session.overrides(given)) as (ctx, show):
        result = up(ctx, confirm=launch_question(options, show))
        show.pause()
        screen.document(result) if options.json else cluster_page(result)
