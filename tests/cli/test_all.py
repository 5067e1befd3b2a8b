"""`status --all` says of a cluster what `status` says: one state, one price."""

import json
from typing import Any

import pytest

from tests.cli.conftest import Lab


def of_all(lab: Lab, name: str) -> dict[str, Any]:
    shown = lab.run("status", "--json", "--local", "--all")
    assert shown.returncode == 0, shown.stderr
    (found,) = [one for one in json.loads(shown.stdout) if one["cluster"] == name]
    return dict(found)


def test_a_spot_cluster_has_one_price_and_one_state(records: Lab) -> None:
    size = ("--nodes", "2", "--instance-type", "g6.xlarge")
    up = records.json("up", "-c", "spot", "--local", *size, "--spot", "-y")
    before = records.environ
    try:
        seen, everywhere = records.json("status", "-c", "spot"), of_all(records, "spot")
        keys = ("state", "nodes", "instance_type", "price_usd_per_hour", "expires")
        assert [everywhere[key] for key in keys] == [seen[key] for key in keys]
        assert seen["price_usd_per_hour"] == pytest.approx(up["price_usd_per_hour"], abs=1e-3)

        elsewhere = {"AWSDDP_HOME": str(records.root / "other"), "AWSDDP_LOCAL": str(records.home)}
        records.environ = before | elsewhere  # without the record: by the market's prices
        assert of_all(records, "spot")["price_usd_per_hour"] == pytest.approx(
            seen["price_usd_per_hour"], abs=1e-3
        )
        records.environ = before

        file = records.home / "clusters" / "spot" / "cluster.json"
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"prepared": []}))  # as a kill in `up` leaves it
        assert (
            records.json("status", "-c", "spot")["state"] == of_all(records, "spot")["state"] == "preparing"
        )
        file.write_text(json.dumps(record))
    finally:
        records.environ = before
        assert records.run("down", "-c", "spot", "-y").returncode == 0
