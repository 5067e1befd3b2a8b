"""The text form of a report, as a terminal shows it."""

from typing import Any

import pytest

from awsddp.cli.pages import report_page, reports_page

STEP = {"who": "node1", "what": "boots and is prepared", "start_s": 5.0, "end_s": 65.0, "error": None}
JOB: dict[str, Any] = {
    "job": "one",
    "state": "succeeded",
    "cause": None,
    "accuracy": 0.5,
    "data": None,
    "home": "runs/one",
    "fetched": True,
    "missing": [],
    "ranks": [{"rank": 0, "local_rank": 0, "node": 1, "exit_code": 0, "seconds": 20.0}],
    "nodes": [{"node": 1, "instance_id": "i-1"}],
    "script": "train.py",
    "args": [],
    "commit": None,
    "dirty": None,
    "launcher": "ssh",
    "world_size": 1,
    "instance_type": "g5.xlarge",
    "price_usd_per_hour": 1.0,
    "started": "2026-11-22T12:00:00Z",
    "ended": None,
    "progress": [],
    "slowest_rank": None,
    "timeline": [
        STEP,
        {**STEP, "who": "AWS", "what": "RunInstances"},
        {**STEP, "what": "is ready", "start_s": 65.0, "end_s": None},
        {**STEP, "who": "this machine", "what": "starts the job", "start_s": 70.0, "end_s": 70.0},
    ],
    "costs": {"job_usd": 0.1, "cluster_usd": 2.0},
    "target": "local",
    "metrics": None,
    "files": [],
    "again": ["awsddp train 'a b' \x1b[31m"],
    "page": "/runs/one/report.html",
}


def test_text_form_has_the_timeline_the_cost_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    report_page(JOB)
    shown = capsys.readouterr().out
    for line in (
        "after       took       who           what",
        "5.0 s       1 min 0 s  node1         boots and is prepared",
        "1 min 5 s   until now  node1         is ready",
        "1 min 10 s             this machine  starts the job",
        "the job would have cost $0.10, its cluster so far $2.00",
        "  awsddp train 'a b' \\x1b[31m",
        "page: /runs/one/report.html",
    ):
        assert line in shown.splitlines(), shown
    assert "RunInstances" not in shown


def test_table_of_jobs_is_for_80_columns_and_says_what_to_type_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "main-20261121-180107-3fa2"
    row = {"job": name, "state": "interrupted", "cluster": "default", "started": JOB["started"]}
    reports_page([row | {"seconds": 7200.0, "job_usd": 12.5}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [
        name,
        "interrupted",
        "default",
        "11-22",
        "12:00",
        "2",
        "h",
        "0",
        "min",
        "$12.50",
    ]
    assert max(map(len, lines)) <= 80
    reports_page([])
    assert "awsddp train" in capsys.readouterr().out
