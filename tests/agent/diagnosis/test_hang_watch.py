"""A silent job: what two looks at its ranks find, and when the nodes look."""

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent.diagnosis.hang_watch import ANSWER_SECONDS, HangWatch, Verdict, compare_looks
from awsddp.agent.diagnosis.stacks import Collective, GroupRecords, NodeStacks, Process
from awsddp.agent_client import launch_requests
from benchmarks.campaigns import stuck
from benchmarks.campaigns.stuck import HUNG, SLOW
from tests.support.seed import SEED, draw_cases
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

LAYOUT = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
NEVER = float("inf")


def frames(line: int, file: str = "/w/train.py", function: str = "step") -> str:
    return f'Thread 0x1 (most recent call first):\n  File "{file}", line {line} in {function}\n'


def make_rank(rank: int, **changes: Any) -> Process:
    """Return a rank's process: rank 2 sleeps in line 41, and the others wait in all_reduce 12 in line 30."""
    last = [] if rank == 2 else [Collective(12, "all_reduce", "", False)]
    records = {"default_pg": GroupRecords(3600.0, [Collective(11, "all_reduce", "", True), *last])}
    usual = {"joined": True, "stacks": frames(41 if rank == 2 else 30), "records": records}
    return Process(10 + rank, 1, rank, "S")._replace(**{**usual, **changes})


def make_look(*processes: Process, changed: bool | None = False) -> dict[int, NodeStacks]:
    """Return the answers of both nodes; `processes` replace the usual ones of the same rank."""
    ranks = {rank: [make_rank(rank)] for rank, _, _ in LAYOUT}
    for rank in {process.rank for process in processes}:
        ranks[rank or 0] = [process for process in processes if process.rank == rank]
    return {
        node: NodeStacks("/w", 3600.0, ranks[2 * node] + ranks[2 * node + 1], {}, 10_000.0, changed)
        for node in (0, 1)
    }


def compare(
    first: dict[int, NodeStacks], second: dict[int, NodeStacks], ended: Sequence[int] = ()
) -> Verdict:
    return compare_looks(LAYOUT, first, second, seconds=60.0, exit_codes=dict.fromkeys(ended, 0))


def test_ranks_at_the_same_place_hang_and_the_rank_behind_is_named_with_its_place() -> None:
    assert compare(make_look(), make_look()) == (
        "hung",
        "The job hangs: rank 2 (node1) is behind: train.py:41 in step. "
        "Ranks 0-1,3 wait in all_reduce (collective 12) at train.py:30 in step.",
        "train.py:41 in step",
        2,
    )


def test_place_of_a_hang_without_a_rank_behind_has_no_number_of_a_collective() -> None:
    waits = make_rank(0)
    look = make_look(make_rank(2, stacks=waits.stacks, records=waits.records))
    verdict = compare(look, look)
    assert (verdict.state, verdict.rank, verdict.place) == ("hung", None, "all_reduce at train.py:30 in step")


def worker(rank: int, stacks: str = "", **changes: Any) -> Process:
    return Process(100 + rank, 10 + rank, rank, "S", stacks=stacks)._replace(**changes)


LOADER = frames(9, "/v/site-packages/torch/utils/data/_utils/worker.py", "_worker_loop")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stacks": frames(42)}, "a stack changes"),
        ({"cpu_s": 0.7}, "a process uses 1% of a CPU core"),
        ({"cpu_s": 60.0}, "a process uses 100% of a CPU core"),
        ({"read_bytes": 5000 * 60}, "a process reads 5000 bytes per second"),
        ({"wakeups": 6 * 60}, "a process wakes up 6 times per second"),
        ({"records": make_rank(0).records}, "collectives begin or end"),
        ({"state": "T"}, "a process was stopped or continued"),
    ],
)
def test_any_change_of_a_rank_that_does_not_wait_is_life(changes: dict[str, Any], reason: str) -> None:
    verdict = compare(make_look(), make_look(make_rank(2, **changes)))
    assert verdict == ("alive", f"The job writes nothing, but {reason} (rank 2 on node1).", "", None)


def test_new_process_is_life() -> None:
    verdict = compare(make_look(), make_look(make_rank(2, pid=99)))
    assert verdict.text == "The job writes nothing, but processes on node1 start or end."


def test_process_ids_of_two_nodes_are_not_mixed_up() -> None:
    """The rank that is behind has the process id that a waiting rank has on another node."""
    first, second = (make_look(make_rank(2, pid=10, cpu_s=cpu_s)) for cpu_s in (0.0, 30.0))
    assert compare(first, second).state == "alive"
    first, second = (make_look(make_rank(2, pid=10), make_rank(0, cpu_s=cpu_s)) for cpu_s in (0.0, 30.0))
    assert compare(first, second).state == "hung"


def test_changed_files_are_life_even_if_a_node_does_not_answer() -> None:
    first, second = make_look(), make_look(changed=True)
    del first[0], second[0]
    assert compare(first, second).text == "The job writes nothing, but files of its results on node1 change."


def test_cpu_time_of_a_rank_that_waits_in_a_collective_is_no_life() -> None:
    spins = make_look(*(make_rank(rank, cpu_s=60.0, wakeups=9999) for rank in (0, 1, 3)))
    assert compare(make_look(), spins).state == "hung"


def test_few_wakeups_of_an_idle_rank_are_no_life() -> None:
    assert (
        compare(make_look(), make_look(make_rank(2, cpu_s=0.5, read_bytes=4096, wakeups=60))).state == "hung"
    )


@pytest.mark.parametrize(
    ("stacks", "cpu_s", "state"),
    [
        (frames(9), 1.0, "alive"),  # a child that runs user code
        (LOADER, 1.0, "alive"),  # a loader's worker with a library's data set
        ("", 1.0, "hung"),  # another program, such as wandb's
        ("", 4.0, "alive"),  # one that works
        (frames(9, "/v/site-packages/wandb/x.py"), 1.0, "hung"),
    ],
)
def test_child_that_works_is_life(stacks: str, cpu_s: float, state: str) -> None:
    first = make_look(make_rank(0), worker(0, stacks))
    second = make_look(make_rank(0), worker(0, stacks, cpu_s=cpu_s, read_bytes=1 << 30 if not stacks else 0))
    assert compare(first, second).state == state


def test_stopped_rank_hangs_without_a_stack() -> None:
    look = make_look(make_rank(2, state="T", joined=False, stacks="", records={}))
    verdict = compare(look, look)
    assert (verdict.state, verdict.rank, verdict.place) == ("hung", 2, "stopped")


def test_ranks_that_wait_for_a_rank_that_has_ended_hang() -> None:
    look = make_look()
    look[1].processes.pop(0)
    verdict = compare(look, look, ended=[2])
    assert (verdict.state, verdict.rank) == ("hung", 2)
    assert "has ended" in verdict.text


def without_node(look: dict[int, NodeStacks]) -> dict[int, NodeStacks]:
    return {0: look[0]}


SILENT = make_look(make_rank(2, stacks=""))
ALONE = make_look(*(make_rank(rank, joined=False, records={}) for rank in range(4)))
UNSEEN = {0: make_look()[0], 1: make_look()[1]._replace(processes=[])}


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (make_look(), without_node(make_look()), "node1 did not answer"),
        (without_node(make_look()), make_look(), "node1 did not answer"),
        (make_look(), make_look(changed=None), "the files of its results on node0 could not be listed"),
        (SILENT, SILENT, "rank 2 returned no stack"),
        (SILENT, make_look(), "rank 2 returned no stack"),
        (UNSEEN, UNSEEN, "rank 2 has no process that can be seen from outside of a container"),
        (ALONE, ALONE, "no rank has joined a process group, so the ranks may wait for something else"),
    ],
)
def test_what_cannot_be_seen_is_no_hang(
    first: dict[int, NodeStacks], second: dict[int, NodeStacks], reason: str
) -> None:
    text = f"The job writes nothing, and awsddp cannot tell if it hangs: {reason}."
    assert compare(first, second) == ("unknown", text, "", None)


def watch_for(
    watch: HangWatch, times: range, looks: Sequence[dict[int, NodeStacks]]
) -> list[tuple[int, str]]:
    """Run the clock; node 0 and 1 answer the n-th look with looks[n] (an empty one: never)."""
    verdicts, remaining = [], list(looks)
    for now in times:
        if watch.is_due(now):
            for node, answer in remaining.pop(0).items():
                watch.receive(node, answer)
        if watch.conclude(now, {0, 1}, {}):
            assert watch.verdict is not None
            verdicts.append((now, watch.verdict.state))
    return verdicts


def test_nodes_look_after_half_an_hour_and_a_minute_later_and_then_again() -> None:
    watch = HangWatch(LAYOUT, (1800.0, 60.0))
    watch.reset(100)
    verdicts = watch_for(watch, range(100, 6000), [make_look()] * 6)
    assert verdicts == [(1960, "hung"), (3820, "hung"), (5680, "hung")]
    assert watch.since == 10_000 - 3600
    watch.reset(6000)
    assert watch.verdict is None


def test_job_that_is_silent_for_hours_and_computes_never_hangs() -> None:
    watch = HangWatch(LAYOUT, (1800.0, 60.0))
    watch.reset(0)
    looks = [make_look(make_rank(2, cpu_s=50.0 * number)) for number in range(8)]
    verdicts = watch_for(watch, range(4 * 1860 + 1), looks)
    assert verdicts == [(1860 * number, "alive") for number in (1, 2, 3, 4)]


def test_changed_files_at_the_first_look_need_no_second_one() -> None:
    watch = HangWatch(LAYOUT, (1800.0, 60.0))
    watch.reset(0)
    assert watch_for(watch, range(1900), [make_look(changed=True)]) == [(1800, "alive")]


def test_node_that_does_not_answer_makes_a_hang_unknown() -> None:
    watch = HangWatch(LAYOUT, (1800.0, 60.0))
    watch.reset(0)
    verdicts = watch_for(watch, range(2000), [make_look(), {0: make_look()[0]}])
    assert verdicts == [(1860 + int(ANSWER_SECONDS), "unknown")]


def test_line_between_two_looks_begins_the_silence_again() -> None:
    watch = HangWatch(LAYOUT, (1800.0, 60.0))
    watch.reset(0)
    assert watch_for(watch, range(1830), [make_look()]) == []
    watch.reset(1830)
    assert watch_for(watch, range(1830, 3700), [make_look(), make_look()]) == [(3690, "hung")]


def test_watch_without_pauses_never_looks() -> None:
    watch = HangWatch(LAYOUT, ())
    watch.reset(0)
    assert not watch.is_due(1e9)


def test_lost_node_of_an_elastic_job_is_not_waited_for() -> None:
    watch = HangWatch(LAYOUT, (10.0, 5.0))
    watch.reset(0)
    for now in (10, 15):
        assert watch.is_due(now)
        watch.receive(1, make_look()[1])
        concluded = watch.conclude(now, {1}, {})
    assert concluded
    assert watch.verdict is not None
    assert (watch.verdict.state, watch.verdict.rank) == ("hung", 2)


WAITS = """\
import os, time
while not os.path.exists("go.txt"): time.sleep(0.5)
print("goes on", flush=True)
time.sleep(600)
"""


def test_real_agents_report_what_they_found_until_a_rank_writes(
    fleet: "Fleet", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_requests, "LOOKS", (0.8, 0.3))
    fleet.launch(WAITS)
    until(lambda: (fleet.document(0)["hang"] or {}).get("state") == "unknown")
    hang = fleet.document(0)["hang"]
    assert hang["text"].endswith(
        "no rank has joined a process group, so the ranks may wait for something else."
    )
    assert 0 <= time.time() - hang["since"] < 60
    fleet.write("go.txt", "")
    until(lambda: fleet.document(0)["hang"] is None)
    assert fleet.document(0)["state"] == "running"


@pytest.mark.prove
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("hung", name) for name in draw_cases(sorted(HUNG), 1, label="hung")),
        *(("slow", name) for name in draw_cases(sorted(SLOW), 1, label="slow")),
    ],
)
def test_silent_job_of_real_ranks_is_judged(kind: str, name: str) -> None:
    number = stuck.PROGRAMS.index((kind, name)) + len(stuck.PROGRAMS) * (SEED % 2)
    row = stuck.run(number, random.Random(f"{SEED} silent"), pairs=1)
    assert row["ok"], row
