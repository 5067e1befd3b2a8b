"""A job in S3 of which somebody has changed what its nodes wrote: it is refused in words of its own."""

import json
import shlex
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awsddp.aws.session import translated
from awsddp.cluster import Cluster
from awsddp.config import load
from awsddp.errors import CloudError, ConfigError, NodeError, NotFoundError
from awsddp.jobs.supervisor import objects
from awsddp.jobs.supervisor.objects import Place, Store
from awsddp.records import Target
from awsddp.results import is_fetched
from awsddp.saved import Saved, in_bucket, store_at
from awsddp.state import Folder
from tests.local.conftest import Cloud

BODY = b"weights"
Change = Callable[[dict[str, Any]], object]


def objects_of_a_job() -> dict[str, Any]:
    """What a job of one rank has saved: a file, and a checkpoint."""
    rank = {"rank": 0, "node": 0, "local_rank": 0, "exit_code": 0, "seconds": 1.0}
    of_job = {"job": "first", "node": 0, "state": "succeeded", "cause": None, "complete": True}
    document = {**of_job, "created": "2026-01-01T00:00:00Z", "ranks": [rank]}
    part = ["node0/run/model.pt", len(BODY)]
    checkpoint = {"name": "run/model.pt", "files": [[0, part[0], len(BODY), [part]]]}
    file = {"size": len(BODY), "modified": 1, "parts": [part]}
    return {
        "job.json": {
            "save": 1,
            "state": "succeeded",
            "nodes": [0],
            "document": document,
            "checkpoint": checkpoint,
        },
        "node0.json": {"files": {part[0]: file}, "links": {}, "ended": True},
    }


class Shelf:
    """A bucket with the objects of a job, and who reads them."""

    def __init__(self, store: Store, home: Path) -> None:
        self.store, self.s3, self.home = store, store.client, home
        self.where = Place(f"saved-{uuid.uuid4().hex}", "runs of mine/first")
        self.s3.create_bucket(Bucket=self.where.bucket)
        self.put("node0/run/model.pt", BODY)
        spec, job = load("default", overrides={"sync.workdir": str(home / "project")}, environ={})
        folder = Folder(home / "home", "default")
        self.cluster = Cluster().but(spec=spec, job_spec=job, folder=folder, on_event=lambda _: None)

    def put(self, name: str, body: bytes) -> None:
        self.s3.put_object(Bucket=self.where.bucket, Key=self.where.key(name), Body=body)

    def write(self, objects: dict[str, Any]) -> None:
        for name, body in objects.items():
            self.put(name, body if isinstance(body, bytes) else json.dumps(body).encode())

    def read(self) -> None:
        """Read all of the job, and its checkpoint."""
        with translated(Target(name="local"), where=str(self.where)):
            saved = Saved(self.cluster, self.store, self.where)
            saved.checkpoint()
            saved.bring(whole=True)


@pytest.fixture(scope="module")
def store(records: Cloud) -> Iterator[Store]:
    info = records.info
    keys = {"access_key_id": info.access_key_id, "secret_access_key": info.secret_access_key}
    target = Target(name="local", region=info.region, endpoint=info.endpoint, **keys)
    with store_at(target, Place("any", "")) as store:
        yield store


@pytest.fixture
def shelf(store: Store, tmp_path: Path) -> Shelf:
    (tmp_path / "project").mkdir()
    return Shelf(store, tmp_path)


def put(*keys: Any, to: Any) -> Change:
    """Change what is found by `keys`."""

    def change(objects: dict[str, Any]) -> None:
        inner: Any = objects
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to

    return change


JOB, NODE = "job.json", "node0.json"
FILES, OUT = (NODE, "files"), {"size": 7, "modified": 1, "parts": [["node0/run/model.pt", 7]]}
OF_CHECKPOINT = (JOB, "checkpoint", "files", 0)
HOSTILE: dict[str, tuple[Change, str, str]] = {
    "no JSON": (put(JOB, to=b"<html>"), JOB, "Expecting value"),
    "no Unicode": (put(JOB, to=b'"\xff'), JOB, "utf-8"),
    "deep": (put(JOB, to=b"[" * 100_000), JOB, "recursion"),
    "a list": (put(JOB, to=[]), JOB, "object"),
    "a wrong type": (put(JOB, "nodes", to="all"), JOB, "array"),
    "a state that is none": (put(JOB, "document", "state", to="\x1b[2J"), JOB, "Invalid enum"),
    "another job": (put(JOB, "document", "job", to="second"), JOB, "speaks of job 'second'"),
    "a node that is none": (put(JOB, "nodes", to=[-1]), JOB, ">= 0"),
    "a node's, no JSON": (put(NODE, to=b"{"), NODE, "Expecting"),
    "a home that leads out": (put(*FILES, to={"node0/../../out": OUT}), NODE, "invalid result path"),
    "an absolute home": (put(*FILES, to={"/etc/passwd": OUT}), NODE, "invalid result path"),
    "a home of another node": (put(*FILES, to={"node1/a": OUT}), NODE, "lies outside of node0/"),
    "a home of awsddp": (put(*FILES, to={"job.json": OUT}), NODE, "lies outside of node0/"),
    "a surrogate": (put(*FILES, to={"node0/\ud800": OUT}), NODE, "surrogates"),
    "a link that leads out": (put(NODE, "links", to={"node0/l": "../../etc"}), NODE, "invalid result path"),
    "a negative size": (put(*FILES, to={"node0/a": {**OUT, "size": -1}}), NODE, ">= 0"),
    "longer than its parts": (put(*FILES, to={"node0/a": {**OUT, "size": 9}}), NODE, "its parts have 7"),
    "a part that is shorter": (
        put(*FILES, to={"node0/a": {**OUT, "size": 9, "parts": [["node0/run/model.pt", 9]]}}),
        NODE,
        "a lacks 2 bytes",
    ),
    "a checkpoint's file that leads out": (
        put(*OF_CHECKPOINT, 1, to="node0/run/model.pt/../../out"),
        JOB,
        "invalid result path",
    ),
    "a checkpoint's file of another": (put(*OF_CHECKPOINT, 1, to="node0/a"), JOB, "is no part of"),
    "a checkpoint that leads out": (put(JOB, "checkpoint", "name", to="run/.."), JOB, "is no part of"),
    "a checkpoint of a wrong size": (put(*OF_CHECKPOINT, 2, to=8), JOB, "its parts have 7"),
}


def test_what_nodes_wrote_is_read(shelf: Shelf) -> None:
    shelf.write(objects_of_a_job())
    shelf.read()
    folder = shelf.cluster.results / "first"
    assert (folder / "node0/run/model.pt").read_bytes() == BODY
    saved = Saved(shelf.cluster, shelf.store, shelf.where)
    saved.bring(whole=False)
    assert is_fetched(folder, saved.job), "who reads logs later says nothing else"


def test_nodes_may_go_only_when_the_first_has_said_that_all_is_saved(
    shelf: Shelf, records: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", records.info.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", records.info.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", records.info.secret_access_key)
    made = objects_of_a_job()
    for state, may_go in (("running", False), ("succeeded", True)):
        made["job.json"]["state"] = state
        shelf.write(made)
        job = Saved(shelf.cluster, shelf.store, shelf.where).job
        assert in_bucket(shelf.cluster, job) == may_go


def test_what_a_fetch_that_was_cut_has_brought_does_not_travel_again(shelf: Shelf) -> None:
    objects = objects_of_a_job()
    part = ["node0/gone", len(BODY)]
    objects["node0.json"]["files"]["node0/gone"] = {"size": len(BODY), "modified": 1, "parts": [part]}
    shelf.write(objects)
    with pytest.raises(NodeError, match="node0/gone is no longer at"):
        shelf.read()
    shelf.put("node0/gone", BODY)
    asked: list[str] = []
    shelf.s3.meta.events.register(
        "before-parameter-build.s3.GetObject", lambda params, **_: asked.append(params["Key"]), "a"
    )
    shelf.read()
    shelf.s3.meta.events.unregister("before-parameter-build.s3.GetObject", unique_id="a")
    assert [key.removeprefix(f"{shelf.where.prefix}/") for key in asked if not key.endswith(".json")] == [
        part[0]
    ]
    assert (shelf.cluster.results / "first/node0/gone").read_bytes() == BODY


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_node_writes_is_refused_with_its_name(shelf: Shelf, what: str) -> None:
    change, name, why = HOSTILE[what]
    objects = objects_of_a_job()
    change(objects)
    shelf.write(objects)
    with pytest.raises(NodeError) as caught:
        shelf.read()
    error, at = caught.value, f"{shelf.where}/{name}"
    assert (error.message, why in error.why) == (f"{at} is not as a node writes it", True), str(error)
    assert error.next.startswith(f"aws s3 cp {shlex.quote(at)} -   #")
    written = {path.relative_to(shelf.home).parts[:4] for path in shelf.home.rglob("*") if path.is_file()}
    assert written <= {("project", "runs", "first", ".part")}


@pytest.mark.parametrize("of_file", [True, False])
def test_a_download_that_is_cut_again_and_again_is_told(shelf: Shelf, *, of_file: bool) -> None:
    shelf.write(objects_of_a_job())

    def cut(parsed: dict[str, Any], **_: object) -> None:
        if (parsed["ContentLength"] == len(BODY)) == of_file:
            parsed["Body"]._content_length = parsed["ContentLength"] + 1  # the connection ends early

    events, key = shelf.s3.meta.events, "after-call.s3.GetObject"
    events.register(key, cut, "cut")
    try:
        with pytest.raises(CloudError, match="did not answer S3 at s3://") as caught:
            shelf.read()
    finally:
        events.unregister(key, unique_id="cut")
    assert caught.value.retryable


def test_a_place_without_a_job_names_the_jobs_there(shelf: Shelf) -> None:
    shelf.put("job.json", b"{}")
    shelf.s3.put_object(Bucket=shelf.where.bucket, Key="runs of mine//\x1b[2J/job.json", Body=b"{}")
    shelf.s3.put_object(Bucket=shelf.where.bucket, Key="runs of mine/\x1b[2J/job.json", Body=b"{}")
    above = Place(shelf.where.bucket, "runs of mine")
    for name in ("", "none"):
        with pytest.raises(NotFoundError, match="no job at") as caught:
            Saved(shelf.cluster, shelf.store, above.below(name) if name else above)
        assert (caught.value.why, caught.value.next) == (
            f"{above}/ has first",
            f"awsddp jobs '{above}/first'",
        )
    with pytest.raises(NotFoundError) as caught:
        Saved(shelf.cluster, shelf.store, Place(above.bucket, "a/b/c"))
    assert caught.value.next == f"aws s3 ls s3://{above.bucket}/a/b/   # what is there"


def test_a_list_that_is_longer_than_awsddp_writes_is_not_read(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "MOST_BYTES", 1000)
    shelf.write({"job.json": b" " * 1001})
    with pytest.raises(NodeError, match=r"job\.json is not as a node writes it") as caught:
        shelf.read()
    assert caught.value.why == "1,001 bytes are more than awsddp writes"


def test_a_key_that_leads_out_of_the_job_is_not_read(shelf: Shelf) -> None:
    shelf.s3.put_object(Bucket=shelf.where.bucket, Key="/secret", Body=BODY)
    made = objects_of_a_job()
    put(*FILES, "node0/run/model.pt", "parts", to=[["/secret", len(BODY)]])(made)
    shelf.write(made)
    with pytest.raises(NodeError, match="is no longer at"):
        shelf.read()


def test_what_is_listed_and_gone_is_told(shelf: Shelf) -> None:
    shelf.write(objects_of_a_job())
    shelf.s3.delete_object(Bucket=shelf.where.bucket, Key=shelf.where.key("node0/run/model.pt"))
    with pytest.raises(NodeError, match=r"node0/run/model.pt is no longer at s3://") as caught:
        shelf.read()
    assert caught.value.next == f"awsddp fetch '{shelf.where}'   # again"
    empty = objects_of_a_job()
    put(JOB, "checkpoint", "files", to=[])(empty)
    shelf.write(empty)
    with pytest.raises(ConfigError, match="no checkpoint at"):
        shelf.read()
