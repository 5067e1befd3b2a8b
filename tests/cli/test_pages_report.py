"""The text form of `jobs` and `report`, as a terminal shows it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awsddp.cli import table
from awsddp.cli.pages import job_page, jobs_page, report_page
from awsddp.util.formatting import optional_utc
from tests.support.records import as_attributes

JOB: dict[str, Any] = {
    "saving": None,
    "job": "main-3",
    "state": "succeeded",
    "cause": None,
    "accuracy": 0.5,
    "data": None,
    "home": "runs/main-3",
    "fetched": True,
    "checkpoint": "runs/main-3/node0/run/latest.pt",
    "missing": [],
    "recoveries": [],
    "ranks": [
        {"rank": rank, "local_rank": 0, "node": rank, "exit_code": 0, "seconds": 20.0} for rank in (0, 1)
    ],
    "started": "2026-11-22T12:00:00Z",
    "ended": "2026-11-22T14:00:00Z",
    "step": 120,
    "loss": 0.68561,
    "fraction": 1.0,
    "target": "local",
    "cluster_id": "0a1b2c3d",
    "seconds": 7200.0,
    "job_usd": 12.5,
    "reported": False,
    "script": "train.py",
    "args": ["--lr", "0.1"],
    "commit": None,
    "dirty": None,
    "launcher": "ssh",
    "world_size": 2,
    "nodes": [],
    "instance_type": "g6.xlarge",
    "price_usd_per_hour": None,
    "cluster": "default",
    "progress": [],
    "usage": [],
    "slowest_rank": None,
    "hang": None,
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


CAUSE = {
    "kind": "exit",
    "rank": 1,
    "node": 1,
    "explanation": "RuntimeError: mat1 and mat2 shapes cannot be " + "multiplied " * 9,
}

CANCELLED = {"kind": "cancelled", "rank": None, "node": None, "explanation": "It was cancelled."}


def test_report_shows_the_state_the_cost_and_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    report_page(as_attributes(JOB | {"page": "/runs/main-3/report.html"}))
    assert capsys.readouterr().out.splitlines() == [
        "Job main-3: succeeded in 2 h 0 min, 2 ranks, loss 0.6856",
        "  accuracy on held-out data: 50.00%",
        "  results: runs/main-3/",
        "  checkpoint: runs/main-3/node0/run/latest.pt",
        "  Free; on EC2 $12.50",
        "page: /runs/main-3/report.html",
    ]


def test_the_page_of_an_ended_job_has_six_lines(capsys: pytest.CaptureFixture[str]) -> None:
    job_page(as_attributes(JOB), next_step="awsddp down   # terminate the nodes")
    assert capsys.readouterr().err.splitlines() == [
        "Job main-3: succeeded in 2 h 0 min, 2 ranks, loss 0.6856",
        "  accuracy on held-out data: 50.00%",
        "  results: runs/main-3/",
        "  checkpoint: runs/main-3/node0/run/latest.pt",
        "  page: awsddp report main-3",
        "  next: awsddp down   # terminate the nodes",
    ]


def test_the_page_of_a_failed_job_has_its_cause_and_next_steps(capsys: pytest.CaptureFixture[str]) -> None:
    cause = CAUSE | {"explanation": "ValueError: no.", "tail": ["Traceback", "ValueError: no"], "next": ""}
    failed = JOB | {"state": "failed", "cause": as_attributes(cause), "accuracy": None, "options": []}
    job_page(as_attributes(failed), next_step="awsddp down   # terminate the nodes", streamed=True)
    assert capsys.readouterr().err.splitlines() == [
        "Job main-3: failed in 2 h 0 min, 2 ranks, loss 0.6856",
        "  cause: rank 1 @ node1: ValueError: no.",
        "  results: runs/main-3/",
        "  checkpoint: runs/main-3/node0/run/latest.pt; continue from it: awsddp train --resume main-3",
        "  page: awsddp report main-3",
        "  next: awsddp train   # again, once the cause is removed",
        "        awsddp down   # terminate the nodes",
    ]
    job_page(as_attributes(failed))
    assert "  | Traceback" in capsys.readouterr().err.splitlines()


def test_a_total_since_a_date_names_what_it_covers(capsys: pytest.CaptureFixture[str]) -> None:
    since = "2026-11-01T00:00:00Z"
    jobs_page(
        as_attributes(
            {"jobs": [], "clusters": [CLUSTER], "total_usd": 14, "would_have_cost_usd": 0, "since": since}
        )
    )
    assert "On AWS since 2026-11-01 00:00 UTC, launched from this machine, without S3: $14.00" in " ".join(
        capsys.readouterr().out.split()
    )


def test_jobs_fit_80_columns_with_a_line_per_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(name: str, hours: float, **more: Any) -> dict[str, Any]:
        return {
            **JOB,
            "job": name,
            "started": optional_utc(datetime.now(UTC) - timedelta(hours=hours)),
            **more,
        }

    nothing = {"step": None, "loss": None, "fraction": None}
    rows = [
        job("gone-1", 72, cluster_id=None, seconds=48.2, job_usd=0.02, fraction=None),
        job("lr-0.1", 5, seconds=61.0, loss=1234.5),
        job(
            "hangs",
            3,
            state="cancelled",
            seconds=83.0,
            cause=as_attributes(CANCELLED),
            **nothing | {"step": 9},
        ),
        job("train-1", 2, state="failed", seconds=22.5, cause=as_attributes(CAUSE), **nothing),
        job("train-2", 1.5, state="succeeded"),
        job("other-1", 1, state="running", fraction=None),
        job("train-3", 0.2, state="running", reported=True, seconds=720.0, fraction=0.45),
    ]
    document = {
        "jobs": rows,
        "clusters": [CLUSTER | {"id": "1", "ended": "2026-11-22T13:00:00Z"}, CLUSTER],
        "total_usd": 14.0,
        "would_have_cost_usd": 0.0,
        "since": None,
    }
    monkeypatch.setattr(table, "width", lambda *, stderr=False: 80)
    jobs_page(as_attributes(document))
    assert capsys.readouterr().out.splitlines() == [
        "job      state         age     time        loss    cost    progress, or cause",
        "gone-1   succeeded     3 days  48.2 s      0.6856  $0.02   step 120",
        "lr-0.1   succeeded     5 h     1 min 1 s   1234    $12.50  100%",
        "hangs    cancelled     3 h     1 min 23 s          $12.50  step 9",
        "train-1  failed        2 h     22.5 s              $12.50  RuntimeError: mat1 a…",
        "train-2  succeeded     1 h     2 h 0 min   0.6856  $12.50  100%",
        "other-1  seen running  1 h     2 h 0 min   0.6856  $12.50  step 120",
        "train-3  running       12 min  12 min 0 s  0.6856  $12.50  45%",
        "Cluster default, 2 x g5.xlarge in us-east-1, 2026-11-22 12:00 to now: $14.00,",
        "  $1.50 of it while idle",
        "On AWS: $14.00 (list price). Rehearsals (free) would have cost: $0.00.",
    ]
    jobs_page(as_attributes(document), verbose=True)
    verbose = " ".join(capsys.readouterr().out.split())
    assert "cause: rank 1 @ node1: RuntimeError: mat1 and mat2" in verbose and "2026-11-22 13:00" in verbose
    jobs_page(as_attributes(document | {"jobs": [rows[1], rows[3]]}), chosen=True)
    assert capsys.readouterr().out.splitlines() == [
        "job      state      arguments  time       loss  cost    progress",
        "lr-0.1   succeeded  --lr 0.1   1 min 1 s  1234  $12.50  100%",
        "train-1  failed     --lr 0.1   22.5 s           $12.50",
    ]


def test_a_cause_without_room_next_to_a_long_name_is_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "width", lambda *, stderr=False: 80)
    job = JOB | {
        "job": "a-name-of-64-characters",
        "state": "failed",
        "cause": as_attributes(CAUSE),
        "started": None,
    }
    jobs_page(as_attributes({"jobs": [job], "clusters": []}))
    assert capsys.readouterr().out.splitlines() == [
        "job                      state   age  time       loss    cost    progress, or c…",
        "a-name-of-64-characters  failed       2 h 0 min  0.6856  $12.50  RuntimeError: …",
    ]
    jobs_page(as_attributes({"jobs": [job | {"job": "n" * 40}], "clusters": []}))
    assert capsys.readouterr().out.splitlines() == [
        "job                                       state   age  time       loss    cost",
        f"{'n' * 40}  failed       2 h 0 min  0.6856  $12.50",
    ]


def test_an_empty_list_of_jobs_names_the_command_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    jobs_page(as_attributes({"jobs": [], "clusters": [], "total_usd": 0.0, "would_have_cost_usd": 0.0}))
    assert capsys.readouterr().out == "No jobs yet. Start one: awsddp train\n"
