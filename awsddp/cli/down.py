"""`awsddp down`: end everything, and say so only when it is gone."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("down", cls=Verb)
@click.option("--discard", is_flag=True, help="End the nodes without bringing results home first.")
@click.option("--orphans", is_flag=True, help="End what is yours and belongs to no cluster that lives.")
def command(options: Globals, *, discard: bool, orphans: bool) -> None:
    """End everything, wait until it is gone, and say what it cost."""
    from awsddp.cli.everywhere_page import orphans_page
    from awsddp.cli.pages import down_page
    from awsddp.cli.questions import down_question, loss_question
    from awsddp.verbs.down import down
    from awsddp.verbs.everywhere import down_orphans

    with session.opened(options) as (ctx, show):
        if orphans:
            ended = down_orphans(ctx, confirm=down_question(options, show))
            show.pause()
            screen.document(ended) if options.json else orphans_page(ended)
            return
        ask, lose = down_question(options, show), loss_question(options, show)
        unnamed = options.yes and not options.named
        result = down(ctx, discard=discard, known_only=unnamed, confirm=ask, lose=lose)
        show.pause()
        screen.document(result) if options.json else down_page(result)
