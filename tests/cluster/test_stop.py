"""`stop` keeps the disks, and reports their price."""

import pytest

from awsddp.cluster.stop import stop
from awsddp.job.jobs import list_jobs as jobs
from awsddp.session.connect import NoReachableNodes
from tests.support.machine import On
from tests.support.prices import DISK


def test_a_stopped_cluster_costs_its_disks(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    stopped = stop(laptop.context(), confirm=laptop.questions.append)
    assert stopped["price_usd_per_hour"] == round(2 * DISK, 4)
    assert not any(
        "waiting for SSH" in text for text in laptop.messages
    )  # no unfetched results: no connection
    with pytest.raises(NoReachableNodes) as error:
        jobs(laptop.context())
    assert error.value.result is not None
    assert error.value.result["clusters"][0]["price_usd_per_hour"] == round(2 * DISK, 4)
