"""Nothing that a node says is used before it was checked against what was asked."""

import json
from datetime import datetime
from typing import Any

import pytest

from awsddp.agent import messages
from awsddp.agent.log_stream import MAGIC
from awsddp.agent.messages import Request
from awsddp.agent_client import calls
from awsddp.errors import NodeError
from awsddp.model import node_answers
from tests.support.fleet import launch_of

RANK = {"rank": 0, "local_rank": 0, "node": 1, "exit_code": None, "seconds": 1.5, "started": None}
DOCUMENT = {
    "job": "j",
    "node": 1,
    "state": "running",
    "cause": None,
    "complete": False,
    "created": "2026-01-01T00:00:00+00:00",
    "ranks": [RANK],
    "facts": {"script": "x.py", "args": ["1"], "commit": None, "dirty": None, "price_usd_per_hour": 1.5},
}
CAUSE = {
    "rank": 0,
    "node": 1,
    "exit_code": 1,
    "signal": None,
    "tail": ["x"],
    "explanation": "x",
    "kind": "exit",
}
FILE = {"path": "/w/x", "home": "node1/x", "size": 1, "sample": "0" * 64}
LINK = {"path": "/w/l", "home": "node1/a/l", "size": 0, "target": "node1/x"}
SKIPPED = {"path": "/w/s", "size": 0, "why": "no", "owed": True}
LIST = {"files": [FILE, LINK], "skipped": [SKIPPED], "excluded": {"files": 1, "size": 2}}
FACTS = {
    "home": "/home/ubuntu",
    "python": "/opt/pytorch/bin/python",
    "nic": "ens5",
    "gpus": 8,
    "host_key": "ssh-ed25519 AAAAC3Nz",
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "driver": "580.65.06",
    "rehearsed": False,
    "rsync": True,
    "watched": True,
    "complaint": "",
    "gpus_said": "",
    "rsync_said": "",
}
JOB = messages.Cancel(job="j")
ANSWERS: list[tuple[Request[Any], dict[str, Any]]] = [
    (messages.State(), {"jobs": [DOCUMENT]}),
    (JOB, {**DOCUMENT, "state": "cancelled", "cause": CAUSE}),
    (messages.Slots(), {"used": [0], "taken": [29400], "jobs": {"seq-1": [0, 1]}}),
    (launch_of(job="j"), {"job": "j"}),
    (messages.Manifest(job="j"), LIST),
]


def check(request: Request[Any], answer: Any) -> Any:
    said = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return calls.parse_response(MAGIC + said, request=request, node=1)


def inspected(facts: dict[str, Any]) -> node_answers.InspectionResult:
    return node_answers.read_answer(json.dumps(facts).encode(), node_answers.InspectionResult, node=1)


def holds(found: Any, told: Any) -> bool:
    """Tell whether a converted answer holds all that was told."""
    if isinstance(told, dict):
        return all(
            holds(found[key] if isinstance(found, dict) else getattr(found, key), told[key]) for key in told
        )
    if isinstance(told, list):
        return len(found) == len(told) and all(map(holds, found, told))
    return bool(found == (datetime.fromisoformat(told) if isinstance(found, datetime) else told))


def refused(request: Request[Any], answer: Any) -> str:
    """Return what is told to be wrong with an answer."""
    with pytest.raises(NodeError, match="node1 gave a malformed answer") as caught:
        check(request, answer)
    return caught.value.why


@pytest.mark.parametrize(("request_", "answer"), ANSWERS)
def test_what_an_honest_node_says_is_taken_as_it_is(request_: Request[Any], answer: dict[str, Any]) -> None:
    assert holds(check(request_, answer), answer)
    newer = {**answer, "newer": {"key": [1.5, None, "x"]}}
    assert holds(check(request_, newer), answer)
    assert holds(inspected({**FACTS, "newer": []}), FACTS)


@pytest.mark.parametrize(("request_", "answer"), [*ANSWERS, (None, FACTS)])
@pytest.mark.parametrize("value", [None, -1, 1e999, 2**80, "x\n", "", [], {}, True, ["x"], [[]]])
def test_no_key_takes_any_value(request_: Request[Any] | None, answer: dict[str, Any], value: object) -> None:
    """Each key takes some of these values at most, and says so of the others as an error of the node."""
    for key in answer:
        try:
            changed = {**answer, key: value}
            check(request_, changed) if request_ else inspected(changed)
        except NodeError:
            continue
        assert value in (None, "", [], {}, True, 0, "x\n"), f"{key}: {value!r}"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"{", "Expecting"),
        (b"[]", "not a JSON object"),
        (b"\xff{}", "utf-8"),
        (b'{"used": [], "taken": [], "x": NaN}', "NaN is not a number"),
        (b'{"used": [], "taken": [], "x": -Infinity}', "-Infinity is not a number"),
        (b"[" * 200_000, "recursion"),
        (b'{"used": [], "taken": [], "x": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"used": [], "taken": [], "x": "\\ud800"}', "surrogates"),
        (b'{"used": [], "taken": [], "\\udc80": 1}', "surrogates"),
        (b'{"used": [], "taken": [], "x": "' + b"x" * (2 << 20) + b'"}', "characters"),
        (b'{"used": [], "taken": [], "x": [' + b"0," * (1 << 20) + b"0]}", "items"),
        (b'{"error": {"message": "m", "why": "w", "kind": "odd"}}', "kind"),
        (b'{"error": "x"}', "error"),
    ],
)
def test_what_is_no_answer_is_refused(said: bytes, why: str) -> None:
    assert why in refused(messages.Slots(), said)


def test_an_answer_has_a_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_answers, "MAX_BYTES", 1 << 20)
    assert refused(messages.Slots(), b"{" + b" " * (1 << 20)) == "over 1 MB"


@pytest.mark.parametrize("key", ["metrics", "samples"])
def test_a_node_says_nothing_of_the_ranks_of_others(key: str) -> None:
    numbers = {"step": 1, "loss": 0.5, "steps_per_second": 1.0, "fraction": None} if key == "metrics" else {}
    ranks = [RANK, {**RANK, "rank": 2, "node": 0}]
    own, other = ({**DOCUMENT, "ranks": ranks, key: [{"rank": rank, **numbers}]} for rank in (0, 2))
    assert holds(check(messages.State(), {"jobs": [own]}).jobs, [own])
    why = refused(messages.State(), {"jobs": [other]})
    assert why == f"{key} of a rank that does not run there"


@pytest.mark.parametrize(
    "change",
    [
        {"job": "../../victim/.ssh"},
        {"job": "other"},
        {"job": "j\n"},
        {"node": 0},
        {"state": "odd"},
        {"created": "yesterday"},
        {"ranks": []},
        {"ranks": [RANK, RANK]},
        {"ranks": [{**RANK, "rank": -1}]},
        {"ranks": [{**RANK, "exit_code": 2**40}]},
        {"ranks": [{**RANK, "exit_code": "0"}]},
        {"ranks": [{**RANK, "seconds": 1e300}]},
        {"cause": {**CAUSE, "tail": "x"}},
        {"cause": {**CAUSE, "kind": "Exit now"}},
        {"facts": {"args": "x"}},
        {"facts": {"price_usd_per_hour": -1}},
        {"cause": {**CAUSE, "retryable": 1}},
        {"cause": {**CAUSE, "tail": ["x"] * 2000}},
        {"cause": {**CAUSE, "explanation": "\ud800"}},
    ],
)
def test_a_job_is_the_one_that_was_asked_for_and_has_the_types_of_one(change: dict[str, Any]) -> None:
    refused(messages.Cancel(job="j"), {**DOCUMENT, **change})
    refused(messages.Cancel(job="j"), {**DOCUMENT, **change})


def test_a_name_of_a_job_is_a_name_where_all_jobs_are_asked_for() -> None:
    for name in ("../../victim/.ssh", "..", "", "a/b", "a\0", ".hidden", "x" * 200, "j\n"):
        refused(messages.State(), {"jobs": [{**DOCUMENT, "job": name}]})
    assert "duplicate job" in refused(messages.State(), {"jobs": [DOCUMENT, DOCUMENT]})


@pytest.mark.parametrize(
    "change",
    [
        {"host_key": "ssh-ed25519 AAAA\n* ssh-ed25519 BBBB"},
        {"host_key": "@cert-authority * ssh-ed25519 AAAA"},
        {"host_key": ""},
        {"home": "relative"},
        {"home": "/home/u\n"},
        {"python": "/bin/sh\x1b[2J"},
        {"nic": "ens5; rm -rf /"},
        {"gpus": -1},
        {"gpus": "8"},
        {"torch": "\x1b]0;x\x07"},
        {"complaint": None},
    ],
)
def test_what_a_node_says_of_itself_has_its_form(change: dict[str, Any]) -> None:
    with pytest.raises(NodeError, match="node1 gave a malformed answer"):
        inspected({**FACTS, **change})


def listed(told: dict[str, Any]) -> node_answers.Manifest:
    """Return a list of results of node 1, where rank 0 runs, as it is used."""
    found: node_answers.Manifest = check(messages.Manifest(job="j", ranks=[(0, 1), (1, 0)]), told)
    return found


@pytest.mark.parametrize(
    "home",
    [
        "/etc/passwd",
        "../x",
        "node1/../../x",
        "node1/\0",
        "node1",
        "node1/",
        "node1//x",
        "node1/./x",
        "node0/x",
        "node11/x",
        "job.json",
        "logs/rank1.log",
        ".awsddp/samples0.json",
        ".awsddp/x",
        "logs/samples1.json",
        "logs/../node1/x",
        "",
        "node1/" + "x" * 256,
        "node1/" + "x/" * 3000 + "x",
        "node1/\ud800",
    ],
)
def test_a_place_that_is_not_the_nodes_own_is_refused(home: str) -> None:
    for entry in (FILE, LINK):
        with pytest.raises(NodeError, match="node1"):
            listed({**LIST, "files": [{**entry, "home": home}]})


def test_a_name_is_as_long_as_a_file_may_have_it() -> None:
    (file,) = listed({**LIST, "files": [{**FILE, "home": home} for home in ["node1/" + "x" * 255]]}).files
    assert len(file.home) == 261


@pytest.mark.parametrize("path", ["relative", "/a/../etc/shadow", "/a\0b", "", "/", "//x", "/a/\ud800"])
def test_a_path_on_a_node_is_absolute_and_plain(path: str) -> None:
    with pytest.raises(NodeError, match="node1"):
        listed({**LIST, "files": [{**FILE, "path": path}]})


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "../x",
        "node1/../../etc",
        "node1/../node0/x",
        "node0/x",
        "node11",
        "..",
        ".",
        "logs",
        "logs/rank1.log",
        "job.json",
        "node1/x\0",
        "",
        "node1/\ud800",
    ],
)
def test_a_link_that_leads_out_of_the_nodes_folder_is_refused(target: str) -> None:
    with pytest.raises(NodeError, match="node1"):
        listed({**LIST, "files": [{**LINK, "target": target}]})


def test_a_nodes_own_places_and_the_logs_of_its_ranks_are_taken() -> None:
    homes = ["node1/x", "node1/odd \udcff\n", "logs/rank0.log", ".awsddp/supervisor1.log"]
    told = {**LIST, "files": [{**FILE, "home": home} for home in homes]}
    assert [file.home for file in listed(told).files] == homes
    targets = ["node1", "node1/odd \udcff\n/x", "logs/rank0.log", ".awsddp/samples1.json"]
    told = {**LIST, "files": [{**LINK, "target": target} for target in targets]}
    assert [file.target for file in listed(told).files] == targets
    with pytest.raises(NodeError, match="node1"):
        listed({**LIST, "files": [{**LINK, "home": "logs/rank0.log"}]})


@pytest.mark.parametrize(
    "file",
    [
        {},
        {**FILE, "size": -1},
        {**FILE, "size": 2**70},
        {**FILE, "sample": "x"},
        {**FILE, "modified": 2**70},
        {**FILE, "data": "%"},
    ],
)
def test_a_file_has_a_size_and_a_hash(file: dict[str, Any]) -> None:
    with pytest.raises(NodeError, match="node1"):
        listed({**LIST, "files": [file]})


@pytest.mark.parametrize("key", ["metrics", "samples"])
def test_a_node_speaks_for_no_rank_of_another_node(key: str) -> None:
    row = {"step": None, "loss": 1.0, "steps_per_second": None, "fraction": None} if key == "metrics" else {}
    ranks = [{**DOCUMENT["ranks"][0], "rank": rank, "node": rank} for rank in (0, 1)]
    own, other = ({**DOCUMENT, "ranks": ranks, key: [{"rank": rank, **row}]} for rank in (1, 0))
    check(messages.State(), {"jobs": [own]})
    assert "of a rank that does not run there" in refused(messages.State(), {"jobs": [other]})
