"""The decisions of the first node, one at a time."""

import itertools
from typing import Any

from awsddp.agent.coordinator import Coordinator, ElasticCoordinator, Message, Order
from awsddp.agent.diagnosis.job_causes import NODE_FAULTS, Cause
from awsddp.agent.diagnosis.stacks import NodeStacks, Process
from awsddp.agent.job_folder import Ending, RankReport
from tests.support.fleet import make_launch

LAYOUT = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
REQUEST = make_launch(layout=LAYOUT)
GO = Order("go")
STOP = Order("stop", 1.0)
STACKS = Order("stacks")
FRAMES = 'Thread 0x1 (most recent call first):\n  File "/w/train.py", line 7 in step\n'
SHUTDOWN = Cause("interrupted", True, "it was shut down", "", node=1)


def start_coordinator(**settings: Any) -> Coordinator:
    coordinator = Coordinator(make_launch(layout=LAYOUT, **settings), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    return coordinator


def make_stacks(node: int, stopped: int | None = None) -> NodeStacks:
    ranks = [rank for rank, _, rank_node in LAYOUT if rank_node == node]
    processes = [
        Process(7 + rank, 1, rank, *(("T", True) if rank == stopped else ("S", True, FRAMES)))
        for rank in ranks
    ]
    return NodeStacks("/w", 9.0, processes)


def make_exit(
    rank: int, code: int, fault: str = "own", text: str = "", kind: str = "exit", restart: int = 0
) -> Message:
    report = RankReport(rank, 5.0, 1.0, code, restart)
    if code:
        cause = Cause(kind, False, text, "", rank=rank, exit_code=code, tail=[text])
        report = report._replace(cause=cause, fault=fault)
    return Message(kind="exit", reports=[report])


def report_gone(coordinator: Coordinator) -> None:
    for node in (0, 1):
        coordinator.receive(node, Message(kind="gone"), now=9)


def get_cause_rank(coordinator: Coordinator) -> int | None:
    cause = coordinator.document().cause
    return None if cause is None else cause.rank


def test_ranks_start_once_when_all_nodes_have_joined() -> None:
    coordinator = Coordinator(REQUEST, now=0)
    coordinator.receive(1, Message(kind="here"), now=1)
    assert coordinator.orders == []
    coordinator.receive(0, Message(kind="here"), now=1)
    coordinator.receive(0, Message(kind="here"), now=1)
    assert coordinator.orders == [GO]


def test_job_succeeds_when_every_rank_has_ended_and_every_node_has_left() -> None:
    coordinator = start_coordinator()
    for rank in (0, 1, 2):
        coordinator.receive(rank // 2, make_exit(rank, 0), now=2)
    assert coordinator.orders == [GO]
    coordinator.receive(1, make_exit(3, 0), now=3)
    assert coordinator.orders == [GO, STOP]
    assert coordinator.document().state == "running"
    report_gone(coordinator)
    assert (coordinator.done, coordinator.document().state) == (True, "succeeded")


def test_cause_is_the_rank_that_failed_and_not_one_that_lost_its_peer() -> None:
    coordinator = start_coordinator()
    coordinator.receive(0, make_exit(0, 1, "echo"), now=2.0)
    assert get_cause_rank(coordinator) == 0
    coordinator.receive(1, make_exit(2, 1, "own"), now=2.3)
    coordinator.receive(0, make_exit(1, -15, "stopped"), now=2.4)
    assert get_cause_rank(coordinator) == 2
    report_gone(coordinator)
    assert coordinator.document().state == "failed"


def test_rendezvous_timeout_is_explained_by_the_address_that_a_rank_could_not_reach() -> None:
    coordinator = start_coordinator()
    kind, text = "master_unreachable", "Nothing answers at localhost, 12354, where rank 0 was expected."
    coordinator.receive(
        0, make_exit(0, 1, "echo", "Only 1 of 2 ranks joined.", "rendezvous_timeout"), now=2.0
    )
    coordinator.receive(1, make_exit(2, 1, "echo", text, kind), now=2.3)
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank, cause.node) == (kind, 2, 1)
    assert cause.explanation == f"Only 1 of 2 ranks joined. Rank 2: {text}"


def test_lost_node_is_the_cause_and_not_a_rank_that_lost_its_peer() -> None:
    coordinator = start_coordinator()
    coordinator.receive(0, make_exit(0, 1, "echo"), now=2.0)
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert not coordinator.done
    coordinator.lose(1, "no heartbeat for 12 s")
    assert coordinator.done
    assert coordinator.document().cause.node == 1
    assert coordinator.document().cause.instance_id == "i-1"


def test_cause_has_the_kind_with_which_a_node_was_lost() -> None:
    coordinator = start_coordinator()
    coordinator.lose(1, "its instance is terminated", "spot_interruption")
    cause = coordinator.document().cause
    assert (cause.kind, cause.retryable) == ("spot_interruption", True)
    assert cause.explanation == "node1 left the job while it ran: its instance is terminated."


def test_first_failure_is_the_cause() -> None:
    coordinator = start_coordinator()
    coordinator.receive(1, make_exit(3, 5), now=2.0)
    coordinator.receive(0, make_exit(0, 6), now=2.1)
    assert get_cause_rank(coordinator) == 3


def test_cancelled_job_has_no_cause_though_a_rank_fails_afterwards() -> None:
    coordinator = start_coordinator()
    coordinator.receive(1, Message(kind="stop", ending=Ending(state="cancelled", grace=30.0)), now=2)
    coordinator.receive(1, make_exit(3, 1, "stopped"), now=3)
    report_gone(coordinator)
    document = coordinator.document()
    assert (document.state, document.cause) == ("cancelled", None)
    assert coordinator.orders[1] == Order("stop", 30.0)


def test_other_ranks_keep_their_grace_when_one_ends_at_once() -> None:
    coordinator = start_coordinator()
    coordinator.receive(
        1, Message(kind="stop", ending=Ending(state="interrupted", grace=30.0, cause=SHUTDOWN)), now=2
    )
    coordinator.receive(1, make_exit(3, -15, "stopped"), now=3)
    coordinator.lose(1, "it closed the connection")
    assert coordinator.orders == [GO, Order("stop", 30.0)]
    coordinator.receive(0, Message(kind="gone"), now=9)
    assert coordinator.document().state == "interrupted"
    assert coordinator.document().cause == SHUTDOWN


def test_cancel_does_not_wait_for_nodes_that_have_not_joined() -> None:
    coordinator = Coordinator(REQUEST, now=0)
    coordinator.receive(0, Message(kind="here"), now=1)
    coordinator.receive(0, Message(kind="stop", ending=Ending(state="cancelled", grace=30.0)), now=2)
    coordinator.receive(0, Message(kind="gone"), now=2)
    assert (coordinator.done, coordinator.document().state) == (True, "cancelled")
    coordinator.receive(1, Message(kind="here"), now=3)
    assert GO not in coordinator.orders


def test_node_that_is_lost_after_success_does_not_change_the_state() -> None:
    coordinator = start_coordinator()
    for rank in range(4):
        coordinator.receive(rank // 2, make_exit(rank, 0), now=2)
    coordinator.lose(1, "it closed the connection")
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert (coordinator.done, coordinator.document().state) == (True, "succeeded")


def test_timeout_counts_from_the_start_of_the_ranks() -> None:
    coordinator = start_coordinator(timeout=10.0)
    coordinator.tick(now=10.9)
    assert coordinator.orders == [GO]
    coordinator.tick(now=11)
    assert coordinator.orders == [GO, STACKS]
    coordinator.receive(0, Message(kind="stacks", answer=make_stacks(0)), now=11.5)
    coordinator.tick(now=12)
    assert coordinator.orders == [GO, STACKS]
    coordinator.receive(1, Message(kind="stacks", answer=make_stacks(1)), now=12.5)
    coordinator.tick(now=12.5)
    assert coordinator.orders == [GO, STACKS, Order("stop", 30.0)]
    assert get_cause_rank(coordinator) is None


def test_node_that_sends_no_stacks_delays_a_timeout_by_3_s() -> None:
    coordinator = start_coordinator(timeout=10.0)
    coordinator.tick(now=11)
    coordinator.tick(now=13.9)
    assert coordinator.orders == [GO, STACKS]
    coordinator.tick(now=14)
    assert coordinator.orders[2:] == [Order("stop", 30.0)]


def test_silent_job_is_ended_with_the_stopped_rank_as_its_cause() -> None:
    coordinator = start_coordinator(hang_after=10.0)
    coordinator.receive(1, Message(kind="output"), now=6)
    coordinator.tick(now=15.9)
    assert coordinator.orders == [GO]
    coordinator.tick(now=16)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="stacks", answer=make_stacks(node, stopped=3)), now=16)
    coordinator.tick(now=16)
    assert coordinator.orders == [GO, STACKS, Order("stop", 30.0)]
    report_gone(coordinator)
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank, cause.node, cause.instance_id) == ("hang", 3, 1, "i-1")
    assert cause.explanation.startswith("No rank wrote to its log for 10 s. Rank 3 (node1) was stopped by ")
    assert cause.values == {"place": "stopped"}
    assert cause.next.startswith("awsddp why job")


def time_out_ranks(coordinator: Coordinator, *ranks: int) -> None:
    for rank in ranks:
        report = make_exit(rank, 1, "echo", "RuntimeError: Timed out.", "gloo_timeout")
        coordinator.receive(rank // 2, report, now=5)


def test_timeout_names_the_ranks_that_still_run_with_their_line() -> None:
    coordinator = start_coordinator()
    time_out_ranks(coordinator, 0, 1, 2)
    assert coordinator.orders == [GO, STACKS]
    process = make_stacks(1).processes[1]
    for node, stacks in ((0, NodeStacks("/w", 9.0, [])), (1, NodeStacks("/w", 9.0, [process]))):
        coordinator.receive(node, Message(kind="stacks", answer=stacks), now=5.1)
    coordinator.tick(now=5.1)
    assert coordinator.orders == [GO, STACKS, STOP]
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank) == ("gloo_timeout", 0)
    assert cause.explanation == (
        "RuntimeError: Timed out. Rank 3 (node1) runs: train.py:7 in step. Ranks 0-2 have ended."
    )


def test_cause_is_a_rank_that_timed_out_before_one_that_lost_its_peer() -> None:
    coordinator = start_coordinator()
    lost = make_exit(0, 1, "echo", "Connection closed by peer.", "peer_lost")
    coordinator.receive(0, lost, now=5)
    time_out_ranks(coordinator, 1)
    assert coordinator.orders == [GO, STACKS]
    coordinator.tick(now=7.9)
    assert coordinator.orders == [GO, STACKS]
    coordinator.tick(now=8)
    assert (coordinator.orders, get_cause_rank(coordinator)) == ([GO, STACKS, STOP], 1)


def test_failed_node_is_the_cause_of_the_errors_of_nccl_on_other_nodes_and_not_of_a_ranks_own_fault() -> None:
    for kind, fault in itertools.product(("nccl_error", "peer_lost", "nccl_timeout", "exit"), NODE_FAULTS):
        coordinator = start_coordinator()
        coordinator.receive(0, make_exit(0, 1, "own" if kind == "exit" else "echo", kind=kind), now=2)
        coordinator.receive(1, make_exit(2, -15, "echo", kind=fault), now=3)  # ended by the job's stop
        cause = coordinator.document().cause
        expected = ("exit", 0) if kind == "exit" else (fault, 1)
        assert (cause.kind, cause.node) == expected, kind
        assert cause.instance_id == f"i-{cause.node}"


def test_lost_node_is_the_cause_of_the_errors_of_nccl_on_other_nodes() -> None:
    coordinator = start_coordinator()
    coordinator.receive(0, make_exit(0, 1, "echo", "NCCL error: unhandled system error", "nccl_error"), now=2)
    coordinator.lose(1, "no heartbeat for 5 s")
    assert coordinator.document().cause.kind == "node_lost"


def test_failure_of_another_rank_ends_the_wait_for_stacks() -> None:
    coordinator = start_coordinator()
    time_out_ranks(coordinator, 0)
    coordinator.receive(1, make_exit(3, 1), now=5.1)
    assert (coordinator.orders, get_cause_rank(coordinator)) == ([GO, STACKS, STOP], 3)


def test_nodes_are_notified_when_the_job_is_silent_for_two_minutes() -> None:
    coordinator = start_coordinator()
    coordinator.tick(now=121)
    coordinator.tick(now=122)
    coordinator.receive(0, Message(kind="output"), now=123)
    coordinator.tick(now=123)
    assert coordinator.orders == [GO, *(Order("silence", silent=silent) for silent in (True, False))]


def test_timeout_first_names_a_rank_that_had_ended_with_exit_code_0() -> None:
    coordinator = start_coordinator(timeout=20.0)
    coordinator.receive(1, make_exit(2, 0), now=9)
    coordinator.tick(now=21)
    coordinator.tick(now=24)
    cause = coordinator.document().cause
    assert cause.explanation.startswith("Rank 2 had ended 12 s before, with exit code 0; ")
    assert cause.explanation.endswith(" The job ran for longer than its timeout of 20 s.")


def test_failed_rank_is_the_cause_and_not_a_node_that_is_lost_later() -> None:
    coordinator = start_coordinator()
    coordinator.receive(0, make_exit(0, 1), now=2)
    coordinator.lose(1, "no heartbeat for 300 s")
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert get_cause_rank(coordinator) == 0


def start_elastic(*, min_nodes: int = 2, max_restarts: int = 0) -> ElasticCoordinator:
    """Return the coordinator of a job under torchrun whose four workers have started."""
    settings = {"min_nodes": min_nodes, "max_restarts": max_restarts}
    coordinator = ElasticCoordinator(make_launch(layout=LAYOUT, elastic=settings), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    start_workers(coordinator, 0, 1, 2, 3)
    return coordinator


def start_workers(coordinator: ElasticCoordinator, *ranks: int, world_size: int = 4) -> None:
    for rank in ranks:
        message = Message(kind="worker", reports=[RankReport(rank, 5.0)], world_size=world_size)
        coordinator.receive(rank // 2, message, now=2)


def fail(coordinator: ElasticCoordinator, rank: int, restart: int, code: int = 1, **extra: Any) -> None:
    coordinator.receive(rank // 2, make_exit(rank, code, restart=restart, **extra), now=3)


def test_lost_node_is_the_cause_while_elastic_agents_restart_their_workers() -> None:
    coordinator = start_elastic()
    coordinator.lose(1, "it closed the connection")
    for rank in (0, 1):
        start_workers(coordinator, rank)
        fail(coordinator, rank, 0, -15, fault="stopped")
    coordinator.receive(0, Message(kind="gone"), now=5)
    document = coordinator.document()
    assert (document.state, document.restarts) == ("failed", [])
    assert (document.cause.kind, document.cause.node) == ("node_lost", 1)


def test_restart_records_the_worker_that_failed_first_and_does_not_become_the_cause() -> None:
    coordinator = start_elastic(max_restarts=2)
    fail(coordinator, 0, 0, fault="echo", text="it lost a peer")
    fail(coordinator, 3, 0, text="first life")
    fail(coordinator, 2, 0, -15, fault="stopped")
    assert coordinator.document().restarts == []
    start_workers(coordinator, 1, 0, 2, 3)
    assert coordinator.document().restarts == ["1 of 2: rank 3 @ node1: first life"]
    fail(coordinator, 1, 1, text="second life")
    start_workers(coordinator, 0, 1, 2, 3)
    fail(coordinator, 2, 2, fault="echo", text="third life")
    assert coordinator.orders == [GO, STOP]
    report_gone(coordinator)
    document = coordinator.document()
    assert document.restarts[1:] == ["2 of 2: rank 1 @ node0: second life"]
    assert (document.cause.rank, document.cause.explanation) == (2, "third life")


def test_restart_of_a_healthy_worker_keeps_the_failure_of_another() -> None:
    coordinator = start_elastic(max_restarts=1)
    fail(coordinator, 3, 0, text="first life")
    start_workers(coordinator, 1)
    assert coordinator.document().restarts == []
    start_workers(coordinator, 3)
    assert coordinator.document().restarts == ["1 of 1: rank 3 @ node1: first life"]


def test_cause_is_a_worker_that_fails_again_before_the_others_have_restarted() -> None:
    coordinator = start_elastic(max_restarts=1)
    fail(coordinator, 0, 0, text="first life")
    start_workers(coordinator, 0)
    fail(coordinator, 0, 1, text="second life")
    start_workers(coordinator, 1, 2, 3)
    report_gone(coordinator)
    document = coordinator.document()
    assert (document.restarts, get_cause_rank(coordinator)) == (["1 of 1: rank 0 @ node0: first life"], 0)
    assert document.cause.explanation == "second life"


def test_node_that_was_lost_before_is_not_the_cause_of_a_later_failure() -> None:
    coordinator = start_elastic(min_nodes=1, max_restarts=0)
    coordinator.lose(1, "it closed the connection")
    assert coordinator.orders == [GO]
    start_workers(coordinator, 0, 1, world_size=2)
    fail(coordinator, 0, 0, fault="echo", text="timed out")
    coordinator.receive(0, Message(kind="gone"), now=5)
    cause = coordinator.document().cause
    assert (cause.rank, cause.explanation) == (0, "timed out")


def test_job_succeeds_when_the_remaining_elastic_agents_have_ended() -> None:
    coordinator = start_elastic(min_nodes=1)
    coordinator.lose(1, "it closed the connection")
    coordinator.receive(0, Message(kind="agent", reports=[RankReport(0, exit_code=0)]), now=3)
    assert coordinator.orders == [GO, STOP]
    coordinator.receive(0, Message(kind="gone"), now=5)
    assert coordinator.document().state == "succeeded"


def test_waiting_job_continues_to_wait_after_it_lost_a_node() -> None:
    settings = {"min_nodes": 1, "max_restarts": 0}
    coordinator = ElasticCoordinator(make_launch(layout=LAYOUT, elastic=settings, after=["other"]), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    coordinator.lose(1, "it closed the connection")
    assert (coordinator.orders, coordinator.document().state) == ([], "waiting")
    coordinator.receive(0, Message(kind="free"), now=3)
    assert (coordinator.orders, coordinator.document().state) == ([GO], "running")


def look_silent(coordinator: Coordinator, *, since: int, changed: bool | None = False) -> None:
    """Let a silent job's coordinator look twice: rank 3 is stopped, and the others wait."""
    for now in range(since, since + 1862):
        coordinator.tick(now=now)
        if Order("look", seconds=now - since) in coordinator.orders[-1:]:
            for node in (0, 1):
                answer = make_stacks(node, stopped=3)._replace(at=5000.0, changed=changed)
                coordinator.receive(node, Message(kind="look", answer=answer), now=now)


def test_job_that_hangs_is_reported_and_not_ended_until_a_rank_writes_again() -> None:
    coordinator = start_coordinator(looks=(1800.0, 60.0))
    coordinator.receive(1, Message(kind="output"), now=6)
    look_silent(coordinator, since=6)
    looks = [order for order in coordinator.orders if order.do != "silence"]
    assert looks == [GO, Order("look", seconds=1800), Order("look", seconds=1860)]
    hang = coordinator.document().hang
    assert hang is not None
    assert (hang["state"], hang["rank"], hang["place"], hang["since"]) == ("hung", 3, "stopped", 4991)
    assert coordinator.document().state == "running"
    coordinator.receive(1, Message(kind="output"), now=2000)
    assert coordinator.document().hang is None


def test_job_with_recover_ends_when_it_hangs_and_the_cause_has_the_place() -> None:
    coordinator = start_coordinator(looks=(1800.0, 60.0), ends_when_hung=True)
    look_silent(coordinator, since=1)
    assert coordinator.orders[-1] == STACKS
    for node in (0, 1):
        answer = make_stacks(node, stopped=3)
        coordinator.receive(node, Message(kind="stacks", answer=answer), now=1862)
    coordinator.tick(now=1862)
    assert coordinator.orders[-1] == Order("stop", 30.0)
    report_gone(coordinator)
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank, cause.node, cause.values) == ("hang", 3, 1, {"place": "stopped"})
    assert cause.explanation.startswith(
        "No rank wrote to its log for 1861 s. No file of the results changed, and two looks at the ranks "
    )
    assert coordinator.document().hang is None


def test_job_whose_ranks_cannot_be_seen_is_not_ended() -> None:
    coordinator = start_coordinator(looks=(1800.0, 60.0), ends_when_hung=True)
    look_silent(coordinator, since=1, changed=None)
    hang = coordinator.document().hang
    assert hang is not None
    assert (hang["state"], coordinator.orders[-1].do) == ("unknown", "look")


def test_job_that_waits_or_has_no_looks_is_not_looked_at() -> None:
    waiting = Coordinator(make_launch(layout=LAYOUT, after=["other"], looks=(1800.0, 60.0)), now=0)
    for node in (0, 1):
        waiting.receive(node, Message(kind="here"), now=1)
    older = start_coordinator()
    for coordinator in (waiting, older):
        coordinator.tick(now=9000)
        assert all(order.do != "look" for order in coordinator.orders)
