"""What is fetched of a job, what its nodes still owe, and that they are kept for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.agent.messages import Manifest
from awsddp.errors import NodeError
from awsddp.job import fetch as selecting
from awsddp.job.fetch import Ephemeral, Unfetched, fetch_from_nodes
from awsddp.model import node_answers
from awsddp.model.events import Event
from awsddp.model.records import JobNode, JobRecord, Node, RankResult
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.loader import load

RANKS = tuple(RankResult(rank=node, local_rank=0, node=node, exit_code=0, seconds=1.0) for node in (0, 1))
MACHINES = tuple(JobNode(node=node, instance_id=f"i-{node}") for node in (0, 1))
LIVING = tuple(
    Node(
        node=one.node,
        instance_id=one.instance_id,
        state="running",
        instance_type="c6i.large",
        zone="us-east-1a",
        image_id="ami-1",
    )
    for one in MACHINES
)
JOB = JobRecord(job="j", state="succeeded", cause=None, ranks=RANKS, home="runs/j", nodes=MACHINES)
FLEET: Any = SimpleNamespace(
    nodes=(0, 1),
    failures={},
    endpoints={one.node: SimpleNamespace(instance_id=one.instance_id) for one in MACHINES},
    nodes_of_job=lambda job: [0, 1],
)


def file(name: str, size: int, **more: Any) -> dict[str, Any]:
    """Return what a node says of a file of its work folder; its name begins with the node."""
    node = name.partition("/")[0]
    return {"path": f"/w/{name}", "home": f"{node}/{name}", "size": size, "limited": True, **more}


@dataclass
class Nodes:
    """Two nodes, which answer with `files` and `skipped`, and whoever fetches from them."""

    root: Path
    files: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {0: [], 1: []})
    skipped: list[dict[str, Any]] = field(default_factory=list)
    mute: set[int] = field(default_factory=set)
    agrees: bool = False
    questions: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)

    def ask(self, fleet: Any, requests: Mapping[int, Manifest], *, timeout_s: float) -> dict[int, Any]:
        return {node: self._answer(node, request) for node, request in requests.items()}

    def _answer(self, node: int, request: Manifest) -> Any:
        if node in self.mute:
            return NodeError("node1: no answer in 300 s")
        outputs = [f"/w/{output}" for output in request.outputs]
        named = [{**one, "limited": one["path"] not in outputs} for one in self.files[node]]
        excluded = {"files": 2 * bool(request.exclude), "size": 2_000_000}
        listed = {"files": named, "skipped": self.skipped, "excluded": excluded}
        return node_answers.convert_answer(listed, node_answers.Manifest)

    def pull(self, wanted: Mapping[int, Any], target: Path, **settings: Any) -> dict[int, Any]:
        target.mkdir(parents=True, exist_ok=True)
        self.fetched = {one.home for files in wanted.values() for one in files}
        settings["last_files"]([])
        return {}

    def bring_home(self, **keys: Any) -> None:
        overrides = {"sync.workdir": str(self.root), **{f"job.{key}": value for key, value in keys.items()}}
        settings = load(environ={}, overrides=overrides)

        def agree(question: str) -> bool:
            self.questions.append(question)
            return self.agrees

        def on_event(event: Event) -> None:
            self.told.append(event.text)

        session = Session(
            name="default", home=self.root / "home", settings=settings, on_event=on_event, confirms=agree
        )
        record: Any = SimpleNamespace(id="0a1b2c3d")
        aws: Any = object()
        cluster = LocatedCluster(session=session, aws_client=aws, local_record=record, nodes=LIVING)
        fetch_from_nodes(ConnectedCluster(cluster=cluster, fleet=FLEET), JOB)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Nodes without results."""
    made = Nodes(tmp_path)

    def release(aws: Any, nodes: Any, job: str, **_: Any) -> None:
        made.released.append(job)

    monkeypatch.setattr(selecting, "call_each_node", made.ask)
    monkeypatch.setattr("awsddp.nodes.download.pull", made.pull)
    monkeypatch.setattr("awsddp.aws.power.release", release)
    monkeypatch.setattr("awsddp.aws.power.unfetched_of", lambda aws, nodes: {})
    return made


def test_what_is_within_the_limit_comes_home_and_the_nodes_are_released(nodes: Nodes) -> None:
    nodes.files = {0: [file("node0/a", 6)], 1: [file("node1/b", 4)]}
    nodes.bring_home()
    assert nodes.fetched == {"node0/node0/a", "node1/node1/b"}
    assert (nodes.released, nodes.questions) == (["j"], [])


def test_over_the_limit_the_largest_stay_are_named_and_keep_the_nodes(nodes: Nodes) -> None:
    nodes.files = {0: [file("node0/big", 3_000_000)], 1: [file("node1/mid", 900_000), file("node1/low", 9)]}
    with pytest.raises(Unfetched) as caught:
        nodes.bring_home(results_limit="1MB")
    assert nodes.fetched == {"node1/node1/mid", "node1/node1/low"}
    assert nodes.released == []
    assert caught.value.exit_code == 6
    text = str(caught.value)
    assert "node0: /w/node0/big (3.0 MB): over job.results_limit (1MB), the smaller files came first" in text
    assert "awsddp fetch j --output PATH" in text
    assert nodes.questions == [
        "The results of j exceed job.results_limit (1MB) by 1 file, 3.0 MB.\nFetch all of it?"
    ]


def test_over_the_limit_everything_comes_home_where_that_is_agreed_to(nodes: Nodes) -> None:
    nodes.files[0], nodes.agrees = [file("node0/big", 3_000_000)], True
    nodes.bring_home(results_limit="1MB")
    assert (nodes.fetched, nodes.released) == ({"node0/node0/big"}, ["j"])


def test_what_an_output_names_and_what_is_at_home_knows_no_limit(nodes: Nodes) -> None:
    nodes.files[0] = [file("node0/big", 3_000_000), file("node0/home", 2_000_000)]
    place = nodes.root / "runs/j/node0/node0"
    place.mkdir(parents=True)
    (place / "home").write_bytes(bytes(2_000_000))
    nodes.bring_home(results_limit="1MB", outputs=["node0/big"])
    assert (nodes.fetched, nodes.questions) == ({"node0/node0/big", "node0/node0/home"}, [])


@pytest.mark.parametrize(("here", "comes"), [(b"data", False), (b"atad", True), (None, True)])
def test_what_a_job_only_touched_comes_unless_it_is_what_the_synced_folder_holds(
    nodes: Nodes, here: bytes | None, comes: bool
) -> None:
    """As after chown -R."""
    nodes.files[0] = [{**file("node0/a", 4), "digest": sha256(b"data").hexdigest()}]
    (nodes.root / "node0").mkdir()
    if here is not None:
        (nodes.root / "node0" / "a").write_bytes(here)
    nodes.bring_home()
    assert nodes.fetched == ({"node0/node0/a"} if comes else set())


@pytest.mark.parametrize("target", ["node0/node0/base.pt", "node0/node0"])
def test_what_a_link_of_the_results_leads_to_comes_also_if_it_was_only_touched(
    nodes: Nodes, target: str
) -> None:
    nodes.files[0] = [
        {**file("node0/base.pt", 4), "digest": sha256(b"data").hexdigest()},
        {**file("node0/best.pt", 0), "target": target},
    ]
    (nodes.root / "node0").mkdir()
    (nodes.root / "node0/base.pt").write_bytes(b"data")
    nodes.bring_home()
    assert "node0/node0/base.pt" in nodes.fetched


def test_what_cannot_be_read_keeps_the_nodes(nodes: Nodes) -> None:
    nodes.files[0] = [file("node0/open", 5)]
    nodes.skipped = [{"path": "/w/folder", "size": 0, "why": "Permission denied", "owed": True}]
    with pytest.raises(Unfetched, match="2 files") as caught:
        nodes.bring_home()
    assert "Permission denied" in str(caught.value)
    assert (nodes.fetched, nodes.released) == ({"node0/node0/open"}, [])


def test_a_node_that_does_not_list_its_results_keeps_them_and_the_others_come_home(nodes: Nodes) -> None:
    nodes.files, nodes.mute = {0: [file("node0/a", 6)], 1: []}, {1}
    with pytest.raises(Unfetched, match="everything on node1 of the results of j are not fetched") as caught:
        nodes.bring_home()
    assert "node1: no answer in 300 s" in caught.value.why
    assert (nodes.fetched, nodes.released) == ({"node0/node0/a"}, [])


def test_what_nobody_owes_is_named_and_what_is_excluded_is_counted(nodes: Nodes) -> None:
    nodes.skipped = [{"path": f"/w/{number}", "size": 0, "why": "a pipe"} for number in range(30)]
    nodes.bring_home(exclude=["data/"])
    assert nodes.told[0] == "4 files, 4.0 MB: matched by job.exclude, stays on the nodes"
    assert nodes.told[1] == "not fetched: /w/0: a pipe"
    assert (len(nodes.told), nodes.told[-1]) == (12, "not fetched: 50 more files")
    assert nodes.released == ["j"]


def test_a_stop_that_would_lose_results_is_refused(nodes: Nodes) -> None:
    nodes.files[1] = [file("node1/x", 5, ephemeral=True), file("node1/y", 5)]
    session = Session(name="default", home=nodes.root, settings=load(environ={}))
    connected = ConnectedCluster(cluster=LocatedCluster(session=session), fleet=FLEET)
    with pytest.raises(Ephemeral, match="results of j, which are on instance store") as caught:
        selecting.refuse_ephemeral_results(connected, [JOB])
    assert caught.value.why == "node1: /w/node1/x (5 bytes): empty after a stop"
    nodes.files[1].clear()
    selecting.refuse_ephemeral_results(connected, [JOB])


@pytest.mark.parametrize("text", ["20", "20 apples", "-1GB", "GB", "1e3GB", "NaNGB"])
def test_a_limit_is_a_size(text: str) -> None:
    from awsddp.errors import ConfigError

    with pytest.raises(ConfigError, match=r"job\.results_limit"):
        load(environ={}, overrides={"job.results_limit": text})
