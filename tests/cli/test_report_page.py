"""The text form of `jobs` and `report`, as a terminal shows it."""

from typing import Any

import pytest

from awsddp.cli.pages import jobs_page, report_page
from tests.records import read

JOB: dict[str, Any] = {
    "job": "main-20261121-180107-3fa2",
    "state": "succeeded",
    "cause": None,
    "accuracy": 0.5,
    "data": None,
    "home": "runs/one",
    "fetched": True,
    "checkpoint": None,
    "missing": [],
    "ranks": [{"rank": 0, "local_rank": 0, "node": 1, "exit_code": 0, "seconds": 20.0}],
    "target": "local",
    "cluster_id": "0a1b2c3d",
    "seconds": 7200.0,
    "job_usd": 12.5,
    "reported": False,
    "page": "/runs/one/report.html",
}
CLUSTER = {
    "cluster": "default",
    "id": "0a1b2c3d",
    "target": "aws",
    "region": "us-east-1",
    "instance_type": "g5.xlarge",
    "nodes": 2,
    "began": "2026-11-22T12:00:00Z",
    "ended": None,
    "cost_usd": 14.0,
    "idle_usd": 1.5,
}


def test_report_shows_the_end_the_cost_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    report_page(read(JOB))
    assert capsys.readouterr().out.splitlines() == [
        "Job main-20261121-180107-3fa2: succeeded",
        "  accuracy on held-out data: 50.00%",
        "  results: runs/one/",
        "  would have cost: $12.50",
        "page: /runs/one/report.html",
    ]


def test_jobs_stand_below_their_cluster_with_costs_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    other = {**CLUSTER, "id": "1", "target": "local", "ended": "2026-11-22T13:00:00Z", "cost_usd": None}
    lost = JOB | {"job": "lost", "cluster_id": None, "state": "running"}
    jobs_page(
        read(
            {
                "jobs": [JOB, lost],
                "clusters": [CLUSTER, other | {"idle_usd": None}],
                "total_usd": 14.0,
                "would_have_cost_usd": 0.0,
            }
        )
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["job", "state", "ranks", "time", "cost", "cause"],
        ["main-20261121-180107-3fa2", "succeeded", "1", "2", "h", "0", "min", "$12.50"],
    ]
    assert max(len(line) for line in lines[1:3]) <= 80
    assert [lines[0], *lines[3:5], *lines[6:]] == [
        "Cluster default, 2 x g5.xlarge in us-east-1, 2026-11-22 12:00 to now: "
        "$14.00, $1.50 of it without a job",
        "Cluster default, 2 x g5.xlarge in the local cloud, 2026-11-22 12:00 to 2026-11-22 13:00: "
        "unknown (not billed)",
        "Jobs of clusters that this machine has no ledger of:",
        "lost  last seen running  1      2 h 0 min  $12.50",
        "On AWS: $14.00, by list price and this machine's ledger. Rehearsals (free), would have cost: $0.00.",
    ]


def test_without_jobs_it_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    jobs_page(read({"jobs": [], "clusters": [], "total_usd": 0.0, "would_have_cost_usd": 0.0}))
    assert capsys.readouterr().out == "No jobs yet. Start one: awsddp train\n"
