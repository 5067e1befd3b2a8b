"""The folder of a job on its node, also as older versions wrote it."""

import json
from typing import TYPE_CHECKING

from awsddp.agent import messages
from awsddp.agent_client.job_reports import merge_job
from tests.support.older_job import LAUNCHED, STATE

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_job_of_an_older_awsddp_is_listed_and_its_results_are_fetched(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank0.log").write_text("said\n")
    (folder / "snapshot.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(STATE))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (report,) = fleet.send_request(0, messages.State()).jobs
    job = merge_job({0: report})
    assert (job.state, job.cause and job.cause.kind) == ("interrupted", "interrupted")
    assert [rank.exit_code for rank in job.ranks] == [3, None]
    assert [node.instance_id for node in job.nodes] == ["i-0", "i-1"]
    assert (job.script, job.started) == ("job.py", "2026-11-25T22:15:24Z")
    assert fleet.send_request(0, messages.Slots()).jobs == {"job": ()}
    manifest = fleet.send_request(0, messages.Manifest(job="job", ranks=[(0, 0), (1, 1)]))
    assert "logs/rank0.log" in {file.home for file in manifest.files}


def test_cause_without_a_kind_is_read_as_unknown(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    folder.mkdir(parents=True)
    cause = {"rank": 0, "node": 0, "exit_code": 3, "explanation": "it burnt"}
    (folder / "state.json").write_text(json.dumps({**STATE, "state": "failed", "cause": cause}))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (report,) = fleet.send_request(0, messages.State()).jobs
    assert report.cause is not None
    assert (report.cause.kind, report.cause.exit_code, report.cause.explanation) == ("unknown", 3, "it burnt")
