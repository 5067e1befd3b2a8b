"""report --cost: what this machine's clusters cost, by their ledgers."""

from datetime import UTC, datetime
from typing import Any

from awsddp import billing
from awsddp.verbs.context import Context
from awsddp.verbs.ledger import pasts


def costs(ctx: Context) -> dict[str, Any]:
    """Return what each cluster of this machine cost by the list price, and their total on AWS.

    Clusters of the local cloud cost nothing; what they would have cost on EC2 is a total of its own.
    """
    now = datetime.now(UTC)
    bills = []
    for past in pasts(ctx.home):
        bill = billing.account(past.rows, now)
        if bill is not None:
            bills.append({"cluster": past.name, **bill.document()})
    bills.sort(key=lambda bill: bill["from"])
    return {
        "clusters": bills,
        "total_usd": _total(bills, "aws"),
        "would_have_cost_usd": _total(bills, "local"),
    }


def _total(bills: list[dict[str, Any]], target: str) -> float:
    return round(sum(bill["cost_usd"] or 0.0 for bill in bills if bill["target"] == target), 2)
