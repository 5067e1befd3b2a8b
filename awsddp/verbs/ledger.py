"""What a cluster costs by the ledger in its folder, completed by what AWS lists."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp import billing
from awsddp.errors import ConfigError
from awsddp.records import Listed
from awsddp.report import json_lines
from awsddp.state import Folder, Record
from awsddp.verbs.context import Context

if TYPE_CHECKING:
    from awsddp.aws.session import Aws


def bill_of(
    ctx: Context, record: Record | None, cluster: Listed | None, aws: "Aws | None" = None
) -> billing.Bill | None:
    """Return the account of the cluster in the folder, now; None where this machine did not launch it.

    What AWS lists and the ledger lacks is written down first, so that no later account is smaller. Where
    nodes are spot, `aws` is asked for the prices that held since they were launched.
    """
    if record is None:
        return None
    now = datetime.now(UTC)
    rows = read_rows(ctx.folder.ledger)
    listed = cluster.nodes if cluster is not None and cluster.id == record.id else None
    nodes = listed or ()
    lacking = billing.unwritten(billing.account(rows, now), listed, launched=launched(record), now=now)
    spot = [node.launched for node in nodes if node.spot and node.launched]
    if aws is not None and spot:
        from awsddp.aws.prices import spot_history

        history = spot_history(aws, {node.instance_type for node in nodes}, since=min(spot))
        lacking += billing.repriced(rows, nodes, history)
    for row in lacking:
        event = str(row.pop("event"))
        with contextlib.suppress(ConfigError):  # a full disk here hides no price
            ctx.folder.note(event, id=record.id, **row)
        rows.append({"event": event, "time": now.isoformat(), "id": record.id, **row})
    running = {node.instance_id for node in nodes if node.state in ("pending", "running")}
    return billing.account(rows, now, running=running)


def note_fetched(ctx: Context, record: Record, job: str, size: int) -> None:
    """Write down what it costs that so many bytes of a job left AWS, by the list price."""
    if size:
        from awsddp.compat.types import EGRESS_USD_PER_GB

        usd = size / 1e9 * EGRESS_USD_PER_GB
        with contextlib.suppress(ConfigError):  # no result waits for its price
            ctx.folder.note("fetched", id=record.id, job=job, bytes=size, usd=round(usd, 6))


def launched(record: Record) -> dict[str, Any]:
    """Return what the ledger's row of a launch says of the cluster: its machines, rates of a node, expiry."""
    price, disk = record.price_usd_per_hour, record.disk_usd_per_hour
    return {
        "target": record.target.name,
        "region": record.target.region,
        "instance_type": record.instance_type,
        "nodes": record.nodes,
        "node_usd_per_hour": None if price is None else round(price / record.nodes - disk, 6),
        "disk_usd_per_hour": disk,
        "expires": record.expires.isoformat(),
        "asked": record.asked,
    }


def read_rows(ledger: Path) -> list[Mapping[str, Any]]:
    """Return the rows of a ledger; none where there is none."""
    if not ledger.is_file():
        return []
    return [
        row
        for row in json_lines(ledger.read_text(encoding="utf-8", errors="replace"))
        if "time" in row and "event" in row
    ]


@dataclass(frozen=True, kw_only=True)
class Past:
    """A cluster that this machine knows, living or ended: its name, its folder, the rows of its ledger.

    `record` is what the folder remembers, None once it has ended.
    """

    name: str
    folder: Path
    rows: list[Mapping[str, Any]]
    record: Record | None = None

    @property
    def bill(self) -> billing.Bill | None:
        """The account by the ledger alone, now; None where nothing was launched."""
        return billing.account(self.rows, datetime.now(UTC))

    @property
    def launched(self) -> Mapping[str, Any]:
        """The row of the first launch: the cluster's id, place and settings; empty without one."""
        return next((row for row in self.rows if row["event"] == "launched"), {})

    @property
    def instances(self) -> set[str]:
        """The ids of all instances that it ever had."""
        return {key for row in self.rows if row["event"] == "launched" for key in row.get("instances", ())}


def was_local(ctx: Context) -> bool:
    """Return whether the last cluster of this name that this machine launched was in the local cloud."""
    launches = [past.launched for past in pasts(ctx.home) if past.name == ctx.spec.name and past.launched]
    return max(launches, key=lambda row: str(row["time"]), default={}).get("target") == "local"


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
