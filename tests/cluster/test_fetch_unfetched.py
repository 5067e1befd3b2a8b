"""A cluster of which a part is missing: the other part is used, and the missing one is named."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.aws import clusters, power
from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.cluster.status import make_cluster_document
from awsddp.errors import CloudError, ConfigError, NodeError
from awsddp.job import fetch as fetch_module
from awsddp.job import follow as follow_module
from awsddp.job.fetch import fetch, fetch_from_nodes
from awsddp.job.follow import JobFollower, fetch_followed_job, follow_to_end, make_merger
from awsddp.job.jobs import list_jobs as jobs
from awsddp.job.reported import find_job_on_nodes
from awsddp.model.records import JobRecord, Node
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.context import ConnectedCluster
from awsddp.session.locate import require_live
from tests.support.folder_nodes import FINDERS, World, start_script
from tests.support.owed_results import SAVES, fetched_nodes, read_logs

LOST = "node1 (i-1) is gone; its part of job j is lost"


def fetch_before_down(world: World) -> None:
    """Fetch as `down` does before it terminates the nodes."""
    fetch_unfetched_results(*require_live(world.located()))


def test_tags_are_read_again_if_another_client_has_locked_them_since(
    unfetched: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags: list[object] = []

    def release(aws: object, nodes: list[Node], job: str, *, tagged: object = None, **_: object) -> None:
        tags.append(tagged)

    def unfetched_of(aws: object, nodes: list[Node]) -> dict[str, list[str]]:
        if tags:
            with unfetched.folder.lock("up", part="tags"):
                pass
        return unfetched.unfetched_of(aws, nodes)

    monkeypatch.setattr(power, "release", release)
    monkeypatch.setattr(power, "unfetched_of", unfetched_of)
    monkeypatch.setattr(fetch_module, "FRESH_S", 60.0)
    os.utime(unfetched.folder.root / "locks" / "default.tags", (0, 0))
    for _ in range(2):
        connected = unfetched.connected()
        fetch_from_nodes(connected, find_job_on_nodes(connected, "j"))
    assert tags == [{"i-0": ["j"], "i-1": ["j"]}, None]


def list_fetched(world: World) -> dict[str, bool]:
    """Return the `fetched` of each job in `status`."""
    return {job["job"]: job["fetched"] for job in make_cluster_document(world.located())["jobs"]}


@pytest.mark.prove
def test_down_fetches_jobs_that_the_tag_has_no_room_for_and_releases_the_nodes(
    unfetched: World,
) -> None:
    start_script(unfetched, SAVES, name="k")
    unfetched.homes.wait("k")
    unfetched.tags = {"i-0": ["..."], "i-1": ["..."]}
    assert list_fetched(unfetched) == {"j": False, "k": False}
    fetch(unfetched.session(), job="j", start=print)
    assert unfetched.tags == {"i-0": ["k"], "i-1": ["k"]}
    unfetched.tags = {"i-0": ["..."], "i-1": ["..."]}
    assert list_fetched(unfetched) == {"j": True, "k": False}
    fetch_before_down(unfetched)
    assert unfetched.tags == {"i-0": [], "i-1": []}
    assert sorted(path.name for path in (unfetched.project / "runs").glob("*")) == ["j", "k"]


def test_fetch_reports_the_part_of_a_replaced_node_as_lost_and_fetches_the_rest(unfetched: World) -> None:
    unfetched.replace_node(1)
    assert [job["job"] for job in jobs(unfetched.session())["jobs"]] == ["j"]
    assert read_logs(unfetched) == b"[rank 0 @ node0] line of 0\n"
    assert LOST in unfetched.events
    for _ in range(2):
        with pytest.raises(NodeError) as error:
            fetch(unfetched.session(), job="j", start=print)
        assert (error.value.exit_code, error.value.why) == (6, LOST)
        assert [node["node"] for node in error.value.document()["nodes"]] == [0]  # type: ignore[attr-defined]
    assert fetched_nodes(unfetched) == ["node0"]
    assert unfetched.tags["i-0"] == []
    assert json.loads((unfetched.project / "runs/j/job.json").read_text())["missing"] == [1]


def test_down_fetches_the_other_parts_and_does_not_wait_for_a_lost_node(unfetched: World) -> None:
    unfetched.replace_node(1)
    fetch_before_down(unfetched)
    assert (fetched_nodes(unfetched), unfetched.tags["i-0"], LOST in unfetched.events) == (
        ["node0"],
        [],
        True,
    )


def test_down_terminates_no_node_if_this_machine_cannot_write_the_results(unfetched: World) -> None:
    (unfetched.project / "runs/j").mkdir(parents=True)
    (unfetched.project / "runs/j/.part").write_text("a file in the way")
    with pytest.raises(ConfigError, match="no node is terminated: the results of j are not fetched") as error:
        fetch_before_down(unfetched)
    assert "cannot write" in error.value.why
    assert "--discard" not in error.value.next
    assert error.value.next.splitlines()[-1] == "awsddp down   # then"
    assert "awsddp down -o" not in error.value.next
    assert unfetched.tags == {"i-0": ["j"], "i-1": ["j"]}


def test_down_advises_up_for_a_stopped_node_and_releases_the_other(unfetched: World) -> None:
    unfetched.set_state(1, "stopped")
    with pytest.raises(NodeError, match="the results of j are not fetched") as error:
        fetch_before_down(unfetched)
    assert error.value.why == "node1 is stopped"  # the local cloud has no price for the wait
    advice = error.value.next.splitlines()
    assert advice[0] == "awsddp up   # start node1; then awsddp down"
    assert (fetched_nodes(unfetched), unfetched.tags) == (["node0"], {"i-0": [], "i-1": ["j"]})


def test_the_part_on_a_stopped_node_is_fetched_once_it_runs(unfetched: World) -> None:
    unfetched.set_state(1, "stopped")
    with pytest.raises(NodeError, match="a part of the results of j is missing") as error:
        fetch(unfetched.session(), start=print)
    assert error.value.why == "node1 (i-1) is stopped; it holds its part of job j"
    assert unfetched.tags == {"i-0": [], "i-1": ["j"]}
    unfetched.set_state(1, "running")
    assert [node["node"] for node in fetch(unfetched.session(), start=print)["nodes"]] == [0, 1]
    assert (fetched_nodes(unfetched), unfetched.tags) == (["node0", "node1"], {"i-0": [], "i-1": []})


def test_fetched_results_and_logs_need_no_node(unfetched: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(unfetched.session(), job="j", start=print)
    connections = unfetched.connection_count
    assert fetch(unfetched.session(), job="j", start=print)["nodes"] == ()
    assert "the results of j are already fetched" in unfetched.events
    unfetched.set_state(0, "stopped")
    unfetched.set_state(1, "stopped")
    assert fetch(unfetched.session(), start=print)["job"] == "j"
    for module in FINDERS:
        monkeypatch.delattr(module, "find_cluster")
    assert sorted(read_logs(unfetched).splitlines()) == [
        b"[rank %d @ node%d] line of %d" % (n, n, n) for n in (0, 1)
    ]
    assert unfetched.connection_count == connections


def test_fetch_reports_a_job_as_lost_if_all_of_its_nodes_are_gone(unfetched: World) -> None:
    for node in (0, 1):
        unfetched.replace_node(node)
    with pytest.raises(NodeError, match="no reachable node knows job j") as error:
        fetch(unfetched.session(), job="j", start=print)
    assert error.value.why.splitlines() == [LOST.replace("1", "0"), LOST]


def follow_last_job(world: World) -> tuple[ConnectedCluster, JobRecord]:
    connected = world.connected()
    return connected, follow_job(connected, world.record.jobs[-1])


def follow_job(connected: ConnectedCluster, job: JobRecord) -> JobRecord:
    merger = make_merger(connected.session, job)
    return JobFollower(connected, job, merger=merger, on_lines=lambda _: None).run()


def test_a_followed_job_reports_its_state_even_if_aws_cannot_be_reached(unfetched: World) -> None:
    unfetched.aws_is_unreachable = True
    connected, job = follow_last_job(unfetched)
    with pytest.raises(CloudError) as error:
        fetch_followed_job(connected, job)
    document = error.value.document()
    assert list(document)[-1] == "error"
    assert (document["job"], document["state"], document["fetched"]) == ("j", "succeeded", True)
    assert document["error"]["exit_code"] == 4  # type: ignore[index]
    assert error.value.message == (
        "job j succeeded, its results are fetched, and also on the nodes: AWS cannot be reached"
    )
    assert error.value.next == "awsddp fetch j   # again\ntry again"
    assert [job.state for job in unfetched.record.jobs] == ["succeeded"]


def test_a_node_whose_sshd_refuses_does_not_delay_the_end_of_a_job(
    unfetched: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "EXTRA_PATIENCE_S", 0.0)
    monkeypatch.setattr(clusters, "describe", lambda *_: [])
    line = unfetched.open_connections()
    line.cut = {1}
    refused = NodeFailure(1, "refused", "no sshd is listening")
    monkeypatch.setattr(line, "reconnect", lambda *_, **__: line.failures.update({1: refused}))
    assert follow_job(unfetched.connected(line=line), unfetched.record.jobs[-1]).state == "succeeded"


def test_a_job_whose_nodes_another_client_terminated_is_interrupted_and_not_fetched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start_script(world, "import time; time.sleep(600)\n", name="j")
    reason = ("Client.UserInitiatedShutdown", "User initiated shutdown")
    ended = [replace(node, state="terminated", reason=reason) for node in world.nodes]
    monkeypatch.setattr(clusters, "describe", lambda *_: ended)
    line = world.open_connections()
    line.cut = {0, 1}
    document = follow_to_end(world.connected(line=line), job, on_lines=lambda _: None)
    cause = document["cause"]
    assert (document["state"], document["fetched"], document["missing"]) == ("interrupted", False, (0, 1))
    assert (cause.kind, cause.node, cause.instance_id) == ("node_lost", 0, "i-0")
    assert cause.explanation == "EC2 reports that its instance is terminated (User initiated shutdown)."
    assert [job.state for job in world.record.jobs] == ["interrupted"]
    ending = "is terminated; its part of job j is not on this machine: another client may have fetched it"
    assert [text for text in world.events if ending in text] == [f"node{n} (i-{n}) {ending}" for n in (0, 1)]


def test_a_fetched_part_is_not_lost_with_its_node(unfetched: World, tmp_path: Path) -> None:
    unfetched.aws_is_unreachable = True
    with pytest.raises(CloudError):
        fetch(unfetched.session(), job="j", start=print)
    unfetched.aws_is_unreachable = False
    unfetched.replace_node(1)
    assert (fetch(unfetched.session(), job="j", start=print)["job"], unfetched.tags["i-0"]) == ("j", [])
    assert json.loads((unfetched.project / "runs/j/job.json").read_text())["missing"] == []
    with pytest.raises(NodeError) as error:
        fetch(unfetched.session(results=str(tmp_path / "elsewhere")), job="j", start=print)
    assert error.value.why == LOST


def test_a_successful_job_with_a_missing_part_exits_with_6_and_its_document(unfetched: World) -> None:
    _, job = follow_last_job(unfetched)
    unfetched.replace_node(1)
    line = unfetched.open_connections()
    line.cut = {1}
    line.failures[1] = NodeError("lost")
    with pytest.raises(NodeError) as error:
        fetch_followed_job(unfetched.connected(line=line), job)
    document = error.value.document()
    assert (error.value.exit_code, document["state"]) == (6, "succeeded")
    assert (document["fetched"], document["missing"]) == (False, (1,))
    assert "job j succeeded, its results are" in error.value.message
    assert error.value.why == LOST
