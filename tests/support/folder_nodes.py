"""Verbs on nodes that are folders of this machine: the real programs, without SSH; AWS is a dict of tags."""

import contextlib
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent_client import launch_requests
from awsddp.agent_client.program import agent_program
from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.aws import power
from awsddp.cluster import down, fetch_unfetched, prepare, reconcile, remote, replaced_nodes, status, stop, up
from awsddp.cluster import sync as cluster_sync
from awsddp.errors import CloudError, NodeError
from awsddp.job import fetch, submit, train
from awsddp.model.events import Event
from awsddp.model.records import ClusterListing, JobRecord, Node, Target
from awsddp.nodes import fleet as transport
from awsddp.nodes import rsync, sync
from awsddp.nodes.fleet import Result
from awsddp.nodes.login import Endpoint
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session import connect
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder, Record
from tests.support.fleet import Fleet, free_ports

_DO = re.compile(rb'"do": "(\w+)"')
FINDERS = (connect, down, fetch, remote, status, stop)
"""The modules that import `find_cluster`."""
_CONNECTORS = (
    cluster_sync,
    connect,
    fetch_unfetched,
    prepare,
    reconcile,
    remote,
    replaced_nodes,
    status,
    stop,
    train,
    up,
)
"""The modules that import `connect`."""


class NodeConnections:
    """Replaces the connections to the nodes: the agent's program of a node answers each request.

    Nodes in `cut` are lost at any request, nodes in `mute` after they have launched a job.
    """

    def __init__(self, homes: Fleet, nodes: tuple[Node, ...]) -> None:
        self.homes = homes
        self.nodes = tuple(node.node for node in nodes)
        self.failures: dict[int, NodeError] = {}
        self.endpoints = {
            node.node: Endpoint(node=node.node, instance_id=node.instance_id, host="", port=22, user="u")
            for node in nodes
        }
        self.cut: set[int] = set()
        self.mute: set[int] = set()
        self.requests: list[dict[int, list[str]]] = []
        """The requests of each round trip, by node."""

    def request(
        self, program: object, messages: Mapping[int, bytes], on_data: Callable[[int, bytes], bool], **_: Any
    ) -> dict[int, Result | NodeError]:
        """Answer as `Fleet.request` does."""
        self.requests.append(
            {node: [name.decode() for name in _DO.findall(data)] for node, data in messages.items()}
        )
        outcomes: dict[int, Result | NodeError] = {}
        for node in messages.keys() & self.cut:
            outcomes[node] = self.failures[node] = NodeFailure(node, "lost", "the connection was lost")
        self.nodes = tuple(node for node in self.nodes if node not in self.cut)
        running = {
            node: self.homes.start(node, data) for node, data in messages.items() if node not in outcomes
        }
        for node, process in running.items():
            out, err = process.communicate(timeout=60)
            if node in self.mute and b'"do": "launch"' in messages[node]:
                self.nodes = tuple(number for number in self.nodes if number != node)
                outcomes[node] = self.failures[node] = NodeFailure(node, "lost", "the reply was lost")
                continue
            whole = on_data(node, out)
            outcomes[node] = Result(exit_code=0 if whole else 1, stdout=b"", stderr=err)
        return outcomes

    def run_each(
        self, commands: Mapping[int, tuple[object, bytes]], **_: Any
    ) -> dict[int, Result | NodeError]:
        """Answer requests of separate agent processes as `Fleet.run_each` does."""
        source, ends = agent_program()[1], {}
        for node, (_argv, data) in commands.items():
            process = self.homes.start(node, data.removeprefix(source))
            out, err = process.communicate(timeout=60)
            ends[node] = Result(exit_code=process.returncode, stdout=out, stderr=err)
        return ends

    responsive_nodes, nodes_of_job = transport.Fleet.responsive_nodes, transport.Fleet.nodes_of_job

    def reconnect(self, nodes: list[int], **_: Any) -> None:
        """Reconnect to no node."""

    def __enter__(self) -> "NodeConnections":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class World:
    """A cluster of nodes that are folders, and its client. `tags` names the unfetched jobs by instance."""

    def __init__(self, folder: Path, homes: Fleet) -> None:
        self.homes = homes
        homes.workdirs = [home / "awsddp" / "work" for home in homes.homes]
        for path in homes.workdirs:
            path.mkdir(parents=True)
        self.tags: dict[str, list[str]] = {}
        self.events: list[str] = []
        self.cut: set[int] = set()
        self.connection_count = 0
        self.aws_is_unreachable = False
        self.nodes = tuple(replace(host.node, launched=datetime.now(UTC)) for host in homes.hosts)
        self.project = folder / "project"
        self.project.mkdir()
        self.folder = ClusterFolder(folder / "home", "default")
        self.folder.write(
            Record(
                id="0a1b2c3d",
                owner="me",
                target=Target(name="local"),
                created=datetime.now(UTC),
                expires=datetime.now(UTC) + timedelta(hours=1),
                instance_type="p4d.24xlarge",
                nodes=len(self.nodes),
                gpus_per_node=8,
                pretended=True,
                ssh_user="ubuntu",
                prepared=tuple(host.prepared for host in homes.hosts),
            )
        )

    def session(self, **job: Any) -> Session:
        """Return a session whose job section has these values."""
        overrides = {"sync.workdir": str(self.project), **{f"job.{key}": value for key, value in job.items()}}
        settings = load("default", overrides=overrides, environ={})
        return Session(name="default", home=self.folder.root, settings=settings, on_event=self._record_event)

    def _record_event(self, event: Event) -> None:
        self.events.append(f"{event.who}: {event.text}" if event.who else event.text)

    def open_connections(self, *_: object, **__: object) -> Any:
        """Return new connections to all running nodes; those to nodes in `cut` break when they are used."""
        self.connection_count += 1
        line = NodeConnections(self.homes, tuple(node for node in self.nodes if node.state == "running"))
        line.cut = set(self.cut)
        return line

    @property
    def listed(self) -> tuple[Node, ...]:
        """The nodes as AWS lists them now."""
        return tuple(
            replace(node, unfetched=tuple(self.tags.get(node.instance_id, ()))) for node in self.nodes
        )

    @property
    def record(self) -> Record:
        """The record of the cluster."""
        record = self.folder.read()
        assert record is not None
        return record

    def located(self, session: Session | None = None) -> LocatedCluster:
        """Return the cluster as `find_cluster` yields it, all nodes in use."""
        gateway: Any = object()
        return LocatedCluster(
            session=session or self.session(),
            target=self.record.target,
            aws_client=gateway,
            local_record=self.record,
            listing=ClusterListing(
                name="default", id="0a1b2c3d", owner="me", region="here", nodes=self.listed
            ),
            searched_places=(),
            nodes=self.listed,
        )

    def connected(
        self, session: Session | None = None, line: NodeConnections | None = None
    ) -> ConnectedCluster:
        """Return the cluster with the connections `line`."""
        fleet: Any = line or self.open_connections()
        return ConnectedCluster(cluster=self.located(session), fleet=fleet)

    @contextlib.contextmanager
    def find_cluster(self, session: Session, **_: object) -> Iterator[LocatedCluster]:
        """Yield the cluster in place of `connect.find_cluster`."""
        yield self.located(session)

    @contextlib.contextmanager
    def connect(self, cluster: LocatedCluster, *_: object, **__: object) -> Iterator[ConnectedCluster]:
        """Yield the connected cluster in place of `connect.connect`."""
        yield ConnectedCluster(cluster=cluster, fleet=self.open_connections())

    def set_state(self, number: int, state: str) -> None:
        """Set the state of a node's instance."""
        self.nodes = tuple(replace(node, state=state) if node.node == number else node for node in self.nodes)

    def replace_node(self, number: int) -> None:
        """Replace a node by one with a new instance and an empty home, as `up` does after a loss."""
        home = self.homes.homes[number]
        home.rename(home.with_name(f"{home.name}-gone"))
        self.homes.workdirs[number].mkdir(parents=True)
        self.tags.pop(self.nodes[number].instance_id, None)
        self.nodes = tuple(
            replace(node, instance_id="i-new") if node.node == number else node for node in self.nodes
        )
        prepared = tuple(
            replace(row, instance_id="i-new") if row.node == number else row for row in self.record.prepared
        )
        self.folder.write(replace(self.record, prepared=prepared))

    def keep(self, aws: object, nodes: list[Node], job: str) -> None:
        for node in nodes:
            self.tags.setdefault(node.instance_id, []).append(job)

    def unfetched_of(self, aws: object, nodes: list[Node]) -> dict[str, list[str]]:
        return {node.instance_id: list(self.tags.get(node.instance_id, ())) for node in nodes}

    def tag(self, aws: object, instance_ids: list[str], name: str, value: str) -> None:
        if self.aws_is_unreachable:
            raise CloudError("AWS cannot be reached", "", "try again")
        assert name == power.TAG
        self.tags |= {key: value.split() for key in instance_ids}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A cluster of two nodes."""
    homes = Fleet(tmp_path / "nodes", 2)
    made = World(tmp_path, homes)
    made.folder.key.touch()
    monkeypatch.setattr(power, "keep_on_poweroff", made.keep)
    monkeypatch.setattr(power, "tag", made.tag)
    monkeypatch.setattr(power, "_on_poweroff", lambda *_: None)
    monkeypatch.setattr(power, "unfetched_of", made.unfetched_of)

    def push(listing: object, fleet: object, *, folder: str, **_: object) -> None:
        made.events.append("sent")
        for name, workdir in itertools.product(made.project.glob("*.py"), homes.workdirs):
            (workdir.parent / folder).mkdir(exist_ok=True)
            (workdir.parent / folder / name.name).write_text(name.read_text())

    monkeypatch.setattr(sync, "push", push)
    monkeypatch.setattr(launch_requests, "FIRST_PORT", free_ports())  # the nodes share this machine's ports

    def transfer(words: list[str], names: list[str], **_: object) -> None:
        for name in names:  # the files of a node are on this machine
            target = Path(words[-1]) / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, target)

    monkeypatch.setattr(rsync, "transfer", transfer)

    for module in FINDERS:
        monkeypatch.setattr(module, "find_cluster", made.find_cluster)
    for module in _CONNECTORS:
        monkeypatch.setattr(module, "connect", made.connect)
    yield made
    homes.end()


def start_script(world: World, script: str, **job: Any) -> JobRecord:
    """Start a script of two ranks, one per node."""
    (world.project / "w.py").write_text(script)
    ranks = layout_ranks([0, 1], gpus=0, world_size=2)
    connected = world.connected(world.session(script="w.py", **job))
    return submit.submit_job(connected, ranks, None)  # type: ignore[arg-type]


SLEEPS = "import time; time.sleep(600)\n"
