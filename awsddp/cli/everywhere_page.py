"""The pages about all clusters of an account, and about orphans."""

from typing import Any

from awsddp.cli.render import line, table
from awsddp.report import money


def all_page(found: list[dict[str, Any]]) -> None:
    """Show every cluster, ours first; orphans are named as such."""
    if not found:
        line("No resource carries awsddp's tags in any searched region.")
        return
    rows = [
        (
            one["cluster"],
            one["id"],
            one["region"],
            "orphan" if one["orphan"] else one["state"],
            "you" if one["mine"] else one["owner"],
            len(one["nodes"]),
            len(one["leftovers"]),
            money(one["price_usd_per_hour"]),
            (one["expires"] or "")[:16].replace("T", " "),
        )
        for one in found
    ]
    table(("cluster", "id", "region", "state", "owner", "nodes", "others", "per hour", "expires, UTC"), rows)
    if any(one["orphan"] for one in found):
        line("Terminate the orphans: awsddp down --orphans")


def orphans_page(ended: dict[str, Any]) -> None:
    """Show how many orphans were ended."""
    count = len(ended["clusters"])
    line(f"{count} orphan{'s' * (count != 1)} terminated. Searched: {', '.join(ended['looked'])}.")
