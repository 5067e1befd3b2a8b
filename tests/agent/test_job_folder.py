"""The folder of a job on its node, as older versions wrote it too."""

import json
from typing import TYPE_CHECKING

from awsddp.agent import messages
from awsddp.agent_client.job_reports import merge_job
from tests.support.older_job import LAUNCHED, STATE

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_a_job_that_an_older_awsddp_launched_is_known_and_fetched(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank0.log").write_text("said\n")
    (folder / "snapshot.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(STATE))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (told,) = fleet.ask(0, messages.State()).jobs
    job = merge_job({0: told})
    assert (job.state, job.cause and job.cause.kind) == ("interrupted", "interrupted")
    assert [one.exit_code for one in job.ranks] == [3, None]
    assert [one.instance_id for one in job.nodes] == ["i-0", "i-1"]
    assert (job.script, job.started) == ("job.py", "2026-11-25T22:15:24Z")
    assert fleet.ask(0, messages.Slots()).jobs == {"job": ()}
    listed = fleet.ask(0, messages.Manifest(job="job", ranks=[(0, 0), (1, 1)]))
    assert "logs/rank0.log" in {one.home for one in listed.files}


def test_a_cause_that_has_no_kind_yet_is_told(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    folder.mkdir(parents=True)
    cause = {"rank": 0, "node": 0, "exit_code": 3, "explanation": "it burnt"}
    (folder / "state.json").write_text(json.dumps({**STATE, "state": "failed", "cause": cause}))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (told,) = fleet.ask(0, messages.State()).jobs
    assert told.cause is not None
    assert (told.cause.kind, told.cause.exit_code, told.cause.explanation) == ("unknown", 3, "it burnt")
