"""What a cluster has cost: its ledger, completed by what AWS lists."""

import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime

from awsddp.errors import ConfigError
from awsddp.model import billing
from awsddp.model.records import Listed, widened
from awsddp.session.context import LocatedCluster
from awsddp.state import Record, read_rows


def bill_of(cluster: LocatedCluster, listed: Listed | None) -> billing.Bill | None:
    """Return the account of the cluster in the folder, now; None where this machine did not launch it.

    What AWS lists and the ledger lacks is written down first, so that no later account is smaller. Where
    nodes are spot, AWS is asked for the prices that held since they were launched.
    """
    if (record := cluster.known) is None:
        return None
    now = datetime.now(UTC)
    rows = read_rows(cluster.session.folder.ledger)
    own = listed.nodes if listed is not None and listed.id == record.id else None
    nodes = own or ()
    lacking = billing.unwritten(billing.account(rows, now), own, launched=launched(record), now=now)
    spot = [node.launched for node in nodes if node.spot and node.launched]
    if spot:
        from awsddp.aws.prices import spot_history

        history = spot_history(cluster.aws, {node.instance_type for node in nodes}, since=min(spot))
        lacking += billing.repriced(rows, nodes, history, now=now)
    for row in lacking:
        with contextlib.suppress(ConfigError):  # a full disk here hides no price
            cluster.session.folder.note(row.event, **row.facts | {"id": record.id})
    running = {node.instance_id for node in nodes if node.state in ("pending", "running")}
    return billing.account([*rows, *lacking], now, running=running)


def note_fetched(cluster: LocatedCluster, job: str, size: int) -> None:
    """Write down what it costs that so many bytes of a job left AWS, by the list price."""
    if size:
        from awsddp.compat.types import EGRESS_USD_PER_GB

        usd = size / 1e9 * EGRESS_USD_PER_GB
        with contextlib.suppress(ConfigError):  # no result waits for its price
            cluster.session.folder.note(
                "fetched", id=cluster.record.id, job=job, bytes=size, usd=round(usd, 6)
            )


def launched(record: Record, instances: Iterable[str] = ()) -> billing.Row:
    """Return the ledger's row of a launch of the cluster: its machines, rates of a node, expiry."""
    price, disk = record.price_usd_per_hour, record.disk_usd_per_hour
    return widened(
        billing.Row,
        record,
        record.target,
        time=datetime.now(UTC),
        event="launched",
        instances=tuple(instances),
        target=record.target.name,
        node_usd_per_hour=None if price is None else round(price / record.nodes - disk, 6),
    )
