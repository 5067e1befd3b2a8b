"""--after: a job waits on its nodes for the end of others, without a client."""

import pytest

from awsddp.errors import InUse, NotFoundError
from awsddp.job.cancel import end_ranks
from awsddp.job.fetch import fetch, fetch_jobs
from awsddp.job.why import why
from awsddp.model.documents import FetchDocument
from tests.support.folder_nodes import World, start_script
from tests.support.waiting import until
from tests.support.waiting_jobs import jobs, script, states


@pytest.mark.prove
def test_a_chain_of_three_jobs_runs_in_order_each_with_its_own_code(world: World) -> None:
    start_script(world, script(1, 600), name="one")
    start_script(world, script(2), name="two", after="one")
    start_script(world, script(3), name="three", after="all")
    assert states(world) == {"one": "running", "two": "waiting", "three": "waiting"}
    assert world.events[-1] == "job three starts when these jobs have ended: one, two"
    with pytest.raises(InUse):
        start_script(world, script(4), name="four")
    with pytest.raises(NotFoundError, match="no job none on the nodes"):
        start_script(world, script(4), name="four", after="none")
    end_ranks(world.connected(), "one", grace_s=0)
    ended = {"one": "cancelled", "two": "succeeded", "three": "succeeded"}
    until(lambda: states(world) == ended, seconds=60)
    for name, code in (("two", 2), ("three", 3)):
        for node, home in enumerate(world.homes.homes):
            log = world.homes.folder(node, name) / "logs" / f"rank{node}.log"
            assert log.read_text() == f"code {code} {home}/awsddp/work-{name}\n"
    assert str(jobs(world)["two"].ended) <= str(jobs(world)["three"].started)


def test_why_without_a_name_is_for_the_running_job_not_a_waiting_one(world: World) -> None:
    start_script(world, script(1, 600), name="one")
    start_script(world, script(2), name="two", after="one")
    assert why(world.session()).job == why(world.session(), "last").job == "one"
    assert (why(world.session(), "two").job, why(world.session(), "two").state) == ("two", "waiting")


def test_one_fetch_gets_several_jobs_and_an_unknown_one_stops_no_other(world: World) -> None:
    for name in ("one", "two"):
        start_script(world, script(0), name=name)
        until(lambda name=name: states(world)[name] == "succeeded", seconds=60)
    session, fetched = world.session(), list[str]()

    def fetch_one(name: str | None) -> FetchDocument:
        return fetch(session, job=name, start=pytest.fail)

    def fetch_these(*names: str) -> list[str]:
        fetched.clear()
        documents = fetch_jobs(
            session, names, fetch_one=fetch_one, on_document=lambda row: fetched.append(row.job)
        )
        return [document.job for document in documents]

    with pytest.raises(NotFoundError, match="no job none"):
        fetch_these("one", "none", "two")
    assert fetched == ["one", "two"] and (world.project / "runs/two/job.json").exists()
    assert fetch_these("two", "one", "two") == fetched == ["two", "one"]
    assert fetch_these("all") == ["one", "two"]
