"""The jobs of this machine, and their cost."""

from dataclasses import replace
from datetime import timedelta

import pytest

from awsddp.job.jobs import make_jobs_document
from awsddp.job.report import write_report as report
from awsddp.model.records import RankProgress
from awsddp.storage.results_dir import make_job_result
from tests.support.ended_cluster import BEGAN, CAUSE, Home, at
from tests.support.event_file import record


def test_jobs_lists_all_clusters_with_the_cost_of_jobs_and_of_idle_time(home: Home) -> None:
    home.job("two", 200, state="failed", cause=CAUSE)
    home.job("one", 100)
    home.job("cut", 400, state="running", ended=None)
    home.job("early", 50, state="failed", started=None, ended=None)
    document = make_jobs_document(home.session(), ())
    assert [(row["job"], row["state"], row["cluster"], row["ended"]) for row in document["jobs"]] == [
        ("early", "failed", "default", None),
        ("one", "succeeded", "default", "2026-11-22T12:02:03Z"),
        ("two", "failed", "default", "2026-11-22T12:03:43Z"),
        ("cut", "interrupted", "default", "2026-11-22T12:10:05Z"),
    ]
    assert [row["job_usd"] for row in document["jobs"]] == [None, 0.0652, 0.0652, 0.5808]
    # two nodes for ten minutes at $5.00 per hour and their disks, and four gigabytes sent from AWS
    (cluster,) = document["clusters"]
    assert cluster["cost_usd"] == round(2 * 5.1 / 6 + 4 * 0.09, 2) == document["total_usd"] == 2.06
    assert cluster["idle_usd"] == round(2.06 - 0.0652 - 0.0652 - 0.5808, 2)
    assert document["would_have_cost_usd"] == 0


def test_two_jobs_on_one_node_share_its_price(home: Home) -> None:
    for name in ("one", "two"):
        home.job(name, 100)
    assert [job.job_usd for job in make_jobs_document(home.session(), ()).jobs] == [0.0326, 0.0326]


def test_jobs_since_a_time_counts_cost_from_then_on(home: Home) -> None:
    home.job("one", 100)
    home.job("two", 300)
    document = make_jobs_document(home.session(), (), since=BEGAN + timedelta(seconds=305))
    assert [job.job for job in document.jobs] == ["two"] and document.since == at(305).replace("+00:00", "Z")
    # the last five of ten minutes, and two gigabytes
    assert document.total_usd == pytest.approx(2 * 5.1 / 12 + 0.09, abs=0.011)
    later = make_jobs_document(home.session(), (), since=BEGAN + timedelta(days=1))
    assert (later.jobs, later.clusters, later.total_usd) == ((), (), 0.0)


def test_jobs_reads_step_and_loss_from_metrics_or_else_from_event_files(home: Home) -> None:
    folders = [
        home.job(name, 100 + offset) for offset, name in enumerate(("written", "events", "both", "none"))
    ]
    for folder in folders[1::2]:
        for path in folder.rglob("metrics.jsonl"):
            path.unlink()
    folders[1].joinpath("node0/tb").mkdir()
    data = b"".join(record(step, (b"train/loss", 8.0 - step)) for step in range(4))
    folders[1].joinpath("node0/tb/events.out.tfevents.1").write_bytes(data + record(4, (b"train/loss", 0.5)))
    folders[1].joinpath("node0/tb/events.out.tfevents.2").write_bytes(b"\xff" * 99)
    for rank, path in enumerate(sorted(folders[2].rglob("metrics.jsonl"))):
        path.write_text(f'{{"rank": {2 * rank}, "epoch": 1, "epochs": 4, "step": 7}}\n')
    folders[2].joinpath("node1/events.out.tfevents.1").write_bytes(data)
    jobs = {
        job.job: (job.step, job.loss, job.fraction) for job in make_jobs_document(home.session(), ()).jobs
    }
    assert jobs == {
        "written": (30, 2.5 / 30, None),
        "events": (4, 0.5, None),
        "both": (3, 5.0, 0.25),
        "none": (None, None, None),
    }
    [_, job, *_] = make_jobs_document(home.session(), ()).jobs
    assert (make_job_result(home.session(), job).step, make_job_result(home.session(), job).loss) == (4, 0.5)
    assert report(home.session(), job="events").loss == 0.5
    running = replace(job, progress=(RankProgress(rank=0, step=9, loss=0.25),))
    assert make_job_result(home.session(), running).loss == 0.25, "the progress of nodes comes first"
