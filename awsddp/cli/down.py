"""`awsddp down`: terminate everything, and report success only when it is gone."""

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import down_page, orphans_page
from awsddp.cli.questions import loss_question

QUESTION = ("Terminate?", "nothing was terminated")


@click.command("down", cls=Verb)
@click.option("--discard", is_flag=True, help="Terminate the nodes without fetching results first.")
@click.option("--orphans", is_flag=True, help="Terminate your resources that belong to no live cluster.")
def command(options: Globals, *, discard: bool, orphans: bool) -> None:
    """Terminate everything, wait until it is gone, and show the cost."""
    from awsddp.verbs.down import down
    from awsddp.verbs.everywhere import down_orphans

    with session.opened(options) as (ctx, show):
        confirm, lose = show.question(*QUESTION), loss_question(show)
        if orphans:
            show.result(down_orphans(ctx, discard=discard, confirm=confirm), orphans_page)
            return
        unnamed = options.yes and not options.named
        show.result(down(ctx, discard=discard, known_only=unnamed, confirm=confirm, lose=lose), down_page)
