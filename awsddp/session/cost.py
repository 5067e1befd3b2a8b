"""Compute a cluster's cost from its ledger and from what AWS lists."""

import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime

from awsddp.errors import ConfigError
from awsddp.model import billing
from awsddp.model.records import ClusterListing, merge_records
from awsddp.session.context import LocatedCluster
from awsddp.state import Record, read_ledger


def compute_bill(cluster: LocatedCluster, listed: ClusterListing | None) -> billing.Bill | None:
    """Return the cluster's bill until now, or None if this machine has no record of the cluster.

    Appends changes that AWS lists and the ledger lacks to the ledger, so that no later bill is smaller. For
    spot nodes, the prices since the launch are requested from AWS.
    """
    if (record := cluster.local_record) is None:
        return None
    now = datetime.now(UTC)
    rows = read_ledger(cluster.session.folder.ledger)
    own_nodes = listed.nodes if listed is not None and listed.id == record.id else None
    nodes = own_nodes or ()
    missing = billing.find_missing_rows(
        billing.make_bill(rows, now), own_nodes, launch_row=make_launch_row(record), now=now
    )
    spot = [node.launched for node in nodes if node.spot and node.launched]
    if spot:
        from awsddp.aws.prices import read_spot_history

        history = read_spot_history(cluster.aws, {node.instance_type for node in nodes}, since=min(spot))
        missing += billing.make_price_rows(rows, nodes, history, now=now)
    for row in missing:
        with contextlib.suppress(ConfigError):  # A full disk must not hide the price.
            cluster.session.folder.append_event(row.event, **row.written_fields | {"id": record.id})
    running = {node.instance_id for node in nodes if node.state in ("pending", "running")}
    return billing.make_bill([*rows, *missing], now, running=running)


def record_fetch_cost(cluster: LocatedCluster, job: str, size: int) -> None:
    """Append the list price of downloading `size` bytes of a job's results from AWS to the ledger."""
    if size:
        from awsddp.compat.types import EGRESS_USD_PER_GB

        usd = size / 1e9 * EGRESS_USD_PER_GB
        with contextlib.suppress(ConfigError):  # a full disk must not stop a fetch
            cluster.session.folder.append_event(
                "fetched", id=cluster.record.id, job=job, bytes=size, usd=round(usd, 6)
            )


def make_launch_row(record: Record, instances: Iterable[str] = ()) -> billing.LedgerRow:
    """Return the ledger's row for a launch of these instances, with their rates and expiry."""
    price, disk = record.price_usd_per_hour, record.disk_usd_per_hour
    return merge_records(
        billing.LedgerRow,
        record,
        record.target,
        time=datetime.now(UTC),
        event="launched",
        instances=tuple(instances),
        target=record.target.name,
        node_usd_per_hour=None if price is None else round(price / record.nodes - disk, 6),
    )
