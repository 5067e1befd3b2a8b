"""A client with the record of a cluster, and a project with the results of its jobs."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent_client import job_reports
from awsddp.api.cluster import Cluster
from awsddp.cluster.status import make_cluster_document
from awsddp.errors import NotFoundError
from awsddp.model.records import (
    ClusterListing,
    JobNode,
    JobRecord,
    JobState,
    Node,
    PreparedNode,
    RankResult,
    Target,
)
from awsddp.session.context import LocatedCluster, Session
from awsddp.session.cost import make_launch_row
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder, Record
from awsddp.util.formatting import optional_utc
from tests.support.folder_nodes import FINDERS

ID = "0a1b2c3d"


BEGAN = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=2)


class Desk:
    """A client with the record of the cluster `default` of two nodes, and a project with results."""

    def __init__(self, top: Path) -> None:
        self.project = top / "project"
        self.project.mkdir()
        self.folder = ClusterFolder(top / "home", "default")
        self.listed = tuple(
            Node(
                node=number,
                instance_id=f"i-{number}",
                state="running",
                instance_type="g6.xlarge",
                zone="us-east-1a",
                image_id="ami-0",
                private_ip=f"10.0.0.{number}",
                launched=BEGAN,
            )
            for number in (0, 1)
        )
        record = Record(
            id=ID,
            owner="me",
            target=Target(region="us-east-1"),
            created=BEGAN,
            expires=BEGAN + timedelta(hours=12),
            instance_type="g6.xlarge",
            nodes=2,
            gpus_per_node=1,
            pretended=False,
            ssh_user="ubuntu",
            price_usd_per_hour=2.2,
            disk_usd_per_hour=0.1,
            prepared=tuple(
                PreparedNode(node=number, instance_id=f"i-{number}", home="/", python="python3", nic="eth0")
                for number in (0, 1)
            ),
        )
        self.folder.write(record)
        self.folder.key.touch()
        self.note("launched", BEGAN, **make_launch_row(record, ("i-0", "i-1")).written_fields)

    def note(self, event: str, at: datetime, **facts: Any) -> None:
        self.folder.append_event(event, **facts | {"id": ID, "at": at})

    def session(self, project: Path | None = None, **keys: Any) -> Session:
        overrides = {"sync.workdir": str(project or self.project), **keys}
        settings = load("default", overrides=overrides, environ={})
        return Session(name="default", home=self.folder.root, settings=settings)

    def api(self) -> Cluster:
        """Return the cluster of the Python API."""
        return Cluster()._of(self.session())

    def train(
        self, name: str, state: JobState, *, minutes: float = 60, saved: JobState | None = None
    ) -> JobRecord:
        """Record a job with its last known state; `saved` is the state at which its results were fetched."""
        job = JobRecord(
            job=name,
            state=state,
            cause=None,
            ranks=tuple(
                RankResult(rank=rank, local_rank=0, node=rank, exit_code=0, seconds=9.0) for rank in (0, 1)
            ),
            home=f"runs/{name}",
            nodes=(JobNode(node=0, instance_id="i-0"), JobNode(node=1, instance_id="i-1")),
            script="train.py",
            started=optional_utc(BEGAN + timedelta(minutes=minutes)),
            price_usd_per_hour=2.2,
        )
        self.folder.append_event("train", job=name, home=str(self.session().results / name))
        self.folder.save_jobs(job)
        if saved is not None:
            self.save(replace(job, state=saved))
        return job

    def save(self, job: JobRecord, project: Path | None = None) -> None:
        folder = self.session(project).results / job.job
        (folder / "node0" / "run").mkdir(parents=True)
        (folder / "node0" / "run" / "a.pt").touch()
        (folder / "job.json").write_bytes(job_reports.encode_job(job))

    def located(self, session: Session | None = None) -> LocatedCluster:
        """Return the cluster as `find_cluster` yields it."""
        return LocatedCluster(
            session=session or self.session(),
            target=Target(region="us-east-1"),
            local_record=self.folder.read(),
            listing=ClusterListing(name="default", id=ID, owner="me", region="us-east-1", nodes=self.listed),
            searched_places=(),
        )

    def status(self, project: Path | None = None) -> dict[str, Any]:
        return make_cluster_document(self.located(self.session(project)))

    def end(self) -> None:
        """Terminate the cluster, as `down` does."""
        self.note("ended", BEGAN + timedelta(minutes=90))
        self.folder.archive(ID)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A client whose cluster has the nodes in `listed`; no connection to them is possible."""
    client = Desk(tmp_path)

    @contextlib.contextmanager
    def find_cluster(session: Session, **_: object) -> Iterator[LocatedCluster]:
        if client.folder.read() is None:
            raise NotFoundError("no cluster default")
        yield client.located(session)

    for module in FINDERS:
        monkeypatch.setattr(module, "find_cluster", find_cluster)
    return client


def row_of_job(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [row] = [row for row in rows if row["job"] == name]
    return row
