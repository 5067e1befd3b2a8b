"""What a rehearsal lacks, if a job failed because of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.job.explain import explain_cause
from awsddp.job.rehearsal_gaps import find_rehearsal_gap
from awsddp.model.records import Cause, JobRecord, Target
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder
from tests.support.causes import MISSING
from tests.support.launched_cluster import RECORD

LOCAL = Target(name="local", endpoint="http://127.0.0.1:5000", node_s3="http://10.77.0.1:5000")


TRITON = Cause(
    rank=0,
    node=0,
    kind="import_error",
    values={"module": "triton"},
    explanation=MISSING.format("triton"),
    next="-",
)


NO_OPERATORS = Cause(
    rank=0,
    node=0,
    kind="packages_mismatch",
    explanation="RuntimeError: Couldn't load custom C++ ops.",
    next="-",
)


OFFLINE = Cause(
    rank=0,
    node=0,
    kind="no_internet",
    explanation="The node could not reach a host on the internet.",
    next="-",
)


@pytest.mark.parametrize(
    ("cause", "why", "advice"),
    [
        (TRITON, "comes with torch for CUDA, but a rehearsal has torch for the CPU", "(rehearsed)"),
        (NO_OPERATORS, "its torchvision has no operators", "(rehearsed)"),
        (
            OFFLINE,
            "reach only this machine, but nodes on AWS reach the internet",
            "awsddp train --data FOLDER",
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Cause) else "",
)
def test_a_rehearsal_gap_is_named_in_a_rehearsal_and_not_on_aws(cause: Cause, why: str, advice: str) -> None:
    gap = find_rehearsal_gap(LOCAL, cause)
    assert gap is not None and why in gap[0] and advice in gap[1]
    assert find_rehearsal_gap(Target(), cause) is None
    assert find_rehearsal_gap(LOCAL, replace(cause, kind="exit")) is None


def test_a_loopback_node_has_the_network_of_this_machine() -> None:
    assert find_rehearsal_gap(replace(LOCAL, node_s3=LOCAL.endpoint), OFFLINE) is None


def test_the_cause_of_a_job_in_a_rehearsal_names_the_gap(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "home", "default")
    folder.write(replace(RECORD, target=LOCAL))
    settings = load(environ={}, overrides={"sync.workdir": str(tmp_path)})
    session = Session(name="default", home=tmp_path / "home", settings=settings, on_event=print)
    result = explain_cause(
        session, JobRecord(job="j", state="failed", cause=TRITON, ranks=(), home="runs/j", script="t.py")
    )
    assert result.cause is not None and result.cause.explanation.endswith("the image of a GPU node has it.")
