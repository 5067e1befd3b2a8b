"""The cost of a spot cluster: `status --all` agrees with `status`, and a budget is not exceeded."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awsddp.compat.types import ADDRESS_USD_PER_HOUR, disk_usd_per_hour
from awsddp.local.offers import price_usd_per_hour
from tests.support.lab import Lab


def read_all(lab: Lab, name: str) -> dict[str, Any]:
    result = lab.run("status", "--json", "--local", "--all")
    assert result.returncode == 0, result.stderr
    (row,) = [row for row in json.loads(result.stdout) if row["cluster"] == name]
    return dict(row)


@pytest.mark.prove
def test_a_spot_cluster_has_one_price_and_one_state(records: Lab) -> None:
    size = ("--nodes", "2", "--instance-type", "g6.xlarge")
    up = records.json("up", "-c", "spot", "--local", *size, "--spot", "-y")
    before = records.environ
    try:
        status, everywhere = records.json("status", "-c", "spot"), read_all(records, "spot")
        keys = ("state", "nodes", "instance_type", "price_usd_per_hour", "expires")
        assert [everywhere[key] for key in keys] == [status[key] for key in keys]
        assert status["price_usd_per_hour"] == pytest.approx(up["price_usd_per_hour"], abs=1e-3)

        elsewhere = {"AWSDDP_HOME": str(records.root / "other"), "AWSDDP_LOCAL": str(records.home)}
        records.environ = before | elsewhere  # without the record: by market prices
        assert read_all(records, "spot")["price_usd_per_hour"] == pytest.approx(
            status["price_usd_per_hour"], abs=1e-3
        )
        records.environ = before

        file = records.home / "clusters" / "spot" / "cluster.json"
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"prepared": []}))  # as a kill in `up` leaves it
        assert (
            records.json("status", "-c", "spot")["state"] == read_all(records, "spot")["state"] == "preparing"
        )
        file.write_text(json.dumps(record))
    finally:
        records.environ = before
        assert records.run("down", "-c", "spot", "-y").returncode == 0


@pytest.mark.prove
def test_a_budget_on_spot_assumes_the_highest_price_of_the_last_7_days(records: Lab) -> None:
    size = ("--instance-type", "g6.xlarge", "--spot")
    began = datetime.now(UTC)
    days = [(began - timedelta(days=back)).date() for back in range(8)]
    up = records.json(
        "up",
        "-c",
        "cheap",
        "--local",
        "--nodes",
        "1",
        *size,
        "--budget",
        "2",
        "-y",
        "-o",
        "capacity.zones=us-east-1b",
    )
    try:
        highest = max(price_usd_per_hour("g6.xlarge", "us-east-1b", day) for day in days)
        rate = highest + disk_usd_per_hour(200) + ADDRESS_USD_PER_HOUR
        expires = datetime.fromisoformat(up["expires"])
        assert (expires - began).total_seconds() == pytest.approx(2 / rate * 3600, abs=60)

        grown = records.json("plan", "-c", "cheap", "--nodes", "2")
        [step] = [step for step in grown["steps"] if step["do"] == "expire"]
        assert f"at up to ${2 * rate:.2f} per hour, the highest spot price of the last 7 days" in step["why"]
        left_s = (datetime.fromisoformat(step["value"]) - began).total_seconds()
        assert left_s == pytest.approx(2 / rate * 1800, abs=120)
        assert grown["budget"]["usd_per_hour"] == pytest.approx(2 * rate, abs=1e-3)

        denied = ("fault", "add", "DescribeSpotPriceHistory", "UnauthorizedOperation")
        assert records.run("local", *denied).returncode == 0
        unknown = records.json("plan", "-c", "other", "--local", "--nodes", "1", *size, "--budget", "2")
        assert unknown["budget"]["source"].startswith("the on-demand price")
        assert unknown["price_usd_per_hour"] is None
    finally:
        records.run("local", "fault", "clear")
        assert records.run("down", "-c", "cheap", "-y").returncode == 0


def test_every_verb_reports_the_same_cost_of_a_cluster_that_stopped_itself(records: Lab) -> None:
    size = ("--nodes", "2", "--instance-type", "g6.xlarge")
    records.json("up", "-c", "slept", "--local", *size, "-y")
    ledger = records.home / "clusters" / "slept" / "ledger.jsonl"
    try:
        running = records.json("status", "-c", "slept")["price_usd_per_hour"]
        assert records.run("stop", "-c", "slept", "-y").returncode == 0
        rows = ledger.read_text().splitlines(keepends=True)
        ledger.write_text("".join(row for row in rows if '"stopped"' not in row))  # not seen by this client
        clusters = records.json("jobs", "-c", "slept", code=6)["clusters"]
        [by_jobs] = [row for row in clusters if row["cluster"] == "slept"]
        status, everywhere = records.json("status", "-c", "slept"), read_all(records, "slept")
        unplaced = records.run("status", "--json", "--all")  # neither a region nor --local
        assert (unplaced.returncode, json.loads(unplaced.stdout)) == (0, [everywhere])
        assert "AWS was not searched: no AWS credentials found" in unplaced.stderr
        assert records.run("down", "--orphans", "-y").returncode == 0
        result = records.run("--json")
        [overview] = [row for row in json.loads(result.stdout)["clusters"] if row["cluster"] == "slept"]
        prices = [row["price_usd_per_hour"] for row in (by_jobs, status, everywhere, overview)]
        assert prices == [status["price_usd_per_hour"]] * 4
        assert prices[0] < running
        assert {status["state"], everywhere["state"]} == {"stopped"}
        assert {by_jobs["cost_usd"], status["cost_usd"]} == {everywhere["cost_usd"]}
    finally:
        down = records.json("down", "-c", "slept", "-y")
    result = records.run("jobs", "--json", "-c", "slept")
    [ended] = [row for row in json.loads(result.stdout)["clusters"] if row["cluster"] == "slept"]
    assert (ended["cost_usd"], ended["price_usd_per_hour"]) == (down["cost_usd"], 0.0)
