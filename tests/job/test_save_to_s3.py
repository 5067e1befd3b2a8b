"""A job that saves to S3: who says that it is over, and which nodes may go then."""

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.agent.messages import Launch
from awsddp.agent_client.calls import call_each_node
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.aws import clusters
from awsddp.cluster import down as ending
from awsddp.cluster import status as looking
from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.errors import CloudError, NodeError
from awsddp.job import fetch as fetching
from awsddp.job import follow as watching
from awsddp.job import save_to_s3, submit
from awsddp.job import train as starting
from awsddp.job.follow import JobFollower, make_merger
from awsddp.job.jobs import list_jobs
from awsddp.job.save_to_s3 import abort_uploads, wait_until_saved
from awsddp.model.documents import FetchDocument
from awsddp.model.node_answers import NameClaimResult
from awsddp.model.records import OLDER_JOBS, JobRecord, Saving
from awsddp.nodes import rsync
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster
from awsddp.session.locate import require_live
from awsddp.storage.results_dir import find_missing_parts
from awsddp.storage.saved_job import derive_signing_secret
from tests.support.folder_nodes import World, start
from tests.support.places import TO
from tests.support.waiting import until

WHOLE = {"files": 1, "bytes": 1, "pending_files": 0, "pending_bytes": 0, "error": "", "ended": True}
SAVES = """
import os
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write(os.environ["RANK"])
"""


def say(world: World, *nodes: int, **more: Any) -> None:
    """Let the savers of job `j` on these nodes have said that they are whole."""
    for node in nodes:
        path = world.homes.homes[node] / ".awsddp" / "jobs" / "j" / "saving.json"
        path.write_text(json.dumps(WHOLE | more))


def test_who_looks_releases_the_nodes_once_all_is_saved_and_not_while_a_node_has_the_only_copy(
    world: World,
) -> None:
    start(world, "", name="j")
    world.homes.wait("j")
    say(world, 0)
    held = {"i-0": ["j"], "i-1": ["j"]}
    for less in ({"ended": False}, {"error": "AccessDenied"}):
        say(world, 1, **less)
        list_jobs(world.session())
        assert world.tags == held
    world.set_state(1, "stopped")
    say(world, 1)
    list_jobs(world.session())
    assert world.tags == held  # it cannot be asked
    world.set_state(1, "running")
    list_jobs(world.session())
    assert world.tags == {"i-0": [], "i-1": []}


@pytest.fixture
def owed(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster whose job `j` has succeeded, and saves to S3; what its nodes say of that is up to a test."""
    monkeypatch.setattr(save_to_s3, "claim_job_name", lambda *_: None)
    monkeypatch.setattr(save_to_s3, "_POLL_S", 0.01)
    start(world, SAVES, name="j", save_to=TO)
    world.homes.wait("j")
    return world


class Bucket:
    """What this machine reads in S3: whether all of a job is there. `asked` are the jobs it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, holds: bool) -> None:
        self.asked: list[str] = []

        def in_bucket(cluster: object, job: JobRecord) -> bool:
            self.asked.append(job.job)
            return holds

        for module in (ending, save_to_s3):
            monkeypatch.setattr(module, "verify_in_s3", in_bucket)


def end(world: World) -> None:
    """Do what `down` does before the nodes end."""
    cluster, listed = require_live(world.located())
    fetch_unfetched_results(cluster, ending._with_unfetched(cluster, listed))


def at_home(world: World) -> list[str]:
    return sorted(path.parent.parent.name for path in (world.project / "runs/j").rglob("saved.txt"))


@pytest.mark.parametrize(
    ("states", "decides"),
    [
        (("running", "running"), False),
        (("stopped", "running"), False),
        (("pending", "terminated"), False),
        (("stopped", "stopping"), True),
        (("terminated", "shutting-down"), True),
    ],
)
def test_s3_decides_only_for_results_that_no_node_holds_which_runs(
    owed: World, monkeypatch: pytest.MonkeyPatch, states: tuple[str, str], *, decides: bool
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    for node, state in enumerate(states):
        owed.set_state(node, state)
    cluster = owed.located()
    assert cluster.listing is not None
    owing = ending._with_unfetched(cluster, cluster.listing)
    assert bucket.asked == ["j"] * decides
    assert {node.unfetched for node in owing.nodes} == ({()} if decides else {("j",)})


def test_logs_and_metrics_of_a_saved_job_come_from_s3_though_its_nodes_were_released_and_run(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    owed.tags["i-0"] = []
    owed.tags["i-1"] = [OLDER_JOBS]
    ending._with_unfetched(*require_live(owed.located()))
    assert bucket.asked == [], "what a tag only counts may be this job's"
    owed.tags["i-1"] = []
    ending._with_unfetched(*require_live(owed.located()))
    assert bucket.asked == ["j"]


def test_s3_decides_where_aws_lists_the_nodes_of_a_job_no_longer(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    for node in (0, 1):
        owed.replace_node(node)
    ending._with_unfetched(*require_live(owed.located()))
    assert bucket.asked == ["j"]


def test_the_question_of_down_says_that_what_s3_holds_is_not_fetched(owed: World) -> None:
    cluster, listed = require_live(owed.located())
    asked = {discard: ending._question(cluster, listed, discard=discard) for discard in (True, False)}
    assert asked[False].endswith("The results of j are fetched first, unless S3 holds them.")
    assert asked[True].endswith("The results of j are lost.")


def test_what_the_nodes_say_is_saved_is_fetched_all_the_same_where_s3_does_not_hold_it(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(owed, 0, 1)
    bucket = Bucket(monkeypatch, holds=True)
    end(owed)
    assert (bucket.asked, at_home(owed)) == (["j"], [])  # the logs and metrics came with the answer of S3
    bucket = Bucket(monkeypatch, holds=False)
    end(owed)
    assert (bucket.asked, at_home(owed)) == (["j"], ["node0", "node1"])


def test_what_s3_is_said_to_hold_is_fetched_all_the_same_where_a_node_has_not_saved_it(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(owed, 0)
    say(owed, 1, error="AccessDenied")
    Bucket(monkeypatch, holds=True)
    end(owed)
    assert at_home(owed) == ["node0", "node1"]


@pytest.mark.parametrize("holds", [True, False])
def test_of_a_node_that_stopped_s3_decides_once_the_node_that_runs_has_said_that_all_is_saved(
    owed: World, monkeypatch: pytest.MonkeyPatch, *, holds: bool
) -> None:
    say(owed, 0)
    owed.set_state(1, "stopped")
    Bucket(monkeypatch, holds=holds)
    with contextlib.nullcontext() if holds else pytest.raises(NodeError, match="are not fetched") as left:
        end(owed)
    assert holds or "node1 is stopped" in left.value.why  # type: ignore[union-attr]


def test_what_s3_has_lost_since_its_nodes_were_released_is_fetched_or_keeps_them(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(owed, 0, 1)
    list_jobs(owed.session())
    assert owed.tags == {"i-0": [], "i-1": []}
    Bucket(monkeypatch, holds=False)
    owed.set_state(1, "stopped")
    with pytest.raises(NodeError, match="the results of j are not fetched"):
        end(owed)
    owed.set_state(1, "running")
    end(owed)
    assert at_home(owed) == ["node0", "node1"]


def test_a_node_that_runs_and_cannot_be_reached_stays_whatever_s3_says(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(owed, 0, 1)
    owed.cut = {1}
    Bucket(monkeypatch, holds=True)
    with pytest.raises(NodeError, match="the results of j are not fetched") as left:
        end(owed)
    assert "node1" in left.value.why


def test_a_lost_part_of_a_saved_job_names_where_it_is(owed: World) -> None:
    owed.replace_node(1)
    told = "node1 (i-1) is gone; the saved files of its part of job j are at s3://results/runs/j"
    job = owed.record.jobs[-1]
    assert find_missing_parts(owed.connected(), job) == {1: f"{told}: awsddp fetch s3://results/runs/j"}
    assert "its part of job j is lost" in find_missing_parts(owed.connected(), replace(job, save_to=None))[1]


def test_results_that_the_next_job_may_overwrite_are_named(owed: World) -> None:
    list_jobs(owed.session())
    cluster, _ = require_live(owed.located())
    starting._report_unfetched(cluster)
    assert owed.said[-1] == "this job may overwrite unfetched results of j: awsddp fetch j   # first"
    said = len(owed.said)
    say(owed, 0, 1)
    list_jobs(owed.session())
    cluster, _ = require_live(owed.located())
    starting._report_unfetched(cluster)
    assert owed.said[said:] == []


class Clock:
    """Time that only sleeping moves, `step` seconds at a time."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += self.step


def told(monkeypatch: pytest.MonkeyPatch, step_s: float, says: list[Saving | None]) -> JobRecord:
    """Let the nodes of a job say this, one after the other; the last is said for ever."""
    job = JobRecord(job="j", state="failed", cause=None, ranks=(), home="runs/j", save_to=TO)
    answers = iter(says)

    def told_jobs(*_: object, **__: object) -> tuple[JobRecord]:
        return (replace(job, saving=next(answers, says[-1])),)

    monkeypatch.setattr(save_to_s3, "list_jobs_on_nodes", told_jobs)
    monkeypatch.setattr(save_to_s3, "time", Clock(step_s))
    return job


def test_a_job_that_ends_before_its_saver_has_spoken_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket(monkeypatch, holds=True)
    job = told(monkeypatch, 1.0, [None, None, Saving(), Saving(files=1, bytes=9, ended=True)])
    assert wait_until_saved(world.connected(), job)
    assert world.said[-1] == "the results of j are in s3://results/runs/j: 1 file, 9 bytes"


def test_a_saver_is_waited_for_while_anything_moves_and_two_minutes_longer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket(monkeypatch, holds=True)
    moves = [Saving(files=files, pending_files=9 - files) for files in range(9)]
    job = told(monkeypatch, 100.0, [*moves, Saving(files=9, ended=True)])
    assert wait_until_saved(world.connected(), job)
    job = told(monkeypatch, 1.0, [Saving(files=1, pending_files=1)])
    assert not wait_until_saved(world.connected(), job)
    assert save_to_s3.time.monotonic() == save_to_s3._STILL_S  # type: ignore[attr-defined]
    assert world.said[-1] == "not all results of j are in s3://results/runs/j: its uploads make no progress"


def test_uploads_of_jobs_that_have_ended_are_given_up_by_the_place_that_they_were_saved_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, list[str]]] = []

    class Store:
        def abort(self, where: object, *, ended_jobs: list[str]) -> None:
            given.append((str(where), ended_jobs))

    @contextlib.contextmanager
    def store_at(*_: object) -> Iterator[Store]:
        yield Store()

    monkeypatch.setattr(save_to_s3, "open_store", store_at)
    places = {"a": TO, "b": "s3://other", "c": TO, "d": None}
    job = JobRecord(job="", state="failed", cause=None, ranks=(), home="")
    abort_uploads(world.located(), [replace(job, job=name, save_to=place) for name, place in places.items()])
    assert given == [(TO, ["a", "c"]), ("s3://other", ["b"])]


def test_a_cluster_that_ends_gives_up_the_uploads_of_its_jobs(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(ending, "abort_uploads", lambda _, jobs: given.extend(one.job for one in jobs))
    ending._forget(owed.located(), "0a1b2c3d")
    assert given == ["j"]


@pytest.mark.parametrize(("state", "waits"), [("stopped", False), ("terminated", False), ("stopping", True)])
def test_a_follower_waits_for_no_node_that_ec2_calls_off(
    owed: World, monkeypatch: pytest.MonkeyPatch, state: str, *, waits: bool
) -> None:
    off = ("Server.InstanceInitiatedShutdown", "powered off")
    states = [owed.nodes[0], replace(owed.nodes[1], state=state, reason=off)]
    monkeypatch.setattr(clusters, "describe", lambda *_: states)
    line = owed.line()
    connected, job = owed.connected(line=line), owed.record.jobs[-1]
    merger = make_merger(connected.session, job)
    watch = JobFollower(connected, job, merger=merger, on_lines=lambda _: None)
    watch._lost_at = {1: 0.0}
    watch._give_up_gone()
    assert watch._followed == ({0, 1} if waits else {0})
    assert [asked[0] for asked in line.asked] == ([] if waits else [["lost"]])


def test_the_secret_of_a_job_follows_from_the_clusters_key(world: World) -> None:
    world.folder.key.write_text("the key")
    session = world.session()
    made = derive_signing_secret(session, "j")
    assert made == "89fe50d11fe5960d61c6ca345cbc22c93196a5cb6e8dca5c6cdce56fd118090e"
    assert made != derive_signing_secret(session, "k")
    world.folder.key.write_text("another key")
    assert made != derive_signing_secret(session, "j")


def begin(world: World, monkeypatch: pytest.MonkeyPatch, *outcomes: NameClaimResult) -> list[dict[str, Any]]:
    """Start job `j` where its first node's claim in S3 has these outcomes; return the orders that it got."""
    orders: list[dict[str, Any]] = []
    said = iter(outcomes)

    def tried(_: object, __: int, ___: str, order: dict[str, Any]) -> NameClaimResult:
        orders.append(order)
        return next(said)

    monkeypatch.setattr(save_to_s3, "_try_claim", tried)
    (world.project / "w.py").write_text("")
    connected = world.connected(world.session(script="w.py", name="j", save_to=TO))
    aws: Any = SimpleNamespace(region="us-east-1")
    connected = replace(connected, cluster=replace(connected.cluster, aws_client=aws))
    submit.submit_job(connected, layout_ranks([0, 1], gpus=0, world_size=2), None)  # type: ignore[arg-type]
    return orders


def test_the_nodes_get_the_launch_and_the_secret_with_their_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    fill = save_to_s3.claim_job_name

    def claim(connected: ConnectedCluster, launches: dict[int, Launch], refused: list[str]) -> None:
        fill(connected, launches, refused)
        launched.extend(launches.values())
        for one in launches.values():
            one.saving = {}  # no saver runs here

    monkeypatch.setattr(save_to_s3, "claim_job_name", claim)
    world.folder.key.write_text("the key")
    orders: list[dict[str, Any]] = []

    def program(python: str, modules: object, order: dict[str, Any]) -> tuple[list[str], bytes]:
        orders.append(order)
        return [python], b""

    monkeypatch.setattr(save_to_s3, "node_program", program)
    orders += begin(world, monkeypatch, NameClaimResult(code=""))
    assert len(orders) == 3
    secret = derive_signing_secret(world.session(), "j")
    assert {(one["launch"], one["secret"]) for one in orders} == {(launched[0].launch, secret)}
    assert launched[0].launch == launched[1].launch


NO_WAY = 'Could not connect to the endpoint URL: "https://results.s3.us-east-1.amazonaws.com/"'
CUT = 'Connection was closed before we received a valid response from endpoint URL: "https://results.s3..."'


@pytest.mark.parametrize(
    ("code", "said", "kind", "endpoint"),
    [
        ("throttled", "An error occurred (SlowDown) when calling PutObject", "throttled", False),
        ("throttled", CUT, "unavailable", False),
        ("unreachable", NO_WAY, "unavailable", True),
    ],
)
def test_s3_that_does_not_answer_at_the_claim_is_a_reason_to_try_again(
    world: World, monkeypatch: pytest.MonkeyPatch, code: Any, said: str, kind: str, *, endpoint: bool
) -> None:
    with pytest.raises(CloudError) as refused:
        begin(world, monkeypatch, NameClaimResult(code=code, said=said))
    error = refused.value
    assert (error.kind, error.retryable, error.exit_code) == (kind, True, 4)
    assert error.next.startswith("run the same command again in a minute")
    assert ("create-vpc-endpoint" in error.next) == endpoint
    assert world.tags == {"i-0": [], "i-1": []}


def test_a_follower_says_once_that_nothing_is_saved_any_more(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        watching, "call_nodes_separately", lambda fleet, asked, **_: call_each_node(fleet, asked)
    )
    events = watching.BackgroundFetch(owed.connected(), owed.record.jobs[-1])
    for at, count in ((time.time(), 0), (time.time() - 300, 1), (time.time() - 300, 1), (time.time(), 1)):
        say(owed, 0, ended=False)
        say(owed, 1, ended=False, at=at)
        events.report_uploads()
        told = [text for text in owed.said if text.startswith(f"saving j to {TO}: ")]
        assert len(told) == count
    assert "uploads have stopped (no heartbeat for 5 min" in told[0]


def test_status_asks_the_nodes_while_a_job_that_has_ended_still_saves(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "_connect_prepared", owed.connect)
    owed.folder.save_jobs(replace(owed.record.jobs[-1], state="succeeded"))
    say(owed, 0, 1, error="AccessDenied")
    assert [job.job for job in looking.refresh_jobs(owed.located())[1]] == ["j"]
    assert looking.refresh_jobs(owed.located())[1] == (), (
        "nothing changes any more: it would only use the nodes"
    )
    owed.folder.save_jobs(replace(owed.record.jobs[-1], saving=None))
    say(owed, 0, 1)
    looking.refresh_jobs(owed.located())
    assert owed.tags == {"i-0": [], "i-1": []}


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_fetch_under_which_another_client_ends_the_nodes_goes_on_from_s3_or_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    job = start(world, "print(1)")
    until(lambda: list_jobs_on_nodes(world.connected())[0].state == "succeeded")

    def lose(*_: object, **__: object) -> None:
        world.nodes = tuple(replace(node, state="terminated") for node in world.nodes)
        world.folder.write(replace(world.record, jobs=(replace(job, save_to="s3://b/runs"),)))
        raise NodeFailure(0, "lost", "rsync: connection unexpectedly closed")

    monkeypatch.setattr(rsync, "transfer", lose)
    monkeypatch.setattr(fetching, "verify_in_s3", lambda _, job: is_saved)
    asked = []
    document = FetchDocument(nodes=(), job=job.job, home="")
    monkeypatch.setattr(fetching, "_fetch_saved", lambda _, uri: asked.append(uri) or document)
    if is_saved:
        assert fetching.fetch(world.session(), job=job.job, start=pytest.fail) is document
        assert asked == [f"s3://b/runs/{job.job}"]
        assert any(text.endswith(f"fetching s3://b/runs/{job.job}") for text in world.said)
        return
    with pytest.raises(NodeError, match="the nodes were ended while their results were fetched") as error:
        fetching.fetch(world.session(), job=job.job, start=pytest.fail)
    assert "rsync" not in error.value.why and not asked
