"""--after: a job that waits on its nodes for the end of others, with no client."""

import pytest

from awsddp.errors import InUse, NotFoundError
from awsddp.job.cancel import end_ranks
from awsddp.job.fetch import fetch, fetch_jobs
from awsddp.job.why import why
from awsddp.model.documents import FetchDocument
from tests.support.folder_nodes import World, start
from tests.support.waiting import until
from tests.support.waiting_jobs import jobs, script, states


@pytest.mark.prove
def test_chain_of_three_runs_one_after_the_other_each_with_the_code_of_its_launch(world: World) -> None:
    start(world, script(1, 600), name="one")
    start(world, script(2), name="two", after="one")
    start(world, script(3), name="three", after="all")
    assert states(world) == {"one": "running", "two": "waiting", "three": "waiting"}
    assert world.said[-1] == "job three starts when these have ended: one, two"
    with pytest.raises(InUse):
        start(world, script(4), name="four")
    with pytest.raises(NotFoundError, match="no job none on the nodes"):
        start(world, script(4), name="four", after="none")
    end_ranks(world.connected(), "one", grace_s=0)
    ended = {"one": "cancelled", "two": "succeeded", "three": "succeeded"}
    until(lambda: states(world) == ended, seconds=60)
    for name, code in (("two", 2), ("three", 3)):
        for node, home in enumerate(world.homes.homes):
            log = world.homes.folder(node, name) / "logs" / f"rank{node}.log"
            assert log.read_text() == f"code {code} {home}/awsddp/work-{name}\n"
    assert str(jobs(world)["two"].ended) <= str(jobs(world)["three"].started)


def test_why_without_a_name_is_of_the_job_that_runs_and_not_of_one_that_waits(world: World) -> None:
    start(world, script(1, 600), name="one")
    start(world, script(2), name="two", after="one")
    assert why(world.session()).job == why(world.session(), "last").job == "one"
    assert (why(world.session(), "two").job, why(world.session(), "two").state) == ("two", "waiting")


def test_several_jobs_are_fetched_by_one_command_and_one_that_cannot_be_stops_no_other(world: World) -> None:
    for name in ("one", "two"):
        start(world, script(0), name=name)
        until(lambda name=name: states(world)[name] == "succeeded", seconds=60)
    session, shown = world.session(), list[str]()

    def fetch_one(name: str | None) -> FetchDocument:
        return fetch(session, job=name, start=pytest.fail)

    def fetch_these(*names: str) -> list[str]:
        shown.clear()
        found = fetch_jobs(session, names, fetch_one=fetch_one, on_document=lambda one: shown.append(one.job))
        return [one.job for one in found]

    with pytest.raises(NotFoundError, match="no job none"):
        fetch_these("one", "none", "two")
    assert shown == ["one", "two"] and (world.project / "runs/two/job.json").exists()
    assert fetch_these("two", "one", "two") == shown == ["two", "one"]
    assert fetch_these("all") == ["one", "two"]
