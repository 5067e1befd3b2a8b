"""A cluster of which a part is missing: what there is can be asked, and what is missing is named."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.aws import clusters, power
from awsddp.cluster.fetch_unfetched import fetch_unfetched_results
from awsddp.cluster.status import make_cluster_document
from awsddp.errors import CloudError, ConfigError, NodeError
from awsddp.job import fetch as fetching
from awsddp.job import follow as watching
from awsddp.job.fetch import fetch, fetch_from_nodes
from awsddp.job.follow import JobFollower, fetch_followed_job, follow_to_end, make_merger
from awsddp.job.jobs import list_jobs as jobs
from awsddp.job.reported import find_job_on_nodes
from awsddp.model.records import JobRecord, Node
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.context import ConnectedCluster
from awsddp.session.locate import require_live
from tests.support.folder_nodes import FINDERS, World, start
from tests.support.owed_results import SAVES, at_home, lines

LOST = "node1 (i-1) is gone; its part of job j is lost"


def end(world: World) -> None:
    """Do what `down` does before the nodes end."""
    fetch_unfetched_results(*require_live(world.located()))


def test_tags_are_read_with_the_results_and_again_if_another_client_had_them_since(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def release(aws: object, nodes: list[Node], job: str, *, tagged: object = None, **_: object) -> None:
        given.append(tagged)

    def unfetched_of(aws: object, nodes: list[Node]) -> dict[str, list[str]]:
        if given:
            with owed.folder.lock("up", part="tags"):
                pass
        return owed.unfetched_of(aws, nodes)

    monkeypatch.setattr(power, "release", release)
    monkeypatch.setattr(power, "unfetched_of", unfetched_of)
    monkeypatch.setattr(fetching, "FRESH_S", 60.0)
    os.utime(owed.folder.root / "locks" / "default.tags", (0, 0))
    for _ in range(2):
        connected = owed.connected()
        fetch_from_nodes(connected, find_job_on_nodes(connected, "j"))
    assert given == [{"i-0": ["j"], "i-1": ["j"]}, None]


def known(world: World) -> dict[str, bool]:
    """Return whether `status` calls each job fetched."""
    return {one["job"]: one["fetched"] for one in make_cluster_document(world.located())["jobs"]}


@pytest.mark.prove
def test_jobs_that_the_tag_has_no_room_for_are_fetched_before_the_end_and_free_the_nodes(
    owed: World,
) -> None:
    start(owed, SAVES, name="k")
    owed.homes.wait("k")
    owed.tags = {"i-0": ["..."], "i-1": ["..."]}
    assert known(owed) == {"j": False, "k": False}
    fetch(owed.session(), job="j", start=print)
    assert owed.tags == {"i-0": ["k"], "i-1": ["k"]}
    owed.tags = {"i-0": ["..."], "i-1": ["..."]}
    assert known(owed) == {"j": True, "k": False}
    end(owed)
    assert owed.tags == {"i-0": [], "i-1": []}
    assert sorted(path.name for path in (owed.project / "runs").glob("*")) == ["j", "k"]


def test_what_a_replaced_node_held_is_named_as_lost_and_the_rest_comes_home(owed: World) -> None:
    owed.replace_node(1)
    assert [job["job"] for job in jobs(owed.session())["jobs"]] == ["j"]
    assert lines(owed) == b"[rank 0 @ node0] line of 0\n"
    assert LOST in owed.said
    for _ in range(2):
        with pytest.raises(NodeError) as partly:
            fetch(owed.session(), job="j", start=print)
        assert (partly.value.exit_code, partly.value.why) == (6, LOST)
        assert [node["node"] for node in partly.value.document()["nodes"]] == [0]  # type: ignore[attr-defined]
    assert at_home(owed) == ["node0"]
    assert owed.tags["i-0"] == []
    assert json.loads((owed.project / "runs/j/job.json").read_text())["missing"] == [1]


def test_down_fetches_what_there_is_and_ends_what_a_lost_node_cannot_hold_up(owed: World) -> None:
    owed.replace_node(1)
    end(owed)
    assert (at_home(owed), owed.tags["i-0"], LOST in owed.said) == (["node0"], [], True)


def test_fault_of_this_machine_ends_no_node_and_advises_no_loss(owed: World) -> None:
    (owed.project / "runs/j").mkdir(parents=True)
    (owed.project / "runs/j/.part").write_text("a file in the way")
    with pytest.raises(
        ConfigError, match="no node is terminated: the results of j are not fetched"
    ) as refused:
        end(owed)
    assert "cannot write" in refused.value.why
    assert "--discard" not in refused.value.next
    assert refused.value.next.splitlines()[-1] == "awsddp down   # then"
    assert "awsddp down -o" not in refused.value.next
    assert owed.tags == {"i-0": ["j"], "i-1": ["j"]}


def test_down_offers_up_for_the_node_that_is_stopped_and_releases_the_other(owed: World) -> None:
    owed.set_state(1, "stopped")
    with pytest.raises(NodeError, match="the results of j are not fetched") as refused:
        end(owed)
    assert refused.value.why == "node1 is stopped"  # in the local cloud nobody pays until then
    ways = refused.value.next.splitlines()
    assert ways[0] == "awsddp up   # start node1; then awsddp down"
    assert (at_home(owed), owed.tags) == (["node0"], {"i-0": [], "i-1": ["j"]})


def test_part_on_a_stopped_node_comes_home_once_it_runs(owed: World) -> None:
    owed.set_state(1, "stopped")
    with pytest.raises(NodeError, match="a part of the results of j is missing") as partly:
        fetch(owed.session(), start=print)
    assert partly.value.why == "node1 (i-1) is stopped; it holds its part of job j"
    assert owed.tags == {"i-0": [], "i-1": ["j"]}
    owed.set_state(1, "running")
    assert [node["node"] for node in fetch(owed.session(), start=print)["nodes"]] == [0, 1]
    assert (at_home(owed), owed.tags) == (["node0", "node1"], {"i-0": [], "i-1": []})


def test_what_is_at_home_needs_no_node(owed: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(owed.session(), job="j", start=print)
    connections = owed.lines
    assert fetch(owed.session(), job="j", start=print)["nodes"] == ()
    assert "the results of j are already fetched" in owed.said
    owed.set_state(0, "stopped")
    owed.set_state(1, "stopped")
    assert fetch(owed.session(), start=print)["job"] == "j"
    for module in FINDERS:
        monkeypatch.delattr(module, "find_cluster")
    assert sorted(lines(owed).splitlines()) == [b"[rank %d @ node%d] line of %d" % (n, n, n) for n in (0, 1)]
    assert owed.lines == connections


def test_job_of_which_every_node_is_gone_is_named_as_lost(owed: World) -> None:
    for node in (0, 1):
        owed.replace_node(node)
    with pytest.raises(NodeError, match="no reachable node knows job j") as lost:
        fetch(owed.session(), job="j", start=print)
    assert lost.value.why.splitlines() == [LOST.replace("1", "0"), LOST]


def follow(world: World) -> tuple[ConnectedCluster, JobRecord]:
    connected = world.connected()
    return connected, watch(connected, world.record.jobs[-1])


def watch(connected: ConnectedCluster, job: JobRecord) -> JobRecord:
    merger = make_merger(connected.session, job)
    return JobFollower(connected, job, merger=merger, on_lines=lambda _: None).run()


def test_verdict_comes_first_where_aws_is_away_at_the_end(owed: World) -> None:
    owed.away = True
    connected, job = follow(owed)
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
    assert [job.state for job in owed.record.jobs] == ["succeeded"]


def test_node_whose_sshd_refuses_does_not_hold_up_the_end_of_a_job(
    owed: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "EXTRA_PATIENCE_S", 0.0)
    monkeypatch.setattr(clusters, "describe", lambda *_: [])
    line = owed.line()
    line.cut = {1}
    refused = NodeFailure(1, "refused", "no sshd is listening")
    monkeypatch.setattr(line, "reconnect", lambda *_, **__: line.failures.update({1: refused}))
    assert watch(owed.connected(line=line), owed.record.jobs[-1]).state == "succeeded"


def test_job_whose_nodes_another_home_has_ended_is_interrupted_and_its_results_are_not_here(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(world, "import time; time.sleep(600)\n", name="j")
    reason = ("Client.UserInitiatedShutdown", "User initiated shutdown")
    ended = [replace(node, state="terminated", reason=reason) for node in world.nodes]
    monkeypatch.setattr(clusters, "describe", lambda *_: ended)
    line = world.line()
    line.cut = {0, 1}
    document = follow_to_end(world.connected(line=line), job, on_lines=lambda _: None)
    cause = document["cause"]
    assert (document["state"], document["fetched"], document["missing"]) == ("interrupted", False, (0, 1))
    assert (cause.kind, cause.node, cause.instance_id) == ("node_lost", 0, "i-0")
    assert cause.explanation == "EC2 says that its instance is terminated (User initiated shutdown)."
    assert [job.state for job in world.record.jobs] == ["interrupted"]
    told = "is terminated; its part of job j is not on this machine: another client may have fetched it"
    assert [said for said in world.said if told in said] == [f"node{n} (i-{n}) {told}" for n in (0, 1)]


def test_part_that_is_home_is_not_lost_with_its_node(owed: World, tmp_path: Path) -> None:
    owed.away = True
    with pytest.raises(CloudError):
        fetch(owed.session(), job="j", start=print)
    owed.away = False
    owed.replace_node(1)
    assert (fetch(owed.session(), job="j", start=print)["job"], owed.tags["i-0"]) == ("j", [])
    assert json.loads((owed.project / "runs/j/job.json").read_text())["missing"] == []
    with pytest.raises(NodeError) as partly:
        fetch(owed.session(results=str(tmp_path / "elsewhere")), job="j", start=print)
    assert partly.value.why == LOST


def test_success_of_which_a_part_is_missing_ends_with_6_behind_its_verdict(owed: World) -> None:
    _, job = follow(owed)
    owed.replace_node(1)
    line = owed.line()
    line.cut = {1}
    line.failures[1] = NodeError("lost")
    with pytest.raises(NodeError) as error:
        fetch_followed_job(owed.connected(line=line), job)
    document = error.value.document()
    assert (error.value.exit_code, document["state"]) == (6, "succeeded")
    assert (document["fetched"], document["missing"]) == (False, (1,))
    assert "job j succeeded, its results are" in error.value.message
    assert error.value.why == LOST
