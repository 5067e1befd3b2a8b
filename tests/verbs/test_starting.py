"""Starting a job: one a node, one client at a time, and a refused launch undoes only what it did itself."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp import train as starting
from awsddp.errors import InUse, NodeError, UsageError
from awsddp.jobs.supervisor import requests
from awsddp.known import end_ranks
from awsddp.reach import told_jobs
from tests.verbs.conftest import World, start

SLEEPS = "import time; time.sleep(600)\n"


def states(world: World) -> dict[str, str]:
    return {job.job: job.state for job in told_jobs(world.handle())}


def test_second_job_is_refused_by_name_before_anything_is_sent_or_tagged(world: World) -> None:
    first = start(world, SLEEPS)
    assert re.fullmatch(r"w-\d{8}-\d{6}-[0-9a-f]{4}", first.job)
    before = (list(world.said), dict(world.tags))
    for settings in ({}, {"name": "other"}, {"name": first.job}):
        with pytest.raises(InUse, match=rf"job {first.job} runs on node0, node1") as refused:
            start(world, SLEEPS, **settings)
        assert refused.value.exit_code == 3
        assert f"awsddp cancel {first.job}" in refused.value.next
        assert f"awsddp logs -f {first.job}" in refused.value.next
    assert (world.said, world.tags) == before
    assert states(world) == {first.job: "running"}
    end_ranks(world.handle(), first.job, grace_s=0)
    assert start(world, "").job != first.job


def test_start_asks_the_nodes_four_times_one_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.line()
    monkeypatch.setattr(world, "line", lambda: line)
    start(world, "")
    assert line.asked == [
        {0: ["claim", "slots"], 1: ["slots"]},
        *[{0: [what], 1: [what]} for what in ("probe", "dial", "launch")],
    ]


def test_nodes_are_asked_again_where_another_client_could_launch_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.line()
    monkeypatch.setattr(world, "line", lambda: line)
    holder = world.homes.start(0, requests.Claim(owner="ann", wait_s=0), close=False)
    assert holder.stdout is not None
    while b"claimed" not in holder.stdout.readline():
        pass
    request = line.request

    def launch_meanwhile(program: object, messages: Any, on_data: Any, **more: Any) -> Any:
        outcomes = request(program, messages, on_data, **more)
        if len(line.asked) == 1:
            holder.communicate(b"")
            for host in world.homes.hosts:
                Path(host.workdir, "anns.py").write_text(SLEEPS)
            world.homes.launch("anns.py", job="anns")
        return outcomes

    monkeypatch.setattr(line, "request", launch_meanwhile)
    with pytest.raises(InUse, match="job anns runs on node0, node1"):
        start(world, "")
    assert line.asked[1:] == [{0: ["claim"]}, {0: ["slots"], 1: ["slots"]}]
    assert (world.said, world.tags) == ([], {})


def test_nodes_are_asked_again_where_another_client_held_the_claim_just_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.line()
    monkeypatch.setattr(world, "line", lambda: line)
    held = world.homes.homes[0] / ".awsddp" / "launch.lock"
    held.parent.mkdir(exist_ok=True)
    held.write_text("ann")
    os.utime(held, (time.time() + 60, time.time() + 60))
    start(world, "")
    assert line.asked[1:3] == [{0: ["claim"]}, {0: ["slots"], 1: ["slots"]}]


def test_name_of_a_job_that_is_not_fetched_yet_is_refused_and_its_tag_stays(world: World) -> None:
    start(world, SLEEPS, name="nm")
    end_ranks(world.handle(), "nm", grace_s=0)
    for name in ("nm", "gone"):
        if name == "gone":  # its part was on a machine that has been replaced: only a tag tells of it
            world.tags["i-1"].append("gone")
        with pytest.raises(UsageError, match=f"job {name} already exists"):
            start(world, SLEEPS, name=name)
    assert world.tags == {"i-0": ["nm"], "i-1": ["nm", "gone"]}


def test_automatic_name_that_is_taken_is_drawn_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "_names", lambda spec: iter(("tagged", "at-home", "free")))
    world.tags["i-0"] = ["tagged"]
    (world.project / "runs" / "at-home").mkdir(parents=True)
    assert start(world, "").job == "free"


def test_launch_that_one_node_refuses_leaves_neither_a_rank_nor_a_tag(world: World) -> None:
    world.homes.hosts[1] = replace(
        world.homes.hosts[1], prepared=replace(world.homes.hosts[1].prepared, python="/no/python")
    )
    record = world.folder.read()
    assert record is not None
    world.folder.write(replace(record, prepared=tuple(host.prepared for host in world.homes.hosts)))
    world.tags["i-0"] = ["older"]
    with pytest.raises(NodeError, match="/no/python cannot be run"):
        start(world, SLEEPS, name="half")
    assert world.tags == {"i-0": ["older"], "i-1": []}
    assert states(world) == {"half": "cancelled"}


def test_tags_stay_where_a_node_that_may_run_the_job_cannot_be_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.line()
    line.mute = {0}
    monkeypatch.setattr(world, "line", lambda: line)
    with pytest.raises(NodeError, match="the reply was lost"):
        start(world, SLEEPS, name="lost")
    assert world.homes.document(0, "lost")["state"] != "succeeded"
    assert world.tags == {"i-0": ["lost"], "i-1": ["lost"]}
