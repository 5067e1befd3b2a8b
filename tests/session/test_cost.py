"""The cost of a cluster is the same in every verb, and never falls."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from awsddp.cluster.down import down
from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.cluster.inventory import list_known_clusters
from awsddp.cluster.status import status
from awsddp.errors import AwsddpError, NotFoundError
from awsddp.job.jobs import list_jobs as jobs
from awsddp.job.jobs import make_jobs_document
from awsddp.session.locate import require_live
from tests.support.desk import BEGAN, Desk
from tests.support.machine import Machine, On
from tests.support.prices import ADDRESS, DISK, MACHINE


def jobs_cost(machine: Machine) -> tuple[float | None, float | None]:
    (bill,) = make_jobs_document(machine.context(), ())["clusters"]
    assert bill["idle_usd"] == bill["cost_usd"], "no job ran"
    return bill["cost_usd"], bill["price_usd_per_hour"]


def status_cost(machine: Machine) -> tuple[float | None, float | None]:
    document = status(machine.context())
    return document["cost_usd"], document["price_usd_per_hour"]


def test_status_down_and_report_agree(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    assert status_cost(laptop) == jobs_cost(laptop) == (0.03, round(2 * (MACHINE + ADDRESS + DISK), 4))
    ended = down(laptop.context(), confirm=laptop.questions.append)
    assert (ended["cost_usd"], 0.0) == jobs_cost(laptop)
    listed = jobs(laptop.context())
    assert listed["total_usd"] == listed["clusters"][0]["cost_usd"] == ended["cost_usd"]
    assert any(text.startswith("no cluster demo") for text in laptop.messages), laptop.messages


def test_jobs_of_an_unknown_cluster_is_an_error_with_the_known_clusters(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    ctx = laptop.context()
    other = replace(ctx, name="typo", settings=(replace(ctx.spec, name="typo"), ctx.job_spec))
    with pytest.raises(NotFoundError) as error:
        jobs(other)
    assert error.value.result is not None
    assert [row["cluster"] for row in error.value.result["clusters"]] == [ctx.spec.name]


def test_a_node_terminated_elsewhere_costs_no_more_and_the_cost_does_not_fall(on: On) -> None:
    laptop = on("laptop")
    cluster = laptop.launch_two_nodes()
    before, _ = status_cost(laptop)
    first, second = (node.instance_id for node in cluster.live)
    laptop.aws.call("TerminateInstances", {"InstanceIds": [first]})
    assert status_cost(laptop) == (before, round(MACHINE + ADDRESS + DISK, 4))
    laptop.aws.call("TerminateInstances", {"InstanceIds": [second]})  # as a `down` that is then killed
    assert status_cost(laptop) == jobs_cost(laptop) == (before, 0.0)


def test_a_launch_without_a_ledger_row_is_counted(on: On) -> None:
    laptop = on("laptop")
    laptop.launch_two_nodes()
    laptop.folder.ledger.unlink()
    assert status_cost(laptop) == jobs_cost(laptop) == (0.03, round(2 * (MACHINE + ADDRESS + DISK), 4))


def read_costs(desk: Desk) -> tuple[float, float]:
    """Return price and cost of the cluster, after a check that `jobs` and `status` report the same."""
    with pytest.raises(AwsddpError) as failed:
        jobs(desk.session())
    [cluster] = failed.value.document()["clusters"]  # type: ignore[misc, str-bytes-safe]
    document = desk.status()
    assert cluster["price_usd_per_hour"] == document["price_usd_per_hour"]
    assert cluster["cost_usd"] == pytest.approx(document["cost_usd"], abs=0.02)
    return document["price_usd_per_hour"], document["cost_usd"]


def test_a_cluster_that_stopped_by_itself_has_one_price_and_one_cost(desk: Desk) -> None:
    stopped = BEGAN + timedelta(hours=1)
    desk.listed = tuple(
        replace(node, state="stopped", changed=stopped, unfetched=("j",)) for node in desk.listed
    )
    assert read_costs(desk) == (0.2, pytest.approx(2.4, abs=0.2))
    assert list_known_clusters(desk.session())["clusters"][0]["price_usd_per_hour"] == 0.2


def test_a_cluster_that_outlives_its_recorded_expiry_has_one_cost(desk: Desk) -> None:
    desk.note("extended", BEGAN, expires=(BEGAN + timedelta(hours=1)).isoformat())
    desk.listed = tuple(replace(node, private_ip=None) for node in desk.listed)
    hours = (datetime.now(UTC) - BEGAN) / timedelta(hours=1)
    assert read_costs(desk) == (2.2, pytest.approx(2.2 * hours, abs=0.05))


def test_the_error_of_down_names_the_price_of_running_nodes(desk: Desk) -> None:
    first, second = desk.listed
    stopped = replace(second, state="stopped", changed=BEGAN, unfetched=("j",))
    desk.listed = (first, stopped)
    located = desk.located()
    desk.folder.key.unlink()
    with pytest.raises(AwsddpError, match="the results of j are not fetched") as refused:
        fetch_unfetched_results(*require_live(located))
    price = desk.status()["price_usd_per_hour"]
    assert price == 1.2
    assert refused.value.why.endswith(f"until then the nodes cost ${price:.2f} per hour")
