"""Bills that were worked out by hand, to the cent."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.model.billing import (
    LedgerRow,
    compute_cost_until,
    compute_shares,
    find_missing_rows,
    make_bill,
    make_price_rows,
    parse_ledger,
)
from awsddp.model.records import Node
from awsddp.util.formatting import optional_utc

DAY = datetime(2026, 11, 21, tzinfo=UTC)
# Two nodes of $1.00 per hour running, and disks of $0.02 per hour each.
RATES = {"node_usd_per_hour": 1.0, "disk_usd_per_hour": 0.02}


def row(hour: float, event: str, *instances: str, **facts: Any) -> LedgerRow:
    return LedgerRow(time=at(hour), event=event, instances=instances, **{"id": "0a1b2c3d"} | facts)


def launched(hour: float, *instances: str, nodes: int = 2, **facts: Any) -> LedgerRow:
    return row(hour, "launched", *instances, nodes=nodes, **(RATES | facts))


def at(hour: float) -> datetime:
    return DAY + timedelta(hours=hour)


def ended(hour: float, *instances: str, seen_at: float) -> LedgerRow:
    return row(seen_at, "resized", *instances, at=at(hour))


def node(number: int, state: str, *, changed: float | None = None, began: float = 8) -> Node:
    return Node(
        node=number,
        instance_id=f"i-{number}",
        state=state,
        instance_type="g6.xlarge",
        zone="us-east-1a",
        image_id="ami-1",
        launched=at(began),
        changed=None if changed is None else at(changed),
    )


LAUNCH = launched(9)
FIRST = launched(8, "i-0", "i-1")
SHORT = launched(8, "i-0", expires=at(10))


@pytest.mark.parametrize(
    ("rows", "cost", "price"),
    [
        ([FIRST], 24.48, 2.04),
        ([FIRST, row(10, "ended")], 4.08, 0.0),
        ([FIRST, row(10, "stopped", "i-0", "i-1")], 4 + 0.48, 0.04),
        ([FIRST, row(10, "stopped"), row(18, "started", "i-0", "i-1")], 8 + 0.48, 2.04),
        ([FIRST, launched(10, "i-2", nodes=3), row(12, "ended")], 8.16 + 2.04, 0.0),
        ([FIRST, ended(10, "i-1", seen_at=10), row(12, "ended")], 4.08 + 2.04, 0.0),
        # i-1 was lost at 9 and replaced at 10.
        (
            [FIRST, ended(9, "i-1", seen_at=11), launched(10, "i-2")],
            23.46,
            2.04,
        ),
        # A `down` that was killed at 9, and a status at 12 that saw what it had ended.
        (
            [FIRST, ended(9, "i-0", "i-1", seen_at=12)],
            2.04,
            0.0,
        ),
        # The spot price of a replacement is its own.
        (
            [FIRST, ended(10, "i-1", seen_at=10), launched(10, "i-2", node_usd_per_hour=0.4)],
            18.48,
            1.44,
        ),
        ([FIRST, row(9, "fetched", usd=0.09)], 24.57, 2.04),
        ([FIRST, row(8.001, "ended")], 0.03, 0.0),
        ([launched(8, "i-0", expires=at(10))], 2.04, 1.02),
        (
            [launched(8, "i-0", expires=at(10)), row(9, "extended", expires=at(30))],
            12.24,
            1.02,
        ),
        ([launched(8, "i-0", node_usd_per_hour=None)], None, None),
        ([FIRST, row(9, "ended", id="another0")], 24.48, 2.04),
    ],
    ids=[
        "runs",
        "ended",
        "stopped",
        "started again",
        "grown",
        "shrunk",
        "replaced",
        "down was killed",
        "another spot price",
        "results fetched",
        "a minute at least",
        "past its expiry",
        "kept longer",
        "no price",
        "another cluster's row",
    ],
)
def test_a_bill_is_exact_to_a_cent(rows: list[LedgerRow], cost: float | None, price: float | None) -> None:
    bill = make_bill(rows, at(20))
    assert bill is not None
    assert (bill.cost_usd, bill.price_usd_per_hour) == (
        None if cost is None else pytest.approx(cost, abs=0.0051),
        price,
    )


def test_a_launch_with_two_ledger_rows_is_counted_once_from_the_earlier() -> None:
    bill = make_bill([FIRST, launched(9, "i-0", "i-1"), row(10, "ended")], at(20))
    assert bill is not None
    assert bill.cost_usd == 4.08


def test_without_a_launch_there_is_no_bill() -> None:
    assert make_bill([row(8, "stopped")], at(9)) is None


def test_a_node_that_runs_past_its_expiry_is_counted() -> None:
    bill = make_bill([launched(8, "i-0", expires=at(10))], at(20), running={"i-0"})
    assert bill is not None
    assert bill.cost_usd == 12.24


def test_a_bill_never_falls() -> None:
    rows = [launched(8, "i-0", "i-1", expires=at(30))]
    before = 0.0
    states = {9: "running", 10: "stopped", 11: "stopped", 12: "running", 13: "terminated", 14: "terminated"}
    for hour, state in states.items():
        nodes = [node(0, "running"), node(1, state, changed=hour - 0.01, began=8 if hour < 12 else 11.5)]
        bill = make_bill(rows, at(hour))
        for new in find_missing_rows(bill, nodes, launch_row=LAUNCH, now=at(hour)):
            rows.append(new)
        bill = make_bill(
            rows, at(hour), running={item.instance_id for item in nodes if item.state == "running"}
        )
        assert bill is not None
        assert bill.cost_usd is not None
        assert bill.cost_usd >= before
        assert bill.price_usd_per_hour == {"running": 2.04, "stopped": 1.04, "terminated": 1.02}[state]
        before = bill.cost_usd


def test_missing_ledger_rows_are_written_once() -> None:
    assert find_missing_rows(None, [node(0, "terminated")], launch_row=LAUNCH, now=at(9)) == []
    first = find_missing_rows(None, [node(0, "running")], launch_row=LAUNCH, now=at(9))
    assert [(entry.event, entry.instances, entry.at) for entry in first] == [("launched", ("i-0",), at(8))]
    bill = make_bill(first, at(9))
    assert find_missing_rows(bill, [node(0, "running")], launch_row=LAUNCH, now=at(9)) == []
    (ended,) = find_missing_rows(bill, [node(0, "shutting-down", changed=8.5)], launch_row=LAUNCH, now=at(9))
    assert (ended.event, ended.at) == ("resized", at(8.5))


@pytest.mark.parametrize("state", ["stopping", "stopped"])
def test_a_node_stopped_elsewhere_costs_until_the_stop_and_again_from_its_start(
    state: str,
) -> None:
    """Stopped in the console at 10 and started at 18, and seen by a `status` at 12 and by one at 20."""
    rows = [launched(8, "i-0", nodes=1)]
    for hour, listed in ((12.0, node(0, state, changed=10)), (20.0, node(0, "running", began=18))):
        for new in find_missing_rows(make_bill(rows, at(hour)), [listed], launch_row=LAUNCH, now=at(hour)):
            rows.append(new)
        bill = make_bill(rows, at(hour), running={"i-0"})
        assert bill is not None
        assert bill.price_usd_per_hour == (1.02 if hour == 20 else 0.02)
    assert bill.cost_usd == 2.0 + 2.0 + 12 * 0.02


def test_a_node_that_is_no_longer_listed_costs_no_more() -> None:
    """Two nodes were terminated in the console so long ago that EC2 no longer lists them."""
    rows = [launched(8, "i-8", "i-9"), launched(19.9, "i-0", nodes=1)]
    facts = launched(19.9, expires=at(18))
    bill = make_bill(rows, at(20))
    assert bill is not None
    assert find_missing_rows(bill, None, launch_row=facts, now=at(20)) == []  # without a listing
    (gone,) = find_missing_rows(
        bill, [], launch_row=facts, now=at(20)
    )  # i-0 is too new to be listed everywhere
    assert (gone.event, gone.instances, gone.at) == ("resized", ("i-8", "i-9"), at(18))
    after = make_bill([*rows, gone], at(20))
    assert after is not None
    assert after.price_usd_per_hour == 1.02
    assert after.cost_usd == round(2 * 10 * 1.02 + 0.1 * 1.02, 2)


def spot(number: int, zone: str = "us-east-1a") -> Node:
    return replace(node(number, "running"), zone=zone, spot=True, public_ip="203.0.113.5")


def test_a_new_spot_price_counts_from_the_time_of_its_change() -> None:
    """Launched at 8 for $1.00; $0.30 from 7 on, $0.50 from 10 on, $0.20 from 11 on; stopped at 10:30."""
    prices = [(at(11), 0.2), (at(6), 9.9), (at(7), 0.3), (at(10), 0.5)]
    history = {("g6.xlarge", "us-east-1a"): prices, ("g6.xlarge", "us-east-1b"): [(at(7), 7.0)]}
    rows = [launched(8, "i-0")]
    lacking = list(make_price_rows(rows, [spot(0)], history, now=at(9)))
    assert [entry.node_usd_per_hour for entry in lacking] == [0.305, 0.505, 0.205]
    assert list(make_price_rows([*rows, *lacking], [spot(0)], history, now=at(9))) == []
    stopped = ended(10.5, "i-0", seen_at=12)
    for ledger in ([*rows, *lacking, stopped], [*rows, stopped, *lacking]):  # before or after the end
        bill = make_bill(ledger, at(20))
        assert bill is not None
        assert bill.cost_usd == round(2 * 0.305 + 0.5 * 0.505 + 2.5 * 0.02, 2) == 0.91
    running = make_bill([*rows, *lacking], at(12), running={"i-0"})
    assert running is not None
    assert running.cost_usd == round(2 * 0.305 + 0.505 + 0.205 + 4 * 0.02, 2)
    assert running.price_usd_per_hour == 0.225


def test_nodes_on_demand_have_one_price() -> None:
    history = {("g6.xlarge", "us-east-1a"): [(at(7), 0.3)]}
    assert list(make_price_rows([FIRST], [node(0, "running")], history, now=at(9))) == []


def test_a_bill_includes_nodes_disks_and_transfers_out_of_aws() -> None:
    bill = make_bill([FIRST, row(10, "stopped"), row(11, "fetched", usd=0.09), row(18, "ended")], at(20))
    assert bill is not None
    assert bill.cost_usd == 4.0 + 0.4 + 0.09


def test_a_ledger_of_an_older_awsddp_is_read_and_invalid_rows_are_skipped() -> None:
    """File and amount are of the last version whose rows were dictionaries."""
    text = (Path(__file__).parent / "old_ledger.jsonl").read_text()
    rows = parse_ledger('half {\n[1]\n{"event": "ended"}\n' + text + '{"time": 7, "event": "ended"}\n')
    names = "launched train repriced repriced fetched extended stopped started resized ended"
    assert " ".join(row.event for row in rows) == names
    bill = make_bill(rows, at(20))
    assert bill is not None
    assert (bill.id, bill.target, bill.region) == ("0a1b2c3d", "aws", "us-east-1")
    assert (bill.instance_type, bill.nodes) == ("g6.xlarge", 2)
    assert (optional_utc(bill.began), optional_utc(bill.ended)) == (
        "2026-11-21T08:00:00Z",
        "2026-11-21T16:00:00Z",
    )
    assert (bill.cost_usd, bill.price_usd_per_hour) == (10.52, 0.0)
    assert rows[0].asked == {"cluster.spot": True, "network.ssh_cidr": ["203.0.113.0/24"]}
    assert rows[1].home == "/home/me/runs/train-0821-aaaa"


def test_a_row_is_read_as_it_was_written() -> None:
    for original in (FIRST, SHORT, ended(9, "i-1", seen_at=11), row(9, "fetched", usd=0.09)):
        line = json.dumps(
            {"time": "2026-11-21T09:00:00Z", "event": original.event, **original.written_fields}, default=str
        )
        (read,) = parse_ledger(line)
        assert read.written_fields == original.written_fields


def test_jobs_that_run_on_a_node_at_the_same_time_share_its_price() -> None:
    pair, solo = ("i-0", "i-1"), ("i-0",)
    assert compute_shares([(at(8), at(10), pair)]) == [1.0]
    assert compute_shares([(at(8), at(10), solo), (at(8), at(10), solo)]) == [0.5, 0.5]
    assert compute_shares([(at(8), at(10), solo), (at(10), at(12), solo)]) == [1.0, 1.0]
    # alone for an hour, an hour with another job on one of its two nodes
    assert compute_shares([(at(8), at(10), pair), (at(9), at(10), solo)]) == [0.875, 0.5]
    assert compute_shares([(at(8), at(8), solo), (at(8), at(9), solo), (at(8), at(9), ())]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("rows", "since", "before"),
    [
        ([FIRST], 7, 0.0),
        ([FIRST], 10, 4.08),
        ([FIRST, row(10, "ended")], 20, 4.08),
        ([FIRST, row(12, "ended")], 10, 4.08),
        ([FIRST, row(9, "stopped"), row(18, "started", "i-0", "i-1")], 10, 2.08),
        ([SHORT, row(9.5, "extended", expires=at(20)), row(12, "ended")], 11, 3.06),
    ],
)
def test_compute_cost_until_returns_the_cost_before_a_moment(
    rows: list[LedgerRow], since: float, before: float
) -> None:
    assert compute_cost_until(rows, at(since)) == pytest.approx(before)
