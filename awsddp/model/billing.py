"""What a cluster costs, from its ledger: one account for `status`, `down` and `jobs`. Pure.

EC2 bills by the second, at least 60 of them at each start; a stopped instance costs its disk alone:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any

import msgspec

from awsddp.errors import ConfigError
from awsddp.model.records import ENDED, Frozen, Node, TargetName
from awsddp.util.format import duration

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
LEAST = timedelta(seconds=60)
LEAST_BUDGET_S = 300.0
"""The shortest time that a budget must last: booting and preparing the nodes takes most of it."""
SETTLES = timedelta(minutes=10)
"""After this EC2 lists every instance that it launched, until an hour after its end."""
History = Mapping[tuple[str, str], Sequence[tuple[datetime, float]]]
"""Spot prices, US dollars per hour of one machine from a moment on, by instance type and zone."""
_ALWAYS = datetime.min.replace(tzinfo=UTC)


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row of a ledger, for each change of a cluster; what is None or empty is not written.

    `event` is "launched", "started", "stopped", "resized", "ended", "extended" (a new expiry), "repriced" (a
    new spot price), "fetched" (bytes that left AWS, for `usd`) or "train" (a `job`, its results in `home`).
    `time` is when the row was written, `at` when it happened, where that is known better. `instances` are
    those that changed (none named: all). A launch tells the cluster's place, type, size and settings
    (`asked`), the price of a machine and of its disk per hour in US dollars (None: not known), and when the
    nodes expire.
    """

    time: Moment
    event: str
    id: str | None = None
    at: Moment | None = None
    instances: tuple[str, ...] = ()
    target: TargetName | None = None
    region: str | None = None
    instance_type: str | None = None
    nodes: int | None = None
    node_usd_per_hour: float | None = None
    disk_usd_per_hour: float | None = None
    expires: Moment | None = None
    asked: dict[str, Any] | None = None
    usd: float | None = None
    job: str | None = None
    home: str | None = None

    @property
    def moment(self) -> datetime:
        """When it happened, as far as that is known."""
        return self.at or self.time

    @property
    def facts(self) -> dict[str, Any]:
        """What is written beside the event and the time."""
        written = msgspec.to_builtins(self, builtin_types=(datetime,))
        return {key: value for key, value in written.items() if key not in ("time", "event")}


def ledger_rows(text: str) -> list[Row]:
    """Return the rows of a ledger; a line that is none is skipped."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(msgspec.json.decode(line, type=Row))
    return rows


class Rate(Frozen):
    """What a budget assumes that all nodes cost per hour (None: unknown), in US dollars.

    `source` tells which price that is; "" is the price of the plan, which does not change.
    """

    usd_per_hour: float | None = None
    source: str = ""

    def __str__(self) -> str:
        cost = "an unknown amount" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f}"
        return f"up to {cost} per hour, {self.source}" if self.source else f"{cost} per hour"


class Budget(Rate):
    """A budget in US dollars, what of it is spent, and the rate that it assumes."""

    usd: float
    spent_usd: float = 0.0

    def __str__(self) -> str:
        spent = f" (${self.spent_usd:,.2f} spent)" if self.spent_usd else ""
        return f"${self.usd:,.2f}{spent} at {super().__str__()}"

    @property
    def lasts_s(self) -> float:
        """How long what is left of it lasts (s); for no time where no price is known.

        Raises ConfigError where that is too short.
        """
        if self.usd_per_hour == 0:
            return float("inf")
        left_usd = max(0.0, self.usd - self.spent_usd)
        term_s = left_usd / self.usd_per_hour * 3600 if self.usd_per_hour is not None else 0.0
        if term_s < LEAST_BUDGET_S:
            raise ConfigError(
                f"cluster.budget_usd: ${self.usd:,.2f} is spent, or does not last {duration(LEAST_BUDGET_S)}",
                f"the budget is {self}",
                "a larger --budget, fewer --nodes, or another --instance-type",
            )
        return term_s


@dataclass(kw_only=True)
class _Meter:
    """The account of one instance that exists since a moment, until it `ended`.

    `rates` are US dollars per hour of the machine from a moment on (None: not known), in order, first the
    launch's; `disk` is the rate of its disk. `runs` is since when it runs, `ran` from when to when it did.
    """

    since: datetime
    runs: datetime | None
    rates: list[tuple[datetime, float | None]]
    disk: float
    expires: datetime | None
    ended: datetime | None = None
    ran: list[tuple[datetime, datetime]] = field(default_factory=list)

    def read(self, row: Row) -> None:
        """Count what a row tells of the machine."""
        match row.event:
            case "started" if self.runs is None and self.ended is None:
                self.runs, self.expires = row.moment, row.expires or self.expires
            case "stopped":
                self.stop(row.moment)
            case "resized" | "ended":
                self.end(row.moment)
            case "extended":
                self.expires = row.expires
            case "repriced":
                self.rates = sorted([*self.rates, (row.moment, row.node_usd_per_hour)], key=itemgetter(0))

    def stop(self, at: datetime) -> None:
        """The machine stops; its disk stays."""
        if self.runs is not None:
            self.ran.append((self.runs, max(at, self.runs + LEAST)))
            self.runs = None

    def end(self, at: datetime) -> None:
        """The machine and its disk are gone."""
        self.stop(at)
        self.ended = self.ended or at

    def rate(self, at: datetime) -> float | None:
        """Return what the machine costs per hour at a moment: the launch's rate until a price is known."""
        return [usd for since, usd in self.rates if since <= at][-1]

    def usd(self, until: datetime) -> float:
        """Return what the machine and its disk cost until a moment, or until they stopped or ended."""
        ran = self.ran if self.runs is None else [*self.ran, (self.runs, max(until, self.runs + LEAST))]
        total = max(0.0, _hours(self.since, self.ended or until)) * self.disk
        for start, end in ran:
            changes = [since for since, _ in self.rates if start < since < end]
            for span in pairwise((start, *changes, end)):
                total += _hours(*span) * (self.rate(span[0]) or 0.0)
        return total


class Bill(Frozen):
    """A cluster's account. `began` and `ended` are UTC; `ended` is None while anything of it exists.

    `cost_usd` and `price_usd_per_hour` (of what runs or is kept now) are None where a price is not known.
    """

    id: str | None
    target: TargetName
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


class Account:
    """A cluster's account: the rows of its ledger are read in their order, its bill can be made at any time.

    Rows before the first launch, and those of another cluster, count nothing.
    """

    def __init__(self) -> None:
        self._launches: list[Row] = []
        self._ended: datetime | None = None
        self._meters: dict[str, _Meter] = {}
        self._fees_usd = 0.0

    def read(self, row: Row) -> None:
        """Count what a row tells."""
        first = next(iter(self._launches), row)
        if row.id not in (None, first.id) or (first is row and row.event != "launched"):
            return
        match row.event:
            case "launched":
                self._read_launch(row)
            case "ended":
                self._ended = row.moment
        self._fees_usd += row.usd or 0.0
        for key in self._meters.keys() & (row.instances or self._meters):
            self._meters[key].read(row)

    def _read_launch(self, row: Row) -> None:
        self._launches.append(row)
        self._ended = None
        for key in row.instances:
            rates, disk = [(_ALWAYS, row.node_usd_per_hour)], row.disk_usd_per_hour or 0.0
            meter = _Meter(since=row.moment, runs=row.moment, rates=rates, disk=disk, expires=row.expires)
            self._meters.setdefault(key, meter)  # a `status` beside `up` may have written it before

    def bill(self, now: datetime, *, running: Collection[str] = ()) -> Bill | None:
        """Return what the cluster cost until `now`; None where it never launched anything.

        An instance that was last seen running, and that AWS does not name among those `running` now, is
        counted until its expiry at the latest, when it ends itself.
        """
        if not self._launches:
            return None
        launch, meters = self._launches[-1], self._meters
        runs = [key for key, meter in meters.items() if meter.runs is not None]
        exists = [key for key, meter in meters.items() if meter.ended is None]
        known = all(meter.rate(now) is not None for meter in meters.values())
        price = sum(meters[key].rate(now) or 0.0 for key in runs) + sum(meters[key].disk for key in exists)
        cost = self._fees_usd
        for key, meter in meters.items():
            until = meter.expires if key in runs and key not in running else None
            cost += meter.usd(min(now, until or now))
        return Bill(
            id=launch.id,
            target=launch.target or "aws",
            region=launch.region,
            instance_type=launch.instance_type or "",
            nodes=len(meters) if launch.nodes is None else launch.nodes,
            began=self._launches[0].moment,
            ended=self._ended,
            cost_usd=round(cost, 2) if known else None,
            price_usd_per_hour=round(price, 4) if known else None,
            running=frozenset(runs),
            stopped=frozenset(exists) - frozenset(runs),
            settled=frozenset(key for key in exists if meters[key].since <= now - SETTLES),
        )


def account(rows: Iterable[Row], now: datetime, *, running: Collection[str] = ()) -> Bill | None:
    """Return the bill of a ledger, as `Account.bill`."""
    read = Account()
    for row in rows:
        read.read(row)
    return read.bill(now, running=running)


def cost_until(rows: Sequence[Row], moment: datetime) -> float:
    """Return what a cluster cost (US dollars) until a moment in the past, by what its ledger says now."""
    known = [row for row in rows if row.moment <= moment]
    running = {key for row in rows if row.event == "launched" for key in row.instances}
    bill = account(known, moment, running=running)
    return (bill.cost_usd or 0.0) if bill is not None else 0.0


def shares(spans: Sequence[tuple[datetime, datetime, Collection[str]]]) -> list[float]:
    """Return which part of the time of its instances each job pays: those that run at once on one share it.

    A span is when a job began and ended, and the ids of its instances.
    """
    owned = [0.0] * len(spans)
    for key in {key for _, _, keys in spans for key in keys}:
        here = [number for number, (_, _, keys) in enumerate(spans) if key in keys]
        moments = sorted({moment for number in here for moment in spans[number][:2]})
        for start, end in pairwise(moments if len(here) > 1 else ()):
            running = [number for number in here if spans[number][0] <= start and end <= spans[number][1]]
            for number in running:
                owned[number] += _hours(start, end) / len(running)
        if len(here) == 1:
            owned[here[0]] += _hours(*spans[here[0]][:2])
    whole = [_hours(start, end) * len(keys) for start, end, keys in spans]
    return [own / all_of if all_of > 0 else 1.0 for own, all_of in zip(owned, whole, strict=True)]


def unwritten(bill: Bill | None, nodes: Sequence[Node] | None, *, launched: Row, now: datetime) -> list[Row]:
    """Return the rows that the ledger lacks, by what AWS lists: launches, starts, stops and ends unseen here.

    `nodes` are all of the cluster (None: AWS was not asked). What is not among them any more ended over an
    hour ago; when is not known, so that it is counted until now, or its expiry. `launched` is the row of a
    launch that was cut off before it was written.
    """
    if nodes is None:
        return []

    def row(event: str, *instances: str, at: datetime) -> Row:
        return Row(event=event, time=now, id=launched.id, instances=instances, at=at)

    rows: list[Row] = []
    if bill is not None and (unlisted := bill.settled - {node.instance_id for node in nodes}):
        rows.append(row("resized", *sorted(unlisted), at=min(now, launched.expires or now)))
    running, stopped = (bill.running, bill.stopped) if bill else (frozenset(), frozenset())
    for node in nodes:
        key, changed, began = node.instance_id, node.changed or now, node.launched or now
        if node.state in ENDED:
            if key in running | stopped:
                rows.append(row("resized", key, at=changed))
        elif key not in running | stopped:
            rows.append(msgspec.structs.replace(launched, instances=(key,), at=began))
        elif key in running and node.state in ("stopping", "stopped"):
            rows.append(row("stopped", key, at=changed))
        elif key in stopped and node.state == "running":
            rows.append(row("started", key, at=began))
    return rows


def repriced(rows: Iterable[Row], nodes: Iterable[Node], history: History, *, now: datetime) -> Iterator[Row]:
    """Yield the rows that a ledger lacks of the spot prices that held since each spot node was launched."""
    from awsddp.compat.types import ADDRESS_USD_PER_HOUR

    written = {(key, row.at) for row in rows if row.event == "repriced" for key in row.instances}
    for node in nodes:
        launched, key = node.launched, node.instance_id
        if not (node.spot and launched):
            continue
        prices = sorted(history.get((node.instance_type, node.zone), ()))
        address = ADDRESS_USD_PER_HOUR if node.public_ip else 0.0
        first = max((n for n, (at, _) in enumerate(prices) if at <= launched), default=0)
        for at, usd in prices[first:]:
            since, rate = max(at, launched), round(usd + address, 6)
            if (key, since) not in written:
                yield Row(event="repriced", time=now, instances=(key,), at=since, node_usd_per_hour=rate)


def _hours(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds() / 3600
