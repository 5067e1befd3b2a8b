"""`awsddp down`: end everything, and say so only when it is gone."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("down", cls=Verb)
@click.option("--discard", is_flag=True, help="End the nodes without bringing results home first.")
def command(options: Globals, *, discard: bool) -> None:
    """End everything, wait until it is gone, and say what it cost."""
    from awsddp.cli.pages import down_page
    from awsddp.cli.questions import down_question
    from awsddp.verbs.down import down

    with session.opened(options) as (ctx, show):
        result = down(ctx, discard=discard, confirm=down_question(options, show))
        show.pause()
        screen.document(result) if options.json else down_page(result)
