"""What this machine knows of its clusters, living and ended: their ledgers, and what they cost."""

import contextlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from awsddp import billing
from awsddp.errors import ConfigError
from awsddp.records import Frozen, Listed, widened
from awsddp.state import Folder, Record

if TYPE_CHECKING:
    from awsddp.cluster import Cluster


def bill_of(cluster: "Cluster", listed: Listed | None) -> billing.Bill | None:
    """Return the account of the cluster in the folder, now; None where this machine did not launch it.

    What AWS lists and the ledger lacks is written down first, so that no later account is smaller. Where
    nodes are spot, AWS is asked for the prices that held since they were launched.
    """
    if (record := cluster.known) is None:
        return None
    now = datetime.now(UTC)
    rows = read_rows(cluster.folder.ledger)
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
            cluster.folder.note(row.event, **row.facts | {"id": record.id})
    running = {node.instance_id for node in nodes if node.state in ("pending", "running")}
    return billing.account([*rows, *lacking], now, running=running)


def note_fetched(cluster: "Cluster", job: str, size: int) -> None:
    """Write down what it costs that so many bytes of a job left AWS, by the list price."""
    if size:
        from awsddp.compat.types import EGRESS_USD_PER_GB

        usd = size / 1e9 * EGRESS_USD_PER_GB
        with contextlib.suppress(ConfigError):  # no result waits for its price
            cluster.folder.note("fetched", id=cluster.record.id, job=job, bytes=size, usd=round(usd, 6))


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


def read_rows(ledger: Path) -> list[billing.Row]:
    """Return the rows of a ledger; none where there is none."""
    if not ledger.is_file():
        return []
    return billing.ledger_rows(ledger.read_text(encoding="utf-8", errors="replace"))


class Past(Frozen):
    """A cluster that this machine knows, living or ended: its name, its folder, the rows of its ledger.

    `record` is what the folder remembers, None once it has ended.
    """

    name: str
    folder: Path
    rows: list[billing.Row]
    record: Record | None = None

    @property
    def bill(self) -> billing.Bill | None:
        """The account by the ledger alone, now; None where nothing was launched."""
        return billing.account(self.rows, datetime.now(UTC))

    @property
    def launched(self) -> billing.Row | None:
        """The row of the first launch: the cluster's id, place and settings."""
        return next((row for row in self.rows if row.event == "launched"), None)

    @property
    def instances(self) -> set[str]:
        """The ids of all instances that it ever had."""
        return {key for row in self.rows if row.event == "launched" for key in row.instances}


def was_local(cluster: "Cluster") -> bool:
    """Return whether the last cluster of this name that this machine launched was in the local cloud."""
    own = [past.launched for past in pasts(cluster.home) if past.name == cluster.spec.name]
    last = max(filter(None, own), key=lambda row: row.time, default=None)
    return last is not None and last.target == "local"


def pasts(home: Path) -> Iterator[Past]:
    """Yield every cluster that this machine knows, those that have ended first; `home` is $AWSDDP_HOME."""
    for folder in sorted(home.glob("history/*")):
        yield Past(name=folder.name[:-9], folder=folder, rows=read_rows(folder / "ledger.jsonl"))
    for folder in sorted(home.glob("clusters/*")):
        yield living(Folder(home, folder.name))


def living(folder: Folder) -> Past:
    """Return the cluster of a folder that `down` has not retired."""
    record = folder.read(newer=True)
    return Past(name=folder.name, folder=folder.path, rows=read_rows(folder.ledger), record=record)
