"""When a run goes on after a machine's fault, and how its cluster is repaired."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from awsddp.agent.diagnosis.causes import TABLE
from awsddp.agent.diagnosis.job_causes import JOB_TABLE, NODE_FAULTS
from awsddp.model.records import Cause, JobState
from awsddp.plan.recovery import (
    COLLECTIVE_CAUSES,
    MACHINE_CAUSES,
    MAX_REFUSALS,
    MIN_LEFT_S,
    Life,
    RecoveryStep,
    Situation,
    find_reason_to_end,
    plan_recovery_step,
)
from tests.support.seed import SEED

HISTORIES = 2000
DRAWN_KINDS = (
    *("succeeded", "spot_interruption", "node_lost", "xid", "ecc_error", "peer_lost", "exit", "hang"),
    *("cuda_oom", "interrupted", "cancelled"),
)
KINDS = sorted({row.kind for row in (*TABLE, *JOB_TABLE)})


def make_life(kind: str, *, state: JobState = "failed", place: str = "", **fields: Any) -> Life:
    cause = Cause(rank=0, node=0, kind=kind, values={"place": place}, **fields)
    return Life(job="train-1", state=state, cause=cause)


@pytest.mark.parametrize("kind", KINDS)
def test_every_cause_of_the_program_ends_the_run(kind: str) -> None:
    situation = Situation(lives=[make_life(kind)], limit=3, is_ready=True)
    is_machine = kind in MACHINE_CAUSES or kind == "hang"
    assert (plan_recovery_step(situation).do == "start") == is_machine


@pytest.mark.parametrize("kind", sorted(COLLECTIVE_CAUSES))
def test_an_error_of_a_collective_counts_only_if_a_node_failed(kind: str) -> None:
    life = make_life(kind)
    assert find_reason_to_end(Situation(lives=[life], limit=3))
    assert not find_reason_to_end(Situation(lives=[life], limit=3, failed=frozenset({"i-1"})))


@pytest.mark.parametrize("kind", ["node_lost", "interrupted"])
def test_an_agent_that_ended_counts_only_if_a_node_failed(kind: str) -> None:
    life = make_life(kind, explanation="node1 left the job while it ran: its agent was killed (signal 9).")
    assert "killed it" in find_reason_to_end(Situation(lives=[life], limit=3))
    assert not find_reason_to_end(Situation(lives=[life], limit=3, failed=frozenset({"i-1"})))


def test_an_exit_code_of_the_user_goes_on_but_a_cancelled_job_does_not() -> None:
    asked = Situation(lives=[make_life("exit", exit_code=75)], limit=1, exit_codes=(75,))
    assert not find_reason_to_end(asked)
    cancelled = Situation(lives=[make_life("cancelled", state="cancelled")], limit=1)
    assert find_reason_to_end(cancelled) == "it was cancelled"


def test_a_run_goes_on_after_the_same_hang_once() -> None:
    first, second = make_life("hang", place="a"), make_life("hang", place="b")
    assert not find_reason_to_end(Situation(lives=[first], limit=9))
    assert not find_reason_to_end(Situation(lives=[first, second], limit=9))
    assert "hung at this place" in find_reason_to_end(Situation(lives=[first, second, first], limit=9))


def test_a_run_that_the_user_ended_does_not_go_on() -> None:
    lost = Situation(lives=[make_life("node_lost")], limit=9, ended_by="down")
    assert plan_recovery_step(lost) == RecoveryStep(do="end", why="`awsddp down` ended the run")
    succeeded = Situation(lives=[make_life("succeeded", state="succeeded")], limit=9, ended_by="stop")
    assert plan_recovery_step(succeeded) == RecoveryStep(do="end")


def test_jobs_whose_ranks_did_not_start_are_not_counted_but_limited() -> None:
    lost = make_life("node_lost")
    unstarted = Life(job="train-1.2", state="failed", cause=lost.cause, has_begun=False)
    assert not find_reason_to_end(Situation(lives=[lost, unstarted], limit=1))
    assert "did not start" in find_reason_to_end(Situation(lives=[lost, *[unstarted] * 3], limit=1))


@dataclass
class World:
    """A drawn cluster, its capacity, and what is on its nodes. `place` counts its moves."""

    draw: random.Random
    nodes: int
    min_nodes: int
    limit: int
    left_s: float
    waits: bool
    has_bucket: bool
    living: set[int] = field(default_factory=set)
    faulty: set[int] = field(default_factory=set)
    unfetched: set[int] = field(default_factory=set)
    lives: list[Life] = field(default_factory=list)
    steps: list[RecoveryStep] = field(default_factory=list)
    refusals: int = 0
    moved: bool = False
    no_capacity: int = 0

    def observe(self) -> Situation:
        return Situation(
            lives=self.lives,
            limit=self.limit,
            exit_codes=(75,),
            failed=frozenset(f"i-{node}" for node in {*range(self.nodes)} - self.living | self.faulty),
            faulty=frozenset(f"i-{node}" for node in self.faulty),
            is_fetched=not self.unfetched,
            living=tuple(sorted(self.living)),
            nodes=self.nodes,
            min_nodes=self.min_nodes,
            is_ready=self.living >= set(range(self.nodes)),
            left_s=self.left_s,
            refusals=self.refusals,
            moved=self.moved,
            waits=self.waits,
        )

    def end_life(self) -> None:
        """End the running job by a drawn cause, which also affects the nodes."""
        kind = self.draw.choice(DRAWN_KINDS)
        if len(self.living) < self.nodes:  # lost while the job was started
            kind = "node_lost"
        states: dict[str, JobState] = {"succeeded": "succeeded", "cancelled": "cancelled"}
        if kind in ("spot_interruption", "node_lost", "interrupted"):
            lost = min(self.draw.randint(1, 2), len(self.living))
            self.living -= set(self.draw.sample(sorted(self.living), lost))
        elif kind in NODE_FAULTS:
            self.faulty = {self.draw.choice(sorted(self.living))}
        self.unfetched = set() if self.has_bucket else set(self.living)
        code = self.draw.choice([1, 75]) if kind == "exit" else None
        self.lives[-1] = make_life(
            kind, state=states.get(kind, "failed"), exit_code=code, place=self.draw.choice("ab")
        )
        if self.draw.random() < 0.3:
            self.no_capacity = self.draw.randint(1, 12)

    def take(self, step: RecoveryStep) -> None:
        """Take a step, which may be refused, and during which another node may be lost."""
        self.left_s -= 30 + step.pause_s
        if step.do == "follow":
            self.left_s -= self.draw.uniform(60, 3600)
            self.end_life()
            self.refusals = 0
            return
        if step.do == "fetch":
            if self.draw.random() < 0.2:
                self.refusals += 1
                return
            self.unfetched = set()
        elif step.do in ("repair", "move"):
            self.change_nodes(step)
            if step.do == "repair" and self.no_capacity:
                self.no_capacity -= 1
                self.refusals += 1
                return
            self.living = set(range(self.nodes)) if step.do == "repair" else set()
        else:
            self.lives.append(Life(job=f"train-1.{len(self.lives) + 1}", state="running"))
            self.unfetched = set(self.living) if not self.has_bucket else set()
        self.refusals = 0
        if self.living and self.draw.random() < 0.1:  # one more loss during the recovery
            self.living.discard(self.draw.choice(sorted(self.living)))

    def change_nodes(self, step: RecoveryStep) -> None:
        replaced = {int(name.removeprefix("i-")) for name in step.replace}
        gone = replaced if step.do == "repair" else set(self.living)
        surplus = {node for node in self.living if node >= step.nodes}
        assert not (gone | surplus) & self.unfetched, (
            "a living node was given up before its results were home"
        )
        self.moved = self.moved or step.do == "move"
        self.living -= gone | surplus
        self.faulty -= gone
        assert step.nodes >= self.min_nodes
        self.nodes = step.nodes


def draw_world(number: int) -> World:
    draw = random.Random(f"{SEED}/{number}")
    nodes = draw.randint(1, 4)
    world = World(
        draw=draw,
        nodes=nodes,
        min_nodes=draw.choice([nodes, nodes, draw.randint(1, nodes)]),
        limit=draw.randint(1, 4),
        left_s=draw.choice([200.0, 3600.0, 86400.0]),
        waits=draw.random() < 0.3,
        has_bucket=draw.random() < 0.5,
        living=set(range(nodes)),
    )
    world.lives.append(Life(job="train-1", state="running"))
    return world


def check_step(world: World, situation: Situation, step: RecoveryStep) -> None:
    """Check what holds for every step of every history."""
    last = world.lives[-1]
    if step.do in ("follow", "fetch", "end"):
        return
    assert last.kind in MACHINE_CAUSES | COLLECTIVE_CAUSES | {"hang"} or last.cause.exit_code == 75  # type: ignore[union-attr]
    assert last.state not in ("succeeded", "cancelled")
    assert situation.left_s >= MIN_LEFT_S
    assert len(world.lives) - 1 < world.limit
    if step.do == "start":
        assert situation.is_ready and not situation.faulty and situation.is_fetched
    if last.kind == "hang":
        places = [life.cause.values["place"] for life in world.lives if life.kind == "hang" and life.cause]
        assert len(places) == len(set(places))


@pytest.mark.parametrize("part", range(4))
def test_drawn_histories_never_repeat_an_own_error_and_lose_no_results(part: int) -> None:
    ends: dict[str, int] = {}
    for number in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        world = draw_world(number)
        for _ in range(3000):
            situation = world.observe()
            step = plan_recovery_step(situation)
            check_step(world, situation, step)
            world.steps.append(step)
            if step.do == "end":
                break
            world.take(step)
        assert world.steps[-1].do == "end", f"history {number} has no end: {world.steps[-6:]}"
        last = world.lives[-1]
        assert (last.state == "succeeded") == (not world.steps[-1].why)
        ends[last.state] = ends.get(last.state, 0) + 1
    assert set(ends) == {"succeeded", "failed", "cancelled"}


def test_the_nodes_move_only_after_the_refusals_and_shrink_only_within_the_limits() -> None:
    lost = [make_life("node_lost")]
    situation = Situation(lives=lost, limit=1, nodes=2, min_nodes=2, living=(0,))
    assert plan_recovery_step(situation) == RecoveryStep(do="repair", nodes=2)
    refused = Situation(lives=lost, limit=1, nodes=2, min_nodes=2, living=(0,), refusals=MAX_REFUSALS)
    assert plan_recovery_step(refused).do == "move"
    elastic = Situation(lives=lost, limit=1, nodes=2, min_nodes=1, living=(0,), refusals=MAX_REFUSALS)
    assert (plan_recovery_step(elastic).do, plan_recovery_step(elastic).nodes) == ("repair", 1)
    shared = Situation(
        lives=lost, limit=1, nodes=2, min_nodes=2, living=(0,), refusals=MAX_REFUSALS, shares_nodes=True
    )
    assert plan_recovery_step(shared).do == "end"
