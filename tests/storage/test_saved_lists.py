"""The documents of nodes in S3 are bounded and validated; an invalid one is refused with its name."""

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


def add_row(name: str, **fields: Any) -> Change:
    """Return a change that adds a file to the list."""
    return set_value("rows", name, to={**make_row(HOME, BODY), **fields})


def add_part(name: str) -> Change:
    """Return a change that adds a file to the checkpoint's page."""
    return set_value("of_checkpoint", name, to=make_row(HOME, BODY))


def set_invalid_checkpoint(saved: SavedJob) -> None:
    saved.checkpoint = "run/.."


HOSTILE: dict[str, tuple[Change, str, str]] = {
    "an older format": (set_value("index", "save", to=1), JOB, "its format is 1; this awsddp reads 2"),
    "a wrong type": (set_value("index", "nodes", to="all"), JOB, "array"),
    "a state that is none": (set_value("index", "document", "state", to="\x1b[2J"), JOB, "Invalid enum"),
    "another job": (set_value("index", "document", "job", to="second"), JOB, "is for job 'second'"),
    "a node that is none": (set_value("index", "nodes", to=[-1]), JOB, ">= 0"),
    "no nodes": (set_value("index", "document", "nodes", to=[]), JOB, "its job has []"),
    "no nodes at all": (
        lambda saved: saved.index.update(nodes=[], document={**saved.index["document"], "nodes": []}),
        JOB,
        "its job has []",
    ),
    "more nodes": (set_value("index", "nodes", to=[0, 1]), JOB, "its job has [0]"),
    "another node": (set_value("nodes", 0, "node", to=1), NODE, "it is for node1"),
    "a home that leads out": (add_row("node0/../../out"), NODE, "invalid result path"),
    "an absolute home": (add_row("/etc/passwd"), NODE, "invalid result path"),
    "a home of another node": (add_row("node1/a"), NODE, "lies outside of node0/"),
    "a home of awsddp": (add_row("job.json"), NODE, "lies outside of node0/"),
    "a surrogate": (add_row("node0/\ud800"), PAGE, "surrogates"),
    "a link that leads out": (set_value("links", "node0/l", to="../../etc"), NODE, "invalid result path"),
    "a negative size": (add_row("node0/a", size=-1), PAGE, ">= 0"),
    "longer than its parts": (add_row("node0/a", size=9), PAGE, "its parts have 7"),
    "a part without an ETag": (add_row("node0/a", parts=[[HOME, 7, "", ""]]), PAGE, "length >= 1"),
    "a digest that is none": (add_row("node0/a", parts=[[HOME, 7, "e", "ab"]]), PAGE, "regex"),
    "a sample that is none": (add_row("node0/a", sample=""), PAGE, "regex"),
    "a part that is too long": (
        add_row("node0/a", size=14 << 30, parts=[[HOME, 7 << 30, "e", ""]] * 2),
        PAGE,
        "a part of 'node0/a' has 7,516,192,768 bytes",
    ),
    "a checkpoint's file that leads out": (
        add_part("node0/run/model.pt/../../out"),
        JOB,
        "invalid result path",
    ),
    "a checkpoint's file of another": (add_part("node0/a"), JOB, "is no part of"),
    "a checkpoint's file of no node": (add_part("node7/run/model.pt"), JOB, "is no part of"),
    "a checkpoint that leads out": (set_invalid_checkpoint, JOB, "is no part of"),
    "a checkpoint of a wrong size": (set_value("of_checkpoint", HOME, "size", to=8), OF_CHECKPOINT, "have 7"),
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


@pytest.mark.parametrize("case", [*HOSTILE, *RAW])
def test_an_invalid_document_is_refused_with_its_name(shelf: Shelf, case: str) -> None:
    saved = job_of_one_file()
    if case in HOSTILE:
        change, name, why = HOSTILE[case]
        change(saved)
        saved.put(shelf.store, shelf.uri)
    else:
        body, name, why = RAW[case]
        saved.put(shelf.store, shelf.uri)
        shelf.put(name, body)
    with pytest.raises(NodeError) as caught:
        shelf.read()
    error, uri = caught.value, f"{shelf.uri}/{name}"
    assert (error.message, why in error.why) == (f"{uri} is not valid", True), str(error)
    assert error.next.startswith(f"aws s3 cp {shlex.quote(uri)} -   #")
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
    "bomb", [pytest.param(name, marks=pytest.mark.prove if name in LONG else ()) for name in BOMBS]
)
def test_no_document_takes_more_than_64_mb_of_memory(shelf: Shelf, bomb: str) -> None:
    body = BOMBS[bomb]
    assert MOST_BYTES * 0.5 < len(body) <= MOST_BYTES
    node = {
        "node": 0,
        "launch": "l",
        "pages": [["page", len(body), shelf.store.put(shelf.uri, "page", body)]],
    }
    shelf.put("job.json", body)
    shelf.put("node0.json", body)
    shelf.put("node1.json", json.dumps({**node, "node": 1}).encode())
    lists = ListReader(shelf.store, shelf.uri)
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


def test_a_client_with_the_clusters_key_accepts_only_what_its_nodes_signed(shelf: Shelf) -> None:
    write_local_record(shelf, f"s3://{shelf.uri.bucket}/runs of mine/")
    saved = job_of_one_file()
    saved.secret = derive_signing_secret(shelf.session, "first")
    saved.put(shelf.store, shelf.uri)
    assert shelf.read()[0].files == 1
    for secret, name in ((None, JOB), ("0" * 64, JOB), (None, NODE), (saved.secret, None)):
        saved.put(shelf.store, shelf.uri)
        body = shelf.store.document(shelf.uri, name or JOB)
        assert body is not None
        forged = SavedJob({HOME: BODY}, secret=secret)
        if name:
            forged._document(shelf.store, shelf.uri, name, json.loads(body.body))
        else:  # the signature of another document
            of_node = shelf.store.document(shelf.uri, NODE)
            assert of_node is not None
            name = JOB
            shelf.store.put(shelf.uri, JOB, body.body, Metadata={"awsddp-signature": of_node.signature})
        with pytest.raises(NodeError) as error:
            shelf.read()
        assert error.value.message == f"{shelf.uri}/{name} was not written by a node of this job"
    other_session = replace(shelf.session, home=shelf.home / "another")
    assert StoredJob(other_session, shelf.store, shelf.uri).job.job == "first"


def test_the_list_of_another_launch_is_ignored(shelf: Shelf) -> None:
    saved = SavedJob({HOME: BODY, "node1/x": b"1"})
    saved.nodes[1]["launch"] = "launch-0"
    saved.put(shelf.store, shelf.uri)
    assert {node: files_read.files for node, files_read in shelf.read().items()} == {0: 1, 1: 0}
    job = read_job(shelf.folder)
    assert job is not None and job.missing == (1,)


def test_a_list_that_keeps_changing_is_read_again_and_then_refused(shelf: Shelf) -> None:
    saved = job_of_one_file()
    saved.put(shelf.store, shelf.uri)
    remaining = [2]

    def change(key: str) -> None:
        if key == PAGE and remaining[0]:
            remaining[0] -= 1
            saved.rows[f"node0/{remaining[0]}"] = make_row(HOME, BODY)
            saved.put(shelf.store, shelf.uri)

    with shelf.on_get(change):
        assert shelf.read()[0].files == 3
        remaining[0] = 99
        with pytest.raises(NodeError, match=r"node0\.json is changing faster than it can be read"):
            shelf.read()


def test_a_key_outside_of_the_job_is_not_read(shelf: Shelf) -> None:
    saved = job_of_one_file()
    for key, secret in (("/secret", "/secret"), ("../second/secret", "runs of mine/second/secret")):
        shelf.s3.put_object(Bucket=shelf.uri.bucket, Key=secret, Body=BODY)
        saved.rows[HOME] = make_row(HOME, BODY, key=key)
        saved.put(shelf.store, shelf.uri)
        with pytest.raises(FilesChanged):
            shelf.read()
        assert shelf.files == {}
