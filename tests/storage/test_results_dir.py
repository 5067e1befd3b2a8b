"""Whether the results of a job are fetched, and that those of another job are not overwritten."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent_client.job_reports import encode_job
from awsddp.errors import ConfigError
from awsddp.job.fetch import fetch_from_nodes
from awsddp.job.follow import make_merger
from awsddp.job.jobs import make_jobs_document
from awsddp.job.report import write_report as report
from awsddp.model.records import JobNode, JobRecord
from awsddp.session.context import ConnectedCluster
from awsddp.storage.results_dir import make_job_result, refuse_other_job
from tests.support.desk import Desk, row_of_job
from tests.support.folder_nodes import World
from tests.support.places import TO

Other = Callable[[JobRecord], JobRecord]


OTHERS: dict[str, tuple[Other, str]] = {
    "no nodes": (lambda job: replace(job, nodes=()), "names no nodes"),
    "other nodes": (lambda job: replace(job, nodes=(JobNode(node=0, instance_id="i-9"),)), "on other nodes"),
    "one of its nodes": (lambda job: replace(job, nodes=job.nodes[:1]), "on other nodes"),
    "another place": (lambda job: replace(job, save_to="s3://results/other"), f"was saved to {TO}"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_job_in_s3_is_not_written_into_the_folder_of_another_of_its_name(world: World, case: str) -> None:
    nodes = (JobNode(node=0, instance_id="i-0"), JobNode(node=1, instance_id="i-1"))
    job = JobRecord(job="j", state="succeeded", cause=None, ranks=(), home="runs/j", nodes=nodes, save_to=TO)
    folder = world.project / "runs" / "j"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode_job(job))
    refuse_other_job(world.session(), replace(job, save_to=f"{TO}/"), strict=True)
    change, why = OTHERS[case]
    with pytest.raises(ConfigError) as error:
        refuse_other_job(world.session(), change(job), strict=True)
    assert why in error.value.why
    assert error.value.next.startswith("aws s3 ls s3://" if case == "no nodes" else "mv ")


def test_a_job_in_s3_is_not_written_into_the_folder_of_an_unsaved_job(world: World) -> None:
    nodes = (JobNode(node=0, instance_id="i-0"),)
    job = JobRecord(job="j", state="succeeded", cause=None, ranks=(), home="runs/j", nodes=nodes)
    folder = world.project / "runs" / "j"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode_job(job))
    with pytest.raises(ConfigError, match="no folder") as error:
        refuse_other_job(world.session(), replace(job, save_to=TO), strict=True)
    assert "was not saved to S3" in error.value.why


def remove_part(job: JobRecord) -> JobRecord:
    return replace(job, missing=(1,))


def replace_nodes(job: JobRecord) -> JobRecord:
    return replace(job, nodes=(JobNode(node=0, instance_id="i-other"),))


@pytest.mark.parametrize(
    ("change", "fetched"),
    [
        (None, False),
        (lambda job: job, True),
        (remove_part, False),
        (replace_nodes, False),
        (lambda job: replace(job, state="running"), False),
    ],
    ids=["nothing", "all", "a part", "another job of its name", "as it ran"],
)
@pytest.mark.parametrize("is_tagged", [True, False], ids=["tagged", "released"])
def test_all_documents_agree_if_results_are_fetched(
    desk: Desk, change: Callable[[JobRecord], JobRecord] | None, fetched: bool, is_tagged: bool
) -> None:
    job = desk.train("j", "succeeded")
    if change is not None:
        desk.save(change(job))
    desk.listed = tuple(replace(node, unfetched=("j",) if is_tagged else ()) for node in desk.listed)
    session, elsewhere_session = desk.session(), desk.session(desk.project.parent)
    surfaces = {
        "status": row_of_job(desk.status()["jobs"], "j")["fetched"],
        "status, from another folder": row_of_job(desk.status(desk.project.parent)["jobs"], "j")["fetched"],
        "train, logs, cancel": make_job_result(session, job)["fetched"],
        "report": report(session, job="j")["fetched"],
        "report, from another folder": report(elsewhere_session, job="j")["fetched"],
    }
    assert surfaces == dict.fromkeys(surfaces, fetched)


def test_results_in_another_folder_belong_to_the_same_job(desk: Desk, tmp_path: Path) -> None:
    job = desk.train("j", "succeeded")
    other = tmp_path / "moved"
    desk.save(job, other)
    [row] = make_jobs_document(desk.session(other), ())["jobs"]
    assert (row["job"], row["cluster"]) == ("j", "default")
    assert report(desk.session(other), job="j")["fetched"]
    assert desk.status(other)["jobs"][0]["fetched"]


def test_results_of_another_job_of_the_same_name_are_not_changed(desk: Desk) -> None:
    theirs = desk.train("train-1", "succeeded")
    desk.save(replace(theirs, nodes=(JobNode(node=0, instance_id="i-older"),)))
    before = {path: path.stat().st_mtime_ns for path in desk.session().results.rglob("*")}
    fleet: Any = None
    connected = ConnectedCluster(cluster=desk.located(), fleet=fleet)
    writes: tuple[Callable[[], object], ...] = (
        lambda: fetch_from_nodes(connected, theirs),
        lambda: make_merger(desk.session(), theirs),
    )
    for write in writes:
        with pytest.raises(ConfigError, match="job train-1 has no folder for its results") as error:
            write()
        assert error.value.next.startswith("mv ")
    assert {path: path.stat().st_mtime_ns for path in desk.session().results.rglob("*")} == before
