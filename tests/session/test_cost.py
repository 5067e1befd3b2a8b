"""What a cluster costs is the same wherever it is shown, and never falls."""

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


def reported(machine: Machine) -> tuple[float | None, float | None]:
    (bill,) = make_jobs_document(machine.context(), ())["clusters"]
    assert bill["idle_usd"] == bill["cost_usd"], "no job ran"
    return bill["cost_usd"], bill["price_usd_per_hour"]


def shown(machine: Machine) -> tuple[float | None, float | None]:
    seen = status(machine.context())
    return seen["cost_usd"], seen["price_usd_per_hour"]


def test_status_down_and_report_agree(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    assert shown(laptop) == reported(laptop) == (0.03, round(2 * (MACHINE + ADDRESS + DISK), 4))
    ended = down(laptop.context(), confirm=laptop.questions.append)
    assert (ended["cost_usd"], 0.0) == reported(laptop)
    listed = jobs(laptop.context())
    assert listed["total_usd"] == listed["clusters"][0]["cost_usd"] == ended["cost_usd"]
    assert any(text.startswith("no cluster demo") for text in laptop.said), laptop.said


def test_jobs_of_a_name_that_was_never_used_are_an_error_beside_what_is_known(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    ctx = laptop.context()
    other = replace(ctx, name="typo", settings=(replace(ctx.spec, name="typo"), ctx.job_spec))
    with pytest.raises(NotFoundError) as error:
        jobs(other)
    assert error.value.result is not None
    assert [one["cluster"] for one in error.value.result["clusters"]] == [ctx.spec.name]


def test_what_was_ended_elsewhere_costs_no_more_and_nothing_is_taken_back(on: On) -> None:
    laptop = on("laptop")
    cluster = laptop.first()
    before, _ = shown(laptop)
    one, other = (node.instance_id for node in cluster.live)
    laptop.aws.call("TerminateInstances", {"InstanceIds": [one]})
    assert shown(laptop) == (before, round(MACHINE + ADDRESS + DISK, 4))
    laptop.aws.call("TerminateInstances", {"InstanceIds": [other]})  # as a `down` that is then killed
    assert shown(laptop) == reported(laptop) == (before, 0.0)


def test_a_launch_that_was_cut_off_before_its_row_is_counted(on: On) -> None:
    laptop = on("laptop")
    laptop.first()
    laptop.folder.ledger.unlink()
    assert shown(laptop) == reported(laptop) == (0.03, round(2 * (MACHINE + ADDRESS + DISK), 4))


def costs(desk: Desk) -> tuple[float, float]:
    """Return the price and the cost of the cluster, on which `jobs`, that looks first, and `status` agree."""
    with pytest.raises(AwsddpError) as away:
        jobs(desk.session())
    [cluster] = away.value.document()["clusters"]  # type: ignore[misc, str-bytes-safe]
    told = desk.status()
    assert cluster["price_usd_per_hour"] == told["price_usd_per_hour"]
    assert cluster["cost_usd"] == pytest.approx(told["cost_usd"], abs=0.02)
    return told["price_usd_per_hour"], told["cost_usd"]


def test_a_cluster_that_stopped_by_itself_has_one_price_and_one_cost(desk: Desk) -> None:
    stopped = BEGAN + timedelta(hours=1)
    desk.listed = tuple(
        replace(node, state="stopped", changed=stopped, unfetched=("j",)) for node in desk.listed
    )
    assert costs(desk) == (0.2, pytest.approx(2.4, abs=0.2))
    assert list_known_clusters(desk.session())["clusters"][0]["price_usd_per_hour"] == 0.2


def test_a_cluster_that_outlives_the_expiry_that_is_known_here_has_one_cost(desk: Desk) -> None:
    desk.note("extended", BEGAN, expires=(BEGAN + timedelta(hours=1)).isoformat())
    desk.listed = tuple(replace(node, private_ip=None) for node in desk.listed)
    hours = (datetime.now(UTC) - BEGAN) / timedelta(hours=1)
    assert costs(desk) == (2.2, pytest.approx(2.2 * hours, abs=0.05))


def test_the_error_of_down_names_the_price_of_what_runs(desk: Desk) -> None:
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
