"""`awsddp plan`, `up`, `status`, `stop`, `down`: a cluster, from its plan to its end."""

from typing import Any

import click

from awsddp.cli import invocation
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb
from awsddp.cli.pages import all_page, cluster_page, down_page, orphans_page
from awsddp.cli.plan_page import launch_question, offers_page, plan_page, settings_page

TERMINATION = ("Terminate?", "nothing was terminated")


@click.command("plan", cls=Verb)
@invocation.options_of("plan")
@click.option("--offers", is_flag=True, help="List every GPU type offered in the region, with prices.")
def plan(options: Globals, *, offers: bool, **given: Any) -> None:
    """Show what `up` would do and cost; with -v where each setting comes from. Changes nothing."""
    from awsddp.cluster.plan import offers as offered
    from awsddp.cluster.plan import plan, settings_of
    from awsddp.plan.records import document

    with invocation.opened(options, invocation.overrides(given)) as (session, show):
        if offers:
            show.result(offered(session), offers_page)
        else:
            launch = plan(session)
            show.result(document(launch), lambda _: plan_page(launch, verbose=bool(options.verbose)))
            if options.verbose:
                show.page(settings_of(session), settings_page)


@click.command("up", cls=Verb)
@invocation.options_of("up")
def up(options: Globals, **given: Any) -> None:
    """Launch the nodes and prepare them. Idempotent: finishes, repairs, resizes.

    Omitted options keep their values: `awsddp up --nodes 4` keeps the type, the image and the rest.
    """
    from awsddp.cluster.up import up

    with invocation.opened(options, invocation.overrides(given)) as (session, show):
        show.result(up(session, confirm=launch_question(show, session.spec)), cluster_page)


@click.command("status", cls=Verb)
@click.option(
    "--all", "all_", is_flag=True, help="Every cluster in every region, other owners' and orphans included."
)
def status(options: Globals, *, all_: bool) -> None:
    """Show nodes, addresses, jobs, price, cost and time left; with -v the idle time left on each node."""
    with invocation.opened(options) as (session, show):
        if all_:
            from awsddp.cluster.inventory import status_all

            show.result(status_all(session), all_page)
        else:
            from awsddp.cluster.status import status

            show.result(status(session, ask_nodes=options.verbose > 0), cluster_page)


@click.command("stop", cls=Verb)
def stop(options: Globals) -> None:
    """Stop the instances and keep their disks; `awsddp up` starts them again.

    Stopped instances cost nothing, their disks do, until `awsddp down`.
    """
    from awsddp.cluster.stop import stop

    with invocation.opened(options) as (session, show):
        confirm = show.question("Stop?", "nothing was stopped")
        show.result(stop(session, confirm=confirm), cluster_page)


@click.command("down", cls=Verb)
@click.option("--discard", is_flag=True, help="Terminate the nodes without fetching results first.")
@click.option("--orphans", is_flag=True, help="Terminate your resources that belong to no live cluster.")
def down(options: Globals, *, discard: bool, orphans: bool) -> None:
    """Terminate everything, wait until it is gone, and show the cost."""
    from awsddp.cluster.down import down
    from awsddp.cluster.inventory import down_orphans

    with invocation.opened(options) as (session, show):
        confirm, lose = show.question(*TERMINATION), show.loses
        if orphans:
            show.result(down_orphans(session, discard=discard, confirm=confirm), orphans_page)
            return
        unnamed = options.yes and not options.named
        ended = down(session, discard=discard, known_only=unnamed, confirm=confirm, lose=lose)
        show.result(ended, down_page)
