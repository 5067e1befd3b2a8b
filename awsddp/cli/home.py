"""`awsddp` alone: what there is, and what to type next."""

from typing import Any

from awsddp.cli import screen, session
from awsddp.cli.options import Globals
from awsddp.cli.tables import line
from awsddp.report import money

_FIRST = """\
No cluster is known on this machine. To begin:

  awsddp run --local -y      rehearse the whole way here: no AWS account, no cost
  awsddp plan                what two nodes on EC2 would be, and cost
  awsddp up                  launch them; then: awsddp train, awsddp down
  awsddp init                a starter awsddp.toml for this folder
"""


def show_home(options: Globals) -> None:
    """Show the clusters that this machine knows, and the next words for each."""
    from awsddp.verbs.home import home

    with session.opened(options) as (ctx, _):
        result = home(ctx)
    if options.json:
        screen.document(result)
        return
    for cluster in result["clusters"]:
        for text in _lines(cluster):
            line(text)
    if not result["clusters"]:
        print(_FIRST)
    if result["local_cloud"]:
        line("The local cloud runs. awsddp local status shows it, awsddp local stop ends it.")
    line("All verbs: awsddp --help")


def _lines(cluster: dict[str, Any]) -> list[str]:
    name = "" if cluster["cluster"] == "default" else f" -c {cluster['cluster']}"
    where = "the local cloud" if cluster["target"] == "local" else cluster["region"]
    cost = "" if cluster["target"] == "local" else f", {money(cluster['price_usd_per_hour'])} an hour"
    until = "was to end itself at" if cluster["expired"] else "ends itself at"
    running = [job["job"] for job in cluster["jobs"] if job["state"] == "running"]
    work = [f"  job {job} ran when last seen: awsddp{name} logs -f {job}" for job in running]
    return [
        f"Cluster {cluster['cluster']}: {cluster['nodes']} x {cluster['instance_type']} in {where}{cost}; "
        f"{until} {cluster['expires']}",
        *work,
        f"  awsddp{name} status   # as it is now",
        f"  awsddp{name} train    # a job on it",
        f"  awsddp{name} down     # end it",
    ]
