"""Nodes are kept for results, and released for jobs that never began."""

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
from tests.support.folder_nodes import SLEEPS, World, start


def tagged_and_killed(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Kill a client after it has tagged the nodes with a job, and before it launches that."""

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(submit, "call_each_node", killed)
        patched.setattr(submit, "end_ranks", killed)  # nor does it undo anything
        start(world, SLEEPS, name=name)
    assert world.tags == {"i-0": [name], "i-1": [name]}


def test_name_of_a_job_that_never_began_is_free_and_other_such_tags_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged_and_killed(world, monkeypatch, "first")
    world.tags = {key: [*jobs, "second"] for key, jobs in world.tags.items()}
    start(world, SLEEPS, name="first")
    assert world.tags == {"i-0": ["first"], "i-1": ["first"]}


@pytest.mark.parametrize("verb", ["jobs", "status", "fetch", "logs", "cancel"])
def test_who_looks_releases_nodes_of_a_job_that_never_began(
    world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    tagged_and_killed(world, monkeypatch, "j")
    looks: dict[str, Callable[[], object]] = {
        "jobs": lambda: list_jobs(world.session()),
        "status": lambda: refresh_jobs(world.located()),
        "fetch": lambda: fetch(world.session(), job="j", start=print),
        "logs": lambda: logs(world.session(), job="j", follow=False, on_lines=print),
        "cancel": lambda: cancel(world.session(), job="j"),
    }
    if verb in ("jobs", "status"):
        looks[verb]()
    else:
        with pytest.raises(NotFoundError, match="job j never began") as told:
            looks[verb]()
        assert told.value.next == "awsddp train --name j SCRIPT   # its name is free"
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
    world.cut = {0}  # the node that gives the right to launch cannot be asked
    list_jobs(world.session())
    assert world.tags == {"i-0": ["j"], "i-1": ["j"]}
    world.cut = set()
    list_jobs(world.session())
    assert world.tags == {"i-0": [], "i-1": []}


def test_tag_of_a_job_that_one_node_knows_stays_there_alone(world: World) -> None:
    start(world, SLEEPS, name="j")
    end_ranks(world.connected(), "j", grace_s=0)
    shutil.rmtree(world.homes.folder(1, "j"))
    list_jobs(world.session())
    assert world.tags == {"i-0": ["j"], "i-1": ["j"]}, "whoever fetches it releases both"
