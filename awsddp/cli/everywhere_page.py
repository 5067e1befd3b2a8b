"""What a person reads of all clusters: whose they are, what they cost, and what was ended."""

from typing import Any

from awsddp.cli.tables import line, table
from awsddp.report import money


def all_page(found: list[dict[str, Any]]) -> None:
    """Show every cluster, ours first; orphans are named as such."""
    if not found:
        line("Nothing carries awsddp's tags, in any region that was looked in.")
        return
    rows = [
        (
            one["cluster"],
            one["id"],
            one["region"],
            "orphan" if one["orphan"] else one["state"],
            "yours" if one["mine"] else f"of {one['owner']}",
            len(one["nodes"]),
            len(one["leftovers"]),
            money(one["price_usd_per_hour"]),
            one["expires"],
        )
        for one in found
    ]
    table(("cluster", "id", "region", "state", "whose", "nodes", "beside", "an hour", "expires"), rows)
    if any(one["orphan"] for one in found):
        line("End the orphans: awsddp down --orphans")


def orphans_page(ended: dict[str, Any]) -> None:
    """Show how many orphans were ended."""
    count = len(ended["clusters"])
    line(f"{count} orphan{'s' * (count != 1)} ended. Looked in: {', '.join(ended['looked'])}.")
