"""The lines about a run's recoveries."""

from awsddp.model.records import JobRecord, Recovery
from awsddp.model.recovery_text import describe_recoveries


def make_job(*recoveries: Recovery, world_size: int = 2) -> JobRecord:
    return JobRecord(
        job="train-1.3",
        state="running",
        cause=None,
        ranks=(),
        home="runs/train-1.3",
        world_size=world_size,
        recoveries=recoveries,
    )


FIRST = Recovery(
    job="train-1",
    kind="spot_interruption",
    checkpoint="runs/train-1/node0/run/state-40.pt",
    steps_repeated=7,
    seconds_lost=61.0,
    cost_usd=0.12,
    earlier_world_size=2,
)
SECOND = Recovery(job="train-1.2", kind="xid", earlier_world_size=2)


def test_each_recovery_is_a_line_with_what_was_lost() -> None:
    assert describe_recoveries(make_job()) == []
    assert describe_recoveries(make_job(FIRST, SECOND)) == [
        "train-1.2: train-1 ended (spot_interruption): the run goes on from "
        "runs/train-1/node0/run/state-40.pt, 7 steps repeated, 1 min 1 s lost, train-1 cost $0.12",
        "train-1.3: train-1.2 ended (xid): the run goes on from step 0, without a checkpoint",
    ]


def test_another_number_of_ranks_is_reported() -> None:
    [line] = describe_recoveries(make_job(SECOND, world_size=1))
    assert line.endswith("1 ranks instead of 2: the global batch size changes, so adapt the learning rate")
