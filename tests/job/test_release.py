"""Nodes are kept for unfetched results, and released from jobs that never began."""

import shutil
from collections.abc import Callable

import pytest

from awsddp.agent import messages as requests
from awsddp.cluster.status import refresh_jobs
from awsddp.errors import NotFoundError
from awsddp.job import submit
from awsddp.job.cancel import cancel, end_ranks
from awsddp.job.fetch import fetch
from awsddp.job.jobs import list_jobs
from awsddp.job.logs import logs
from tests.support.folder_nodes import SLEEPS, World, start_script


def kill_client_after_tagging(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Kill a client after it has tagged the nodes with a job, and before it launches the job."""

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(submit, "call_each_node", kill)
        patched.setattr(submit, "end_ranks", kill)  # it undoes nothing either
        start_script(world, SLEEPS, name=name)
    assert world.tags == {"i-0": [name], "i-1": [name]}


def test_the_name_of_a_job_that_never_began_is_free_and_its_tags_are_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_client_after_tagging(world, monkeypatch, "first")
    world.tags = {key: [*jobs, "second"] for key, jobs in world.tags.items()}
    start_script(world, SLEEPS, name="first")
    assert world.tags == {"i-0": ["first"], "i-1": ["first"]}


@pytest.mark.parametrize("verb", ["jobs", "status", "fetch", "logs", "cancel"])
def test_verbs_release_the_nodes_of_a_job_that_never_began(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    kill_client_after_tagging(world, monkeypatch, "j")
    verbs: dict[str, Callable[[], object]] = {
        "jobs": lambda: list_jobs(world.session()),
        "status": lambda: refresh_jobs(world.located()),
        "fetch": lambda: fetch(world.session(), job="j", start=print),
        "logs": lambda: logs(world.session(), job="j", follow=False, on_lines=print),
        "cancel": lambda: cancel(world.session(), job="j"),
    }
    if verb in ("jobs", "status"):
        verbs[verb]()
    else:
        with pytest.raises(NotFoundError, match="job j never began") as error:
            verbs[verb]()
        assert error.value.next == "awsddp train --name j SCRIPT   # its name is free"
    assert world.tags == {"i-0": [], "i-1": []}


def test_tags_stay_while_another_client_may_be_about_to_launch(world: World) -> None:
    world.tags = {"i-0": ["j"], "i-1": ["j"]}
    holder = world.homes.start(0, requests.Claim(owner="ann", wait_s=0), close=False)
    assert holder.stdout is not None
    while b"claimed" not in holder.stdout.readline():
        pass
    list_jobs(world.session())
    assert world.tags == {"i-0": ["j"], "i-1": ["j"]}
    holder.communicate(b"")
    world.cut = {0}  # the node that holds the claim is unreachable
    list_jobs(world.session())
    assert world.tags == {"i-0": ["j"], "i-1": ["j"]}
    world.cut = set()
    list_jobs(world.session())
    assert world.tags == {"i-0": [], "i-1": []}


def test_tags_of_a_job_that_only_one_node_knows_stay_on_both(world: World) -> None:
    start_script(world, SLEEPS, name="j")
    end_ranks(world.connected(), "j", grace_s=0)
    shutil.rmtree(world.homes.folder(1, "j"))
    list_jobs(world.session())
    assert world.tags == {"i-0": ["j"], "i-1": ["j"]}, "the fetch releases both"
