"""All verbs and documents give the same answer about a job."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from awsddp.cluster.inventory import list_known_clusters
from awsddp.errors import NodeError, NotFoundError, UsageError
from awsddp.job.checkpoint import find_checkpoint_to_resume
from awsddp.job.fetch import fetch
from awsddp.job.jobs import list_jobs as jobs
from awsddp.job.jobs import make_jobs_document
from awsddp.job.logs import logs
from awsddp.job.registry import JobRegistry
from awsddp.job.report import write_report as report
from awsddp.model.records import JobNode, JobState
from awsddp.session.context import Session
from awsddp.state import ClusterFolder
from awsddp.util.formatting import optional_utc
from tests.support.desk import BEGAN, ID, Desk, row_of_job


@pytest.mark.parametrize(
    ("seen", "saved", "state"),
    [
        ("running", None, "running"),
        ("waiting", None, "waiting"),
        ("succeeded", "running", "succeeded"),  # fetched while it ran, and seen later
        ("running", "failed", "failed"),  # fetched by another client of this project
        ("cancelled", "cancelled", "cancelled"),
    ],
)
def test_all_documents_show_the_same_state_of_a_job(
    desk: Desk, seen: JobState, saved: JobState | None, state: JobState
) -> None:
    desk.train("j", seen, saved=saved)
    session = desk.session()
    [cluster] = list_known_clusters(session)["clusters"]
    surfaces = {
        "status": row_of_job(desk.status()["jobs"], "j")["state"],
        "jobs": row_of_job(make_jobs_document(session, ())["jobs"], "j")["state"],
        "bare awsddp": row_of_job(cluster["jobs"], "j")["state"],
        "report": report(session, job="j")["state"],
    }
    if state not in ("running", "waiting"):  # otherwise the Python API asks the nodes
        surfaces["Python API"] = desk.api().job("j").state
    assert surfaces == dict.fromkeys(surfaces, state)


@pytest.mark.parametrize("saved", [None, "running", "waiting"])
def test_a_running_job_is_interrupted_by_the_end_of_its_cluster(desk: Desk, saved: JobState | None) -> None:
    job = desk.train("j", "running", saved=saved)
    desk.note("ended", BEGAN + timedelta(minutes=90))  # another part of it could not be terminated
    desk.listed = tuple(replace(node, state="terminated") for node in desk.listed)
    [cluster] = list_known_clusters(desk.session())["clusters"]
    assert [row_of_job(rows, "j")["state"] for rows in (desk.status()["jobs"], cluster["jobs"])] == [
        "interrupted"
    ] * 2
    desk.folder.archive(ID)
    if saved is None:
        desk.save(job)
    session = desk.session()
    [row] = jobs(session)["jobs"]
    assert (row["state"], row["ended"]) == ("interrupted", optional_utc(BEGAN + timedelta(minutes=90)))
    assert report(session, job="j")["state"] == "interrupted"
    assert logs(session, job="j", follow=False, on_lines=lambda data: None)["state"] == "interrupted"
    assert desk.api().job("j").state == "interrupted"


def test_the_end_of_another_cluster_of_its_name_interrupts_no_job(desk: Desk) -> None:
    desk.train("j", "running")
    desk.folder.append_event("ended", id="ffffffff")
    assert row_of_job(make_jobs_document(desk.session(), ())["jobs"], "j")["state"] == "running"
    assert desk.status()["jobs"][0]["state"] == "running"


def test_the_last_job_is_the_one_that_was_launched_last(desk: Desk) -> None:
    desk.train("first", "succeeded", minutes=10, saved="succeeded")
    second = desk.train("second", "succeeded", minutes=20, saved="succeeded")
    desk.folder.save_jobs(replace(second, job="first", started=optional_utc(BEGAN + timedelta(minutes=10))))
    (desk.session().results / "first" / "job.json").touch()  # it was seen and fetched last
    desk.listed = tuple(replace(node, state="stopped") for node in desk.listed)
    session = desk.session(**{"job.script": "train.py", "job.resume": "last"})
    checkpoint = find_checkpoint_to_resume(session)
    assert checkpoint is not None
    surfaces = {
        "jobs": make_jobs_document(session, ())["jobs"][-1]["job"],
        "status": desk.status()["jobs"][-1]["job"],
        "report": report(session)["job"],
        "logs": logs(session, job=None, follow=False, on_lines=lambda data: None)["job"],
        "fetch": fetch(session, start=print)["job"],
        "train --resume last": checkpoint.job,
    }
    assert surfaces == dict.fromkeys(surfaces, "second")


def test_every_verb_finds_a_job_by_a_part_of_its_name_but_prefers_its_name(desk: Desk) -> None:
    for minutes, name in enumerate(("train-1", "train-10", "lr-0.1"), start=1):
        desk.train(name, "succeeded", minutes=minutes, saved="succeeded")
    desk.listed = tuple(replace(node, state="stopped") for node in desk.listed)
    session = desk.session()

    def listed(*texts: str) -> list[str]:
        with pytest.raises(NodeError) as error:  # its result has the jobs of the record
            jobs(session, texts)
        return [job["job"] for job in error.value.result["jobs"]]

    def resumed(text: str) -> str:
        checkpoint = find_checkpoint_to_resume(desk.session(**{"job.script": "train.py", "job.resume": text}))
        assert checkpoint is not None
        return checkpoint.job

    verbs: dict[str, Callable[[str], str]] = {
        "jobs": lambda text: listed(text)[0],
        "report": lambda text: report(session, job=text)["job"],
        "logs": lambda text: logs(session, job=text, follow=False, on_lines=lambda data: None)["job"],
        "fetch": lambda text: fetch(session, job=text, start=print)["job"],
        "train --resume": resumed,
        "Python API": lambda text: desk.api().job(text).name,
    }
    for text, name in {"train-1": "train-1", "10": "train-10", "lr": "lr-0.1"}.items():
        assert {verb: find(text) for verb, find in verbs.items()} == dict.fromkeys(verbs, name)
    assert listed("last", "10") == ["lr-0.1", "train-10"]
    for find in verbs.values():
        with pytest.raises(UsageError, match="several jobs have tra in their name") as error:
            find("tra")
        assert (error.value.why, error.value.exit_code) == ("train-1, train-10", 2)
    for text in ("nope", "", "*", ".*"):
        with pytest.raises(NotFoundError) as error:
            report(session, job=text)
        assert error.value.exit_code == 7


def test_jobs_of_this_project_are_preferred_but_not_over_an_exact_name(desk: Desk, tmp_path: Path) -> None:
    desk.train("theirs-7", "succeeded")
    desk.folder.append_event("train", job="theirs-7", home=str(tmp_path / "other" / "theirs-7"))
    desk.train("train-7", "succeeded", saved="succeeded")
    session = desk.session()
    later = ClusterFolder(desk.folder.root, "later")
    later.append_event(
        "launched", id="ffffffff", instances=["i-9"], target="aws", node_usd_per_hour=1.0, nodes=1
    )
    later.append_event("train", job="train-7", home=str(tmp_path / "other" / "train-7"))
    newer = replace(desk.train("x", "succeeded"), job="train-7", nodes=(JobNode(node=0, instance_id="i-9"),))
    desk.save(newer, tmp_path / "other")
    later.append_event("train", job="train-7", home=str(desk.session(tmp_path / "other").results / "train-7"))
    clusters = [job.cluster for job in make_jobs_document(session, ())["jobs"] if job.job == "train-7"]
    assert clusters == ["default", "later"]
    [chosen] = make_jobs_document(session, (), names=["7"])["jobs"]
    assert (chosen.job, chosen.cluster, report(session, job="7").cluster) == ("train-7", "default", "default")
    registry = JobRegistry(session)
    assert registry.resolve_name("7") == "train-7"
    assert registry.resolve_name("theirs-7") == "theirs-7"
    assert registry.resolve_name("theirs") == "theirs-7"
    with pytest.raises(UsageError, match="several jobs have 7"):
        registry.resolve_name("7", also_reported=["new-77"])
    assert registry.resolve_name("new", also_reported=["new-77"]) == "new-77"
    assert [registry.resolve_name(text) for text in (None, "last")] == [None, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [("last", "no job last"), ("never", "no job never"), (None, "no jobs have run from this machine")],
)
def test_an_unknown_job_is_named_as_requested(tmp_path: Path, name: str | None, message: str) -> None:
    with pytest.raises(NotFoundError) as error:
        JobRegistry(Session(name="default", home=tmp_path / "home")).require(name)
    assert error.value.message == message
