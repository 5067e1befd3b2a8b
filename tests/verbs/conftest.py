"""Verbs on nodes that are folders of this machine: the real programs, no SSH, and AWS a list of tags."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws import poweroff
from awsddp.cluster import Node, Target
from awsddp.errors import NodeError
from awsddp.nodes.failures import NodeFailure
from awsddp.nodes.sync import Endpoint
from awsddp.nodes.transport import Result
from awsddp.report import Event
from awsddp.spec import load
from awsddp.state import Folder, Record
from awsddp.verbs import sync
from awsddp.verbs.context import Context
from awsddp.verbs.nodes import Ready
from tests.jobs.conftest import Fleet as Homes


class Line:
    """Stands in for the connections to the nodes: each request is answered by the node's own program."""

    def __init__(self, homes: Homes, nodes: tuple[Node, ...]) -> None:
        self.homes = homes
        self.nodes = tuple(node.node for node in nodes)
        self.failures: dict[int, NodeError] = {}
        self.endpoints = {
            node.node: Endpoint(node=node.node, instance_id=node.instance_id, host="", port=22, user="u")
            for node in nodes
        }
        self.cut: set[int] = set()
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def converse(
        self, program: object, messages: Mapping[int, bytes], on_data: Callable[[int, bytes], bool], **_: Any
    ) -> dict[int, Result | NodeError]:
        """Answer as `Fleet.converse` does; a node that is `cut` is lost."""
        outcomes: dict[int, Result | NodeError] = {}
        for node in messages.keys() & self.cut:
            outcomes[node] = self.failures[node] = NodeFailure(node, "lost", "the connection was lost")
        self.nodes = tuple(node for node in self.nodes if node not in self.cut)
        running = {
            node: self.homes.start(node, data) for node, data in messages.items() if node not in outcomes
        }
        for node, process in running.items():
            out, err = process.communicate(timeout=60)
            whole = on_data(node, out)
            outcomes[node] = Result(exit_code=0 if whole else 1, stdout=b"", stderr=err)
        return outcomes

    def reconnect(self, nodes: list[int], **_: Any) -> None:
        """Nothing comes back."""


class World:
    """A cluster of nodes that are folders, seen from one machine. `tags` are those of unfetched jobs."""

    def __init__(self, folder: Path, homes: Homes) -> None:
        self.homes = homes
        homes.workdirs = [home / "awsddp" / "work" for home in homes.homes]
        for path in homes.workdirs:
            path.mkdir(parents=True)
        self.tags: dict[str, list[str]] = {}
        self.said: list[str] = []
        self.nodes = tuple(replace(host.node, launched=datetime.now(UTC)) for host in homes.hosts)
        self.project = folder / "project"
        self.project.mkdir()
        self.folder = Folder(folder / "home", "default")
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

    def ctx(self, **job: object) -> Context:
        """A context whose job section is as given."""
        overrides = {"sync.workdir": str(self.project), **{f"job.{key}": value for key, value in job.items()}}
        spec, asked = load("default", overrides=overrides, environ={})
        return Context(spec=spec, job=asked, folder=self.folder, on_event=self._hear)

    def _hear(self, event: Event) -> None:
        self.said.append(f"{event.who}: {event.text}" if event.who else event.text)

    def line(self) -> Any:
        """Fresh connections to all nodes."""
        return Line(self.homes, self.nodes)

    @property
    def cluster(self) -> Ready:
        """The cluster as AWS lists it now."""
        record = self.folder.read()
        assert record is not None
        nodes = tuple(
            replace(node, unfetched=tuple(self.tags.get(node.instance_id, ()))) for node in self.nodes
        )
        return Ready(aws=None, record=record, nodes=nodes)  # type: ignore[arg-type]

    def keep(self, aws: object, nodes: list[Node], job: str) -> None:
        for node in nodes:
            self.tags.setdefault(node.instance_id, []).append(job)

    def release(self, aws: object, nodes: list[Node], job: str) -> None:
        for node in nodes:
            self.tags[node.instance_id].remove(job)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Two nodes."""
    homes = Homes(tmp_path / "nodes", 2)
    made = World(tmp_path, homes)
    monkeypatch.setattr(poweroff, "keep_on_poweroff", made.keep)
    monkeypatch.setattr(poweroff, "release", made.release)

    def send(ctx: Context, fleet: object, listing: object, *, bundled: bool = False) -> None:
        made.said.append("sent")
        for name, workdir in itertools.product(made.project.glob("*.py"), homes.workdirs):
            (workdir / name.name).write_text(name.read_text())

    monkeypatch.setattr(sync, "send", send)
    yield made
    homes.end()
