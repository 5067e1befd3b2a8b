"""`awsddp up`: plan, ask, do."""

from typing import Any

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("up", cls=Verb)
@session.options_of(session.PLAN_OPTIONS)
@click.option("--dry-run", is_flag=True, help="Ask AWS whether each call would be allowed; make nothing.")
def command(options: Globals, *, dry_run: bool, **given: Any) -> int:
    """Launch the nodes and prepare them. Run again it finishes, mends, resizes, or changes nothing.

    What is not said again stays as it is: `awsddp up --nodes 4` keeps type, image and all the rest.
    """
    from awsddp.cli.pages import cluster_page
    from awsddp.cli.plan_page import permissions_page
    from awsddp.cli.questions import launch_question
    from awsddp.verbs.up import up

    with session.opened(options, session.overrides(given)) as (ctx, show):
        if dry_run:
            from awsddp.verbs import doctor

            found = doctor.dry_run(ctx)
            show.pause()
            screen.document(found) if options.json else permissions_page(found)
            return 4 if any(one["answer"] in ("denied", "refused") for one in found["permissions"]) else 0
        result = up(ctx, confirm=launch_question(options, show, ctx.spec))
        show.pause()
        screen.document(result) if options.json else cluster_page(result)
        return 0
