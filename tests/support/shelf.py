"""A bucket with the objects of a saved job, and a client that reads them."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.s3.store import S3Uri, Store
from awsddp.aws.login import translate_aws_errors
from awsddp.model.documents import NodeFiles
from awsddp.model.events import Event
from awsddp.model.records import JobNode, JobRecord, Target
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.state import Record
from awsddp.storage.saved_job import StoredJob, open_store
from tests.support.local_cloud import Cloud
from tests.support.saved_job import SavedJob

BODY, HOME = b"weights", "node0/run/model.pt"


Change = Callable[[SavedJob], object]


def job_of_one_file() -> SavedJob:
    """Return the saved job of one rank with one file, which is a checkpoint."""
    return SavedJob({HOME: BODY}, checkpoint="run/model.pt")


class Shelf:
    """A bucket with the objects of a saved job, and a client that reads them."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.s3, self.home = store, store.client, home
        self.uri = S3Uri(f"saved-{uuid.uuid4().hex}", "runs of mine/first")
        self.s3.create_bucket(Bucket=self.uri.bucket)
        settings = load("default", overrides={"sync.workdir": str(home / "project")}, environ={})
        self.events: list[Event] = []
        self.session = Session(
            name="default", home=home / "home", settings=settings, on_event=self.events.append
        )

    def put(self, name: str, body: bytes) -> None:
        self.s3.put_object(Bucket=self.uri.bucket, Key=self.uri.key(name), Body=body)

    def read(self) -> dict[int, NodeFiles]:
        """Download all results of the job, and read its checkpoint."""
        with translate_aws_errors(Target(name="local"), location=str(self.uri)):
            saved = StoredJob(self.session, self.store, self.uri)
            if saved._index.checkpoint is not None:
                saved.read_checkpoint()
            return saved.download(all_results=True)

    @contextlib.contextmanager
    def on_get(self, do: Callable[[str], object]) -> Iterator[None]:
        """Call `do` before each read of an object, with its key below the job."""
        events, name, unique = self.s3.meta.events, "before-parameter-build.s3.GetObject", uuid.uuid4().hex

        def hook(params: dict[str, Any], **_: object) -> None:
            do(params["Key"].removeprefix(f"{self.uri.prefix}/"))

        events.register(name, hook, unique)
        try:
            yield
        finally:
            events.unregister(name, unique_id=unique)

    @property
    def folder(self) -> Path:
        """The results folder of the job."""
        return self.session.results / "first"

    @property
    def files(self) -> dict[str, bytes]:
        """The downloaded results, without job.json."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and path.name != "job.json"]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def store(records: Cloud) -> Iterator[Store]:
    info = records.info
    keys = {"access_key_id": info.access_key_id, "secret_access_key": info.secret_access_key}
    target = Target(name="local", region=info.region, endpoint=info.endpoint, **keys)
    with open_store(target, S3Uri("any", "")) as store:
        yield store


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    (tmp_path / "project").mkdir()
    return Shelf(store, tmp_path)


def set_value(attribute: str, *keys: Any, to: Any) -> Change:
    """Return a function that sets the value at `keys` in an attribute of the saved job."""

    def change(made: SavedJob) -> None:
        inner: Any = getattr(made, attribute)
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return change


JOB, NODE, PAGE, OF_CHECKPOINT = "job.json", "node0.json", "lists/node0-0", "lists/checkpoint-0"


def write_local_record(
    shelf: Shelf, save_to: str, target: Target | None = None, *, nodes: tuple[JobNode, ...] = ()
) -> None:
    """Write the cluster's key and a record with the job on this client."""
    shelf.session.folder.path.mkdir(parents=True)
    shelf.session.folder.key.write_text("the cluster's key")
    of_job = {"job": "first", "state": "running", "cause": None, "ranks": (), "home": "runs/first"}
    job = JobRecord(**of_job, save_to=save_to, nodes=nodes)
    now = datetime.now(UTC)
    of_cluster: dict[str, Any] = {"id": "c", "owner": "o", "created": now, "expires": now}
    of_cluster["target"] = target or Target(name="local")
    machine = {"instance_type": "t", "nodes": 1, "gpus_per_node": 1, "pretended": False, "ssh_user": "u"}
    shelf.session.folder.write(Record(**of_cluster, **machine, jobs=(job,)))
