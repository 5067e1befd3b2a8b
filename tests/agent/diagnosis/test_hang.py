"""Jobs that hang on purpose: the right rank and line are named, and the job continues."""

import itertools
import json
import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent.diagnosis.hang import diagnose, format_ranges
from awsddp.agent.diagnosis.stacks import DUMP, NodeStacks, Process, parse_flight_records
from awsddp.agent.messages import to_json_value
from awsddp.agent_client.launchers import LAUNCHERS
from benchmarks.campaigns.hangs import HANGS, is_named, line_of
from tests.support.seed import SEED, draw_cases
from tests.support.stacks import diagnose_fleet, wait_until
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def wait_until_stuck(fleet: "Fleet") -> dict[str, Any]:
    """Return the diagnosis once all ranks are up and none of them moves."""
    until(fleet.ranks_are_up, seconds=90)
    previous: list[Any] = []

    def is_unchanged() -> bool:
        result = diagnose_fleet(fleet)
        current = [(rank["state"], rank["stack"], rank["collective"]) for rank in result["ranks"]]
        previous[:], is_same = [current], previous == [current]
        return is_same and not result["explanation"].startswith("The job may")

    until(is_unchanged, seconds=60)
    return diagnose_fleet(fleet)


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "name"), draw_cases(list(itertools.product(LAUNCHERS, HANGS)), 3, label="hangs")
)
def test_rank_that_the_others_wait_for_is_named_with_its_line(
    fleet: "Fleet", launcher: str, name: str
) -> None:
    culprit = random.Random(f"{SEED} hang {name}").randrange(4)
    fleet.write(f"{name}.py", HANGS[name][0])
    fleet.launch(f"{name}.py", launcher=launcher, variables={"CULPRIT": str(culprit)})
    result = wait_until_stuck(fleet)
    assert is_named(result, name, culprit), result["explanation"]
    assert all(fleet.document(node)["state"] == "running" for node in (0, 1))


def test_format_ranges_joins_consecutive_numbers() -> None:
    assert format_ranges([3, 0, 1, 5, 2]) == "0-3,5"


def test_job_that_hangs_is_ended_by_hang_after_with_the_rank_as_its_cause(fleet: "Fleet") -> None:
    stop = "if os.environ['RANK'] == '2': os.kill(os.getpid(), signal.SIGSTOP)\n"
    script = f"import os, signal\n{stop}signal.pause()\n"
    job = fleet.run(script, hang_after="2s", grace="1s")
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.kind, job.cause.rank, job.cause.instance_id) == ("hang", 2, "i-1")
    assert job.cause.explanation.startswith(
        "No rank wrote to its log for 2 s. Rank 2 (node1) was stopped by "
    )
    dumps = [json.loads((fleet.folder(node) / "run" / DUMP).read_text()) for node in (0, 1)]
    assert [process["state"] for dump in dumps for process in dump["processes"]].count("T") == 1


def record(rank: int, *entries: tuple[int, str, str], began_ns: int = 1_700_000_000_000_000_000) -> Process:
    """Return a rank with NCCL's records: entries as torch 2.13 writes them, created after `began_ns`."""
    base = {"pg_id": 0, "process_group": ["0", "default_pg"], "is_p2p": False, "input_sizes": [[1024]]}
    rows = [
        {
            **base,
            "collective_seq_id": number,
            "profiling_name": f"nccl:{operation}",
            "state": state,
            "retired": state == "completed",
            "time_created_ns": began_ns + number,
        }
        for number, operation, state in entries
    ]
    trace = json.dumps({"version": "2.10", "pg_config": {}, "entries": rows})
    frames = f'Thread 0x1 (most recent call first):\n  File "/w/train.py", line {rank + 1} in step\n'
    return Process(10 + rank, 1, rank, "R", joined=True, stacks=frames, records=parse_flight_records([trace]))


def inspect(*processes: Process) -> dict[str, Any]:
    layout = [(rank, rank, 0) for rank in range(len(processes))]
    return to_json_value(diagnose(layout, {0: NodeStacks("/w", 1.0, list(processes))}, exit_codes={}))


def test_records_of_nccl_name_the_rank_that_called_fewer_collectives() -> None:
    waits = ((1, "all_reduce", "completed"), (2, "all_reduce", "started"))
    result = inspect(record(0, *waits), record(1, *waits), record(2, waits[0]))
    assert result["behind"] == [2]
    assert result["explanation"] == (
        "Rank 2 (node0) is behind: train.py:3 in step. Rank 0 (node0) waits in all_reduce "
        "(collective 2) at train.py:1 in step, rank 1 (node0) waits in all_reduce (collective 2) at "
        "train.py:2 in step."
    )


def test_records_of_nccl_name_the_rank_that_called_another_collective() -> None:
    waits = ((1, "all_reduce", "completed"), (2, "all_reduce", "started"), (3, "barrier", "scheduled"))
    result = inspect(record(0, *waits), record(1, waits[0], (2, "broadcast", "started")), record(2, *waits))
    assert result["behind"] == [1]
    assert "called broadcast where the others called all_reduce as collective 2" in result["explanation"]


def test_ranks_that_all_wait_in_the_same_collective_are_not_behind() -> None:
    waits = ((1, "all_reduce", "completed"), (2, "all_reduce", "started"))
    result = inspect(record(0, *waits), record(1, *waits))
    assert (result["behind"], result["explanation"][:16]) == ([], "No rank is behin")


def test_slow_job_is_not_called_stuck_and_the_rank_that_is_behind_now_is_named() -> None:
    calls, now = ((1, "all_reduce", "completed"), (2, "all_reduce", "started")), time.time_ns()
    result = inspect(record(0, calls[0], began_ns=now), record(1, *calls, began_ns=now))
    assert result["moving"] and result["behind"] == [0]
    first, _, places = result["explanation"].partition(": ")
    assert re.fullmatch(
        r"The job may be slow rather than stuck \(a collective began \d\.\d s ago\)\. "
        r"At this moment rank 0 \(node0\) is behind",
        first,
    )
    assert places.startswith("train.py:1 in step. Rank 1 (node0) waits in all_reduce")
    result = inspect(record(0, *calls, began_ns=now), record(1, *calls, began_ns=now))
    assert "At this moment no rank is behind: " in result["explanation"]


def test_node_that_does_not_answer_is_named() -> None:
    answer = NodeStacks("/w", 1.0, [record(0, (1, "all_reduce", "started"))])
    result = diagnose([(0, 0, 0), (1, 0, 1)], {0: answer}, exit_codes={})
    assert result.behind == [1]
    assert "is on a node that does not answer" in result.explanation


def test_rank_that_still_runs_is_behind_and_not_those_that_have_ended() -> None:
    answer = NodeStacks("/w", 1.0, [record(0, (1, "all_reduce", "completed"))])
    result = diagnose([(0, 0, 0), (1, 1, 0), (2, 2, 0)], {0: answer}, exit_codes={1: 0, 2: 0})
    assert result.behind == [0]
    assert result.explanation == "Rank 0 (node0) runs: train.py:1 in step. Ranks 1-2 have ended."


def test_rank_that_has_ended_is_behind_while_others_wait_for_it() -> None:
    answer = NodeStacks("/w", 1.0, [record(0, (1, "all_reduce", "started"))])
    result = diagnose([(0, 0, 0), (1, 1, 0)], {0: answer}, exit_codes={1: 0})
    assert result.behind == [1]
    assert result.explanation.startswith("Rank 1 (node0) has ended while the others run. Rank 0 (node0) wait")


def test_program_that_waits_for_a_thread_at_its_end_has_the_line_of_the_thread(
    make_fleet: "Callable[[int], Fleet]",
) -> None:
    fleet = make_fleet(1)
    script = """\
import threading, time
def write():
    time.sleep(600)  # here
threading.Thread(target=write).start()
print("up", flush=True)
raise ValueError("no")
"""
    fleet.launch(script, world_size=1)
    expected = (
        f"job.py:{line_of(script)} in write (a thread; the main thread has ended and waits for this thread)"
    )
    wait_until(lambda: diagnose_fleet(fleet)["ranks"][0]["where"] == expected)
