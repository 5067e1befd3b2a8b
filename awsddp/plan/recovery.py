"""Decide whether a job goes on after a machine's fault, and what the next step is. This module does no I/O.

A run is a job and the jobs that continued it; each of these jobs is a life of the run. `recover` observes the
run and the cluster, takes one step, and observes again. A client that was killed therefore continues at the
same step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from awsddp.agent.diagnosis.job_causes import LOSSES, NODE_FAULTS, TIMED_OUT, WAITED
from awsddp.model.records import ACTIVE, Cause, JobState
from awsddp.util.formatting import counted, duration

MACHINE_CAUSES = frozenset({*LOSSES, *NODE_FAULTS, "interrupted"})
"""The causes that are a machine's fault. "interrupted": a node was powered off or restarted."""
AGENT_CAUSES = frozenset({"node_lost", "interrupted"})
"""The causes that count only with evidence if they say that an agent ended."""
COLLECTIVE_CAUSES = frozenset({*WAITED, *TIMED_OUT, "nccl_error"})
"""The causes that a machine's fault or the program can have. They count as a machine's fault only if a node
of the job is gone, or if its own checks show that it failed."""
MIN_LEFT_S = 300.0
"""A run does not go on if less time than this is left until the nodes' expiry (s): it takes most of this time
to repair the nodes."""
MAX_REFUSALS = 3
"""How often AWS may refuse a step, or a step may fail, before another step is tried."""
FIRST_PAUSE_S, MAX_PAUSE_S = 20.0, 120.0
"""The pause before a refused step is repeated, and its maximum; the pause doubles each time."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """A job of a run. `has_begun` is False if the job ended before its ranks started."""

    job: str
    state: JobState
    cause: Cause | None = None
    has_begun: bool = True

    @property
    def kind(self) -> str:
        """The kind of the cause, or "" if there is none."""
        return self.cause.kind if self.cause is not None else ""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known about a run and its cluster.

    `lives` are the run's lives, oldest first. `limit` is `job.recover`, and `exit_codes` is `job.recover_on`.
    `failed` are the instances of the last life that are gone, do not answer, or whose own checks show a
    failure; `faulty` are those that still run and must be replaced. `is_fetched` is True if all results of
    the last life that living nodes have are on this machine or in S3 (of a life that succeeded: on this
    machine). `living` are the numbers of the living nodes, `nodes` is the requested number, and `min_nodes`
    is the number with which the job may go on. `is_ready` is True if all requested nodes run and are
    prepared. `shares_nodes` is True if another job runs on the nodes. `left_s` is the time until the nodes'
    expiry, which the budget limits too. `refusals` is how often the last step was refused, and `moved` is
    True if the nodes of this life were already moved. `waits` is `capacity.retry_until_up`. `ended_by` is the
    verb with which the user ended the run, or "".
    """

    lives: Sequence[Life]
    limit: int
    exit_codes: tuple[int, ...] = ()
    failed: frozenset[str] = frozenset()
    faulty: frozenset[str] = frozenset()
    is_fetched: bool = True
    living: tuple[int, ...] = ()
    nodes: int = 1
    min_nodes: int = 1
    is_ready: bool = False
    shares_nodes: bool = False
    left_s: float = float("inf")
    refusals: int = 0
    moved: bool = False
    waits: bool = False
    ended_by: str = ""


@dataclass(frozen=True, kw_only=True)
class RecoveryStep:
    """The next step of a recovery.

    - "follow": the last life runs or waits; wait for its end.
    - "end": the run does not go on; `why` is the reason, or "" if the job succeeded.
    - "fetch": fetch the results of the last life.
    - "repair": after `pause_s`, replace the instances `replace` and launch the missing nodes; the cluster
      then has `nodes` nodes.
    - "move": terminate all nodes, so that the next step can launch `nodes` nodes in any allowed zone.
    - "start": start the next life.
    """

    do: Literal["follow", "end", "fetch", "repair", "move", "start"]
    why: str = ""
    replace: tuple[str, ...] = ()
    nodes: int = 0
    pause_s: float = 0.0


def plan_recovery_step(situation: Situation) -> RecoveryStep:
    """Return the next step of a run's recovery."""
    last = situation.lives[-1]
    if last.state in ACTIVE:
        if situation.refusals >= MAX_REFUSALS:
            return RecoveryStep(do="end", why="its nodes cannot be reached")
        return RecoveryStep(do="follow", pause_s=_pause_s(situation.refusals))
    if not situation.is_fetched and situation.refusals < MAX_REFUSALS:
        return RecoveryStep(do="fetch", pause_s=_pause_s(situation.refusals))
    if last.state == "succeeded":
        return RecoveryStep(do="end")
    if why := find_reason_to_end(situation):
        return RecoveryStep(do="end", why=why)
    if not situation.is_fetched:
        return RecoveryStep(do="end", why=f"the results of {last.job} could not be fetched")
    if situation.is_ready and not situation.faulty:
        if situation.refusals >= MAX_REFUSALS:
            return RecoveryStep(do="end", why="the job could not be started")
        return RecoveryStep(do="start", pause_s=_pause_s(situation.refusals))
    return _plan_nodes(situation)


def find_reason_to_end(situation: Situation) -> str:
    """Return why the run does not go on after its last life, or "" if it does."""
    lives, last = situation.lives, situation.lives[-1]
    if why := _find_own_fault(situation):
        return why
    if situation.ended_by:
        return f"`awsddp {situation.ended_by}` ended the run"
    if last.kind == "hang" and any(_hung_at_same_place(last, life) for life in lives[:-1]):
        return "it hung at this place before"
    recoveries = sum(life.has_begun for life in lives[1:])
    if recoveries >= situation.limit:
        return f"it already went on {counted(recoveries, 'time')} (job.recover)"
    unstarted = sum(not life.has_begun for life in lives[-MAX_REFUSALS:])
    if unstarted == MAX_REFUSALS:
        return f"its ranks did not start in the last {MAX_REFUSALS} attempts"
    if situation.left_s < MIN_LEFT_S:
        left = duration(max(0.0, situation.left_s))
        return f"the nodes expire in {left}, because of cluster.expires or the budget"
    return ""


def _find_own_fault(situation: Situation) -> str:
    """Return why the last life's end is not a machine's fault, or "" if it is, or if the user named its exit
    code."""
    last = situation.lives[-1]
    if last.state == "cancelled":
        return "it was cancelled"
    if last.cause is not None and last.cause.exit_code in situation.exit_codes:
        return ""
    if last.kind in AGENT_CAUSES and _says_agent_ended(last) and not situation.failed:
        return "its nodes run, but an agent ended: a rank or a user may have killed it"
    if last.kind in MACHINE_CAUSES or last.kind == "hang":
        return ""
    if last.kind in COLLECTIVE_CAUSES:
        if situation.failed:
            return ""
        return f"no node of it failed: {last.kind} is then the program's own error"
    if last.cause is None and last.state == "interrupted" and situation.failed:
        return ""
    return f"its end is not a machine's fault{last.kind and f' ({last.kind})'}"


def _says_agent_ended(life: Life) -> bool:
    """Return True if a job ended because an agent ended, which a rank can cause (kill -1)."""
    return life.cause is not None and "agent" in life.cause.explanation


def _hung_at_same_place(life: Life, earlier: Life) -> bool:
    """Return True if two lives hung at the same place. Unknown places count as the same place."""
    if life.cause is None or earlier.cause is None or earlier.kind != "hang":
        return False
    return life.cause.values.get("place", "") == earlier.cause.values.get("place", "")


def _plan_nodes(situation: Situation) -> RecoveryStep:
    """Return the step that repairs the cluster.

    First the failed nodes are replaced next to the living nodes. After MAX_REFUSALS refusals, a job with
    MIN:MAX nodes goes on with the living nodes; otherwise all nodes are terminated and launched elsewhere, if
    need be fewer of them. No nodes are terminated while another job uses them.
    """
    needed, living = situation.nodes, len(situation.living)
    waits = situation.moved and situation.waits
    if situation.refusals >= 2 * MAX_REFUSALS + needed and not waits:
        return RecoveryStep(do="end", why="its nodes could not be repaired")
    if situation.refusals < MAX_REFUSALS or waits:
        replaced = tuple(sorted(situation.faulty))
        return RecoveryStep(do="repair", replace=replaced, nodes=needed, pause_s=_pause_s(situation.refusals))
    is_usable = situation.living == tuple(range(living)) and not situation.faulty
    if is_usable and situation.min_nodes <= living < needed:
        return RecoveryStep(do="repair", nodes=living, why="AWS has no capacity for the missing nodes")
    if situation.moved:
        fewer = needed - 1
        if fewer < situation.min_nodes:
            return RecoveryStep(do="end", why="AWS has no capacity for its nodes")
        return RecoveryStep(do="repair", nodes=fewer, why=f"AWS has no capacity for {needed} nodes")
    if situation.shares_nodes:
        return RecoveryStep(do="end", why="AWS has no capacity, and another job uses the living nodes")
    pause_s = _pause_s(situation.refusals - MAX_REFUSALS)
    why = "AWS has no capacity next to the living nodes"
    return RecoveryStep(do="move", nodes=needed, why=why, pause_s=pause_s)


def _pause_s(refusals: int) -> float:
    return min(FIRST_PAUSE_S * 2 ** (refusals - 1), MAX_PAUSE_S) if refusals else 0.0
