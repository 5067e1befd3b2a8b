"""A job is followed over connections that are lost; the nodes and EC2 are simulated."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.agent.log_stream import HEADER, MAGIC
from awsddp.agent_client.logs import Merger
from awsddp.errors import NodeError
from awsddp.job import follow as follow_module
from awsddp.job.follow import JobFollower
from awsddp.model.records import JobNode, JobRecord, Node, RankResult
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.spec import ClusterSpec, JobSection, JobSpec

LINES = b"".join(b"line %d\n" % number for number in range(20))


def make_document(node: int, state: str) -> dict[str, Any]:
    ranks = [{"rank": rank, "local_rank": 0, "node": rank, "exit_code": 0, "seconds": 1.0} for rank in (0, 1)]
    return {
        "job": "job",
        "node": node,
        "state": state,
        "cause": None,
        "complete": node == 0,
        "created": "2026-11-22T09:00:00+00:00",
        "ranks": ranks,
    }


class Nodes:
    """Two nodes: each writes a line per second, and ends after 20. `cuts`: at which second each is lost."""

    def __init__(self, cuts: dict[int, int], *, back_at: int) -> None:
        self.now = 0
        self.nodes: set[int] = {0, 1}
        self.endpoints = {node: SimpleNamespace(instance_id=f"i-{node}") for node in (0, 1)}
        self.failures: dict[int, NodeError] = {}
        self.reports: list[dict[str, Any]] = []
        self._cuts = cuts
        self._back_at = back_at

    def nodes_of_job(self, job: JobRecord) -> list[int]:
        return sorted(self.nodes)

    def request(
        self,
        program: object,
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        *,
        silent_after_s: float | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, NodeError]:
        requests = {node: json.loads(message.partition(b"\n")[2]) for node, message in messages.items()}
        if timeout_s is not None:
            self.reports += requests.values()
            for node in requests:
                on_data(node, MAGIC + b'{"heard": true}\n')
            return {}
        for node in requests:
            on_data(node, MAGIC)
        offsets = {node: request["offsets"][str(node)] for node, request in requests.items()}
        lost: dict[int, NodeError] = {}
        while offsets:
            self.now += 1
            for node in list(offsets):
                if self._cuts.get(node) == self.now:
                    self.nodes.discard(node)
                    lost[node] = self.failures[node] = NodeError(f"node{node}: it does not respond")
                    del offsets[node]
                elif on_data(node, self._frames(node, offsets)):
                    del offsets[node]
        return lost

    def _frames(self, node: int, offsets: dict[int, int]) -> bytes:
        end = min(len(LINES), 8 * self.now)
        payload = LINES[offsets[node] : end]
        frame = HEADER.pack(b"L", node, offsets[node], len(payload)) + payload
        offsets[node] = end
        if end < len(LINES):
            return frame
        final = json.dumps(make_document(node, "succeeded")).encode()
        return frame + HEADER.pack(b"E", 0, 0, len(final)) + final

    def reconnect(self, nodes: Any, *, deadline_s: float, partial: bool) -> None:
        self.now += 5
        if self.now >= self._back_at:
            self.nodes |= set(nodes)


SPOT = "Server.SpotInstanceTermination: Spot instance termination"


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The states of the instances in EC2."""
    by_instance = {"i-0": "running", "i-1": "running"}
    monkeypatch.setattr(
        "awsddp.aws.clusters.describe",
        lambda *_: [
            Node(
                node=-1,
                instance_id=name,
                state=state,
                instance_type="t",
                zone="",
                image_id="",
                reason=(SPOT.partition(":")[0], SPOT),
            )
            for name, state in by_instance.items()
        ],
    )
    yield by_instance


def watch(nodes: Nodes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[JobRecord, bytes, list[str]]:
    clock = SimpleNamespace(monotonic=lambda: float(nodes.now), sleep=lambda _: None)
    monkeypatch.setattr(follow_module, "time", clock)
    events: list[str] = []
    shown = bytearray()
    ranks = tuple(
        RankResult(rank=rank, local_rank=0, node=rank, exit_code=None, seconds=0.0) for rank in (0, 1)
    )
    session = Session(
        name="default",
        home=folder,
        settings=(ClusterSpec(), JobSpec(job=JobSection(heartbeat_timeout="1m"))),
        on_event=lambda event: events.append(event.text),
    )
    fields: dict[str, Any] = {"state": "running", "instance_type": "t", "zone": "", "image_id": ""}
    gateway: Any = object()
    record: Any = SimpleNamespace(id="x")
    cluster = LocatedCluster(
        session=session,
        aws_client=gateway,
        local_record=record,
        nodes=tuple(Node(node=node, instance_id=f"i-{node}", **fields) for node in (0, 1)),
    )
    fleet: Any = nodes
    job_nodes = tuple(JobNode(node=node, instance_id=f"i-{node}") for node in (0, 1))
    job = JobRecord(job="job", state="running", cause=None, ranks=ranks, home="runs/job", nodes=job_nodes)
    merger = Merger({0: 0, 1: 1}, folder=folder)
    follower = JobFollower(
        ConnectedCluster(cluster=cluster, fleet=fleet), job, merger=merger, on_lines=shown.extend
    )
    return follower.run(), bytes(shown), events


def lines_of(rank: int, shown: bytes) -> bytes:
    label = b"[rank %d @ node%d] " % (rank, rank)
    return b"".join(
        line.removeprefix(label) for line in shown.splitlines(keepends=True) if line.startswith(label)
    )


@pytest.mark.parametrize("cuts", [{1: 5}, {0: 5, 1: 5}])
def test_lines_are_complete_after_a_lost_connection(
    cuts: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    job, shown, events = watch(Nodes(cuts, back_at=50), tmp_path, monkeypatch)
    assert job.state == "succeeded"
    assert [lines_of(rank, shown) for rank in (0, 1)] == [LINES, LINES]
    assert len([event for event in events if "reconnecting" in event]) == len(cuts)


def test_a_node_is_reconnected_while_the_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    nodes = Nodes({1: 2}, back_at=3)
    _, shown, _ = watch(nodes, tmp_path, monkeypatch)
    assert shown.index(b"[rank 1 @ node1] line 9\n") < shown.index(b"[rank 0 @ node0] line 19\n")


def test_a_node_is_given_up_after_the_heartbeat_timeout_and_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    nodes = Nodes({1: 3}, back_at=10_000)
    job, shown, _ = watch(nodes, tmp_path, monkeypatch)
    assert 120 < nodes.now < 140
    assert (job.state, lines_of(0, shown)) == ("succeeded", LINES)


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_ec2_terminated_is_given_up_at_once_and_reported(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    states[f"i-{number}"] = "terminated"
    nodes = Nodes({number: 3}, back_at=10_000)
    watch(nodes, tmp_path, monkeypatch)
    assert nodes.now < 60
    assert [(report["do"], report["node"]) for report in nodes.reports] == [("lost", number)]
    assert nodes.reports[0]["why"] == f"EC2 reports that its instance is terminated ({SPOT})"
    assert nodes.reports[0]["kind"] == "spot_interruption"


@pytest.mark.parametrize(("second", "state"), [("shutting-down", "interrupted"), ("running", "running")])
def test_a_running_job_is_interrupted_once_ec2_has_ended_all_of_its_nodes(
    second: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    class Reporting(Nodes):
        """Sends the job's state after each frame."""

        def _frames(self, node: int, offsets: dict[int, int]) -> bytes:
            running = json.dumps(make_document(node, "running")).encode()
            return super()._frames(node, offsets) + HEADER.pack(b"S", 0, 0, len(running)) + running

    states |= {"i-0": "terminated", "i-1": second}
    job, _, _ = watch(Reporting({0: 2, 1: 2}, back_at=10_000), tmp_path, monkeypatch)
    assert job.state == state
    if job.cause is None:
        assert state == "running"
        return
    assert (job.cause.kind, job.cause.node, job.cause.retryable) == ("spot_interruption", 0, True)
    assert job.cause.next.startswith("awsddp recover job ")


def test_a_node_whose_streams_end_without_data_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    class Hostile(Nodes):
        """Node 1 accepts each connection, and ends each stream at once."""

        def request(
            self, program: object, messages: Any, on_data: Any, **limits: Any
        ) -> dict[int, NodeError]:
            honest = {node: message for node, message in messages.items() if node == 0}
            ended = super().request(program, honest, on_data, **limits) if honest else {}
            return ended | {node: NodeError("node1: it ended") for node in messages if node == 1}

    job, shown, events = watch(Hostile({}, back_at=0), tmp_path, monkeypatch)
    assert job.state == "succeeded"
    assert lines_of(0, shown) == LINES
    assert len(events) < 100


def test_a_job_without_output_is_reported_once_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    class Silent(Nodes):
        def _frames(self, node: int, offsets: dict[int, int]) -> bytes:
            if self.now < 800:
                return HEADER.pack(b"H", 0, 0, 0)
            return super()._frames(node, offsets)

    _, _, events = watch(Silent({}, back_at=0), tmp_path, monkeypatch)
    assert events == ["no output for 5 min: awsddp why job   # where its ranks are"]


def test_what_the_nodes_find_about_a_silent_job_is_reported_each_time_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, str]
) -> None:
    found = {3: ("alive", "It is\nalive."), 5: ("alive", "It is\nalive."), 7: ("hung", "It hangs."), 9: None}

    class Silent(Nodes):
        def _frames(self, node: int, offsets: dict[int, int]) -> bytes:
            document = make_document(node, "running")
            if node == 0 and (hang := found.get(self.now)):
                document["hang"] = {"state": hang[0], "text": hang[1], "since": 1, "place": "", "rank": None}
            text = json.dumps(document).encode()
            return (
                HEADER.pack(b"S", 0, 0, len(text)) * (self.now in found)
                + text * (self.now in found)
                + (super()._frames(node, offsets))
            )

    _, _, events = watch(Silent({}, back_at=0), tmp_path, monkeypatch)
    assert events == ["It is alive.", "It hangs."]
