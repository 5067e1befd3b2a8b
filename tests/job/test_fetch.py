"""Which results of a job are fetched, which are not, and that nodes are kept for those."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.agent.messages import Manifest
from awsddp.errors import NodeError
from awsddp.job import fetch as fetch_module
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
        node=machine.node,
        instance_id=machine.instance_id,
        state="running",
        instance_type="c6i.large",
        zone="us-east-1a",
        image_id="ami-1",
    )
    for machine in MACHINES
)
JOB = JobRecord(job="j", state="succeeded", cause=None, ranks=RANKS, home="runs/j", nodes=MACHINES)
FLEET: Any = SimpleNamespace(
    nodes=(0, 1),
    failures={},
    endpoints={machine.node: SimpleNamespace(instance_id=machine.instance_id) for machine in MACHINES},
    nodes_of_job=lambda job: [0, 1],
)


def make_file(name: str, size: int, **fields: Any) -> dict[str, Any]:
    """Return a node's description of a file in its work folder; the name begins with the node."""
    node = name.partition("/")[0]
    return {"path": f"/w/{name}", "home": f"{node}/{name}", "size": size, "limited": True, **fields}


@dataclass
class Nodes:
    """Two nodes, which answer with `files` and `skipped`, and the client that fetches from them."""

    root: Path
    files: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: {0: [], 1: []})
    skipped: list[dict[str, Any]] = field(default_factory=list)
    mute: set[int] = field(default_factory=set)
    agrees: bool = False
    questions: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)

    def answer_all(self, fleet: Any, requests: Mapping[int, Manifest], *, timeout_s: float) -> dict[int, Any]:
        return {node: self._answer(node, request) for node, request in requests.items()}

    def _answer(self, node: int, request: Manifest) -> Any:
        if node in self.mute:
            return NodeError("node1: no answer in 300 s")
        outputs = [f"/w/{output}" for output in request.outputs]
        files = [{**file, "limited": file["path"] not in outputs} for file in self.files[node]]
        excluded = {"files": 2 * bool(request.exclude), "size": 2_000_000}
        answer = {"files": files, "skipped": self.skipped, "excluded": excluded}
        return node_answers.convert_answer(answer, node_answers.Manifest)

    def pull(self, requested: Mapping[int, Any], target: Path, **settings: Any) -> dict[int, Any]:
        target.mkdir(parents=True, exist_ok=True)
        self.fetched = {file.home for files in requested.values() for file in files}
        settings["last_files"]([])
        return {}

    def fetch(self, **keys: Any) -> None:
        overrides = {"sync.workdir": str(self.root), **{f"job.{key}": value for key, value in keys.items()}}
        settings = load(environ={}, overrides=overrides)

        def agree(question: str) -> bool:
            self.questions.append(question)
            return self.agrees

        def on_event(event: Event) -> None:
            self.texts.append(event.text)

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
    fake_nodes = Nodes(tmp_path)

    def release(aws: Any, nodes: Any, job: str, **_: Any) -> None:
        fake_nodes.released.append(job)

    monkeypatch.setattr(fetch_module, "call_each_node", fake_nodes.answer_all)
    monkeypatch.setattr("awsddp.nodes.download.pull", fake_nodes.pull)
    monkeypatch.setattr("awsddp.aws.power.release", release)
    monkeypatch.setattr("awsddp.aws.power.unfetched_of", lambda aws, nodes: {})
    return fake_nodes


def test_results_within_the_limit_are_fetched_and_the_nodes_released(nodes: Nodes) -> None:
    nodes.files = {0: [make_file("node0/a", 6)], 1: [make_file("node1/b", 4)]}
    nodes.fetch()
    assert nodes.fetched == {"node0/node0/a", "node1/node1/b"}
    assert (nodes.released, nodes.questions) == (["j"], [])


def test_the_largest_files_over_the_limit_are_named_and_keep_the_nodes(nodes: Nodes) -> None:
    nodes.files = {
        0: [make_file("node0/big", 3_000_000)],
        1: [make_file("node1/mid", 900_000), make_file("node1/low", 9)],
    }
    with pytest.raises(Unfetched) as error:
        nodes.fetch(results_limit="1MB")
    assert nodes.fetched == {"node1/node1/mid", "node1/node1/low"}
    assert nodes.released == []
    assert error.value.exit_code == 6
    text = str(error.value)
    assert (
        "node0: /w/node0/big (3.0 MB): does not fit in job.results_limit (1MB); "
        "smaller files are fetched first" in text
    )
    assert "awsddp fetch j --output PATH" in text
    assert nodes.questions == [
        "The results of j exceed job.results_limit (1MB) by 1 file, 3.0 MB.\nFetch all of them?"
    ]


def test_files_over_the_limit_are_fetched_if_the_user_agrees(nodes: Nodes) -> None:
    nodes.files[0], nodes.agrees = [make_file("node0/big", 3_000_000)], True
    nodes.fetch(results_limit="1MB")
    assert (nodes.fetched, nodes.released) == ({"node0/node0/big"}, ["j"])


def test_named_outputs_and_fetched_files_are_exempt_from_the_limit(nodes: Nodes) -> None:
    nodes.files[0] = [make_file("node0/big", 3_000_000), make_file("node0/home", 2_000_000)]
    folder = nodes.root / "runs/j/node0/node0"
    folder.mkdir(parents=True)
    (folder / "home").write_bytes(bytes(2_000_000))
    nodes.fetch(results_limit="1MB", outputs=["node0/big"])
    assert (nodes.fetched, nodes.questions) == ({"node0/node0/big", "node0/node0/home"}, [])


@pytest.mark.parametrize(("local", "fetched"), [(b"data", False), (b"atad", True), (None, True)])
def test_a_touched_file_is_fetched_unless_the_synced_folder_has_its_content(
    nodes: Nodes, local: bytes | None, fetched: bool
) -> None:
    """For example after chown -R."""
    nodes.files[0] = [{**make_file("node0/a", 4), "digest": sha256(b"data").hexdigest()}]
    (nodes.root / "node0").mkdir()
    if local is not None:
        (nodes.root / "node0" / "a").write_bytes(local)
    nodes.fetch()
    assert nodes.fetched == ({"node0/node0/a"} if fetched else set())


@pytest.mark.parametrize("target", ["node0/node0/base.pt", "node0/node0"])
def test_the_target_of_a_link_in_the_results_is_fetched_even_if_only_touched(
    nodes: Nodes, target: str
) -> None:
    nodes.files[0] = [
        {**make_file("node0/base.pt", 4), "digest": sha256(b"data").hexdigest()},
        {**make_file("node0/best.pt", 0), "target": target},
    ]
    (nodes.root / "node0").mkdir()
    (nodes.root / "node0/base.pt").write_bytes(b"data")
    nodes.fetch()
    assert "node0/node0/base.pt" in nodes.fetched


def test_unreadable_results_keep_the_nodes(nodes: Nodes) -> None:
    nodes.files[0] = [make_file("node0/open", 5)]
    nodes.skipped = [{"path": "/w/folder", "size": 0, "why": "Permission denied", "owed": True}]
    with pytest.raises(Unfetched, match="2 files") as error:
        nodes.fetch()
    assert "Permission denied" in str(error.value)
    assert (nodes.fetched, nodes.released) == ({"node0/node0/open"}, [])


def test_a_node_that_does_not_list_its_results_is_kept_and_the_others_fetched(nodes: Nodes) -> None:
    nodes.files, nodes.mute = {0: [make_file("node0/a", 6)], 1: []}, {1}
    with pytest.raises(Unfetched, match="everything on node1 of the results of j are not fetched") as error:
        nodes.fetch()
    assert "node1: no answer in 300 s" in error.value.why
    assert (nodes.fetched, nodes.released) == ({"node0/node0/a"}, [])


def test_skipped_special_files_are_named_and_excluded_ones_counted(nodes: Nodes) -> None:
    nodes.skipped = [{"path": f"/w/{number}", "size": 0, "why": "a pipe"} for number in range(30)]
    nodes.fetch(exclude=["data/"])
    assert nodes.texts[0] == "not fetched because of job.exclude: 4 files, 4.0 MB"
    assert nodes.texts[1] == "not fetched: /w/0: a pipe"
    assert (len(nodes.texts), nodes.texts[-1]) == (12, "not fetched: 50 more files")
    assert nodes.released == ["j"]


def test_a_stop_that_would_lose_results_is_refused(nodes: Nodes) -> None:
    nodes.files[1] = [make_file("node1/x", 5, ephemeral=True), make_file("node1/y", 5)]
    session = Session(name="default", home=nodes.root, settings=load(environ={}))
    connected = ConnectedCluster(cluster=LocatedCluster(session=session), fleet=FLEET)
    with pytest.raises(Ephemeral, match="results of j, which are on instance store") as error:
        fetch_module.refuse_ephemeral_results(connected, [JOB])
    assert error.value.why == "node1: /w/node1/x (5 bytes): empty after a stop"
    nodes.files[1].clear()
    fetch_module.refuse_ephemeral_results(connected, [JOB])


@pytest.mark.parametrize("limit", ["20", "20 apples", "-1GB", "GB", "1e3GB", "NaNGB"])
def test_an_invalid_limit_is_refused(limit: str) -> None:
    from awsddp.errors import ConfigError

    with pytest.raises(ConfigError, match=r"job\.results_limit"):
        load(environ={}, overrides={"job.results_limit": limit})
