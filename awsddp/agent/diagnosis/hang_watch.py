"""Decide whether a silent job hangs, from two looks at all ranks.

A look has all nodes' stacks, collectives, CPU times and changed results. This module does no I/O and reads no
clock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from awsddp.agent.diagnosis.hang import diagnose, is_joining, is_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from awsddp.agent.diagnosis.hang import Diagnosis, RankState
    from awsddp.agent.diagnosis.stacks import NodeStacks, Process

    Answers = Mapping[int, NodeStacks]

ANSWER_SECONDS = 45.0
"""How long the nodes may take for a look, which includes a search for changed results (changes.py)."""
_LOADER = "torch/utils/data/_utils/worker.py"
_MAX_PLACE, _MAX_TEXT = 200, 2000


class _Limits(NamedTuple):
    """Up to which use per second a process counts as idle: CPU time (s), bytes read from files and pipes, and
    wakeups of its main thread.
    """

    cpu_s: float
    read_bytes: float
    wakeups: float


_USES = {
    "cpu_s": "a process uses {:.0%} of a CPU core",
    "read_bytes": "a process reads {:.0f} bytes per second",
    "wakeups": "a process wakes up {:.0f} times per second",
}
_IDLE = _Limits(0.01, 4096.0, 5.0)
"""For a rank, and for a child that runs user code. NCCL's watchdog thread wakes up 10 times per second
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp), and the main
thread every 5 s if it waits for a DataLoader's workers. Receiving data takes far more wakeups."""
_WAITING = _Limits(float("inf"), 4096.0, float("inf"))
"""For a rank that waits for others in a collective, where it may spin."""
_OTHER = _Limits(0.05, float("inf"), float("inf"))
"""For other children. wandb's process samples the machine while the rank does nothing:
https://docs.wandb.ai/guides/models/track/log/#automatically-logged-metrics"""


class Verdict(NamedTuple):
    """What two looks found. `state` is "hung", "alive" or "unknown", and `text` says why.

    For a job that hangs, `place` is where the rank that is behind is (or else most ranks), and `rank` is the
    rank that is behind, if only one is. `place` has no number of a collective, so that it is the same when
    the job is run again.
    """

    state: str
    text: str
    place: str = ""
    rank: int | None = None


def compare_looks(
    layout: Sequence[Sequence[int]],
    first: Answers,
    second: Answers,
    *,
    seconds: float,
    exit_codes: Mapping[int, int | None],
) -> Verdict:
    """Return the verdict on a silent job from two looks, `seconds` apart.

    `layout` has a row [rank, local rank, node] for each rank, and `exit_codes` has the ranks that have ended.
    Any sign of life makes the job "alive". The job is "hung" only if all ranks could be seen.
    """
    diagnosis = diagnose(layout, second, exit_codes=exit_codes)
    life = next(_find_life(diagnosis, first, second, seconds), "")
    if life:
        return Verdict("alive", f"The job writes nothing, but {life}."[:_MAX_TEXT])
    doubt = next(_find_doubts(diagnosis, first, second), "")
    if doubt:
        return Verdict("unknown", f"The job writes nothing, and awsddp cannot tell if it hangs: {doubt}.")
    rank = diagnosis.behind[0] if len(diagnosis.behind) == 1 else None
    text = f"The job hangs: {diagnosis.explanation[:1].lower()}{diagnosis.explanation[1:]}"
    return Verdict("hung", text[:_MAX_TEXT], find_place(diagnosis), rank)


def find_place(diagnosis: Diagnosis) -> str:
    """Return where the first rank that is behind is, or else where most ranks are ("": not known)."""
    behind = [rank for rank in diagnosis.ranks if rank.rank in diagnosis.behind]
    places = Counter(filter(None, map(_format_place, behind[:1] or diagnosis.ranks)))
    return max(places, key=lambda place: places[place], default="")[:_MAX_PLACE]


def _format_place(rank: RankState) -> str:
    """Return a rank's place, such as "all_reduce at train.py:30 in step"."""
    location = rank.where or ("stopped" if rank.state == "stopped" else "")
    operation = f"{rank.collective.operation} at " if rank.collective and location else ""
    workers = sorted({worker.where for worker in rank.workers if worker.where})
    return f"{operation}{location}{''.join(f' (worker: {worker})' for worker in workers[:1])}"


def _find_life(diagnosis: Diagnosis, first: Answers, second: Answers, seconds: float) -> Iterator[str]:
    """Yield a clause for each sign of life."""
    limits = _idle_limits(diagnosis)
    for node, answer in sorted(second.items()):
        if answer.changed:
            yield f"files of its results on node{node} change"
        if node not in first:
            continue
        before = {process.pid: process for process in first[node].processes}
        if before.keys() != {process.pid for process in answer.processes}:
            yield f"processes on node{node} start or end"
            continue
        for process in answer.processes:
            limit = limits.get((node, process.pid), _OTHER)
            life = _describe_life(before[process.pid], process, limit, seconds)
            if life:
                yield f"{life} (rank {process.rank} on node{node})"


def _idle_limits(diagnosis: Diagnosis) -> dict[tuple[int, int], _Limits]:
    """Return {(node, pid): limits} for the ranks' main processes, and for children that run user code."""
    limits: dict[tuple[int, int], _Limits] = {}
    for rank in diagnosis.ranks:
        for worker in rank.workers:
            if worker.where or any(_LOADER in frame for frame in worker.stack):
                limits[rank.node, worker.pid] = _IDLE
        if rank.pid is not None:
            limits[rank.node, rank.pid] = _WAITING if is_waiting(rank) else _IDLE
    return limits


def _describe_life(before: Process, now: Process, limits: _Limits, seconds: float) -> str:
    """Return a process's first sign of life between two looks, or "" if there is none."""
    if before.is_stopped != now.is_stopped:
        return "a process was stopped or continued"
    if before.stacks and now.stacks and before.stacks != now.stacks:
        return "a stack changes"
    if _numbers(before) != _numbers(now):
        return "collectives begin or end"
    for name, text in _USES.items():
        use = (getattr(now, name) - getattr(before, name)) / max(seconds, 0.001)
        if use > getattr(limits, name):
            return text.format(use)
    return ""


def _numbers(process: Process) -> dict[str, list[tuple[int, bool]]]:
    """Return the collectives that a process has begun, and whether each has ended."""
    return {
        name: [(record.number, record.over) for record in group.records]
        for name, group in process.records.items()
    }


def _find_doubts(diagnosis: Diagnosis, first: Answers, second: Answers) -> Iterator[str]:
    """Yield a clause for each reason why a job without signs of life might still be alive."""
    ranks = [rank for rank in diagnosis.ranks if rank.state != "ended"]
    for node in sorted({rank.node for rank in ranks}):
        if node not in first or node not in second:
            yield f"node{node} did not answer"
        elif second[node].changed is None:
            yield f"the files of its results on node{node} could not be listed"
    for rank in ranks:
        if rank.state == "missing":
            yield f"rank {rank.rank} has no process that can be seen from outside of a container"
        elif rank.state != "stopped" and not _has_stack(rank, first.get(rank.node)):
            yield f"rank {rank.rank} returned no stack"
    if not any(rank.joined or is_joining(rank) for rank in ranks):
        yield "no rank has joined a process group, so the ranks may wait for something else"


def _has_stack(rank: RankState, answer: NodeStacks | None) -> bool:
    """Return True if a rank's main process returned stacks in both looks."""
    processes = answer.processes if answer else []
    return rank.state == "running" and any(process.stacks for process in processes if process.pid == rank.pid)


class HangWatch:
    """When to look at a job's ranks, and what the last two looks found (`verdict`, None while ranks write).

    `since` is when a rank last wrote a line (Unix time), according to the nodes. `pauses` are the seconds of
    silence before the first look, and between the two looks; without them, the watch never looks. After two
    looks, the same silence follows until the next ones. `now` is always in seconds on the same clock.
    """

    def __init__(self, layout: Sequence[Sequence[int]], pauses: Sequence[float]) -> None:
        self._layout, self._pauses = layout, pauses
        self._due_at = float("inf")
        self._look_at: float | None = None  # when the current look began; None: there is none
        self._answers: dict[int, NodeStacks] = {}
        self._first: tuple[float, dict[int, NodeStacks]] | None = None
        self.verdict: Verdict | None = None
        self.since = 0

    def reset(self, now: float) -> None:
        """Begin again, because a rank has written a line."""
        self.verdict = self._look_at = self._first = None
        self._due_at = now + self._pauses[0] if self._pauses else float("inf")

    def receive(self, node: int, answer: NodeStacks) -> None:
        """Take a node's answer to the current look."""
        self._answers[node] = answer

    def is_due(self, now: float) -> bool:
        """Return True if all nodes must be asked for a look now."""
        if self._look_at is not None or now < self._due_at:
            return False
        self._look_at, self._answers = now, {}
        return True

    def conclude(self, now: float, nodes: set[int], exit_codes: Mapping[int, int | None]) -> bool:
        """Return True if there is a new verdict, because all `nodes` have answered or the time is over."""
        late = self._look_at is not None and now >= self._look_at + ANSWER_SECONDS
        if self._look_at is None or not (late or nodes <= self._answers.keys()):
            return False
        look_at, self._look_at = self._look_at, None
        first_at, first = self._first or (look_at, self._answers)
        if self._first is None and not any(answer.changed for answer in self._answers.values()):
            self._first, self._due_at = (look_at, self._answers), look_at + self._pauses[1]
            return False
        self._first, self._due_at = None, now + self._pauses[0]
        layout = [row for row in self._layout if row[2] in nodes]
        self.verdict = compare_looks(
            layout, first, self._answers, seconds=look_at - first_at, exit_codes=exit_codes
        )
        last = (answer.at - answer.silent_s for answer in self._answers.values())
        self.since = round(max(last, default=0.0))
        return True
