"""The decisions of the first node, one at a time."""

from typing import Any

from awsddp.agent.coordinator import Coordinator, ElasticCoordinator, Message, Order
from awsddp.agent.diagnosis.job_causes import Cause
from awsddp.agent.diagnosis.stacks import NodeStacks, Process
from awsddp.agent.job_folder import Ending, RankReport
from tests.support.fleet import launch_of

LAYOUT = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
REQUEST = launch_of(layout=LAYOUT)
GO = Order("go")
STOP = Order("stop", 1.0)
LOOK = Order("stacks")
SHUT = Cause("interrupted", True, "it was shut down", "", node=1)


def joined(**settings: Any) -> Coordinator:
    coordinator = Coordinator(launch_of(layout=LAYOUT, **settings), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    return coordinator


def answer(node: int, stopped: int | None = None) -> NodeStacks:
    ranks = [rank for rank, _, on in LAYOUT if on == node]
    found = [Process(7, 1, rank, "T" if rank == stopped else "S", joined=True) for rank in ranks]
    return NodeStacks("/w", 9.0, found)


def exit_of(
    rank: int, code: int, fault: str = "own", said: str = "", kind: str = "exit", restart: int = 0
) -> Message:
    report = RankReport(rank, 5.0, 1.0, code, restart)
    if code:
        cause = Cause(kind, False, said, "", rank=rank, exit_code=code, tail=[said])
        report = report._replace(cause=cause, fault=fault)
    return Message(kind="exit", reports=[report])


def gone(coordinator: Coordinator) -> None:
    for node in (0, 1):
        coordinator.receive(node, Message(kind="gone"), now=9)


def named(coordinator: Coordinator) -> int | None:
    cause = coordinator.document().cause
    return None if cause is None else cause.rank


def test_ranks_start_when_all_are_here_and_once() -> None:
    coordinator = Coordinator(REQUEST, now=0)
    coordinator.receive(1, Message(kind="here"), now=1)
    assert coordinator.orders == []
    coordinator.receive(0, Message(kind="here"), now=1)
    coordinator.receive(0, Message(kind="here"), now=1)
    assert coordinator.orders == [GO]


def test_success_needs_every_rank_and_every_node_gone() -> None:
    coordinator = joined()
    for rank in (0, 1, 2):
        coordinator.receive(rank // 2, exit_of(rank, 0), now=2)
    assert coordinator.orders == [GO]
    coordinator.receive(1, exit_of(3, 0), now=3)
    assert coordinator.orders == [GO, STOP]
    assert coordinator.document().state == "running"
    gone(coordinator)
    assert (coordinator.done, coordinator.document().state) == (True, "succeeded")


def test_rank_that_lost_its_peer_is_no_cause_beside_the_one_that_left() -> None:
    coordinator = joined()
    coordinator.receive(0, exit_of(0, 1, "echo"), now=2.0)
    assert named(coordinator) == 0
    coordinator.receive(1, exit_of(2, 1, "own"), now=2.3)
    coordinator.receive(0, exit_of(1, -15, "stopped"), now=2.4)
    assert named(coordinator) == 2
    gone(coordinator)
    assert coordinator.document().state == "failed"


def test_ranks_that_did_not_join_are_explained_by_the_address_at_which_one_found_nobody() -> None:
    coordinator = joined()
    kind, said = "master_unreachable", "Nothing answers at localhost, 12354, where rank 0 was expected."
    coordinator.receive(0, exit_of(0, 1, "echo", "Only 1 of 2 ranks joined.", "rendezvous_timeout"), now=2.0)
    coordinator.receive(1, exit_of(2, 1, "echo", said, kind), now=2.3)
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank, cause.node) == (kind, 2, 1)
    assert cause.explanation == f"Only 1 of 2 ranks joined. Rank 2: {said}"


def test_lost_node_is_the_cause_of_what_the_others_then_say() -> None:
    coordinator = joined()
    coordinator.receive(0, exit_of(0, 1, "echo"), now=2.0)
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert not coordinator.done
    coordinator.lose(1, "no heartbeat for 12 s")
    assert coordinator.done
    assert coordinator.document().cause.node == 1
    assert coordinator.document().cause.instance_id == "i-1"


def test_kind_of_the_loss_of_a_node_is_that_of_the_cause() -> None:
    coordinator = joined()
    coordinator.lose(1, "its instance is terminated", "spot_interruption")
    cause = coordinator.document().cause
    assert (cause.kind, cause.retryable) == ("spot_interruption", True)
    assert cause.explanation == "node1 left the job while it ran: its instance is terminated."


def test_first_of_several_own_failures_is_the_cause() -> None:
    coordinator = joined()
    coordinator.receive(1, exit_of(3, 5), now=2.0)
    coordinator.receive(0, exit_of(0, 6), now=2.1)
    assert named(coordinator) == 3


def test_cancel_is_no_failure_whatever_the_ranks_then_say() -> None:
    coordinator = joined()
    coordinator.receive(1, Message(kind="stop", ending=Ending(state="cancelled", grace=30.0)), now=2)
    coordinator.receive(1, exit_of(3, 1, "stopped"), now=3)
    gone(coordinator)
    document = coordinator.document()
    assert (document.state, document.cause) == ("cancelled", None)
    assert coordinator.orders[1] == Order("stop", 30.0)


def test_rank_that_ends_at_once_leaves_the_others_their_grace() -> None:
    coordinator = joined()
    coordinator.receive(
        1, Message(kind="stop", ending=Ending(state="interrupted", grace=30.0, cause=SHUT)), now=2
    )
    coordinator.receive(1, exit_of(3, -15, "stopped"), now=3)
    coordinator.lose(1, "it closed the connection")
    assert coordinator.orders == [GO, Order("stop", 30.0)]
    coordinator.receive(0, Message(kind="gone"), now=9)
    assert coordinator.document().state == "interrupted"
    assert coordinator.document().cause == SHUT


def test_cancel_before_all_are_here_does_not_wait_for_them() -> None:
    coordinator = Coordinator(REQUEST, now=0)
    coordinator.receive(0, Message(kind="here"), now=1)
    coordinator.receive(0, Message(kind="stop", ending=Ending(state="cancelled", grace=30.0)), now=2)
    coordinator.receive(0, Message(kind="gone"), now=2)
    assert (coordinator.done, coordinator.document().state) == (True, "cancelled")
    coordinator.receive(1, Message(kind="here"), now=3)
    assert GO not in coordinator.orders


def test_lost_node_after_the_work_was_done_changes_nothing() -> None:
    coordinator = joined()
    for rank in range(4):
        coordinator.receive(rank // 2, exit_of(rank, 0), now=2)
    coordinator.lose(1, "it closed the connection")
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert (coordinator.done, coordinator.document().state) == (True, "succeeded")


def test_timeout_counts_from_the_start_of_the_ranks() -> None:
    coordinator = joined(timeout=10.0)
    coordinator.tick(now=10.9)
    assert coordinator.orders == [GO]
    coordinator.tick(now=11)
    assert coordinator.orders == [GO, LOOK]
    coordinator.receive(0, Message(kind="stacks", answer=answer(0)), now=11.5)
    coordinator.tick(now=12)
    assert coordinator.orders == [GO, LOOK]
    coordinator.receive(1, Message(kind="stacks", answer=answer(1)), now=12.5)
    coordinator.tick(now=12.5)
    assert coordinator.orders == [GO, LOOK, Order("stop", 30.0)]
    assert named(coordinator) is None


def test_node_that_does_not_look_delays_a_timeout_by_3_s() -> None:
    coordinator = joined(timeout=10.0)
    coordinator.tick(now=11)
    coordinator.tick(now=13.9)
    assert coordinator.orders == [GO, LOOK]
    coordinator.tick(now=14)
    assert coordinator.orders[2:] == [Order("stop", 30.0)]


def test_job_that_is_silent_is_ended_and_the_rank_that_stands_elsewhere_named() -> None:
    coordinator = joined(hang_after=10.0)
    coordinator.receive(1, Message(kind="output"), now=6)
    coordinator.tick(now=15.9)
    assert coordinator.orders == [GO]
    coordinator.tick(now=16)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="stacks", answer=answer(node, stopped=3)), now=16)
    coordinator.tick(now=16)
    assert coordinator.orders == [GO, LOOK, Order("stop", 30.0)]
    gone(coordinator)
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank, cause.node, cause.instance_id) == ("hang", 3, 1, "i-1")
    assert cause.explanation.startswith("No rank wrote to its log for 10 s. Rank 3 (node1) was stopped by ")
    assert cause.next.startswith("awsddp why job")


def timed_out(coordinator: Coordinator, *ranks: int) -> None:
    for rank in ranks:
        report = exit_of(rank, 1, "echo", "RuntimeError: Timed out.", "gloo_timeout")
        coordinator.receive(rank // 2, report, now=5)


def test_ranks_that_still_run_when_the_others_time_out_are_named_with_their_line() -> None:
    coordinator = joined()
    timed_out(coordinator, 0, 1, 2)
    assert coordinator.orders == [GO, LOOK]
    frames = 'Thread 0x1 (most recent call first):\n  File "/w/train.py", line 7 in step\n'
    left = answer(1).processes[1]._replace(stacks=frames)
    for node, one in ((0, NodeStacks("/w", 9.0, [])), (1, NodeStacks("/w", 9.0, [left]))):
        coordinator.receive(node, Message(kind="stacks", answer=one), now=5.1)
    coordinator.tick(now=5.1)
    assert coordinator.orders == [GO, LOOK, STOP]
    cause = coordinator.document().cause
    assert (cause.kind, cause.rank) == ("gloo_timeout", 0)
    assert cause.explanation == (
        "RuntimeError: Timed out. Rank 3 (node1) runs: train.py:7 in step. Ranks 0-2 have ended."
    )


def test_rank_that_timed_out_is_named_before_those_that_lost_it() -> None:
    coordinator = joined()
    lost = exit_of(0, 1, "echo", "Connection closed by peer.", "peer_lost")
    coordinator.receive(0, lost, now=5)
    timed_out(coordinator, 1)
    assert coordinator.orders == [GO, LOOK]
    coordinator.tick(now=7.9)
    assert coordinator.orders == [GO, LOOK]
    coordinator.tick(now=8)
    assert (coordinator.orders, named(coordinator)) == ([GO, LOOK, STOP], 1)


def test_fault_of_its_own_ends_the_look_at_the_others() -> None:
    coordinator = joined()
    timed_out(coordinator, 0)
    coordinator.receive(1, exit_of(3, 1), now=5.1)
    assert (coordinator.orders, named(coordinator)) == ([GO, LOOK, STOP], 3)


def test_nodes_know_when_the_job_is_silent_for_two_minutes() -> None:
    coordinator = joined()
    coordinator.tick(now=121)
    coordinator.tick(now=122)
    coordinator.receive(0, Message(kind="output"), now=123)
    coordinator.tick(now=123)
    assert coordinator.orders == [GO, *(Order("silence", silent=silent) for silent in (True, False))]


def test_rank_that_left_with_0_is_named_first_when_the_others_time_out() -> None:
    coordinator = joined(timeout=20.0)
    coordinator.receive(1, exit_of(2, 0), now=9)
    coordinator.tick(now=21)
    coordinator.tick(now=24)
    cause = coordinator.document().cause
    assert cause.explanation.startswith("Rank 2 had ended with exit code 0 12 s before; ")
    assert cause.explanation.endswith(" The job ran for longer than its timeout of 20 s.")


def test_rank_that_failed_by_itself_is_the_cause_and_not_a_node_that_is_lost_later() -> None:
    coordinator = joined()
    coordinator.receive(0, exit_of(0, 1), now=2)
    coordinator.lose(1, "no heartbeat for 300 s")
    coordinator.receive(0, Message(kind="gone"), now=3)
    assert named(coordinator) == 0


def elastic(*, min_nodes: int = 2, max_restarts: int = 0) -> ElasticCoordinator:
    """A job under torchrun whose four workers have started."""
    settings = {"min_nodes": min_nodes, "max_restarts": max_restarts}
    coordinator = ElasticCoordinator(launch_of(layout=LAYOUT, elastic=settings), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    starts(coordinator, 0, 1, 2, 3)
    return coordinator


def starts(coordinator: ElasticCoordinator, *ranks: int, world_size: int = 4) -> None:
    for rank in ranks:
        begin = Message(kind="worker", reports=[RankReport(rank, 5.0)], world_size=world_size)
        coordinator.receive(rank // 2, begin, now=2)


def fails(coordinator: ElasticCoordinator, rank: int, restart: int, code: int = 1, **more: Any) -> None:
    coordinator.receive(rank // 2, exit_of(rank, code, restart=restart, **more), now=3)


def test_lost_node_is_the_cause_also_where_the_agents_were_just_restarting_their_workers() -> None:
    coordinator = elastic()
    coordinator.lose(1, "it closed the connection")
    for rank in (0, 1):
        starts(coordinator, rank)
        fails(coordinator, rank, 0, -15, fault="stopped")
    coordinator.receive(0, Message(kind="gone"), now=5)
    document = coordinator.document()
    assert (document.state, document.restarts) == ("failed", [])
    assert (document.cause.kind, document.cause.node) == ("node_lost", 1)


def test_restart_tells_which_worker_failed_first_and_is_no_cause_of_what_comes_later() -> None:
    coordinator = elastic(max_restarts=2)
    fails(coordinator, 0, 0, fault="echo", said="it lost a peer")
    fails(coordinator, 3, 0, said="first life")
    fails(coordinator, 2, 0, -15, fault="stopped")
    assert coordinator.document().restarts == []
    starts(coordinator, 1, 0, 2, 3)
    assert coordinator.document().restarts == ["1 of 2: rank 3 @ node1: first life"]
    fails(coordinator, 1, 1, said="second life")
    starts(coordinator, 0, 1, 2, 3)
    fails(coordinator, 2, 2, fault="echo", said="third life")
    assert coordinator.orders == [GO, STOP]
    gone(coordinator)
    document = coordinator.document()
    assert document.restarts[1:] == ["2 of 2: rank 1 @ node0: second life"]
    assert (document.cause.rank, document.cause.explanation) == (2, "third life")


def test_start_of_a_worker_that_did_not_fail_forgets_no_failure() -> None:
    coordinator = elastic(max_restarts=1)
    fails(coordinator, 3, 0, said="first life")
    starts(coordinator, 1)
    assert coordinator.document().restarts == []
    starts(coordinator, 3)
    assert coordinator.document().restarts == ["1 of 1: rank 3 @ node1: first life"]


def test_worker_that_fails_before_another_has_started_again_is_the_cause() -> None:
    coordinator = elastic(max_restarts=1)
    fails(coordinator, 0, 0, said="first life")
    starts(coordinator, 0)
    fails(coordinator, 0, 1, said="second life")
    starts(coordinator, 1, 2, 3)
    gone(coordinator)
    document = coordinator.document()
    assert (document.restarts, named(coordinator)) == (["1 of 1: rank 0 @ node0: first life"], 0)
    assert document.cause.explanation == "second life"


def test_node_that_the_job_went_on_without_is_no_cause_of_what_comes_later() -> None:
    coordinator = elastic(min_nodes=1, max_restarts=0)
    coordinator.lose(1, "it closed the connection")
    assert coordinator.orders == [GO]
    starts(coordinator, 0, 1, world_size=2)
    fails(coordinator, 0, 0, fault="echo", said="timed out")
    coordinator.receive(0, Message(kind="gone"), now=5)
    cause = coordinator.document().cause
    assert (cause.rank, cause.explanation) == (0, "timed out")


def test_job_ends_when_the_agents_that_are_left_have_done_their_work() -> None:
    coordinator = elastic(min_nodes=1)
    coordinator.lose(1, "it closed the connection")
    coordinator.receive(0, Message(kind="agent", reports=[RankReport(0, exit_code=0)]), now=3)
    assert coordinator.orders == [GO, STOP]
    coordinator.receive(0, Message(kind="gone"), now=5)
    assert coordinator.document().state == "succeeded"


def test_job_that_waits_goes_on_waiting_without_a_node_that_was_lost() -> None:
    settings = {"min_nodes": 1, "max_restarts": 0}
    coordinator = ElasticCoordinator(launch_of(layout=LAYOUT, elastic=settings, after=["other"]), now=0)
    for node in (0, 1):
        coordinator.receive(node, Message(kind="here"), now=1)
    coordinator.lose(1, "it closed the connection")
    assert (coordinator.orders, coordinator.document().state) == ([], "waiting")
    coordinator.receive(0, Message(kind="free"), now=3)
    assert (coordinator.orders, coordinator.document().state) == ([GO], "running")
