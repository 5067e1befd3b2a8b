"""A job that saves to S3: when all of it is saved, and which nodes are released then."""

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
from awsddp.cluster import down
from awsddp.cluster import status as status_module
from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.errors import CloudError, NodeError
from awsddp.job import fetch as fetch_module
from awsddp.job import follow as follow_module
from awsddp.job import save_to_s3, submit
from awsddp.job import train as train_module
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
from tests.support.folder_nodes import World, start_script
from tests.support.places import TO
from tests.support.waiting import until

WHOLE = {"files": 1, "bytes": 1, "pending_files": 0, "pending_bytes": 0, "error": "", "ended": True}
SAVES = """
import os
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write(os.environ["RANK"])
"""


def write_saving(world: World, *nodes: int, **fields: Any) -> None:
    """Write the uploaders' reports of job `j` on these nodes: all is saved, except for `fields`."""
    for node in nodes:
        path = world.homes.homes[node] / ".awsddp" / "jobs" / "j" / "saving.json"
        path.write_text(json.dumps(WHOLE | fields))


def test_jobs_releases_the_nodes_once_every_node_has_saved_all(
    world: World,
) -> None:
    start_script(world, "", name="j")
    world.homes.wait("j")
    write_saving(world, 0)
    tags = {"i-0": ["j"], "i-1": ["j"]}
    for fields in ({"ended": False}, {"error": "AccessDenied"}):
        write_saving(world, 1, **fields)
        list_jobs(world.session())
        assert world.tags == tags
    world.set_state(1, "stopped")
    write_saving(world, 1)
    list_jobs(world.session())
    assert world.tags == tags  # it is unreachable
    world.set_state(1, "running")
    list_jobs(world.session())
    assert world.tags == {"i-0": [], "i-1": []}


@pytest.fixture
def saving(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster whose job `j` has succeeded and saves to S3; tests write its uploaders' reports."""
    monkeypatch.setattr(save_to_s3, "claim_job_name", lambda *_: None)
    monkeypatch.setattr(save_to_s3, "_POLL_S", 0.01)
    start_script(world, SAVES, name="j", save_to=TO)
    world.homes.wait("j")
    return world


class Bucket:
    """Replaces the check whether S3 holds all results of a job. `verified`: the jobs that were checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, holds: bool) -> None:
        self.verified: list[str] = []

        def verify(cluster: object, job: JobRecord) -> bool:
            self.verified.append(job.job)
            return holds

        for module in (down, save_to_s3):
            monkeypatch.setattr(module, "verify_in_s3", verify)


def fetch_before_down(world: World) -> None:
    """Fetch as `down` does before it terminates the nodes."""
    cluster, listing = require_live(world.located())
    fetch_unfetched_results(cluster, down._with_unfetched(cluster, listing))


def list_fetched(world: World) -> list[str]:
    return sorted(path.parent.parent.name for path in (world.project / "runs/j").rglob("saved.txt"))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("running", "running"), False),
        (("stopped", "running"), False),
        (("pending", "terminated"), False),
        (("stopped", "stopping"), True),
        (("terminated", "shutting-down"), True),
    ],
)
def test_down_checks_s3_only_for_results_that_no_running_node_holds(
    saving: World, monkeypatch: pytest.MonkeyPatch, states: tuple[str, str], *, expected: bool
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    for node, state in enumerate(states):
        saving.set_state(node, state)
    cluster = saving.located()
    assert cluster.listing is not None
    listing = down._with_unfetched(cluster, cluster.listing)
    assert bucket.verified == ["j"] * expected
    assert {node.unfetched for node in listing.nodes} == ({()} if expected else {("j",)})


def test_down_reads_a_saved_job_from_s3_although_its_released_nodes_run(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    saving.tags["i-0"] = []
    saving.tags["i-1"] = [OLDER_JOBS]
    down._with_unfetched(*require_live(saving.located()))
    assert bucket.verified == [], "the tag for older jobs may mean this one"
    saving.tags["i-1"] = []
    down._with_unfetched(*require_live(saving.located()))
    assert bucket.verified == ["j"]


def test_down_checks_s3_if_aws_no_longer_lists_the_nodes_of_a_job(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(monkeypatch, holds=True)
    for node in (0, 1):
        saving.replace_node(node)
    down._with_unfetched(*require_live(saving.located()))
    assert bucket.verified == ["j"]


def test_the_question_of_down_says_that_results_in_s3_are_not_fetched(saving: World) -> None:
    cluster, listing = require_live(saving.located())
    texts = {discard: down._question(cluster, listing, discard=discard) for discard in (True, False)}
    assert texts[False].endswith("The results of j are fetched first, unless S3 holds them.")
    assert texts[True].endswith("The results of j are lost.")


def test_down_fetches_what_nodes_report_as_saved_if_s3_does_not_hold_it(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_saving(saving, 0, 1)
    bucket = Bucket(monkeypatch, holds=True)
    fetch_before_down(saving)
    assert (bucket.verified, list_fetched(saving)) == (["j"], [])  # the check fetched logs and metrics
    bucket = Bucket(monkeypatch, holds=False)
    fetch_before_down(saving)
    assert (bucket.verified, list_fetched(saving)) == (["j"], ["node0", "node1"])


def test_down_fetches_what_s3_holds_if_a_node_reports_an_error(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_saving(saving, 0)
    write_saving(saving, 1, error="AccessDenied")
    Bucket(monkeypatch, holds=True)
    fetch_before_down(saving)
    assert list_fetched(saving) == ["node0", "node1"]


@pytest.mark.parametrize("holds", [True, False])
def test_results_of_a_stopped_node_are_checked_in_s3_once_the_running_one_has_saved_all(
    saving: World, monkeypatch: pytest.MonkeyPatch, *, holds: bool
) -> None:
    write_saving(saving, 0)
    saving.set_state(1, "stopped")
    Bucket(monkeypatch, holds=holds)
    with contextlib.nullcontext() if holds else pytest.raises(NodeError, match="are not fetched") as error:
        fetch_before_down(saving)
    assert holds or "node1 is stopped" in error.value.why  # type: ignore[union-attr]


def test_results_that_s3_lost_after_the_release_are_fetched_or_keep_the_nodes(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_saving(saving, 0, 1)
    list_jobs(saving.session())
    assert saving.tags == {"i-0": [], "i-1": []}
    Bucket(monkeypatch, holds=False)
    saving.set_state(1, "stopped")
    with pytest.raises(NodeError, match="the results of j are not fetched"):
        fetch_before_down(saving)
    saving.set_state(1, "running")
    fetch_before_down(saving)
    assert list_fetched(saving) == ["node0", "node1"]


def test_an_unreachable_running_node_is_kept_even_if_s3_holds_all(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_saving(saving, 0, 1)
    saving.cut = {1}
    Bucket(monkeypatch, holds=True)
    with pytest.raises(NodeError, match="the results of j are not fetched") as error:
        fetch_before_down(saving)
    assert "node1" in error.value.why


def test_the_lost_part_of_a_saved_job_names_its_uri(saving: World) -> None:
    saving.replace_node(1)
    reason = "node1 (i-1) is gone; the saved files of its part of job j are at s3://results/runs/j"
    job = saving.record.jobs[-1]
    assert find_missing_parts(saving.connected(), job) == {1: f"{reason}: awsddp fetch s3://results/runs/j"}
    assert (
        "its part of job j is lost" in find_missing_parts(saving.connected(), replace(job, save_to=None))[1]
    )


def test_results_that_the_next_job_may_overwrite_are_named(saving: World) -> None:
    list_jobs(saving.session())
    cluster, _ = require_live(saving.located())
    train_module._report_unfetched(cluster)
    assert saving.events[-1] == "this job may overwrite unfetched results of j: awsddp fetch j   # first"
    count = len(saving.events)
    write_saving(saving, 0, 1)
    list_jobs(saving.session())
    cluster, _ = require_live(saving.located())
    train_module._report_unfetched(cluster)
    assert saving.events[count:] == []


class Clock:
    """A clock that advances only in sleeps, by `step` seconds each."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self.now += self.step


def fake_saving(monkeypatch: pytest.MonkeyPatch, step_s: float, reports: list[Saving | None]) -> JobRecord:
    """Have the nodes of a job report these states one after the other, and then always the last."""
    job = JobRecord(job="j", state="failed", cause=None, ranks=(), home="runs/j", save_to=TO)
    answers = iter(reports)

    def list_reported(*_: object, **__: object) -> tuple[JobRecord]:
        return (replace(job, saving=next(answers, reports[-1])),)

    monkeypatch.setattr(save_to_s3, "list_jobs_on_nodes", list_reported)
    monkeypatch.setattr(save_to_s3, "time", Clock(step_s))
    return job


def test_the_client_waits_for_an_uploader_that_has_not_reported_yet(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket(monkeypatch, holds=True)
    job = fake_saving(monkeypatch, 1.0, [None, None, Saving(), Saving(files=1, bytes=9, ended=True)])
    assert wait_until_saved(world.connected(), job)
    assert world.events[-1] == "the results of j are in s3://results/runs/j: 1 file, 9 bytes"


def test_the_client_waits_for_uploads_until_two_minutes_without_progress(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket(monkeypatch, holds=True)
    reports = [Saving(files=files, pending_files=9 - files) for files in range(9)]
    job = fake_saving(monkeypatch, 100.0, [*reports, Saving(files=9, ended=True)])
    assert wait_until_saved(world.connected(), job)
    job = fake_saving(monkeypatch, 1.0, [Saving(files=1, pending_files=1)])
    assert not wait_until_saved(world.connected(), job)
    assert save_to_s3.time.monotonic() == save_to_s3._STILL_S  # type: ignore[attr-defined]
    assert world.events[-1] == "not all results of j are in s3://results/runs/j: its uploads make no progress"


def test_uploads_of_ended_jobs_are_aborted_once_per_uri(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[tuple[str, list[str]]] = []

    class Store:
        def abort(self, uri: object, *, ended_jobs: list[str]) -> None:
            aborted.append((str(uri), ended_jobs))

    @contextlib.contextmanager
    def store_at(*_: object) -> Iterator[Store]:
        yield Store()

    monkeypatch.setattr(save_to_s3, "open_store", store_at)
    uris = {"a": TO, "b": "s3://other", "c": TO, "d": None}
    job = JobRecord(job="", state="failed", cause=None, ranks=(), home="")
    abort_uploads(world.located(), [replace(job, job=name, save_to=uri) for name, uri in uris.items()])
    assert aborted == [(TO, ["a", "c"]), ("s3://other", ["b"])]


def test_down_aborts_the_uploads_of_the_clusters_jobs(saving: World, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(down, "abort_uploads", lambda _, jobs: aborted.extend(job.job for job in jobs))
    down._forget(saving.located(), "0a1b2c3d")
    assert aborted == ["j"]


@pytest.mark.parametrize(("state", "waits"), [("stopped", False), ("terminated", False), ("stopping", True)])
def test_the_follower_gives_up_a_node_that_ec2_reports_as_ended(
    saving: World, monkeypatch: pytest.MonkeyPatch, state: str, *, waits: bool
) -> None:
    reason = ("Server.InstanceInitiatedShutdown", "powered off")
    described = [saving.nodes[0], replace(saving.nodes[1], state=state, reason=reason)]
    monkeypatch.setattr(clusters, "describe", lambda *_: described)
    line = saving.open_connections()
    connected, job = saving.connected(line=line), saving.record.jobs[-1]
    merger = make_merger(connected.session, job)
    follower = JobFollower(connected, job, merger=merger, on_lines=lambda _: None)
    follower._lost_at = {1: 0.0}
    follower._give_up_gone()
    assert follower._followed == ({0, 1} if waits else {0})
    assert [requests[0] for requests in line.requests] == ([] if waits else [["lost"]])


def test_the_secret_of_a_job_is_derived_from_the_clusters_key(world: World) -> None:
    world.folder.key.write_text("the key")
    session = world.session()
    secret = derive_signing_secret(session, "j")
    assert secret == "89fe50d11fe5960d61c6ca345cbc22c93196a5cb6e8dca5c6cdce56fd118090e"
    assert secret != derive_signing_secret(session, "k")
    world.folder.key.write_text("another key")
    assert secret != derive_signing_secret(session, "j")


def start_job(
    world: World, monkeypatch: pytest.MonkeyPatch, *outcomes: NameClaimResult
) -> list[dict[str, Any]]:
    """Start job `j`; its first node's claim in S3 has these outcomes. Return the orders that it got."""
    orders: list[dict[str, Any]] = []
    results = iter(outcomes)

    def try_claim(_: object, __: int, ___: str, order: dict[str, Any]) -> NameClaimResult:
        orders.append(order)
        return next(results)

    monkeypatch.setattr(save_to_s3, "_try_claim", try_claim)
    (world.project / "w.py").write_text("")
    connected = world.connected(world.session(script="w.py", name="j", save_to=TO))
    aws: Any = SimpleNamespace(region="us-east-1")
    connected = replace(connected, cluster=replace(connected.cluster, aws_client=aws))
    submit.submit_job(connected, layout_ranks([0, 1], gpus=0, world_size=2), None)  # type: ignore[arg-type]
    return orders


def test_uploaders_get_the_launch_and_the_secret_with_their_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Launch] = []
    fill_launches = save_to_s3.claim_job_name

    def claim(connected: ConnectedCluster, launches: dict[int, Launch], refused: list[str]) -> None:
        fill_launches(connected, launches, refused)
        launched.extend(launches.values())
        for launch in launches.values():
            launch.saving = {}  # no uploader runs in this test

    monkeypatch.setattr(save_to_s3, "claim_job_name", claim)
    world.folder.key.write_text("the key")
    orders: list[dict[str, Any]] = []

    def program(python: str, modules: object, order: dict[str, Any]) -> tuple[list[str], bytes]:
        orders.append(order)
        return [python], b""

    monkeypatch.setattr(save_to_s3, "node_program", program)
    orders += start_job(world, monkeypatch, NameClaimResult(code=""))
    assert len(orders) == 3
    secret = derive_signing_secret(world.session(), "j")
    assert {(order["launch"], order["secret"]) for order in orders} == {(launched[0].launch, secret)}
    assert launched[0].launch == launched[1].launch


NO_WAY = 'Could not connect to the endpoint URL: "https://results.s3.us-east-1.amazonaws.com/"'
CUT = 'Connection was closed before we received a valid response from endpoint URL: "https://results.s3..."'


@pytest.mark.parametrize(
    ("code", "message", "kind", "endpoint"),
    [
        ("throttled", "An error occurred (SlowDown) when calling PutObject", "throttled", False),
        ("throttled", CUT, "unavailable", False),
        ("unreachable", NO_WAY, "unavailable", True),
    ],
)
def test_an_s3_that_does_not_answer_the_claim_is_a_retryable_error(
    world: World, monkeypatch: pytest.MonkeyPatch, code: Any, message: str, kind: str, *, endpoint: bool
) -> None:
    with pytest.raises(CloudError) as error:
        start_job(world, monkeypatch, NameClaimResult(code=code, said=message))
    assert (error.value.kind, error.value.retryable, error.value.exit_code) == (kind, True, 4)
    assert error.value.next.startswith("run the same command again in a minute")
    assert ("create-vpc-endpoint" in error.value.next) == endpoint
    assert world.tags == {"i-0": [], "i-1": []}


def test_the_follower_reports_once_that_uploads_have_stopped(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        follow_module, "call_nodes_separately", lambda fleet, requests, **_: call_each_node(fleet, requests)
    )
    fetcher = follow_module.BackgroundFetch(saving.connected(), saving.record.jobs[-1])
    for beat, count in ((time.time(), 0), (time.time() - 300, 1), (time.time() - 300, 1), (time.time(), 1)):
        write_saving(saving, 0, ended=False)
        write_saving(saving, 1, ended=False, at=beat)
        fetcher.report_uploads()
        reports = [text for text in saving.events if text.startswith(f"saving j to {TO}: ")]
        assert len(reports) == count
    assert "uploads have stopped (no heartbeat for 5 min" in reports[0]


def test_status_asks_the_nodes_while_an_ended_job_still_uploads(
    saving: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "_connect_prepared", saving.connect)
    saving.folder.save_jobs(replace(saving.record.jobs[-1], state="succeeded"))
    write_saving(saving, 0, 1, error="AccessDenied")
    assert [job.job for job in status_module.refresh_jobs(saving.located())[1]] == ["j"]
    assert status_module.refresh_jobs(saving.located())[1] == (), (
        "no further change: it would only load the nodes"
    )
    saving.folder.save_jobs(replace(saving.record.jobs[-1], saving=None))
    write_saving(saving, 0, 1)
    status_module.refresh_jobs(saving.located())
    assert saving.tags == {"i-0": [], "i-1": []}


@pytest.mark.parametrize("is_saved", [True, False])
def test_fetch_continues_from_s3_or_fails_if_another_client_ends_the_nodes(
    world: World, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    job = start_script(world, "print(1)")
    until(lambda: list_jobs_on_nodes(world.connected())[0].state == "succeeded")

    def lose(*_: object, **__: object) -> None:
        world.nodes = tuple(replace(node, state="terminated") for node in world.nodes)
        world.folder.write(replace(world.record, jobs=(replace(job, save_to="s3://b/runs"),)))
        raise NodeFailure(0, "lost", "rsync: connection unexpectedly closed")

    monkeypatch.setattr(rsync, "transfer", lose)
    monkeypatch.setattr(fetch_module, "verify_in_s3", lambda _, job: is_saved)
    uris = []
    document = FetchDocument(nodes=(), job=job.job, home="")
    monkeypatch.setattr(fetch_module, "_fetch_saved", lambda _, uri: uris.append(uri) or document)
    if is_saved:
        assert fetch_module.fetch(world.session(), job=job.job, start=pytest.fail) is document
        assert uris == [f"s3://b/runs/{job.job}"]
        assert any(text.endswith(f"fetching s3://b/runs/{job.job}") for text in world.events)
        return
    with pytest.raises(NodeError, match="the nodes were ended while their results were fetched") as error:
        fetch_module.fetch(world.session(), job=job.job, start=pytest.fail)
    assert "rsync" not in error.value.why and not uris
