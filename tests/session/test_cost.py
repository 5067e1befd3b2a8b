"""What a cluster costs is the same wherever it is shown, and never falls."""

from dataclasses import replace

import pytest

from awsddp.cluster.down import down
from awsddp.cluster.status import status
from awsddp.errors import NotFoundError
from awsddp.job.jobs import jobs_document
from awsddp.job.jobs import jobs_of_all as jobs
from tests.support.machine import Machine, On
from tests.support.prices import ADDRESS, DISK, MACHINE


def reported(machine: Machine) -> tuple[float | None, float | None]:
    (bill,) = jobs_document(machine.context(), ())["clusters"]
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
