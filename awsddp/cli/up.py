"""`awsddp up`: plan, ask, do."""

from typing import Any

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.pages import cluster_page
from awsddp.cli.plan_page import permissions_page
from awsddp.cli.questions import launch_question


@click.command("up", cls=Verb)
@session.options_of(session.PLAN_OPTIONS)
@click.option("--dry-run", is_flag=True, help="Ask AWS whether each call would be allowed; create nothing.")
def command(options: Globals, *, dry_run: bool, **given: Any) -> int:
    """Launch the nodes and prepare them. Idempotent: finishes, repairs, resizes.

    Omitted options keep their values: `awsddp up --nodes 4` keeps the type, the image and the rest.
    """
    from awsddp.verbs.up import up

    with session.opened(options, session.overrides(given)) as (ctx, show):
        if dry_run:
            from awsddp.verbs import doctor

            result = doctor.dry_run(ctx)
            show.result(result, permissions_page)
            return 4 if any(one["answer"] in ("denied", "refused") for one in result["permissions"]) else 0
        show.result(up(ctx, confirm=launch_question(show, ctx.spec)), cluster_page)
        return 0
