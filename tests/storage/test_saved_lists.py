"""What nodes wrote to S3 is bounded and checked; what no node writes is refused with its name."""

import contextlib
import json
import shlex
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from awsddp.agent.s3.store import MOST_BYTES
from awsddp.errors import NodeError
from awsddp.storage.results_dir import read_job
from awsddp.storage.saved_job import FilesChanged, StoredJob, derive_signing_secret
from awsddp.storage.saved_lists import ListReader
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


def home(name: str, **more: Any) -> Change:
    """Have the list name one more file."""
    return put("rows", name, to={**row(HOME, BODY), **more})


def named(name: str) -> Change:
    """Have the checkpoint's page name one more file."""
    return put("of_checkpoint", name, to=row(HOME, BODY))


def call_checkpoint(made: SavedJob) -> None:
    made.checkpoint = "run/.."


HOSTILE: dict[str, tuple[Change, str, str]] = {
    "an older format": (put("index", "save", to=1), JOB, "its format is 1; this awsddp reads 2"),
    "a wrong type": (put("index", "nodes", to="all"), JOB, "array"),
    "a state that is none": (put("index", "document", "state", to="\x1b[2J"), JOB, "Invalid enum"),
    "another job": (put("index", "document", "job", to="second"), JOB, "is for job 'second'"),
    "a node that is none": (put("index", "nodes", to=[-1]), JOB, ">= 0"),
    "no nodes": (put("index", "document", "nodes", to=[]), JOB, "its job has []"),
    "no nodes at all": (
        lambda made: made.index.update(nodes=[], document={**made.index["document"], "nodes": []}),
        JOB,
        "its job has []",
    ),
    "more nodes": (put("index", "nodes", to=[0, 1]), JOB, "its job has [0]"),
    "another node": (put("nodes", 0, "node", to=1), NODE, "it is for node1"),
    "a home that leads out": (home("node0/../../out"), NODE, "invalid result path"),
    "an absolute home": (home("/etc/passwd"), NODE, "invalid result path"),
    "a home of another node": (home("node1/a"), NODE, "lies outside of node0/"),
    "a home of awsddp": (home("job.json"), NODE, "lies outside of node0/"),
    "a surrogate": (home("node0/\ud800"), PAGE, "surrogates"),
    "a link that leads out": (put("links", "node0/l", to="../../etc"), NODE, "invalid result path"),
    "a negative size": (home("node0/a", size=-1), PAGE, ">= 0"),
    "longer than its parts": (home("node0/a", size=9), PAGE, "its parts have 7"),
    "a part without an ETag": (home("node0/a", parts=[[HOME, 7, "", ""]]), PAGE, "length >= 1"),
    "a digest that is none": (home("node0/a", parts=[[HOME, 7, "e", "ab"]]), PAGE, "regex"),
    "a sample that is none": (home("node0/a", sample=""), PAGE, "regex"),
    "a part that is too long": (
        home("node0/a", size=14 << 30, parts=[[HOME, 7 << 30, "e", ""]] * 2),
        PAGE,
        "a part of 'node0/a' has 7,516,192,768 bytes",
    ),
    "a checkpoint's file that leads out": (named("node0/run/model.pt/../../out"), JOB, "invalid result path"),
    "a checkpoint's file of another": (named("node0/a"), JOB, "is no part of"),
    "a checkpoint's file of no node": (named("node7/run/model.pt"), JOB, "is no part of"),
    "a checkpoint that leads out": (call_checkpoint, JOB, "is no part of"),
    "a checkpoint of a wrong size": (put("of_checkpoint", HOME, "size", to=8), OF_CHECKPOINT, "have 7"),
}


RAW: dict[str, tuple[bytes, str, str]] = {
    "no JSON": (b"<html>", JOB, "Expecting value"),
    "no Unicode": (b'"\xff', JOB, "utf-8"),
    "deep": (b"[" * 100_000, JOB, "recursion"),
    "a list": (b"[]", JOB, "object"),
    "a node's, no JSON": (b"{", NODE, "Expecting"),
    "too long": (b" " * (MOST_BYTES + 1), JOB, "2,097,153 bytes are more than awsddp writes"),
    "a node's, too long": (b" " * (MOST_BYTES + 1), NODE, "2,097,153 bytes are more than awsddp writes"),
    "too many pages": (
        json.dumps({"node": 0, "launch": "launch-1", "pages": [["lists/node0-0", 1, "e"]] * 65}).encode(),
        NODE,
        "length <= 64",
    ),
    "a page that is too long": (
        json.dumps({"node": 0, "launch": "launch-1", "pages": [["lists/node0-0", 3 << 20, "e"]]}).encode(),
        NODE,
        "<= 2097152",
    ),
}


@pytest.mark.parametrize("what", [*HOSTILE, *RAW])
def test_what_no_node_writes_is_refused_with_its_name(shelf: Shelf, what: str) -> None:
    made = job_of_one_file()
    if what in HOSTILE:
        change, name, why = HOSTILE[what]
        change(made)
        made.put(shelf.store, shelf.where)
    else:
        body, name, why = RAW[what]
        made.put(shelf.store, shelf.where)
        shelf.put(name, body)
    with pytest.raises(NodeError) as caught:
        shelf.read()
    error, at = caught.value, f"{shelf.where}/{name}"
    assert (error.message, why in error.why) == (f"{at} is not valid", True), str(error)
    assert error.next.startswith(f"aws s3 cp {shlex.quote(at)} -   #")
    assert not list(shelf.home.rglob("runs"))


BOMBS = {
    "lists": b"[" + b"[]," * (MOST_BYTES // 3 - 1) + b"1]",
    "objects": b"[" + b"{}," * (MOST_BYTES // 3 - 1) + b"1]",
    "a key each": b"[" + b'{"a":{}},' * (MOST_BYTES // 9 - 1) + b"1]",
    "one key": b"{" + b'"a":{},' * (MOST_BYTES // 7 - 1) + b'"b":1}',
    "keys": b"{" + b",".join(b'"%x":1' % number for number in range(170_000)) + b"}",
    "files": b'{"files":{' + b",".join(b'"%011x":{}' % number for number in range(99_000)) + b"}}",
    "texts": b"[" + b'"ab",' * (MOST_BYTES // 5 - 1) + b"1]",
    "numbers": b"[" + b"300," * (MOST_BYTES // 4 - 1) + b"1]",
    "nodes": b'{"save":2,"launch":"l","state":"x","nodes":[' + b"300," * 500_000 + b"1]}",
    "links": b'{"links":{' + b",".join(b'"%x":"ab"' % number for number in range(150_000)) + b"}}",
}


LONG = ("texts", "keys", "numbers", "nodes")


@pytest.mark.parametrize(
    "bomb", [pytest.param(one, marks=pytest.mark.prove if one in LONG else ()) for one in BOMBS]
)
def test_no_document_costs_more_than_64_mb(shelf: Shelf, bomb: str) -> None:
    body = BOMBS[bomb]
    assert MOST_BYTES * 0.5 < len(body) <= MOST_BYTES
    node = {
        "node": 0,
        "launch": "l",
        "pages": [["page", len(body), shelf.store.put(shelf.where, "page", body)]],
    }
    shelf.put("job.json", body)
    shelf.put("node0.json", body)
    shelf.put("node1.json", json.dumps({**node, "node": 1}).encode())
    lists = ListReader(shelf.store, shelf.where)
    for read in (
        lists.read_index,
        lambda: lists.read_node(0, launch="l"),
        lambda: lists.read_node(1, launch="l"),
    ):
        tracemalloc.start()
        with contextlib.suppress(NodeError):
            read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64e6, f"{peak / 1e6:.0f} MB"


def test_who_has_the_clusters_key_believes_what_its_nodes_signed_and_nothing_else(shelf: Shelf) -> None:
    knows(shelf, f"s3://{shelf.where.bucket}/runs of mine/")
    made = job_of_one_file()
    made.secret = derive_signing_secret(shelf.session, "first")
    made.put(shelf.store, shelf.where)
    assert shelf.read()[0].files == 1
    for secret, put_again in ((None, JOB), ("0" * 64, JOB), (None, NODE), (made.secret, None)):
        made.put(shelf.store, shelf.where)
        body = shelf.store.document(shelf.where, put_again or JOB)
        assert body is not None
        other = SavedJob({HOME: BODY}, secret=secret)
        if put_again:
            other._document(shelf.store, shelf.where, put_again, json.loads(body.body))
        else:  # what a node signed as another document
            of_node = shelf.store.document(shelf.where, NODE)
            assert of_node is not None
            put_again = JOB
            shelf.store.put(shelf.where, JOB, body.body, Metadata={"awsddp-signature": of_node.signature})
        with pytest.raises(NodeError) as caught:
            shelf.read()
        assert caught.value.message == f"{shelf.where}/{put_again} was not written by a node of this job"
    knows_not = replace(shelf.session, home=shelf.home / "another")
    assert StoredJob(knows_not, shelf.store, shelf.where).job.job == "first"


def test_the_list_of_another_launch_is_not_believed(shelf: Shelf) -> None:
    made = SavedJob({HOME: BODY, "node1/x": b"1"})
    made.nodes[1]["launch"] = "launch-0"
    made.put(shelf.store, shelf.where)
    assert {node: one.files for node, one in shelf.read().items()} == {0: 1, 1: 0}
    kept = read_job(shelf.folder)
    assert kept is not None and kept.missing == (1,)


def test_a_list_whose_pages_change_is_read_again_and_not_for_ever(shelf: Shelf) -> None:
    made = job_of_one_file()
    made.put(shelf.store, shelf.where)
    left = [2]

    def change(key: str) -> None:
        if key == PAGE and left[0]:
            left[0] -= 1
            made.rows[f"node0/{left[0]}"] = row(HOME, BODY)
            made.put(shelf.store, shelf.where)

    with shelf.on_get(change):
        assert shelf.read()[0].files == 3
        left[0] = 99
        with pytest.raises(NodeError, match=r"node0\.json is changing faster than it can be read"):
            shelf.read()


def test_a_key_that_leads_out_of_the_job_is_not_read(shelf: Shelf) -> None:
    made = job_of_one_file()
    for key, secret in (("/secret", "/secret"), ("../second/secret", "runs of mine/second/secret")):
        shelf.s3.put_object(Bucket=shelf.where.bucket, Key=secret, Body=BODY)
        made.rows[HOME] = row(HOME, BODY, key=key)
        made.put(shelf.store, shelf.where)
        with pytest.raises(FilesChanged):
            shelf.read()
        assert shelf.files == {}
