"""A job in S3 is read as its nodes list it, while it changes too; nodes may go once all of it is there."""

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
from tests.support.local_cloud import Cloud, fault_add, fault_clear
from tests.support.saved_job import SavedJob, row
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
    knows,
    put,
)


@pytest.fixture
def aws(records: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login of this machine is for the local S3."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", records.info.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", records.info.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", records.info.secret_access_key)


def test_what_nodes_wrote_is_read(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.saved_job.PAGE_ROWS", 2)
    files = {HOME: BODY, "node0/empty": b"", "node0/a b": b"1", "node0/x": b"4", "node1/run/model.pt": b"2"}
    made = SavedJob({**files, "logs/rank1.log": b""}, checkpoint="run/model.pt")
    made.rows["node1/\udcff"] = row("raw", b"3")
    made.objects["raw"] = b"3"
    made.grow("logs/rank1.log", b"a log of several parts")
    made.links["node0/latest"] = "node0/run"
    made.put(shelf.store, shelf.where)
    assert {node: one.files for node, one in shelf.read().items()} == {0: 4, 1: 3}
    latin1 = {"node1/\udcff": b"3", "logs/rank1.log": b"a log of several parts"}
    assert shelf.files == files | latin1
    assert (shelf.folder / "node0/latest").resolve() == shelf.folder / "node0/run"
    saved = StoredJob(shelf.session, shelf.store, shelf.where)
    assert is_fetched(shelf.folder, saved.job)
    saved.download(all_results=False)
    assert is_fetched(shelf.folder, saved.job), "who reads logs later says nothing else"
    assert not list(shelf.folder.rglob(".part"))


def test_nodes_without_files_are_named_in_one_line(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY, **{f"node{node}/x": b"" for node in range(1, 50)}})
    made.rows = {HOME: made.rows[HOME]}
    made.put(shelf.store, shelf.where)
    assert shelf.read().keys() == set(range(50))
    about = [one.text for one in shelf.said if "no files" in one.text or one.who not in ("", "node0")]
    assert about == [
        f"no files of {', '.join(f'node{node}' for node in range(1, 11))} and 39 more at {shelf.where}"
    ]


def test_many_small_files_cost_one_request_each_and_no_thread_each(shelf: Shelf) -> None:
    files = {f"node0/{number}": b"%d" % number for number in range(300)}
    SavedJob(files).put(shelf.store, shelf.where)
    asked: list[str] = []
    threads: set[int] = set()

    def note(key: str) -> None:
        asked.append(key)
        threads.add(threading.get_ident())

    with shelf.on_get(note):
        shelf.read()
    assert sorted(asked) == sorted([JOB, NODE, PAGE, *files])
    assert len(threads) <= CONCURRENCY + 2, "those of the store, of who reads, and of the lists"
    assert shelf.files == files


# ---- who wrote it


def test_a_job_of_this_name_at_another_place_is_not_ours(shelf: Shelf) -> None:
    knows(shelf, f"s3://{shelf.where.bucket}/others")
    job_of_one_file().put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 1


# ---- what changes while it is read


def test_a_file_that_is_another_one_by_now_comes_as_it_is_listed_then(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY, "node0/other": b"other"}, state="running")
    made.put(shelf.store, shelf.where)
    changes = [b"a longer version"]

    def change(key: str) -> None:
        if key == HOME and changes:
            made.objects[HOME] = changes.pop()
            made.rows[HOME] = row(HOME, made.objects[HOME], modified=2)
            made.put(shelf.store, shelf.where)

    with shelf.on_get(change):
        assert shelf.read()[0].files == 2
    assert shelf.files == {HOME: b"a longer version", "node0/other": b"other"}
    assert (shelf.folder / HOME).stat().st_mtime_ns == 2


@pytest.mark.parametrize("sizes", ["alike", "unlike"])
def test_a_file_that_never_rests_is_named_and_all_others_come(shelf: Shelf, aws: None, sizes: str) -> None:
    made = SavedJob({HOME: BODY, "node0/other": b"other", "node1/x": b"x"}, state="running")
    made.put(shelf.store, shelf.where)
    reads: list[str] = []

    def change(key: str) -> None:
        if key == HOME:
            reads.append(key)
            made.objects[HOME] = b"%07d" % len(reads) if sizes == "alike" else b"x" * len(reads)
            made.rows[HOME] = row(HOME, made.objects[HOME])
            made.put(shelf.store, shelf.where)
            shelf.put(HOME, b"yet another one")

    with shelf.on_get(change):
        with pytest.raises(FilesChanged, match=f"faster than it can be read: {HOME}\n"):
            shelf.read()
        assert len(reads) == 4, "it is read once, and after each of three more lists"
    assert shelf.files == {"node0/other": b"other", "node1/x": b"x"}
    kept = read_job(shelf.folder)
    assert kept is not None and kept.missing == (0,)


def test_fetch_names_what_never_rests_ends_with_1_and_tells_what_came(shelf: Shelf, aws: None) -> None:
    made = SavedJob({HOME: BODY, "node0/other": b"other"}, state="running")
    made.put(shelf.store, shelf.where)
    shelf.put(HOME, b"another one")
    with pytest.raises(FilesChanged) as caught:
        fetch(shelf.session, job=str(shelf.where), start=lambda: None)
    assert (caught.value.exit_code, caught.value.kind, caught.value.retryable) == (1, "changing", True)
    document = caught.value.document()
    assert (document["job"], document["nodes"]) == ("first", ({"node": 0, "files": 1, "bytes": 5},))
    assert (
        caught.value.next
        == f"awsddp fetch {shlex.quote(str(shelf.where))}   # again, once the job writes less"
    )


def test_what_another_writer_replaced_when_the_job_was_over_is_named_as_that(shelf: Shelf, aws: None) -> None:
    SavedJob({HOME: BODY, "node0/other": b"other"}).put(shelf.store, shelf.where)
    shelf.put(HOME, b"another one")
    with pytest.raises(FilesChanged, match="not in S3 as listed") as caught:
        fetch(shelf.session, job=str(shelf.where), start=lambda: None)
    assert caught.value.next.startswith("aws s3api list-object-versions --bucket")
    assert shelf.files == {"node0/other": b"other"}


@pytest.mark.parametrize("what", ["not ended", "could not save", "no list"])
def test_what_a_node_did_not_save_of_a_job_that_is_over_is_an_error_of_fetch(
    shelf: Shelf, aws: None, what: str
) -> None:
    made = SavedJob({HOME: BODY, "node1/x": b"x"})
    made.nodes[1] |= {"not ended": {"ended": False}, "could not save": {"error": "disk full"}}.get(what, {})
    made.put(shelf.store, shelf.where)
    if what == "no list":
        gone("node1.json")(shelf)
    with pytest.raises(NodeError, match="a part of the results of first is not at s3://") as caught:
        fetch(shelf.session, job=str(shelf.where), start=lambda: None)
    assert (caught.value.exit_code, "node1 did not save all" in caught.value.why) == (6, True)
    assert caught.value.document()["job"] == "first"
    assert shelf.files[HOME] == BODY


def test_times_that_other_file_systems_do_not_have_are_read(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY})
    for modified in (-1_000_000_000, 5_000_000_000 * 10**9):
        made.rows[HOME] = row(HOME, BODY, modified=modified)
        made.put(shelf.store, shelf.where)
        shelf.read()
        assert (shelf.folder / HOME).stat().st_mtime_ns == modified
        shutil.rmtree(shelf.folder)


def test_what_the_job_has_removed_meanwhile_is_not_missing(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY, "node0/other": b"other"})
    made.put(shelf.store, shelf.where)
    shelf.put(HOME, b"another one")

    def change(key: str) -> None:
        if made.rows.pop(HOME, None):
            made.put(shelf.store, shelf.where)
            shelf.put(HOME, b"another one")

    with shelf.on_get(lambda key: key == HOME and change(key)):
        shelf.read()
    kept = read_job(shelf.folder)
    assert (shelf.files, kept and kept.missing) == ({"node0/other": b"other"}, ())


def test_a_growing_file_that_was_written_anew_is_not_taken_for_the_old_one(shelf: Shelf) -> None:
    made = SavedJob({"node0/log.jsonl": b""})
    made.grow("node0/log.jsonl", b"12345678")
    made.put(shelf.store, shelf.where)
    shelf.put("parts/node0/log.jsonl/000000000000000", b"other and longer")
    with pytest.raises(FilesChanged):
        shelf.read()
    assert shelf.files == {}


def test_no_more_than_the_list_says_travels(shelf: Shelf) -> None:
    made = job_of_one_file()
    made.put(shelf.store, shelf.where)
    big = b"x" * (40 << 20)
    etag = shelf.store.put(shelf.where, "big", big)
    made.rows["node0/big"] = {**row(HOME, BODY), "parts": [["big", 7, etag, ""]]}
    made.put(shelf.store, shelf.where)
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


def test_a_download_that_is_cut_again_and_again_is_told(shelf: Shelf, records: Cloud) -> None:
    job_of_one_file().put(shelf.store, shelf.where)
    for only in (HOME, JOB):
        fault_add(records.info, "GetObject", "cut", times=50, only=shelf.where.key(only))
        try:
            with pytest.raises(CloudError, match="did not answer S3 at s3://") as caught:
                shelf.read()
        finally:
            fault_clear(records.info)
        assert caught.value.retryable
    assert shelf.read()[0].files == 1


# ---- what is here


def test_what_a_fetch_that_was_cut_has_brought_does_not_travel_again(shelf: Shelf, records: Cloud) -> None:
    made = SavedJob({HOME: BODY, "node0/last": b"last"})
    made.put(shelf.store, shelf.where)
    fault_add(records.info, "GetObject", "AccessDenied", only=shelf.where.key("node0/last"))
    with pytest.raises(CloudError, match="AccessDenied"):
        shelf.read()
    fault_clear(records.info)
    asked: list[str] = []
    with shelf.on_get(asked.append):
        shelf.read()
    assert [key for key in asked if not key.startswith(("lists/", "job", "node0.json"))] == ["node0/last"]
    assert shelf.files == {HOME: BODY, "node0/last": b"last"}


def test_what_was_rewritten_in_place_with_its_size_and_time_comes_again(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY}, state="running")
    made.nodes[0]["ended"] = False
    made.put(shelf.store, shelf.where)
    shelf.read()
    made.objects[HOME] = b"WEIGHTS"
    made.rows[HOME] = row(HOME, b"WEIGHTS")
    made.put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 1
    assert shelf.files == {HOME: b"WEIGHTS"}
    assert shelf.read()[0].files == 0


def test_a_file_and_a_folder_of_one_name_both_come(shelf: Shelf) -> None:
    made = SavedJob({"node0/a": b"file", "node0/a/b": b"in a folder", "node0/a/b/c": b"deeper"})
    made.put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 3
    assert sorted(shelf.files.values()) == [b"deeper", b"file", b"in a folder"]


def test_what_lies_in_a_folder_that_is_whole_stays_and_what_lacks_comes(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY, "node0/other": b"other"})
    made.links["node0/link"] = HOME
    made.put(shelf.store, shelf.where)
    shelf.read()
    (shelf.folder / HOME).write_bytes(b"mine")
    (shelf.folder / "node0/other").unlink()
    (shelf.folder / "node0/link").unlink()
    (shelf.folder / "node0/link").write_bytes(b"mine, too")
    before = (shelf.folder / "job.json").read_bytes()
    made.objects[HOME] = b"forged!"
    made.rows[HOME] = row(HOME, b"forged!", modified=9)
    made.index["document"]["cause"] = None
    made.index["document"]["created"] = "2027-01-01T00:00:00Z"
    made.put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 1
    assert shelf.files == {HOME: b"mine", "node0/other": b"other", "node0/link": b"mine, too"}
    assert (shelf.folder / "job.json").read_bytes() == before


def test_a_job_of_other_nodes_or_of_another_place_writes_nothing(shelf: Shelf) -> None:
    made = job_of_one_file()
    made.put(shelf.store, shelf.where)
    shelf.read()
    elsewhere = shelf.where._replace(prefix="others/first")
    made.put(shelf.store, elsewhere)
    before = shelf.files
    made.index["document"]["nodes"] = [{"node": 0, "instance_id": "i-9"}]
    made.objects[HOME], made.rows[HOME] = b"4", row(HOME, b"4")
    made.put(shelf.store, shelf.where)
    for where in (shelf.where, elsewhere):
        with pytest.raises(ConfigError, match="has no folder for its results"):
            StoredJob(shelf.session, shelf.store, where).download(all_results=True)
        assert shelf.files == before


# ---- may the nodes go?


def machines(*keys: str) -> list[dict[str, Any]]:
    return [{"node": node, "instance_id": key} for node, key in enumerate(keys)]


def gone(key: str) -> Callable[[Shelf], object]:
    return lambda shelf: shelf.s3.delete_object(Bucket=shelf.where.bucket, Key=shelf.where.key(key))


LISTED: dict[str, tuple[Change, str]] = {
    "it goes on": (put("index", "state", to="running"), "the job has not ended there"),
    "a node goes on": (put("nodes", 1, "ended", to=False), "node1 did not save all"),
    "a node could not save": (put("nodes", 1, "error", to="denied"), "node1 did not save all"),
    "others": (put("index", "document", "nodes", to=machines("i-0", "i-9")), "are of other nodes"),
}
STORED: dict[str, tuple[Callable[[Shelf], object], str]] = {
    "a node is silent": (gone("node1.json"), "node1 did not save all"),
    "no list": (gone(JOB), "no job at"),
    "a forged list": (lambda shelf: shelf.put(JOB, b"{}"), "is not valid"),
    "an object is gone": (gone(HOME), "not in S3 as listed: 'runs of mine/first/node0/run/model.pt'"),
    "an object is another": (lambda shelf: shelf.put(HOME, b"WEIGHTS"), "not in S3 as listed"),
    "a part has grown": (lambda shelf: shelf.put("parts/node1/log/0", b"12345678 and more"), "node1/log/0"),
}


@pytest.mark.parametrize("what", ["all is well", "fewer machines", "no key", *LISTED, *STORED])
def test_nodes_may_go_only_when_all_is_there_as_it_is_listed(shelf: Shelf, aws: None, what: str) -> None:
    with open_target(shelf.session, None) as target:
        knows(shelf, f"s3://{shelf.where.bucket}/runs of mine", target)
    made = SavedJob({HOME: BODY, "node1/log": b"12345678", "logs/rank1.log": b"said"})
    made.secret = derive_signing_secret(shelf.session, "first")
    if what == "no key":
        shelf.session.folder.key.unlink()
    made.objects["parts/node1/log/0"] = made.objects.pop("node1/log")
    made.rows["node1/log"] = row("parts/node1/log/0", b"12345678")
    made.rows["node1/log"]["parts"][0][3] = hashlib.sha256(b"12345678").hexdigest()
    change, why = LISTED.get(what, (lambda _: None, ""))
    change(made)
    made.put(shelf.store, shelf.where)
    after, why = STORED.get(what, (lambda _: None, why))
    after(shelf)
    known = {"ranks": (), "home": "runs/first", "save_to": f"s3://{shelf.where.bucket}/runs of mine"}
    keys = ("i-0",) if what == "fewer machines" else ("i-0", "i-1")
    nodes = tuple(JobNode(**one) for one in machines(*keys))
    job = JobRecord(job="first", state="running", cause=None, nodes=nodes, **known)
    assert verify_in_s3(shelf.session, job) == (what == "all is well")
    said = [one.text for one in shelf.said if one.text.startswith("not all results of first are in s3://")]
    assert len(said) == (what != "all is well") and all(why in text for text in said), shelf.said
    assert (shelf.folder / "logs/rank1.log").exists() == (what == "all is well")
    assert not (shelf.folder / HOME).exists()


# ---- a checkpoint


def test_a_checkpoint_is_all_its_files_on_all_nodes(shelf: Shelf) -> None:
    files = {f"node{node}/run/step 5/{node}.pt": b"%d" % node for node in (0, 1)}
    made = SavedJob({**files, "node0/run/step 5-old/x": b"x"}, checkpoint="run/step 5")
    made.put(shelf.store, shelf.where)
    found = StoredJob(shelf.session, shelf.store, shelf.where).read_checkpoint()
    assert (found.name, found.uri, found.job) == ("step 5", shelf.where, "first")
    parts = {f"step 5/{node}.pt": made.rows[f"node{node}/run/step 5/{node}.pt"]["parts"] for node in (0, 1)}
    assert {path: [list(one) for one in several] for path, several in found.files.items()} == parts


def test_a_checkpoint_that_changes_is_read_again_and_not_for_ever(shelf: Shelf) -> None:
    made = job_of_one_file()
    made.put(shelf.store, shelf.where)
    left = [3]

    def change(key: str) -> None:
        if key == OF_CHECKPOINT and left[0]:
            left[0] -= 1
            made.of_checkpoint[HOME] = row(HOME, b"x" * left[0])
            made.put(shelf.store, shelf.where)

    saved = StoredJob(shelf.session, shelf.store, shelf.where)
    with shelf.on_get(change):
        assert saved.read_checkpoint().files["model.pt"][0].size == 0
        left[0] = 99
        with pytest.raises(NodeError, match=r"job\.json is changing faster than it can be read"):
            saved.read_checkpoint()


def test_a_job_without_a_checkpoint_says_so(shelf: Shelf) -> None:
    for checkpoint in (None, "run/none"):
        made = SavedJob({HOME: BODY}, checkpoint=checkpoint)
        made.put(shelf.store, shelf.where)
        with pytest.raises(ConfigError, match="no checkpoint at"):
            StoredJob(shelf.session, shelf.store, shelf.where).read_checkpoint()


# ---- what there is instead


def test_a_place_without_a_job_names_the_jobs_there(shelf: Shelf) -> None:
    shelf.put("job.json", b"{}")
    for name in ("\x1b[2J/", "/\x1b[2J/", "parts/", "lists/", "node12/"):
        shelf.s3.put_object(Bucket=shelf.where.bucket, Key=f"runs of mine/{name}job.json", Body=b"{}")
    above = S3Uri(shelf.where.bucket, "runs of mine")
    for name in ("", "none", "first/none"):
        with pytest.raises(NotFoundError, match="no job at") as caught:
            StoredJob(shelf.session, shelf.store, above.join(name) if name else above)
        expected = (f"{above}/ has first", f"awsddp jobs '{above}/first'")
        if name == "first/none":
            expected = ("", f"aws s3 ls '{above}/first'/   # what is there")
        assert (caught.value.why, caught.value.next) == expected
    with pytest.raises(NotFoundError) as caught:
        StoredJob(shelf.session, shelf.store, S3Uri(above.bucket, "a/b/c"))
    assert caught.value.next == f"aws s3 ls s3://{above.bucket}/a/b/   # what is there"


def test_a_job_without_a_list_is_not_advised_again_nor_what_it_consists_of(shelf: Shelf) -> None:
    claim = {"job": "first", "save": 2, "by": "i-0", "launch": "l", "state": "claimed"}
    shelf.put("job.json", json.dumps(claim).encode())
    for name in ("parts/x", "lists/x", "node0/x", "mine/x"):
        shelf.put(name, b"x")
    above = S3Uri(shelf.where.bucket, "runs of mine")
    with pytest.raises(NotFoundError, match=r"no results of the job yet at s3://") as caught:
        shelf.read()
    assert (caught.value.why, caught.value.next) == ("", f"aws s3 ls '{above}'/   # what is there")
    shelf.store.put(above, "second/job.json", b"{}")
    with pytest.raises(NotFoundError) as caught:
        shelf.read()
    assert caught.value.next == f"awsddp jobs '{above}/second'"


def test_what_an_older_job_of_the_name_wrote_on_other_nodes_is_not_taken_for_ours(shelf: Shelf) -> None:
    knows(shelf, f"s3://{shelf.where.bucket}/runs of mine", nodes=(JobNode(node=0, instance_id="i-9"),))
    made = job_of_one_file()
    made.secret = derive_signing_secret(shelf.session, "first")
    made.put(shelf.store, shelf.where)
    with pytest.raises(NodeError, match="holds a job of that name of other nodes") as caught:
        shelf.read()
    assert caught.value.why == "those of first are i-9"
    assert not shelf.folder.exists()
    made.index["document"]["nodes"] = machines("i-9")
    made.put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 1
