"""`awsddp` without a verb: the known clusters and the next commands."""

from typing import Any

from awsddp.cli import session
from awsddp.cli.options import Globals
from awsddp.cli.render import line
from awsddp.report import money

_FIRST = """\
No clusters on this machine yet. To begin:

  awsddp run --local -y      rehearse everything here: no AWS account, no cost
  awsddp plan                show two nodes on EC2 and their price
  awsddp up                  launch them; then: awsddp train, awsddp down
  awsddp init                write a starter awsddp.toml into this folder
"""


def show_home(options: Globals) -> None:
    """Show the clusters that this machine knows, and the next commands for each."""
    from awsddp.verbs.home import home

    with session.opened(options) as (ctx, show):
        show.result(home(ctx), home_page)


def home_page(result: dict[str, Any]) -> None:
    """Show the clusters of `home`, or how to start."""
    for cluster in result["clusters"]:
        for text in _lines(cluster):
            line(text)
    if not result["clusters"]:
        print(_FIRST)
    if result["local_cloud"]:
        line("The local cloud is running: awsddp local status, awsddp local stop")
    line("All commands: awsddp --help")


def _lines(cluster: dict[str, Any]) -> list[str]:
    name = "" if cluster["cluster"] == "default" else f" -c {cluster['cluster']}"
    where = "the local cloud" if cluster["target"] == "local" else cluster["region"]
    cost = "" if cluster["target"] == "local" else f", {money(cluster['price_usd_per_hour'])} per hour"
    until = "expired at" if cluster["expired"] else "expires at"
    running = [job["job"] for job in cluster["jobs"] if job["state"] == "running"]
    work = [f"  job {job} was running when last seen: awsddp{name} logs -f {job}" for job in running]
    return [
        f"Cluster {cluster['cluster']}: {cluster['nodes']} x {cluster['instance_type']} in {where}{cost}; "
        f"{until} {cluster['expires']}",
        *work,
        f"  awsddp{name} status   # its current state",
        f"  awsddp{name} train    # run a job on it",
        f"  awsddp{name} down     # terminate it",
    ]
