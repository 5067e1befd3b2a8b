"""An answer of a node is validated against its request before it is used."""

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
from tests.support.fleet import make_launch

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
    (make_launch(job="j"), {"job": "j"}),
    (messages.Manifest(job="j"), LIST),
]


def parse_answer(request: Request[Any], answer: Any) -> Any:
    payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return calls.parse_response(MAGIC + payload, request=request, node=1)


def parse_facts(facts: dict[str, Any]) -> node_answers.InspectionResult:
    return node_answers.read_answer(json.dumps(facts).encode(), node_answers.InspectionResult, node=1)


def has_values(parsed: Any, expected: Any) -> bool:
    """Return True if a parsed answer has all the expected values."""
    if isinstance(expected, dict):
        return all(
            has_values(parsed[key] if isinstance(parsed, dict) else getattr(parsed, key), expected[key])
            for key in expected
        )
    if isinstance(expected, list):
        return len(parsed) == len(expected) and all(map(has_values, parsed, expected))
    return bool(parsed == (datetime.fromisoformat(expected) if isinstance(parsed, datetime) else expected))


def get_refusal(request: Request[Any], answer: Any) -> str:
    """Return the reason why an answer is refused."""
    with pytest.raises(NodeError, match="node1 gave a malformed answer") as caught:
        parse_answer(request, answer)
    return caught.value.why


@pytest.mark.parametrize(("request_", "answer"), ANSWERS)
def test_a_valid_answer_is_parsed_unchanged(request_: Request[Any], answer: dict[str, Any]) -> None:
    assert has_values(parse_answer(request_, answer), answer)
    newer = {**answer, "newer": {"key": [1.5, None, "x"]}}
    assert has_values(parse_answer(request_, newer), answer)
    assert has_values(parse_facts({**FACTS, "newer": []}), FACTS)


@pytest.mark.parametrize(("request_", "answer"), [*ANSWERS, (None, FACTS)])
@pytest.mark.parametrize("value", [None, -1, 1e999, 2**80, "x\n", "", [], {}, True, ["x"], [[]]])
def test_no_key_accepts_all_values(
    request_: Request[Any] | None, answer: dict[str, Any], value: object
) -> None:
    """Each key accepts some of these values at most, and raises NodeError for the others."""
    for key in answer:
        try:
            changed = {**answer, key: value}
            parse_answer(request_, changed) if request_ else parse_facts(changed)
        except NodeError:
            continue
        assert value in (None, "", [], {}, True, 0, "x\n"), f"{key}: {value!r}"


@pytest.mark.parametrize(
    ("payload", "reason"),
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
def test_an_invalid_answer_is_refused(payload: bytes, reason: str) -> None:
    assert reason in get_refusal(messages.Slots(), payload)


def test_an_answer_over_the_maximum_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_answers, "MAX_BYTES", 1 << 20)
    assert get_refusal(messages.Slots(), b"{" + b" " * (1 << 20)) == "the answer has more than 1 MB"


@pytest.mark.parametrize("key", ["metrics", "samples"])
def test_metrics_of_a_rank_of_another_node_are_refused_with_the_reason(key: str) -> None:
    numbers = {"step": 1, "loss": 0.5, "steps_per_second": 1.0, "fraction": None} if key == "metrics" else {}
    ranks = [RANK, {**RANK, "rank": 2, "node": 0}]
    valid, foreign = ({**DOCUMENT, "ranks": ranks, key: [{"rank": rank, **numbers}]} for rank in (0, 2))
    assert has_values(parse_answer(messages.State(), {"jobs": [valid]}).jobs, [valid])
    reason = get_refusal(messages.State(), {"jobs": [foreign]})
    assert reason == f"{key} of a rank that does not run there"


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
def test_a_job_with_another_name_or_invalid_values_is_refused(change: dict[str, Any]) -> None:
    get_refusal(messages.Cancel(job="j"), {**DOCUMENT, **change})
    get_refusal(messages.Cancel(job="j"), {**DOCUMENT, **change})


def test_invalid_and_repeated_names_of_jobs_are_refused() -> None:
    for name in ("../../victim/.ssh", "..", "", "a/b", "a\0", ".hidden", "x" * 200, "j\n"):
        get_refusal(messages.State(), {"jobs": [{**DOCUMENT, "job": name}]})
    assert "duplicate job" in get_refusal(messages.State(), {"jobs": [DOCUMENT, DOCUMENT]})


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
def test_invalid_facts_of_a_node_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(NodeError, match="node1 gave a malformed answer"):
        parse_facts({**FACTS, **change})


def parse_manifest(answer: dict[str, Any]) -> node_answers.Manifest:
    """Parse a manifest of node 1, on which rank 0 runs."""
    manifest: node_answers.Manifest = parse_answer(messages.Manifest(job="j", ranks=[(0, 1), (1, 0)]), answer)
    return manifest


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
def test_a_home_outside_the_nodes_own_folder_is_refused(home: str) -> None:
    for entry in (FILE, LINK):
        with pytest.raises(NodeError, match="node1"):
            parse_manifest({**LIST, "files": [{**entry, "home": home}]})


def test_a_file_name_of_255_characters_is_accepted() -> None:
    files = [{**FILE, "home": home} for home in ["node1/" + "x" * 255]]
    (file,) = parse_manifest({**LIST, "files": files}).files
    assert len(file.home) == 261


@pytest.mark.parametrize("path", ["relative", "/a/../etc/shadow", "/a\0b", "", "/", "//x", "/a/\ud800"])
def test_an_invalid_path_on_a_node_is_refused(path: str) -> None:
    with pytest.raises(NodeError, match="node1"):
        parse_manifest({**LIST, "files": [{**FILE, "path": path}]})


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
        parse_manifest({**LIST, "files": [{**LINK, "target": target}]})


def test_files_of_the_node_and_logs_of_its_ranks_are_accepted() -> None:
    homes = ["node1/x", "node1/odd \udcff\n", "logs/rank0.log", ".awsddp/supervisor1.log"]
    answer = {**LIST, "files": [{**FILE, "home": home} for home in homes]}
    assert [file.home for file in parse_manifest(answer).files] == homes
    targets = ["node1", "node1/odd \udcff\n/x", "logs/rank0.log", ".awsddp/samples1.json"]
    answer = {**LIST, "files": [{**LINK, "target": target} for target in targets]}
    assert [file.target for file in parse_manifest(answer).files] == targets
    with pytest.raises(NodeError, match="node1"):
        parse_manifest({**LIST, "files": [{**LINK, "home": "logs/rank0.log"}]})


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
def test_a_file_without_a_valid_size_or_hash_is_refused(file: dict[str, Any]) -> None:
    with pytest.raises(NodeError, match="node1"):
        parse_manifest({**LIST, "files": [file]})


@pytest.mark.parametrize("key", ["metrics", "samples"])
def test_metrics_and_samples_of_a_rank_of_another_node_are_refused(key: str) -> None:
    row = {"step": None, "loss": 1.0, "steps_per_second": None, "fraction": None} if key == "metrics" else {}
    ranks = [{**DOCUMENT["ranks"][0], "rank": rank, "node": rank} for rank in (0, 1)]
    valid, foreign = ({**DOCUMENT, "ranks": ranks, key: [{"rank": rank, **row}]} for rank in (1, 0))
    parse_answer(messages.State(), {"jobs": [valid]})
    assert "of a rank that does not run there" in get_refusal(messages.State(), {"jobs": [foreign]})
