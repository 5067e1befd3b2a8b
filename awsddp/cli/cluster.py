"""The commands `awsddp plan`, `up`, `status`, `stop` and `down`."""

from typing import Any

import click

from awsddp.cli import invocation
from awsddp.cli.command_line import Globals
from awsddp.cli.options import Verb
from awsddp.cli.pages import cluster_page, clusters_page, down_page, orphans_page
from awsddp.cli.plan_page import launch_question, offers_page, plan_page, settings_page

TERMINATION = ("Terminate?", "nothing was terminated")


@click.command("plan", cls=Verb)
@invocation.add_options("plan")
@click.option("--offers", is_flag=True, help="List every GPU type offered in the region, with prices.")
def plan(options: Globals, *, offers: bool, **values: Any) -> None:
    """Show what `up` would do and cost, and with -v the source of each setting. Nothing is changed."""
    from awsddp.cluster.plan import find_offers as list_offers
    from awsddp.cluster.plan import list_plan_settings, plan
    from awsddp.plan.records import plan_to_document

    with invocation.opened(options, invocation.read_overrides(values)) as (session, show):
        if offers:
            show.result(list_offers(session), offers_page)
        else:
            launch = plan(session)
            show.result(plan_to_document(launch), lambda _: plan_page(launch, verbose=bool(options.verbose)))
            if options.verbose:
                show.page(list_plan_settings(session), settings_page)


@click.command("up", cls=Verb)
@invocation.add_options("up")
def up(options: Globals, **values: Any) -> None:
    """Launch the nodes and prepare them; complete, repair or resize an existing cluster.

    The command can be repeated without harm. Omitted options keep their values: `awsddp up --nodes 4` keeps
    the instance type, the image and so on.
    """
    from awsddp.cluster.up import up

    with invocation.opened(options, invocation.read_overrides(values)) as (session, show):
        show.result(up(session, confirm=launch_question(show, session.spec)), cluster_page)


@click.command("status", cls=Verb)
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Show every cluster in every region, including other owners' clusters and orphans.",
)
def status(options: Globals, *, all_: bool) -> None:
    """Show nodes, addresses, jobs, price, cost and time left, and with -v each node's idle time left."""
    with invocation.opened(options) as (session, show):
        if all_:
            from awsddp.cluster.inventory import status_all

            show.result(status_all(session), clusters_page)
        else:
            from awsddp.cluster.status import status

            show.result(status(session, ask_nodes=options.verbose > 0), cluster_page)


@click.command("stop", cls=Verb)
def stop(options: Globals) -> None:
    """Stop the instances and keep their disks; `awsddp up` starts them again.

    Stopped instances cost nothing; their disks cost money until `awsddp down`.
    """
    from awsddp.cluster.stop import stop

    with invocation.opened(options) as (session, show):
        confirm = show.question("Stop?", "nothing was stopped")
        show.result(stop(session, confirm=confirm), cluster_page)


@click.command("down", cls=Verb)
@click.option("--discard", is_flag=True, help="Terminate the nodes without fetching results first.")
@click.option(
    "--orphans", is_flag=True, help="Terminate your resources that do not belong to a live cluster."
)
def down(options: Globals, *, discard: bool, orphans: bool) -> None:
    """Fetch the results, terminate everything, wait until it is gone, and show the cost."""
    from awsddp.cluster.down import down
    from awsddp.cluster.inventory import down_orphans

    with invocation.opened(options) as (session, show):
        confirm, lose = show.question(*TERMINATION), show.confirm_loss
        if orphans:
            show.result(down_orphans(session, discard=discard, confirm=confirm), orphans_page)
            return
        unnamed = options.yes and not options.is_named
        document = down(session, discard=discard, known_only=unnamed, confirm=confirm, lose=lose)
        show.result(document, down_page)
