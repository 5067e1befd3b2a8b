"""The start of a job: one per node, one client at a time; a refused launch undoes only its own changes."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent import messages as requests
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.errors import InUse, NodeError, UsageError
from awsddp.job import submit
from awsddp.job import train as train_module
from awsddp.job.cancel import end_ranks
from awsddp.model.node_answers import Slots
from awsddp.model.records import OLDER_JOBS
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.next_steps import complete_error
from awsddp.state import read_ledger
from awsddp.storage.checkpoints import Checkpoint
from tests.support.folder_nodes import SLEEPS, NodeConnections, World, start_script


def states(world: World) -> dict[str, str]:
    return {job.job: job.state for job in list_jobs_on_nodes(world.connected())}


def test_a_second_job_is_refused_before_anything_is_sent_or_tagged(world: World) -> None:
    first = start_script(world, SLEEPS)
    assert first.job == "w-1"
    before = (list(world.events), dict(world.tags))
    for settings in ({}, {"name": "other"}, {"name": first.job}):
        with pytest.raises(InUse, match=rf"job {first.job} runs on node0, node1") as error:
            start_script(world, SLEEPS, **settings)
        assert error.value.exit_code == 3
        assert f"awsddp cancel {first.job}" in error.value.next
        assert f"awsddp logs -f {first.job}" in error.value.next
        assert "waiting jobs" not in error.value.why, "none waits"
        complete_error(world.session(script="w.py", args=["--lr", "1"]), error.value)
        name_option = " --name other" if settings == {"name": "other"} else ""  # the third name is taken
        assert f" --after {first.job}{name_option} w.py -- --lr 1   # or" in error.value.next
    assert (world.events, world.tags) == before
    assert states(world) == {first.job: "running"}
    end_ranks(world.connected(), first.job, grace_s=0)
    assert start_script(world, "").job == "w-2"


def test_the_advice_to_wait_keeps_the_name_and_the_detach_option(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start_script(world, SLEEPS)
    monkeypatch.setattr(train_module, "ready_cluster", world.find_cluster)
    for detach, job, command in (
        (True, {"name": "mine"}, f"train --detach --after {first.job} --name mine"),
        (False, {"name": "mine"}, f"train --after {first.job} --name mine"),
        (True, {}, f"train --detach --after {first.job}"),
    ):
        with pytest.raises(InUse) as error:
            train_module.train(world.session(script="w.py", **job), on_lines=lambda _: None, detach=detach)
        assert f"\nawsddp {command}   # or let" in error.value.next


def test_a_job_has_the_environment_options_of_a_later_up(world: World) -> None:
    world.folder.write(replace(world.record, asked={"env.packages_from": "node"}))
    start_script(world, "")
    (job,) = list_jobs_on_nodes(world.connected())
    assert "env.packages_from=node" in job.options


def test_a_start_takes_four_round_trips(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    start_script(world, "")
    assert line.requests == [
        {0: ["claim", "slots"], 1: ["slots"]},
        *[{0: [request], 1: [request]} for request in ("probe", "dial", "launch")],
    ]


def test_slots_are_read_again_if_another_client_could_launch_before_the_claim(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    holder = world.homes.start(0, requests.Claim(owner="ann", wait_s=0), close=False)
    assert holder.stdout is not None
    while b"claimed" not in holder.stdout.readline():
        pass
    request = line.request

    def launch_then_request(program: object, messages: Any, on_data: Any, **options: Any) -> Any:
        outcomes = request(program, messages, on_data, **options)
        if len(line.requests) == 1:
            holder.communicate(b"")
            for host in world.homes.hosts:
                Path(host.workdir, "anns.py").write_text(SLEEPS)
            world.homes.launch("anns.py", job="anns")
        return outcomes

    monkeypatch.setattr(line, "request", launch_then_request)
    with pytest.raises(InUse, match="job anns runs on node0, node1"):
        start_script(world, "")
    assert line.requests[1:] == [{0: ["claim"]}, {0: ["slots"], 1: ["slots"]}]
    assert (world.events, world.tags) == ([], {})


def test_slots_are_read_again_if_another_client_held_the_claim_just_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    lock = world.homes.homes[0] / ".awsddp" / "launch.lock"
    lock.parent.mkdir(exist_ok=True)
    lock.write_text("ann")
    os.utime(lock, (time.time() + 60, time.time() + 60))
    start_script(world, "")
    assert line.requests[1:3] == [{0: ["claim"]}, {0: ["slots"], 1: ["slots"]}]


def test_a_taken_name_is_refused_with_its_location_and_its_tag_stays(world: World) -> None:
    start_script(world, SLEEPS, name="nm")
    end_ranks(world.connected(), "nm", grace_s=0)
    results = world.project / "runs" / "kept"
    results.mkdir(parents=True)
    (world.project / "runs" / "empty").mkdir()
    (results / "model.pt").write_bytes(bytes(2000))
    causes = {
        "nm": "node0, node1 has a job with that name: awsddp jobs nm",
        "kept": "runs/kept exists: 1 file, 2 kB",
        "empty": "runs/empty exists: it is empty",
    }
    for name, why in causes.items():
        with pytest.raises(UsageError, match=f"job {name} already exists") as error:
            start_script(world, SLEEPS, name=name)
        assert error.value.why.endswith(why)
    assert world.tags == {"i-0": ["nm"], "i-1": ["nm"]}


def test_a_name_in_the_tag_of_a_node_that_does_not_answer_is_taken(world: World) -> None:
    world.tags["i-1"] = ["away"]
    cluster, slots = world.located(), Slots(used=(), taken=(), jobs={})
    reason = "node1 holds results of a job with that name, according to its tag"
    assert submit._why_taken(cluster, "away", {0: slots}) == reason
    assert submit._why_taken(cluster, "away", {0: slots, 1: slots}) == ""


@pytest.mark.prove
def test_an_automatic_name_follows_the_numbers_on_nodes_in_tags_record_and_runs(
    world: World,
) -> None:
    runs = Path(world.session().results)
    runs.mkdir()

    def name(*nodes: int) -> str:
        (world.project / "w.py").write_text("")
        ranks = layout_ranks(nodes or (0, 1), gpus=0, world_size=len(nodes) or 2)
        started = submit.submit_job(world.connected(world.session(script="w.py")), ranks, None)  # type: ignore[arg-type]
        world.homes.wait(started.job, nodes=[rank.node for rank in started.ranks])
        return started.job

    assert name(1) == "w-1"
    assert name(0) == "w-2", "node1, on which it does not run, has a w-1"
    world.tags["i-1"] = ["w-4", "x-9", "w-7x", "w-07-8"]
    assert name() == "w-5"
    world.folder.save_jobs(replace(world.record.jobs[-1], job="w-8"))
    assert name() == "w-9"
    for taken in ("w-19", "w-" + "9" * 40, "w-\u0663", "other-99"):
        (runs / taken).mkdir()
    assert name() == "w-20"
    (runs / "w-999999").mkdir()
    assert [name(), name()] == ["w-1000000", "w-1000001"]


def launch_as_another_client(
    world: World, line: NodeConnections, *jobs: str, script: str = "print('another')"
) -> None:
    """Have another client start jobs on the nodes, which end, immediately before our launch."""
    request, remaining = line.request, list(jobs)

    def launch_first(program: object, messages: Any, on_data: Any, **options: Any) -> Any:
        if remaining and b'"do": "launch"' in messages[0]:
            for host in world.homes.hosts:
                Path(host.workdir, "other.py").write_text(script)
            world.homes.launch("other.py", job=remaining[0])
            if script != SLEEPS:
                world.homes.wait(remaining[0])
            del remaining[0]
        return request(program, messages, on_data, **options)

    line.request = launch_first  # type: ignore[method-assign]


def test_a_client_whose_number_was_taken_starts_once_with_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    launch_as_another_client(world, line, "w-1", "w-2")
    job = start_script(world, "print('ours')")
    assert job.job == "w-3"
    world.homes.wait("w-3")
    logs = {path.parent.parent.name: path.read_text() for path in world.homes.homes[0].rglob("rank0.log")}
    assert logs == {"w-1": "another\n", "w-2": "another\n", "w-3": "ours\n"}
    assert states(world) == {"w-1": "succeeded", "w-2": "succeeded", "w-3": "succeeded"}
    assert world.tags == {"i-0": ["w-1", "w-2", "w-3"], "i-1": ["w-1", "w-2", "w-3"]}, "theirs stay"
    assert [row.job for row in read_ledger(world.folder.ledger) if row.event == "train"] == ["w-3"]


@pytest.mark.prove
def test_a_client_whose_number_a_running_job_took_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    launch_as_another_client(world, line, "w-1", script=SLEEPS)
    with pytest.raises(InUse, match="job w-1 runs on node0, node1"):
        start_script(world, "print('ours')")
    assert states(world) == {"w-1": "running"}
    assert world.tags == {"i-0": ["w-1"], "i-1": ["w-1"]}


def test_a_given_name_that_another_client_took_is_refused_and_its_tag_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    launch_as_another_client(world, line, "mine")
    with pytest.raises(UsageError, match="job mine already exists on this node"):
        start_script(world, SLEEPS, name="mine")
    assert states(world) == {"mine": "succeeded"}
    assert world.tags == {"i-0": ["mine"], "i-1": ["mine"]}


@pytest.mark.prove
def test_a_start_fails_after_five_taken_numbers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    line = world.open_connections()
    monkeypatch.setattr(world, "open_connections", lambda: line)
    launch_as_another_client(world, line, *(f"w-{number}" for number in range(1, 9)))
    with pytest.raises(UsageError, match="job w-5 already exists"):
        start_script(world, "")


def test_a_launch_whose_reply_is_lost_is_not_repeated_with_the_next_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    line.mute = {0}
    monkeypatch.setattr(world, "open_connections", lambda: line)
    with pytest.raises(NodeError, match="the reply was lost"):
        start_script(world, SLEEPS)
    assert {path.name for path in world.homes.homes[0].glob(".awsddp/jobs/*")} == {"w-1"}


def test_a_launch_that_one_node_refuses_leaves_no_rank_and_no_tag(world: World) -> None:
    world.homes.hosts[1] = replace(
        world.homes.hosts[1], prepared=replace(world.homes.hosts[1].prepared, python="/no/python")
    )
    record = world.folder.read()
    assert record is not None
    world.folder.write(replace(record, prepared=tuple(host.prepared for host in world.homes.hosts)))
    world.tags["i-0"] = [OLDER_JOBS]
    with pytest.raises(NodeError, match="/no/python cannot be run"):
        start_script(world, SLEEPS, name="half")
    assert world.tags == {"i-0": [OLDER_JOBS], "i-1": []}
    assert states(world) == {"half": "cancelled"}


def test_tags_stay_if_a_node_that_may_run_the_job_does_not_reply(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = world.open_connections()
    line.mute = {0}
    monkeypatch.setattr(world, "open_connections", lambda: line)
    with pytest.raises(NodeError, match="the reply was lost"):
        start_script(world, SLEEPS, name="lost")
    assert world.homes.document(0, "lost")["state"] != "succeeded"
    assert world.tags == {"i-0": ["lost"], "i-1": ["lost"]}


@pytest.mark.parametrize(("run_id", "is_same"), [("first-run", True), (None, False)])
def test_a_resumed_job_continues_the_run_of_the_job_that_it_resumes(
    world: World, run_id: str | None, is_same: bool
) -> None:
    connected = world.connected(world.session(script="w.py", resume="first"))
    checkpoint = Checkpoint(job="first", parts=(Path("a.pt"),), run_id=run_id)
    ranks = layout_ranks([0, 1], gpus=0, world_size=2)
    _, launches, _ = submit._make_requests(connected, ranks, None, checkpoint)  # type: ignore[arg-type]
    ids = {launch.facts["run_id"] for launch in launches.values()}
    assert ids == {"first-run" if is_same else launches[0].launch}
