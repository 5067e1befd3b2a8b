"""What a person reads of a job: when it was last seen to run, and where its results are."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from awsddp.cli.pages import cluster_page, job_lines
from awsddp.cluster import Job, JobState
from awsddp.report import iso, job_document


def job(state: JobState, **more: object) -> dict[str, object]:
    return job_document(Job(job="j", state=state, cause=None, ranks=(), home="runs/j")) | more


def shown(capsys: pytest.CaptureFixture[str], **seen: object) -> str:
    cluster_page(
        {
            "cluster": "default",
            "state": "ready",
            "target": "local",
            "region": "here",
            "instance_type": "g6.xlarge",
            "nodes": [],
            "jobs": [job("running", fetched=False, **seen)],
            "price_usd_per_hour": 1.0,
            "cost_usd": 1.0,
            "budget_usd": None,
            "idle": None,
            "expires": None,
        }
    )
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("j "))


def test_job_that_runs_is_told_as_last_seen_by_this_machines_clock(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC-5")  # five hours ahead
    time.tzset()
    try:
        now = datetime.now(UTC)
        today = f"last seen running at {now + timedelta(hours=5):%H:%M}  on the nodes"
        assert today in shown(capsys, last_seen=iso(now))
        before = "last seen running on 2026-11-20 at 07:00  on the nodes"
        assert before in shown(capsys, last_seen="2026-11-20T02:00:00Z")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_results_are_told_where_they_are() -> None:
    kept = "  results: on the nodes; fetch them: awsddp fetch --job j"
    assert job_lines(job("cancelled", fetched=False)) == ["Job j: cancelled", kept]
    assert job_lines(job("succeeded", fetched=True)) == ["Job j: succeeded", "  results: runs/j/"]
    partly = "  results: runs/j/, incomplete, missing node1: awsddp fetch --job j"
    assert job_lines(job("failed", fetched=False, missing=[1])) == ["Job j: failed", partly]
