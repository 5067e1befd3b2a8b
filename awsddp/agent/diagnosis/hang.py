"""Find the ranks that make a job hang, from the stacks and collectives that all nodes send (stacks.py).

This module does no I/O.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from awsddp.agent.diagnosis.stacks import Collective, GroupRecords, NodeStacks, Process

    Frame = tuple[str, int, str]  # file, line, function

RECENT_SECONDS = 5.0
"""If a collective began within this time, the job may be slow rather than stuck."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d{1,9}) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*:$", re.MULTILINE)
_INITS = (" in init_process_group", " in _new_group_with_tag")
_BOOTSTRAP = "/multiprocessing/process.py"
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python")
_COLLECTIVE = "torch/distributed/distributed_c10d.py"


class ProcessState(NamedTuple):
    """The state of a process.

    `stack` has the process's frames, oldest first. `where` is the frame to show, and `source` is its line of
    code.
    """

    pid: int
    state: str
    where: str | None
    stack: list[str]
    source: str | None


class InFlight(NamedTuple):
    """A collective in progress."""

    group: str
    number: int
    operation: str


class RankState(NamedTuple):
    """A rank has a main process, which can have child processes that run user code (`workers`).

    `joined` and `records` are used only for the diagnosis, and are not shown.
    """

    rank: int
    node: int
    state: str
    pid: int | None = None
    where: str | None = None
    stack: Sequence[str] = ()
    workers: Sequence[ProcessState] = ()
    collective: InFlight | None = None
    source: str | None = None
    joined: bool = False
    records: Mapping[str, GroupRecords] = {}


class Diagnosis(NamedTuple):
    """A diagnosis has the ranks that are `behind` the others, an `explanation`, and the state of all `ranks`.

    The part of the explanation before the first colon contains no lines of code. `moving` is true if a
    collective began so recently that the job may be slow rather than stuck.
    """

    silent_s: float | None
    moving: bool
    behind: list[int]
    explanation: str
    ranks: list[RankState]


def diagnose(
    layout: Sequence[Sequence[int]],
    answers: Mapping[int, NodeStacks],
    *,
    exit_codes: Mapping[int, int | None],
) -> Diagnosis:
    """Return the diagnosis of a job.

    `layout` has a row [rank, local rank, node] for each rank. `answers` maps each node that answered to its
    stacks, and `exit_codes` maps each rank that has ended to its exit code.
    """
    ranks = [_rank(rank, node, answers.get(node), exit_codes.get(rank)) for rank, _, node in layout]
    behind, explanation = _find_behind(ranks)
    ages = [group.age for rank in ranks for group in rank.records.values()]
    moving = bool(ages) and min(ages) < RECENT_SECONDS and all(rank.state == "running" for rank in ranks)
    if moving:
        note = f"The job may be slow rather than stuck (a collective began {max(0.0, min(ages)):.1f} s ago). "
        explanation = f"{note}At this moment {explanation[:1].lower()}{explanation[1:]}"
    silent_s = min((answer.silent_s for answer in answers.values()), default=None)
    return Diagnosis(silent_s, moving, behind, _sentence(explanation), ranks)


def _rank(rank: int, node: int, answer: NodeStacks | None, exit_code: object) -> RankState:
    if exit_code is not None:
        return RankState(rank, node, "ended")
    if answer is None:
        return RankState(rank, node, "unreachable")
    processes = [process for process in answer.processes if process.rank == rank]
    if not processes:
        return RankState(rank, node, "missing")
    pids = {process.pid for process in processes}
    main = min(processes, key=lambda process: (not process.joined, process.parent in pids, process.pid))
    state = _process_state(main, answer)
    children = [process for process in processes if process is not main and process.parent in pids]
    return RankState(
        rank,
        node,
        **state._asdict(),
        workers=[_process_state(child, answer, in_folder_only=True) for child in children],
        collective=_in_flight(main.records),
        joined=main.joined,
        records=main.records,
    )


def _process_state(process: Process, answer: NodeStacks, *, in_folder_only: bool = False) -> ProcessState:
    """Return a process's state.

    With `in_folder_only`, `where` is None unless the process runs code from the project folder.
    """
    frames, thread, workdir = _main_thread(process.stacks), "", answer.workdir
    if frames and frames[-1][0].endswith("/threading.py") and frames[-1][2] == "_shutdown":
        frames, thread = _last_thread(process.stacks, workdir) or frames, _ENDING
    state = "stopped" if process.is_stopped else "running" if frames else "silent"
    stack = [_format_frame(frame, workdir) for frame in frames]
    innermost = _innermost(frames, workdir, in_folder_only=in_folder_only)
    location = innermost and _format_frame(innermost, workdir) + thread
    source = innermost and answer.sources.get(f"{innermost[0]}:{innermost[1]}")
    return ProcessState(process.pid, state, location, stack, source)


_ENDING = " (a thread; the main thread has ended and waits for this thread)"


def _main_thread(text: str) -> list[Frame]:
    """Return the main thread's frames, oldest first. faulthandler writes the newest thread first."""
    return _frames(_THREAD.split(text)[-1]) if text else []


def _last_thread(text: str, workdir: str) -> list[Frame]:
    """Return the frames of the newest thread that runs code from the project folder."""
    threads = map(_frames, _THREAD.split(text)[1:-1])
    return next((thread for thread in threads if any(_is_own(frame[0], workdir) for frame in thread)), [])


def _frames(thread: str) -> list[Frame]:
    lines = thread.splitlines()
    matches = [match for match in map(_FRAME.match, lines) if match and not match[1].startswith("<frozen ")]
    frames = [(match[1], int(match[2]), match[3]) for match in reversed(matches)]
    starts = [
        at for at, frame in enumerate(frames) if frame[0].endswith(_BOOTSTRAP) and frame[2] == "_bootstrap"
    ]
    # The frames before _bootstrap belong to the parent process, which forked this process.
    return frames[starts[-1] + 1 :] if starts else frames


def _format_frame(frame: Frame, workdir: str) -> str:
    """Return a frame as "train.py:12 in step"; a library file's path is relative to site-packages."""
    path, line, function = frame
    if workdir and path.startswith(f"{workdir}/"):
        path = path[len(workdir) + 1 :]
    for folder in _LIBRARY[:2]:
        path = path.rpartition(folder)[2]
    return f"{os.path.normpath(path)}:{line} in {function}"


def _innermost(frames: list[Frame], workdir: str, *, in_folder_only: bool) -> Frame | None:
    """Return the innermost frame in the project folder, or None if there is none.

    Without `in_folder_only`, fall back to the innermost frame outside of libraries, or else to the innermost
    frame.
    """
    candidates = [frame for frame in frames if _is_own(frame[0], workdir)]
    if not (candidates or in_folder_only):
        outside = [frame for frame in frames if not any(folder in frame[0] for folder in _LIBRARY)]
        candidates = outside or frames
    return candidates[-1] if candidates else None


def _is_own(path: str, workdir: str) -> bool:
    if any(folder in path for folder in _LIBRARY):
        return False
    return path.startswith(f"{workdir}/") or not path.startswith(("/", "<"))


def _in_flight(records: Mapping[str, GroupRecords]) -> InFlight | None:
    """Return a collective in progress, or None. The group with the newest collective is searched first."""
    for name, group in sorted(records.items(), key=lambda item: item[1].age):
        for call in group.records:
            if not call.over:
                return InFlight(name, call.number, call.operation)
    return None


def _find_behind(ranks: list[RankState]) -> tuple[list[int], str]:
    """Return the ranks that the others are waiting for, and an explanation."""
    for state, verbs in _STATES.items():
        affected = [rank for rank in ranks if rank.state == state]
        if affected and len(affected) < len(ranks):
            return _numbers(affected), f"{_clause(affected, *verbs)}. {_format_others(ranks, affected)}"
    gone = [rank for rank in ranks if rank.state in ("ended", "missing")]
    remaining = [rank for rank in ranks if rank not in gone]
    if gone and remaining:
        waiting = [rank for rank in remaining if is_waiting(rank)]
        ended = _clause(gone, "has ended", "have ended")
        if not waiting:
            runs = f"{_clause(remaining, 'runs', 'run')}: {_format_places(remaining)}"
            return _numbers(remaining), f"{runs}. {_sentence(ended)}."
        if len(waiting) == len(remaining):
            return _numbers(gone), f"{ended} while the others run. {_format_others(ranks, gone)}"
        ranks = remaining
    for judge in (_judge_by_start, _judge_by_records, _judge_by_stacks):
        result = judge(ranks)
        if result is not None:
            return result
    places = {rank.where for rank in ranks}
    same = f"all are at {places.pop()}" if len(places) == 1 else "all are at different places"
    return [], f"No rank is behind: {_format_waiting(ranks) or same}."


_STATES = {
    "stopped": (
        "was stopped by a signal (SIGSTOP) or a debugger",
        "were stopped by a signal (SIGSTOP) or a debugger",
    ),
    "unreachable": ("is on a node that does not answer", "are on a node that does not answer"),
}


def _clause(ranks: list[RankState], singular: str, plural: str) -> str:
    """Return text with the ranks and a verb: "rank 3 (node1) waits", or "ranks 0-2 wait"."""
    return f"{_names(ranks)} {singular if len(ranks) == 1 else plural}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def is_waiting(rank: RankState) -> bool:
    """Return True if a rank is in a collective or waits for others to join the process group."""
    return bool(rank.collective) or any(_COLLECTIVE in frame for frame in rank.stack)


def is_joining(rank: RankState) -> bool:
    """Return True if a rank waits for others to join the process group."""
    return any(frame.endswith(_INITS) for frame in rank.stack)


def _judge_by_start(ranks: list[RankState]) -> tuple[list[int], str] | None:
    """Diagnose a job in which ranks wait for other ranks to join the process group."""
    joining = [rank for rank in ranks if is_joining(rank)]
    if not joining:
        return None
    absent = [rank for rank in ranks if rank not in joining and not rank.joined]
    if absent:
        waiting = _sentence(_clause(joining, "waits in init_process_group.", "wait in init_process_group."))
        missed = f"{_names(absent)} did not join the process group: {_format_places(absent)}"
        return _numbers(absent), f"{missed}. {waiting}"
    if len(joining) == len(ranks):
        why = (
            "their addresses, ports, world sizes or ranks differ, or the network between the nodes is closed"
        )
        return [], f"No rank is behind, because all wait in init_process_group. {_sentence(why)}."
    return None


def _judge_by_records(ranks: list[RankState]) -> tuple[list[int], str] | None:
    """Diagnose a job from the collectives that torch recorded.

    In each group, first compare the operations, then the number of each rank's last collective.
    """
    groups = {name for rank in ranks for name in rank.records}
    for group in sorted(groups, key=lambda name: name != "default_pg"):
        is_default = group == "default_pg"
        members = [rank for rank in ranks if group in rank.records or (is_default and rank.joined)]
        result = _judge_by_difference(members, group) or _judge_by_number(members, group)
        if result is not None:
            return result
    return None


def _judge_by_difference(members: list[RankState], group: str) -> tuple[list[int], str] | None:
    """Find the first collective in which ranks called different operations.

    Return the ranks whose operation differs from the most frequent operation, and an explanation, or None.
    """
    calls_of_ranks = [(rank, {call.number: call[1:3] for call in _records(rank, group)}) for rank in members]
    for number in sorted({number for _, numbers in calls_of_ranks for number in numbers}):
        called = [(rank, numbers[number]) for rank, numbers in calls_of_ranks if number in numbers]
        counts = Counter(call for _, call in called)
        if len(counts) > 1:
            usual_call = max(counts, key=lambda call: counts[call])
            wrong = [rank for rank, call in called if call != usual_call]
            wrong_calls = {_format_call(call, usual_call) for _, call in called if call != usual_call}
            wrong_text = f"{_names(wrong)} called {', '.join(sorted(wrong_calls))}"
            usual_text = f"the others called {usual_call[0]} as collective {number}"
            return _numbers(wrong), f"{wrong_text} where {usual_text}: {_format_places(wrong)}."
    return None


def _format_call(call: tuple[str, str], other: object) -> str:
    return f"{call[0]} of {call[1]}" if isinstance(other, tuple) and other[0] == call[0] else call[0]


def _judge_by_number(members: list[RankState], group: str) -> tuple[list[int], str] | None:
    last = [(rank, max((call.number for call in _records(rank, group)), default=0)) for rank in members]
    most = max((number for _, number in last), default=0)
    behind = [rank for rank, number in last if number < most]
    return (_numbers(behind), _format_behind(behind, members)) if behind else None


def _records(rank: RankState, group: str) -> Sequence[Collective]:
    return rank.records[group].records if group in rank.records else ()


def _judge_by_stacks(ranks: list[RankState]) -> tuple[list[int], str] | None:
    """Diagnose a job from the stacks only. If some ranks are in a collective, all other ranks are behind."""
    others = [rank for rank in ranks if not is_waiting(rank)]
    return (_numbers(others), _format_behind(others, ranks)) if 0 < len(others) < len(ranks) else None


def _format_behind(behind: list[RankState], ranks: list[RankState]) -> str:
    places = _format_places(behind)
    return f"{_clause(behind, 'is', 'are')} behind: {places}. {_format_others(ranks, behind)}"


def _format_others(ranks: list[RankState], behind: list[RankState]) -> str:
    waiting = _format_waiting([rank for rank in ranks if rank not in behind])
    return f"{_sentence(waiting)}." if waiting else ""


def _format_waiting(ranks: list[RankState]) -> str:
    """Return text on where ranks wait, such as "ranks 0-2 wait in all_reduce (collective 12) at ...".

    The collective in which most ranks wait comes first.
    """
    places: dict[str, list[RankState]] = {}
    for rank in ranks:
        collective = rank.collective
        if collective:
            text = f"{collective.operation} (collective {collective.number}) at {rank.where}"
            places.setdefault(text, []).append(rank)
    frequent = sorted(places.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{_clause(waiting, 'waits', 'wait')} in {place}" for place, waiting in frequent[:3])


def _format_places(ranks: list[RankState]) -> str:
    """Return the current frames of the ranks and of their children that run user code, without duplicates."""
    texts = []
    for rank in ranks:
        worker_frames = sorted({worker.where for worker in rank.workers if worker.where})
        location = rank.where or "it returned no stack"
        workers = f" (its worker processes: {', '.join(worker_frames[:3])})" if worker_frames else ""
        texts.append(f"{location}{workers}")
    return "; ".join(dict.fromkeys(texts))


def _numbers(ranks: list[RankState]) -> list[int]:
    return [rank.rank for rank in ranks]


def _names(ranks: list[RankState]) -> str:
    """Return "rank 3 (node1)", or "ranks 0-2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} (node{ranks[0].node})"
    return f"ranks {format_ranges(_numbers(ranks))}"


def format_ranges(numbers: list[int]) -> str:
    """Return sorted numbers as "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
