"""Compute what a cluster costs from its ledger, for `status`, `down` and `jobs`.

This module does no I/O. EC2 bills by the second, and at least 60 s per start. A stopped instance costs only
the price of its disk: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-on-demand-instances.html
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
from awsddp.model.records import ENDED_STATES, Frozen, Node, TargetName
from awsddp.util.formatting import duration

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
MIN_BILLED = timedelta(seconds=60)
MIN_BUDGET_S = 300.0
"""The minimum time that a budget must last (s): booting and preparing the nodes takes most of it."""
LISTING_DELAY = timedelta(minutes=10)
"""EC2 lists every instance that is at least this old, until an hour after the instance's end."""
SpotPrices = Mapping[tuple[str, str], Sequence[tuple[datetime, float]]]
"""Maps an instance type and zone to its spot prices: (time, US dollars per instance-hour from then on)."""
_ALWAYS = datetime.min.replace(tzinfo=UTC)


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row in a ledger, which records one change to a cluster. Fields that are None or empty are not
    written.

    `event` is "launched", "started", "stopped", "resized", "ended", "extended" (a new expiry), "repriced" (a
    new spot price), "fetched" (bytes left AWS at a cost of `usd`) or "train" (a `job` with its results in
    `home`). `time` is when the row was written, and `at` is when the event happened, if that is known more
    precisely. `instances` are the instances that changed (empty: all). A "launched" row has the cluster's
    target, region, type, size and settings (`asked`), the hourly prices of an instance and its disk in US
    dollars (None: unknown), and the nodes' expiry.
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
    def happened_at(self) -> datetime:
        """The time when the event happened, as precisely as it is known."""
        return self.at or self.time

    @property
    def written_fields(self) -> dict[str, Any]:
        """The fields that are written, except event and time."""
        written = msgspec.to_builtins(self, builtin_types=(datetime,))
        return {key: value for key, value in written.items() if key not in ("time", "event")}


def parse_ledger(text: str) -> list[LedgerRow]:
    """Return a ledger's rows; invalid lines are skipped."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(msgspec.json.decode(line, type=LedgerRow))
    return rows


class Rate(Frozen):
    """The hourly cost, in US dollars, that a budget assumes for all nodes (None: unknown).

    `source` describes the price; "" means the plan's price, which does not change.
    """

    usd_per_hour: float | None = None
    source: str = ""

    def __str__(self) -> str:
        cost = "an unknown amount" if self.usd_per_hour is None else f"${self.usd_per_hour:,.2f}"
        return f"up to {cost} per hour, {self.source}" if self.source else f"{cost} per hour"


class Budget(Rate):
    """A budget in US dollars, the part that is already spent, and the assumed hourly cost."""

    usd: float
    spent_usd: float = 0.0

    def __str__(self) -> str:
        spent = f" (${self.spent_usd:,.2f} spent)" if self.spent_usd else ""
        return f"${self.usd:,.2f}{spent} at {super().__str__()}"

    @property
    def lasts_s(self) -> float:
        """How long the remaining budget lasts (s). Raises ConfigError if the time is too short or unknown."""
        if self.usd_per_hour == 0:
            return float("inf")
        remaining_usd = max(0.0, self.usd - self.spent_usd)
        term_s = remaining_usd / self.usd_per_hour * 3600 if self.usd_per_hour is not None else 0.0
        if term_s < MIN_BUDGET_S:
            raise ConfigError(
                f"cluster.budget_usd: ${self.usd:,.2f} is spent, or lasts less than {duration(MIN_BUDGET_S)}",
                f"the budget is {self}",
                "use a larger --budget, fewer --nodes, or another --instance-type",
            )
        return term_s


@dataclass(kw_only=True)
class _Meter:
    """Adds up the cost of one instance, which exists from `since` to `ended`.

    `rates` are (time, US dollars per instance-hour from then on; None: unknown), sorted by time, with the
    launch's rate first. `disk` is the hourly rate of the instance's disk. `running_since` is the start of the
    current run (None: the instance is not running), and `runs` are the earlier runs.
    """

    since: datetime
    running_since: datetime | None
    rates: list[tuple[datetime, float | None]]
    disk: float
    expires: datetime | None
    ended: datetime | None = None
    runs: list[tuple[datetime, datetime]] = field(default_factory=list)

    def apply(self, row: LedgerRow) -> None:
        """Apply a row of the ledger."""
        match row.event:
            case "started" if self.running_since is None and self.ended is None:
                self.running_since, self.expires = row.happened_at, row.expires or self.expires
            case "stopped":
                self.stop(row.happened_at)
            case "resized" | "ended":
                self.end(row.happened_at)
            case "extended":
                self.expires = row.expires
            case "repriced":
                self.rates = sorted(
                    [*self.rates, (row.happened_at, row.node_usd_per_hour)], key=itemgetter(0)
                )

    def stop(self, at: datetime) -> None:
        """End the current run; the disk continues to cost."""
        if self.running_since is not None:
            self.runs.append((self.running_since, max(at, self.running_since + MIN_BILLED)))
            self.running_since = None

    def end(self, at: datetime) -> None:
        """End the instance and its disk."""
        self.stop(at)
        self.ended = self.ended or at

    def rate(self, at: datetime) -> float | None:
        """Return the instance's hourly rate at a moment. Before the first price, the rate is the launch's
        rate."""
        return [usd for since, usd in self.rates if since <= at][-1]

    def usd(self, until: datetime) -> float:
        """Return the cost of the instance's runs and of its disk until a moment."""
        runs = list(self.runs)
        if self.running_since is not None:
            runs.append((self.running_since, max(until, self.running_since + MIN_BILLED)))
        total = max(0.0, _hours(self.since, self.ended or until)) * self.disk
        for start, end in runs:
            changes = [since for since, _ in self.rates if start < since < end]
            for span in pairwise((start, *changes, end)):
                total += _hours(*span) * (self.rate(span[0]) or 0.0)
        return total


class Bill(Frozen):
    """A cluster's bill. `began` and `ended` are in UTC. `ended` is None while any of the cluster's resources
    exist.

    `price_usd_per_hour` is the current hourly price, including the disks of stopped nodes. This price and
    `cost_usd` are None if a price is unknown.
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
    """The instances in `running` and `stopped` that are old enough to be listed by EC2 if they still exist.
    If EC2 does not list such an instance, the instance has ended."""


class Account:
    """Replays a ledger's rows in order; `bill` returns the bill so far.

    Ignores rows before the first launch and rows about another cluster.
    """

    def __init__(self) -> None:
        self._launches: list[LedgerRow] = []
        self._ended: datetime | None = None
        self._meters: dict[str, _Meter] = {}
        self._fees_usd = 0.0

    def apply(self, row: LedgerRow) -> None:
        """Apply a row of the ledger."""
        first = next(iter(self._launches), row)
        if row.id not in (None, first.id) or (first is row and row.event != "launched"):
            return
        match row.event:
            case "launched":
                self._read_launch(row)
            case "ended":
                self._ended = row.happened_at
        self._fees_usd += row.usd or 0.0
        for key in self._meters.keys() & (row.instances or self._meters):
            self._meters[key].apply(row)

    def _read_launch(self, row: LedgerRow) -> None:
        self._launches.append(row)
        self._ended = None
        for key in row.instances:
            rates, disk = [(_ALWAYS, row.node_usd_per_hour)], row.disk_usd_per_hour or 0.0
            begins = row.happened_at
            meter = _Meter(since=begins, running_since=begins, rates=rates, disk=disk, expires=row.expires)
            self._meters.setdefault(key, meter)  # another `status` may already have written the row

    def bill(self, now: datetime, *, running: Collection[str] = ()) -> Bill | None:
        """Return the bill until `now`, or None for a cluster that was never launched.

        `running` are the instances that AWS now lists as running. If the ledger says that another instance is
        running, the instance is charged until its expiry at most, because it then terminates itself.
        """
        if not self._launches:
            return None
        launch, meters = self._launches[-1], self._meters
        running_keys = [key for key, meter in meters.items() if meter.running_since is not None]
        existing = [key for key, meter in meters.items() if meter.ended is None]
        has_prices = all(meter.rate(now) is not None for meter in meters.values())
        price = sum(meters[key].rate(now) or 0.0 for key in running_keys) + sum(
            meters[key].disk for key in existing
        )
        cost = self._fees_usd
        for key, meter in meters.items():
            until = meter.expires if key in running_keys and key not in running else None
            cost += meter.usd(min(now, until or now))
        return Bill(
            id=launch.id,
            target=launch.target or "aws",
            region=launch.region,
            instance_type=launch.instance_type or "",
            nodes=len(meters) if launch.nodes is None else launch.nodes,
            began=self._launches[0].happened_at,
            ended=self._ended,
            cost_usd=round(cost, 2) if has_prices else None,
            price_usd_per_hour=round(price, 4) if has_prices else None,
            running=frozenset(running_keys),
            stopped=frozenset(existing) - frozenset(running_keys),
            settled=frozenset(key for key in existing if meters[key].since <= now - LISTING_DELAY),
        )


def make_bill(rows: Iterable[LedgerRow], now: datetime, *, running: Collection[str] = ()) -> Bill | None:
    """Return the bill for a ledger's rows. `now` and `running` have the same meaning as in `Account.bill`."""
    ledger = Account()
    for row in rows:
        ledger.apply(row)
    return ledger.bill(now, running=running)


def compute_cost_until(rows: Sequence[LedgerRow], moment: datetime) -> float:
    """Return a cluster's cost (US dollars) until a moment in the past, according to its ledger."""
    past_rows = [row for row in rows if row.happened_at <= moment]
    running = {key for row in rows if row.event == "launched" for key in row.instances}
    bill = make_bill(past_rows, moment, running=running)
    return (bill.cost_usd or 0.0) if bill is not None else 0.0


def compute_shares(spans: Sequence[tuple[datetime, datetime, Collection[str]]]) -> list[float]:
    """Return, for each job, the share (0 to 1) of its instances' time that the job pays for.

    A span has a job's start, end and instance ids. Jobs that run on one instance at the same time share its
    time equally.
    """
    shared_hours = [0.0] * len(spans)
    for key in {key for _, _, keys in spans for key in keys}:
        jobs = [job for job, (_, _, keys) in enumerate(spans) if key in keys]
        moments = sorted({moment for job in jobs for moment in spans[job][:2]})
        for start, end in pairwise(moments if len(jobs) > 1 else ()):
            running = [job for job in jobs if spans[job][0] <= start and end <= spans[job][1]]
            for job in running:
                shared_hours[job] += _hours(start, end) / len(running)
        if len(jobs) == 1:
            shared_hours[jobs[0]] += _hours(*spans[jobs[0]][:2])
    all_hours = [_hours(start, end) * len(keys) for start, end, keys in spans]
    return [hours / total if total > 0 else 1.0 for hours, total in zip(shared_hours, all_hours, strict=True)]


def find_missing_rows(
    bill: Bill | None, nodes: Sequence[Node] | None, *, launch_row: LedgerRow, now: datetime
) -> list[LedgerRow]:
    """Return the rows for launches, starts, stops and ends that AWS shows but the ledger lacks.

    `nodes` are all nodes that AWS lists for the cluster (None: no listing). An instance that is no longer
    listed ended more than an hour ago, but the exact time is unknown. Such an instance is charged until now,
    or until its expiry if that is earlier. `launch_row` is the row for instances whose launch was interrupted
    before the row was written.
    """
    if nodes is None:
        return []

    def row(event: str, *instances: str, at: datetime) -> LedgerRow:
        return LedgerRow(event=event, time=now, id=launch_row.id, instances=instances, at=at)

    rows: list[LedgerRow] = []
    if bill is not None and (unlisted := bill.settled - {node.instance_id for node in nodes}):
        rows.append(row("resized", *sorted(unlisted), at=min(now, launch_row.expires or now)))
    running, stopped = (bill.running, bill.stopped) if bill else (frozenset(), frozenset())
    for node in nodes:
        key, changed, began = node.instance_id, node.changed or now, node.launched or now
        if node.state in ENDED_STATES:
            if key in running | stopped:
                rows.append(row("resized", key, at=changed))
        elif key not in running | stopped:
            rows.append(msgspec.structs.replace(launch_row, instances=(key,), at=began))
        elif key in running and node.state in ("stopping", "stopped"):
            rows.append(row("stopped", key, at=changed))
        elif key in stopped and node.state == "running":
            rows.append(row("started", key, at=began))
    return rows


def make_price_rows(
    rows: Iterable[LedgerRow], nodes: Iterable[Node], spot_prices: SpotPrices, *, now: datetime
) -> Iterator[LedgerRow]:
    """For each spot node, yield the rows that the ledger lacks for spot prices since the node's launch."""
    from awsddp.compat.types import ADDRESS_USD_PER_HOUR

    written = {(key, row.at) for row in rows if row.event == "repriced" for key in row.instances}
    for node in nodes:
        launched, key = node.launched, node.instance_id
        if not (node.spot and launched):
            continue
        prices = sorted(spot_prices.get((node.instance_type, node.zone), ()))
        address = ADDRESS_USD_PER_HOUR if node.public_ip else 0.0
        first = max((n for n, (at, _) in enumerate(prices) if at <= launched), default=0)
        for at, usd in prices[first:]:
            since, rate = max(at, launched), round(usd + address, 6)
            if (key, since) not in written:
                yield LedgerRow(
                    event="repriced", time=now, instances=(key,), at=since, node_usd_per_hour=rate
                )


def _hours(start: datetime, end: datetime) -> float:
    return (end - start).total_seconds() / 3600
