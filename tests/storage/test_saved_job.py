"""A job in S3 is read as its nodes list it, also while it changes; and verified before nodes are released."""

import hashlib
import json
import shlex
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from awsddp.agent.s3.store import CONCURRENCY, S3Uri
from awsddp.errors import CloudError, ConfigError, NodeError, NotFoundError
from awsddp.job.fetch import fetch
from awsddp.model.records import JobNode, JobRecord
from awsddp.session.locate import open_target
from awsddp.storage.results_dir import is_fetched, read_job
from awsddp.storage.saved_job import FilesChanged, StoredJob, derive_signing_secret, verify_in_s3
from tests.support.local_cloud import Cloud, add_fault, clear_fault
from tests.support.saved_job import SavedJob, make_row
from tests.support.shelf import (
    BODY,
    HOME,
    JOB,
    NODE,
    OF_CHECKPOINT,
    PAGE,
    Change,
    Shelf,
    job_of_one_file,
    set_value,
    write_local_record,
)


@pytest.fixture
def aws(records: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set this machine's login to the local S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", records.info.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", records.info.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", records.info.secret_access_key)


def test_a_saved_job_is_read_as_its_nodes_wrote_it(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.saved_job.PAGE_ROWS", 2)
    files = {HOME: BODY, "node0/empty": b"", "node0/a b": b"1", "node0/x": b"4", "node1/run/model.pt": b"2"}
    saved = SavedJob({**files, "logs/rank1.log": b""}, checkpoint="run/model.pt")
    saved.rows["node1/\udcff"] = make_row("raw", b"3")
    saved.objects["raw"] = b"3"
    saved.grow("logs/rank1.log", b"a log of several parts")
    saved.links["node0/latest"] = "node0/run"
    saved.put(shelf.store, shelf.uri)
    assert {node: files_read.files for node, files_read in shelf.read().items()} == {0: 4, 1: 3}
    latin1 = {"node1/\udcff": b"3", "logs/rank1.log": b"a log of several parts"}
    assert shelf.files == files | latin1
    assert (shelf.folder / "node0/latest").resolve() == shelf.folder / "node0/run"
    stored = StoredJob(shelf.session, shelf.store, shelf.uri)
    assert is_fetched(shelf.folder, stored.job)
    stored.download(all_results=False)
    assert is_fetched(shelf.folder, stored.job), "a later read of the logs alone does not change it"
    assert not list(shelf.folder.rglob(".part"))


def test_nodes_without_files_are_named_in_one_line(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY, **{f"node{node}/x": b"" for node in range(1, 50)}})
    saved.rows = {HOME: saved.rows[HOME]}
    saved.put(shelf.store, shelf.uri)
    assert shelf.read().keys() == set(range(50))
    texts = [
        event.text for event in shelf.events if "no files" in event.text or event.who not in ("", "node0")
    ]
    assert texts == [
        f"no files of {', '.join(f'node{node}' for node in range(1, 11))} and 39 more at {shelf.uri}"
    ]


def test_many_small_files_take_one_request_each_on_few_threads(shelf: Shelf) -> None:
    files = {f"node0/{number}": b"%d" % number for number in range(300)}
    SavedJob(files).put(shelf.store, shelf.uri)
    keys: list[str] = []
    threads: set[int] = set()

    def record_key(key: str) -> None:
        keys.append(key)
        threads.add(threading.get_ident())

    with shelf.on_get(record_key):
        shelf.read()
    assert sorted(keys) == sorted([JOB, NODE, PAGE, *files])
    assert len(threads) <= CONCURRENCY + 2, "the store's, the reader's, and that of the lists"
    assert shelf.files == files


# ---- signatures


def test_a_job_of_a_known_name_at_another_uri_needs_no_signature(shelf: Shelf) -> None:
    write_local_record(shelf, f"s3://{shelf.uri.bucket}/others")
    job_of_one_file().put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 1


# ---- a job that changes while it is read


def test_a_file_replaced_during_the_read_is_read_in_its_new_version(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY, "node0/other": b"other"}, state="running")
    saved.put(shelf.store, shelf.uri)
    changes = [b"a longer version"]

    def change(key: str) -> None:
        if key == HOME and changes:
            saved.objects[HOME] = changes.pop()
            saved.rows[HOME] = make_row(HOME, saved.objects[HOME], modified=2)
            saved.put(shelf.store, shelf.uri)

    with shelf.on_get(change):
        assert shelf.read()[0].files == 2
    assert shelf.files == {HOME: b"a longer version", "node0/other": b"other"}
    assert (shelf.folder / HOME).stat().st_mtime_ns == 2


@pytest.mark.parametrize("sizes", ["alike", "unlike"])
def test_a_file_that_keeps_changing_is_named_and_others_are_read(shelf: Shelf, aws: None, sizes: str) -> None:
    saved = SavedJob({HOME: BODY, "node0/other": b"other", "node1/x": b"x"}, state="running")
    saved.put(shelf.store, shelf.uri)
    reads: list[str] = []

    def change(key: str) -> None:
        if key == HOME:
            reads.append(key)
            saved.objects[HOME] = b"%07d" % len(reads) if sizes == "alike" else b"x" * len(reads)
            saved.rows[HOME] = make_row(HOME, saved.objects[HOME])
            saved.put(shelf.store, shelf.uri)
            shelf.put(HOME, b"yet another one")

    with shelf.on_get(change):
        with pytest.raises(FilesChanged, match=f"faster than it can be read: {HOME}\n"):
            shelf.read()
        assert len(reads) == 4, "one read, and one after each of three more lists"
    assert shelf.files == {"node0/other": b"other", "node1/x": b"x"}
    job = read_job(shelf.folder)
    assert job is not None and job.missing == (0,)


def test_fetch_names_a_file_that_keeps_changing_and_exits_with_1(shelf: Shelf, aws: None) -> None:
    saved = SavedJob({HOME: BODY, "node0/other": b"other"}, state="running")
    saved.put(shelf.store, shelf.uri)
    shelf.put(HOME, b"another one")
    with pytest.raises(FilesChanged) as error:
        fetch(shelf.session, job=str(shelf.uri), start=lambda: None)
    assert (error.value.exit_code, error.value.kind, error.value.retryable) == (1, "changing", True)
    document = error.value.document()
    assert (document["job"], document["nodes"]) == ("first", ({"node": 0, "files": 1, "bytes": 5},))
    assert (
        error.value.next == f"awsddp fetch {shlex.quote(str(shelf.uri))}   # again, once the job writes less"
    )


def test_fetch_reports_a_file_that_was_replaced_after_the_job_had_ended(shelf: Shelf, aws: None) -> None:
    SavedJob({HOME: BODY, "node0/other": b"other"}).put(shelf.store, shelf.uri)
    shelf.put(HOME, b"another one")
    with pytest.raises(FilesChanged, match="not in S3 as listed") as error:
        fetch(shelf.session, job=str(shelf.uri), start=lambda: None)
    assert error.value.next.startswith("aws s3api list-object-versions --bucket")
    assert shelf.files == {"node0/other": b"other"}


@pytest.mark.parametrize("case", ["not ended", "could not save", "no list"])
def test_fetch_fails_if_a_node_did_not_save_all_of_an_ended_job(shelf: Shelf, aws: None, case: str) -> None:
    saved = SavedJob({HOME: BODY, "node1/x": b"x"})
    saved.nodes[1] |= {"not ended": {"ended": False}, "could not save": {"error": "disk full"}}.get(case, {})
    saved.put(shelf.store, shelf.uri)
    if case == "no list":
        delete("node1.json")(shelf)
    with pytest.raises(NodeError, match="a part of the results of first is not at s3://") as error:
        fetch(shelf.session, job=str(shelf.uri), start=lambda: None)
    assert (error.value.exit_code, "node1 did not save all" in error.value.why) == (6, True)
    assert error.value.document()["job"] == "first"
    assert shelf.files[HOME] == BODY


def test_times_that_other_file_systems_do_not_have_are_kept(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY})
    for modified in (-1_000_000_000, 5_000_000_000 * 10**9):
        saved.rows[HOME] = make_row(HOME, BODY, modified=modified)
        saved.put(shelf.store, shelf.uri)
        shelf.read()
        assert (shelf.folder / HOME).stat().st_mtime_ns == modified
        shutil.rmtree(shelf.folder)


def test_a_file_that_the_job_removes_during_the_read_is_not_missing(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY, "node0/other": b"other"})
    saved.put(shelf.store, shelf.uri)
    shelf.put(HOME, b"another one")

    def change(key: str) -> None:
        if saved.rows.pop(HOME, None):
            saved.put(shelf.store, shelf.uri)
            shelf.put(HOME, b"another one")

    with shelf.on_get(lambda key: key == HOME and change(key)):
        shelf.read()
    job = read_job(shelf.folder)
    assert (shelf.files, job and job.missing) == ({"node0/other": b"other"}, ())


def test_an_overwritten_part_is_not_read_as_the_listed_one(shelf: Shelf) -> None:
    saved = SavedJob({"node0/log.jsonl": b""})
    saved.grow("node0/log.jsonl", b"12345678")
    saved.put(shelf.store, shelf.uri)
    shelf.put("parts/node0/log.jsonl/000000000000000", b"other and longer")
    with pytest.raises(FilesChanged):
        shelf.read()
    assert shelf.files == {}


def test_no_more_bytes_than_listed_are_downloaded(shelf: Shelf) -> None:
    saved = job_of_one_file()
    saved.put(shelf.store, shelf.uri)
    big = b"x" * (40 << 20)
    etag = shelf.store.put(shelf.uri, "big", big)
    saved.rows["node0/big"] = {**make_row(HOME, BODY), "parts": [["big", 7, etag, ""]]}
    saved.put(shelf.store, shelf.uri)
    received: list[int] = []

    def count(parsed: dict[str, Any], **_: object) -> None:
        body = parsed["Body"]
        read = body.read
        body.read = lambda amt=None: received.append(len(data := read(amt))) or data

    shelf.s3.meta.events.register("after-call.s3.GetObject", count, "count")
    try:
        with pytest.raises(FilesChanged, match="node0/big"):
            shelf.read()
    finally:
        shelf.s3.meta.events.unregister("after-call.s3.GetObject", unique_id="count")
    assert sum(received) < 1 << 20


def test_a_download_that_keeps_failing_is_a_retryable_error(shelf: Shelf, records: Cloud) -> None:
    job_of_one_file().put(shelf.store, shelf.uri)
    for only in (HOME, JOB):
        add_fault(records.info, "GetObject", "cut", times=50, only=shelf.uri.key(only))
        try:
            with pytest.raises(CloudError, match="did not answer S3 at s3://") as error:
                shelf.read()
        finally:
            clear_fault(records.info)
        assert error.value.retryable
    assert shelf.read()[0].files == 1


# ---- local files


def test_files_of_an_interrupted_fetch_are_not_downloaded_again(shelf: Shelf, records: Cloud) -> None:
    saved = SavedJob({HOME: BODY, "node0/last": b"last"})
    saved.put(shelf.store, shelf.uri)
    add_fault(records.info, "GetObject", "AccessDenied", only=shelf.uri.key("node0/last"))
    with pytest.raises(CloudError, match="AccessDenied"):
        shelf.read()
    clear_fault(records.info)
    keys: list[str] = []
    with shelf.on_get(keys.append):
        shelf.read()
    assert [key for key in keys if not key.startswith(("lists/", "job", "node0.json"))] == ["node0/last"]
    assert shelf.files == {HOME: BODY, "node0/last": b"last"}


def test_a_file_rewritten_with_its_size_and_time_is_downloaded_again(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY}, state="running")
    saved.nodes[0]["ended"] = False
    saved.put(shelf.store, shelf.uri)
    shelf.read()
    saved.objects[HOME] = b"WEIGHTS"
    saved.rows[HOME] = make_row(HOME, b"WEIGHTS")
    saved.put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 1
    assert shelf.files == {HOME: b"WEIGHTS"}
    assert shelf.read()[0].files == 0


def test_a_file_and_a_folder_of_the_same_name_are_both_read(shelf: Shelf) -> None:
    saved = SavedJob({"node0/a": b"file", "node0/a/b": b"in a folder", "node0/a/b/c": b"deeper"})
    saved.put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 3
    assert sorted(shelf.files.values()) == [b"deeper", b"file", b"in a folder"]


def test_files_in_a_complete_folder_stay_and_missing_ones_are_downloaded(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY, "node0/other": b"other"})
    saved.links["node0/link"] = HOME
    saved.put(shelf.store, shelf.uri)
    shelf.read()
    (shelf.folder / HOME).write_bytes(b"mine")
    (shelf.folder / "node0/other").unlink()
    (shelf.folder / "node0/link").unlink()
    (shelf.folder / "node0/link").write_bytes(b"mine, too")
    before = (shelf.folder / "job.json").read_bytes()
    saved.objects[HOME] = b"forged!"
    saved.rows[HOME] = make_row(HOME, b"forged!", modified=9)
    saved.index["document"]["cause"] = None
    saved.index["document"]["created"] = "2027-01-01T00:00:00Z"
    saved.put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 1
    assert shelf.files == {HOME: b"mine", "node0/other": b"other", "node0/link": b"mine, too"}
    assert (shelf.folder / "job.json").read_bytes() == before


def test_a_job_of_other_nodes_or_at_another_uri_is_not_written(shelf: Shelf) -> None:
    saved = job_of_one_file()
    saved.put(shelf.store, shelf.uri)
    shelf.read()
    other_uri = shelf.uri._replace(prefix="others/first")
    saved.put(shelf.store, other_uri)
    before = shelf.files
    saved.index["document"]["nodes"] = [{"node": 0, "instance_id": "i-9"}]
    saved.objects[HOME], saved.rows[HOME] = b"4", make_row(HOME, b"4")
    saved.put(shelf.store, shelf.uri)
    for uri in (shelf.uri, other_uri):
        with pytest.raises(ConfigError, match="has no folder for its results"):
            StoredJob(shelf.session, shelf.store, uri).download(all_results=True)
        assert shelf.files == before


# ---- verification before the nodes are released


def make_nodes(*keys: str) -> list[dict[str, Any]]:
    return [{"node": node, "instance_id": key} for node, key in enumerate(keys)]


def delete(key: str) -> Callable[[Shelf], object]:
    return lambda shelf: shelf.s3.delete_object(Bucket=shelf.uri.bucket, Key=shelf.uri.key(key))


LISTED: dict[str, tuple[Change, str]] = {
    "it goes on": (set_value("index", "state", to="running"), "the job has not ended there"),
    "a node goes on": (set_value("nodes", 1, "ended", to=False), "node1 did not save all"),
    "a node could not save": (set_value("nodes", 1, "error", to="denied"), "node1 did not save all"),
    "others": (set_value("index", "document", "nodes", to=make_nodes("i-0", "i-9")), "come from other nodes"),
}
STORED: dict[str, tuple[Callable[[Shelf], object], str]] = {
    "a node is silent": (delete("node1.json"), "node1 did not save all"),
    "no list": (delete(JOB), "no job at"),
    "a forged list": (lambda shelf: shelf.put(JOB, b"{}"), "is not valid"),
    "an object is gone": (delete(HOME), "not in S3 as listed: 'runs of mine/first/node0/run/model.pt'"),
    "an object is another": (lambda shelf: shelf.put(HOME, b"WEIGHTS"), "not in S3 as listed"),
    "a part has grown": (lambda shelf: shelf.put("parts/node1/log/0", b"12345678 and more"), "node1/log/0"),
}


@pytest.mark.parametrize("case", ["all is well", "fewer machines", "no key", *LISTED, *STORED])
def test_results_are_verified_only_if_all_objects_are_as_listed(shelf: Shelf, aws: None, case: str) -> None:
    with open_target(shelf.session, None) as target:
        write_local_record(shelf, f"s3://{shelf.uri.bucket}/runs of mine", target)
    saved = SavedJob({HOME: BODY, "node1/log": b"12345678", "logs/rank1.log": b"said"})
    saved.secret = derive_signing_secret(shelf.session, "first")
    if case == "no key":
        shelf.session.folder.key.unlink()
    saved.objects["parts/node1/log/0"] = saved.objects.pop("node1/log")
    saved.rows["node1/log"] = make_row("parts/node1/log/0", b"12345678")
    saved.rows["node1/log"]["parts"][0][3] = hashlib.sha256(b"12345678").hexdigest()
    change, why = LISTED.get(case, (lambda _: None, ""))
    change(saved)
    saved.put(shelf.store, shelf.uri)
    change_store, why = STORED.get(case, (lambda _: None, why))
    change_store(shelf)
    fields = {"ranks": (), "home": "runs/first", "save_to": f"s3://{shelf.uri.bucket}/runs of mine"}
    keys = ("i-0",) if case == "fewer machines" else ("i-0", "i-1")
    nodes = tuple(JobNode(**node) for node in make_nodes(*keys))
    job = JobRecord(job="first", state="running", cause=None, nodes=nodes, **fields)
    assert verify_in_s3(shelf.session, job) == (case == "all is well")
    texts = [
        event.text for event in shelf.events if event.text.startswith("not all results of first are in s3://")
    ]
    assert len(texts) == (case != "all is well") and all(why in text for text in texts), shelf.events
    assert (shelf.folder / "logs/rank1.log").exists() == (case == "all is well")
    assert not (shelf.folder / HOME).exists()


# ---- a checkpoint


def test_a_checkpoint_has_its_files_of_all_nodes(shelf: Shelf) -> None:
    files = {f"node{node}/run/step 5/{node}.pt": b"%d" % node for node in (0, 1)}
    saved = SavedJob({**files, "node0/run/step 5-old/x": b"x"}, checkpoint="run/step 5")
    saved.put(shelf.store, shelf.uri)
    checkpoint = StoredJob(shelf.session, shelf.store, shelf.uri).read_checkpoint()
    assert (checkpoint.name, checkpoint.uri, checkpoint.job) == ("step 5", shelf.uri, "first")
    parts = {f"step 5/{node}.pt": saved.rows[f"node{node}/run/step 5/{node}.pt"]["parts"] for node in (0, 1)}
    assert {path: [list(part) for part in parts] for path, parts in checkpoint.files.items()} == parts


def test_a_checkpoint_that_keeps_changing_is_read_again_and_then_refused(shelf: Shelf) -> None:
    saved = job_of_one_file()
    saved.put(shelf.store, shelf.uri)
    remaining = [3]

    def change(key: str) -> None:
        if key == OF_CHECKPOINT and remaining[0]:
            remaining[0] -= 1
            saved.of_checkpoint[HOME] = make_row(HOME, b"x" * remaining[0])
            saved.put(shelf.store, shelf.uri)

    stored = StoredJob(shelf.session, shelf.store, shelf.uri)
    with shelf.on_get(change):
        assert stored.read_checkpoint().files["model.pt"][0].size == 0
        remaining[0] = 99
        with pytest.raises(NodeError, match=r"job\.json is changing faster than it can be read"):
            stored.read_checkpoint()


def test_a_job_without_a_checkpoint_is_an_error(shelf: Shelf) -> None:
    for checkpoint in (None, "run/none"):
        saved = SavedJob({HOME: BODY}, checkpoint=checkpoint)
        saved.put(shelf.store, shelf.uri)
        with pytest.raises(ConfigError, match="no checkpoint at"):
            StoredJob(shelf.session, shelf.store, shelf.uri).read_checkpoint()


# ---- advice if there is no job


def test_a_uri_without_a_job_names_the_jobs_near_it(shelf: Shelf) -> None:
    shelf.put("job.json", b"{}")
    for name in ("\x1b[2J/", "/\x1b[2J/", "parts/", "lists/", "node12/"):
        shelf.s3.put_object(Bucket=shelf.uri.bucket, Key=f"runs of mine/{name}job.json", Body=b"{}")
    parent = S3Uri(shelf.uri.bucket, "runs of mine")
    for name in ("", "none", "first/none"):
        with pytest.raises(NotFoundError, match="no job at") as error:
            StoredJob(shelf.session, shelf.store, parent.join(name) if name else parent)
        expected = (f"{parent}/ has first", f"awsddp jobs '{parent}/first'")
        if name == "first/none":
            expected = ("", f"aws s3 ls '{parent}/first'/   # what is there")
        assert (error.value.why, error.value.next) == expected
    with pytest.raises(NotFoundError) as error:
        StoredJob(shelf.session, shelf.store, S3Uri(parent.bucket, "a/b/c"))
    assert error.value.next == f"aws s3 ls s3://{parent.bucket}/a/b/   # what is there"


def test_the_advice_omits_a_job_without_a_list_and_its_folders(shelf: Shelf) -> None:
    claim = {"job": "first", "save": 2, "by": "i-0", "launch": "l", "state": "claimed"}
    shelf.put("job.json", json.dumps(claim).encode())
    for name in ("parts/x", "lists/x", "node0/x", "mine/x"):
        shelf.put(name, b"x")
    parent = S3Uri(shelf.uri.bucket, "runs of mine")
    with pytest.raises(NotFoundError, match=r"no results of the job yet at s3://") as error:
        shelf.read()
    assert (error.value.why, error.value.next) == ("", f"aws s3 ls '{parent}'/   # what is there")
    shelf.store.put(parent, "second/job.json", b"{}")
    with pytest.raises(NotFoundError) as error:
        shelf.read()
    assert error.value.next == f"awsddp jobs '{parent}/second'"


def test_a_job_that_other_nodes_saved_under_the_same_name_is_refused(shelf: Shelf) -> None:
    write_local_record(
        shelf, f"s3://{shelf.uri.bucket}/runs of mine", nodes=(JobNode(node=0, instance_id="i-9"),)
    )
    saved = job_of_one_file()
    saved.secret = derive_signing_secret(shelf.session, "first")
    saved.put(shelf.store, shelf.uri)
    with pytest.raises(NodeError, match="holds a job with the same name that other nodes saved") as error:
        shelf.read()
    assert error.value.why == "the nodes of first are i-9"
    assert not shelf.folder.exists()
    saved.index["document"]["nodes"] = make_nodes("i-9")
    saved.put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 1
