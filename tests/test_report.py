"""What happened, as figures and text."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from awsddp.report import json_lines, last_value, ledger_bill, loss_plot

NOW = datetime(2026, 11, 21, 20, tzinfo=UTC)


def row(hour: int, event: str, **facts: Any) -> dict[str, Any]:
    return {"time": f"2026-11-21T{hour:02}:00:00Z", "event": event, "id": "0a1b2c3d", **facts}


FIRST = row(8, "launched", instances=["i-0", "i-1"], nodes=2, price_usd_per_hour=2.0)


@pytest.mark.parametrize(
    ("rows", "hours", "cost"),
    [
        ([FIRST], 12, 24.0),
        ([FIRST, row(10, "ended")], 2, 4.0),
        ([FIRST, row(10, "stopped"), row(18, "started")], 4, 8.0),
        (
            [
                FIRST,
                row(10, "launched", instances=["i-2"], nodes=3, price_usd_per_hour=3.0),
                row(12, "ended"),
            ],
            4,
            10.0,
        ),
        (
            [FIRST, row(10, "resized", instances=["i-1"], nodes=1, price_usd_per_hour=1.0), row(12, "ended")],
            4,
            6.0,
        ),
        ([FIRST, row(19, "launched", instances=["i-3", "i-4"], nodes=2, price_usd_per_hour=2.0)], 1, 2.0),
    ],
    ids=["runs", "ended", "stopped and started", "grown", "shrunk", "ended by itself and launched anew"],
)
def test_a_bill_counts_each_size_for_its_own_time(
    rows: list[dict[str, Any]], hours: float, cost: float
) -> None:
    bill = ledger_bill(rows, NOW)
    assert bill is not None
    assert (bill["hours"], bill["cost_usd"]) == (hours, cost)


def test_without_a_launch_there_is_no_bill() -> None:
    assert ledger_bill([row(8, "stopped")], NOW) is None


def test_whatever_a_program_writes_down_as_its_metrics_can_be_shown() -> None:
    rows = json_lines(
        '{"loss": 1, "step": "x"}\n{"loss": NaN}\n{"loss": 1e999, "accuracy": Infinity}\n[1]\nhalf {\n'
        f'{{"loss": 2, "step": {"9" * 400}, "accuracy": 0.5}}\n' + "[" * 100_000
    )
    assert [row.get("loss") for row in rows] == [1, None, None, 2]
    assert last_value(rows, "accuracy") == 0.5
    plot = loss_plot(rows, title="<loss>")
    assert plot is not None
    assert "<loss>" not in plot
    json.dumps(rows, allow_nan=False)
