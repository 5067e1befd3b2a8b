"""A cluster for the time of a with block."""

import pytest

import awsddp
from tests.support.lab import Lab


def test_run_terminates_the_cluster_after_its_block_and_keeps_the_error(active_lab: Lab) -> None:
    with pytest.raises(ZeroDivisionError), awsddp.run("short", nodes=2, local=True) as cluster:
        assert cluster.status()["idle"] == "10m"
        1 / 0  # noqa: B018
    assert cluster.status()["state"] == "absent"
