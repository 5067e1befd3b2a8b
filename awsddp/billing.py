"""What a cluster costs, from its ledger: one account for `status`, `down` and `jobs`. Pure.

The ledger has a row for each change: "launched", "started", "stopped", "resized", "ended", "extended" (a new
expiry), "repriced" (a new spot price), "fetched" (bytes that left AWS). `time` is when the row was written,
`at` when it happened, where that is known better.

EC2 bills by the second, at least 60 of them at each start; a stopped instance costs its disk alone:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from awsddp.records import ENDED, Node
from awsddp.report import iso

LEAST = timedelta(seconds=60)
SETTLES = timedelta(minutes=10)
"""After this EC2 lists every instance that it launched, until an hour after its end."""
History = Mapping[tuple[str, str], Sequence[tuple[datetime, float]]]
"""Spot prices, US dollars per hour of one machine from a moment on, by instance type and zone."""


@dataclass
class _Meter:
    """The account of one instance. `rates` are US dollars per hour of the machine from a moment on (None: not
    known), `disk` is the rate of its disk; `ran` holds when the machine began to run and when it stopped.
    """

    rates: list[tuple[datetime, float | None]]
    disk: float
    exists: datetime | None
    runs: datetime | None
    expires: datetime | None
    disk_usd: float = 0.0
    ran: list[tuple[datetime, datetime]] = field(default_factory=list)

    def stop(self, at: datetime) -> None:
        """The machine stops; its disk stays."""
        if self.runs is not None:
            self.ran.append((self.runs, max(at, self.runs + LEAST)))
            self.runs = None

    def end(self, at: datetime) -> None:
        """The machine and its disk are gone."""
        self.stop(at)
        if self.exists is not None:
            self.disk_usd += max(0.0, _hours(self.exists, at)) * self.disk
            self.exists = None

    def rate(self, at: datetime) -> float | None:
        """Return what the machine costs per hour at a moment: the launch's rate until a price is known."""
        estimate, *prices = self.rates
        began = [usd for since, usd in sorted(prices, key=lambda one: one[0]) if since <= at]
        return began[-1] if began else estimate[1]

    @property
    def machine_usd(self) -> float:
        """What the machine cost, without its disk, until it stopped or ended."""
        total = 0.0
        for start, end in self.ran:
            changes = sorted(since for since, _ in self.rates if start < since < end)
            for span in pairwise((start, *changes, end)):
                total += _hours(*span) * (self.rate(span[0]) or 0.0)
        return total


@dataclass(frozen=True, kw_only=True)
class Bill:
    """A cluster's account. `began` and `ended` are UTC; `ended` is None while anything of it exists.

    `cost_usd` and `price_usd_per_hour` (of what runs or is kept now) are None where a price is not known.
    """

    id: str | None
    target: str
    region: str | None
    instance_type: str
    nodes: int
    began: datetime
    ended: datetime | None = None
    cost_usd: float | None = 0.0
    price_usd_per_hour: float | None = 0.0
    running: frozenset[str] = frozenset()
    stopped: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    """Those of `running` and `stopped` that EC2 lists, if they exist."""

    def document(self) -> dict[str, Any]:
        """Return the account as `jobs` shows it."""
        shown = asdict(self) | {"began": iso(self.began), "ended": iso(self.ended)}
        return {key: value for key, value in shown.items() if key not in _INSTANCES}


_INSTANCES = ("running", "stopped", "settled")


@dataclass
class _Account:
    """The meters of all instances, by id, while the rows are read."""

    first: dict[str, Any]
    began: datetime
    meters: dict[str, _Meter] = field(default_factory=dict)
    egress_usd: float = 0.0
    ended: datetime | None = None

    def read(self, row: Mapping[str, Any], at: datetime) -> None:
        chosen = [self.meters[key] for key in row.get("instances") or self.meters if key in self.meters]
        match row.get("event"):
            case "launched":
                facts = ("target", "region", "instance_type", "nodes")
                self.first |= {key: row[key] for key in facts if key in row}
                self.ended = None
                disk, expires = row.get("disk_usd_per_hour", 0.0), _moment(row.get("expires"))
                for key in row.get("instances", ()):  # a `status` beside `up` may have written it before
                    rates = [(at, row.get("node_usd_per_hour"))]
                    self.meters.setdefault(key, _Meter(rates, disk, at, at, expires))
            case "started":
                for meter in chosen:
                    if meter.runs is None and meter.exists is not None:
                        meter.runs, meter.expires = at, _moment(row.get("expires")) or meter.expires
            case "stopped":
                for meter in chosen:
                    meter.stop(at)
            case "resized" | "ended" as event:
                for meter in chosen:
                    meter.end(at)
                self.ended = at if event == "ended" else self.ended
            case "extended":
                for meter in chosen:
                    meter.expires = _moment(row.get("expires"))
            case "repriced":
                for meter in chosen:
                    meter.rates.append((at, float(row["node_usd_per_hour"])))
            case "fetched":
                self.egress_usd += float(row.get("usd", 0.0))


def account(
    rows: Iterable[Mapping[str, Any]], now: datetime, *, running: Collection[str] = ()
) -> Bill | None:
    """Return what a ledger says that its cluster cost until `now`; None where it never launched anything.

    An instance that was last seen running, and that AWS does not name among those `running` now, is counted
    until its expiry at the latest, when it ends itself.
    """
    made: _Account | None = None
    for row in rows:
        at = _when(row)
        if made is None and row.get("event") == "launched":
            made = _Account(first={"id": row.get("id")}, began=at)
        if made is not None and row.get("id", made.first["id"]) == made.first["id"]:
            made.read(row, at)
    if made is None:
        return None
    meters = made.meters
    runs = frozenset(key for key, meter in meters.items() if meter.runs is not None)
    exists = frozenset(key for key, meter in meters.items() if meter.exists is not None)
    settled = frozenset(key for key in exists if meters[key].rates[0][0] <= now - SETTLES)
    known = all(meter.rate(now) is not None for meter in meters.values())
    price = sum((m.rate(now) or 0.0) if m.runs else 0.0 for m in meters.values())
    price += sum(m.disk if m.exists else 0.0 for m in meters.values())
    for key, meter in meters.items():
        late = key not in running and meter.expires is not None and meter.expires < now
        until = meter.expires if late and meter.expires is not None else now
        meter.stop(max(until, meter.runs) if meter.runs else until)
        meter.end(now if not late or key not in runs else until)
    cost = made.egress_usd + sum(meter.machine_usd + meter.disk_usd for meter in meters.values())
    return Bill(
        id=made.first["id"],
        target=str(made.first.get("target", "aws")),
        region=made.first.get("region"),
        instance_type=str(made.first.get("instance_type", "")),
        nodes=int(made.first.get("nodes", len(meters))),
        began=made.began,
        ended=made.ended,
        cost_usd=round(cost, 2) if known else None,
        price_usd_per_hour=round(price, 4) if known else None,
        running=runs,
        stopped=exists - runs,
        settled=settled,
    )


def unwritten(
    bill: Bill | None, nodes: Sequence[Node] | None, *, launched: Mapping[str, Any], now: datetime
) -> list[dict[str, Any]]:
    """Return the rows that the ledger lacks, by what AWS lists: launches, starts, stops and ends unseen here.

    `nodes` are all of the cluster (None: AWS was not asked). What is not among them any more ended over an
    hour ago; when is not known, so that it is counted until now, or its expiry. `launched` are the facts of a
    launch that was cut off before its row was written.
    """
    if nodes is None:
        return []
    rows: list[dict[str, Any]] = []
    if bill is not None and (unlisted := bill.settled - {node.instance_id for node in nodes}):
        until = min(now, _moment(launched.get("expires")) or now)
        rows.append({"event": "resized", "instances": sorted(unlisted), "at": until.isoformat()})
    known = (bill.running | bill.stopped) if bill else frozenset()
    for node in nodes:
        gone = node.state in ENDED
        at = node.changed or now
        row = {"instances": [node.instance_id], "at": at.isoformat()}
        if node.instance_id not in known:
            if not gone:
                began = (node.launched or now).isoformat()
                rows.append({"event": "launched", **launched, **row, "at": began})
        elif gone:
            rows.append({"event": "resized", **row})
        elif node.instance_id in (bill.running if bill else ()) and node.state in ("stopping", "stopped"):
            rows.append({"event": "stopped", **row})
        elif node.instance_id in (bill.stopped if bill else ()) and node.state == "running":
            rows.append({"event": "started", **row, "at": (node.launched or now).isoformat()})
    return rows


def repriced(
    rows: Iterable[Mapping[str, Any]], nodes: Iterable[Node], history: History
) -> Iterator[dict[str, Any]]:
    """Return the rows that a ledger lacks of the spot prices that held since each spot node was launched."""
    from awsddp.compat.types import ADDRESS_USD_PER_HOUR

    written = {(key, row["at"]) for row in rows if row.get("event") == "repriced" for key in row["instances"]}
    for node in nodes:
        launched = node.launched
        if not (node.spot and launched):
            continue
        prices = sorted(history.get((node.instance_type, node.zone), ()))
        address = ADDRESS_USD_PER_HOUR if node.public_ip else 0.0
        first = max((n for n, (at, _) in enumerate(prices) if at <= launched), default=0)
        for at, usd in prices[first:]:
            since = max(at, launched).isoformat()
            if (node.instance_id, since) not in written:
                rate = round(usd + address, 6)
                row = {"instances": [node.instance_id], "at": since, "node_usd_per_hour": rate}
                yield {"event": "repriced", **row}


def _hours(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds() / 3600


def _when(row: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(str(row.get("at") or row["time"]))


def _moment(text: Any) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None
