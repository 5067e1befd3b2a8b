"""Where a job hangs: judges what the processes of all its nodes do (stacks.py). Pure."""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from awsddp.agent.diagnosis.stacks import Answer, Collective, Group, Process

    Frame = tuple[str, int, str]  # file, line, function

LIVELY_SECONDS = 5.0
"""A collective that began within these tells that the job may be slow, and not stuck."""
_FRAME = re.compile(r'^ +File "(.+)", line (\d{1,9}) in (.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) .*:$", re.MULTILINE)
_INITS = (" in init_process_group", " in _new_group_with_tag")
_BOOTSTRAP = "/multiprocessing/process.py"
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python")
_COLLECTIVE = "torch/distributed/distributed_c10d.py"


class Seen(NamedTuple):
    """What a process does: its `state`, its `stack`, oldest frame first, `where` in that it is, that line."""

    pid: int
    state: str
    where: str | None
    stack: list[str]
    source: str | None


class InFlight(NamedTuple):
    """A collective that is not over."""

    group: str
    number: int
    operation: str


class Rank(NamedTuple):
    """What a rank does: its main process, and the children of that in which user code runs.

    `joined` and `records` are for the judgement alone: no reader is shown them.
    """

    rank: int
    node: int
    state: str
    pid: int | None = None
    where: str | None = None
    stack: Sequence[str] = ()
    workers: Sequence[Seen] = ()
    collective: InFlight | None = None
    source: str | None = None
    joined: bool = False
    records: Mapping[str, Group] = {}


class Diagnosis(NamedTuple):
    """Which ranks of a job are `behind` the others, an `explanation`, and what each of `ranks` does.

    The explanation up to its first colon is a sentence without the places. `moving`: a collective began so
    recently that the job may not hang at all.
    """

    silent_s: float | None
    moving: bool
    behind: list[int]
    explanation: str
    ranks: list[Rank]


def diagnose(
    layout: Sequence[Sequence[int]], answers: Mapping[int, Answer], *, exit_codes: Mapping[int, int | None]
) -> Diagnosis:
    """Return where the ranks of a job are.

    `layout` holds [rank, local rank, node]; `answers` are by node. `exit_codes` has the ranks that ended.
    """
    ranks = [_rank(rank, node, answers.get(node), exit_codes.get(rank)) for rank, _, node in layout]
    behind, explanation = _behind(ranks)
    ages = [group.age for rank in ranks for group in rank.records.values()]
    moving = bool(ages) and min(ages) < LIVELY_SECONDS and all(rank.state == "running" for rank in ranks)
    if moving:
        ago = f"The job may be slow, and not stuck (a collective began {max(0.0, min(ages)):.1f} s ago). "
        explanation = f"{ago}At this moment {explanation[:1].lower()}{explanation[1:]}"
    silent = min((answer.silent_s for answer in answers.values()), default=None)
    return Diagnosis(silent, moving, behind, _sentence(explanation), ranks)


def _rank(rank: int, node: int, answer: Answer | None, exit_code: object) -> Rank:
    if exit_code is not None:
        return Rank(rank, node, "ended")
    if answer is None:
        return Rank(rank, node, "unreachable")
    processes = [one for one in answer.processes if one.rank == rank]
    if not processes:
        return Rank(rank, node, "missing")
    pids = {one.pid for one in processes}
    main = min(processes, key=lambda one: (not one.joined, one.parent in pids, one.pid))
    seen = _seen(main, answer)
    children = [one for one in processes if one is not main and one.parent in pids]
    return Rank(
        rank,
        node,
        **seen._asdict(),
        workers=[_seen(one, answer, own=True) for one in children],
        collective=_in_flight(main.records),
        joined=main.joined,
        records=main.records,
    )


def _seen(process: Process, answer: Answer, *, own: bool = False) -> Seen:
    """Return what a process does; with `own` it is somewhere only where it runs code of the synced folder."""
    frames, thread, workdir = _main_thread(process.stacks), "", answer.workdir
    if frames and frames[-1][0].endswith("/threading.py") and frames[-1][2] == "_shutdown":
        frames, thread = _last_thread(process.stacks, workdir) or frames, _ENDING
    state = "stopped" if process.is_stopped else "running" if frames else "silent"
    stack, at = [_place(frame, workdir) for frame in frames], _innermost(frames, workdir, own=own)
    where, source = at and _place(at, workdir) + thread, at and answer.sources.get(f"{at[0]}:{at[1]}")
    return Seen(process.pid, state, where, stack, source)


_ENDING = " (a thread; the main program has ended and waits for it)"


def _main_thread(text: str) -> list[Frame]:
    """Return the frames of the main thread, oldest first: faulthandler writes the newest thread first."""
    return _frames(_THREAD.split(text)[-1]) if text else []


def _last_thread(text: str, workdir: str) -> list[Frame]:
    """Return the frames of the newest thread that runs code of the synced folder."""
    threads = map(_frames, _THREAD.split(text)[1:-1])
    return next((one for one in threads if any(_is_own(frame[0], workdir) for frame in one)), [])


def _frames(thread: str) -> list[Frame]:
    lines = thread.splitlines()
    found = [match for match in map(_FRAME.match, lines) if match and not match[1].startswith("<frozen ")]
    frames = [(match[1], int(match[2]), match[3]) for match in reversed(found)]
    starts = [
        at for at, frame in enumerate(frames) if frame[0].endswith(_BOOTSTRAP) and frame[2] == "_bootstrap"
    ]
    return frames[starts[-1] + 1 :] if starts else frames  # before it are those of the parent that forked


def _place(frame: Frame, workdir: str) -> str:
    """Return a frame as "train.py:12 in step"; of a library's file what follows its folder of packages."""
    path, line, function = frame
    if workdir and path.startswith(f"{workdir}/"):
        path = path[len(workdir) + 1 :]
    for folder in _LIBRARY[:2]:
        path = path.rpartition(folder)[2]
    return f"{os.path.normpath(path)}:{line} in {function}"


def _innermost(frames: list[Frame], workdir: str, *, own: bool) -> Frame | None:
    """Return the innermost frame of the user's folder; failing that, the innermost outside of libraries."""
    chosen = [frame for frame in frames if _is_own(frame[0], workdir)]
    if not (chosen or own):
        chosen = [frame for frame in frames if not any(folder in frame[0] for folder in _LIBRARY)] or frames
    return chosen[-1] if chosen else None


def _is_own(path: str, workdir: str) -> bool:
    if any(folder in path for folder in _LIBRARY):
        return False
    return path.startswith(f"{workdir}/") or not path.startswith(("/", "<"))


def _in_flight(records: Mapping[str, Group]) -> InFlight | None:
    """Return the first collective that is not over, of the group that has the newest one."""
    for name, group in sorted(records.items(), key=lambda item: item[1].age):
        for call in group.records:
            if not call.over:
                return InFlight(name, call.number, call.operation)
    return None


def _behind(ranks: list[Rank]) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and a sentence or two."""
    for state, what in _STATES.items():
        found = [one for one in ranks if one.state == state]
        if found and len(found) < len(ranks):
            return _named(found), f"{_say(found, *what)}. {_others(ranks, found)}"
    gone = [one for one in ranks if one.state in ("ended", "missing")]
    left = [one for one in ranks if one not in gone]
    if gone and left:
        waiting = [one for one in left if _waits(one)]
        ended = _say(gone, "has ended", "have ended")
        if not waiting:
            return _named(left), f"{_say(left, 'runs', 'run')}: {_places(left)}. {_sentence(ended)}."
        if len(waiting) == len(left):
            return _named(gone), f"{ended} while the others run. {_others(ranks, gone)}"
        ranks = left
    for judge in (_by_start, _by_records, _by_stacks):
        result = judge(ranks)
        if result is not None:
            return result
    places = {one.where for one in ranks}
    same = f"all are at {places.pop()}" if len(places) == 1 else "each does something of its own"
    return [], f"No rank is behind: {_waiting(ranks) or same}."


_STATES = {
    "stopped": (
        "was stopped by a signal (SIGSTOP) or a debugger",
        "were stopped by a signal (SIGSTOP) or a debugger",
    ),
    "unreachable": ("is on a node that does not answer", "are on a node that does not answer"),
}


def _say(ranks: list[Rank], singular: str, plural: str) -> str:
    """Return who does what: "rank 3 (node1) waits", or "ranks 0-2 wait"."""
    return f"{_names(ranks)} {singular if len(ranks) == 1 else plural}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _waits(one: Rank) -> bool:
    """Tell whether a rank is in a collective, or waits for others to join the process group."""
    return bool(one.collective) or any(_COLLECTIVE in place for place in one.stack)


def _by_start(ranks: list[Rank]) -> tuple[list[int], str] | None:
    """Judge a job in which ranks wait for others to join the process group."""
    joining = [one for one in ranks if any(place.endswith(_INITS) for place in one.stack)]
    if not joining:
        return None
    absent = [one for one in ranks if one not in joining and not one.joined]
    if absent:
        waiting = _sentence(_say(joining, "waits in init_process_group.", "wait in init_process_group."))
        missed = f"{_names(absent)} did not join the process group: {_places(absent)}"
        return _named(absent), f"{missed}. {waiting}"
    if len(joining) == len(ranks):
        why = (
            "their addresses, ports, world sizes or ranks differ, or the network between the nodes is closed"
        )
        return [], f"No rank is behind, all wait in init_process_group; {why}."
    return None


def _by_records(ranks: list[Rank]) -> tuple[list[int], str] | None:
    """Judge by the collectives that torch recorded: the first that differs, then the last number."""
    groups = {name for one in ranks for name in one.records}
    for group in sorted(groups, key=lambda name: name != "default_pg"):
        joined = group == "default_pg"
        members = [one for one in ranks if group in one.records or (joined and one.joined)]
        result = _by_difference(members, group) or _by_number(members, group)
        if result is not None:
            return result
    return None


def _by_difference(members: list[Rank], group: str) -> tuple[list[int], str] | None:
    """Find the first number for which ranks called different operations; fewer ranks are wrong than right."""
    calls = [(one, {call.number: call[1:3] for call in _records(one, group)}) for one in members]
    for number in sorted({number for _, numbers in calls for number in numbers}):
        called = [(one, numbers[number]) for one, numbers in calls if number in numbers]
        counts = Counter(call for _, call in called)
        if len(counts) > 1:
            usual = max(counts, key=lambda call: counts[call])
            wrong = [one for one, call in called if call != usual]
            which = ", ".join(sorted({_call(call, usual) for _, call in called if call != usual}))
            right = f"the others called {_call(usual, which)} as collective {number}"
            return _named(wrong), f"{_names(wrong)} called {which} where {right}: {_places(wrong)}."
    return None


def _call(call: tuple[str, str], other: object) -> str:
    return f"{call[0]} of {call[1]}" if isinstance(other, tuple) and other[0] == call[0] else call[0]


def _by_number(members: list[Rank], group: str) -> tuple[list[int], str] | None:
    last = [(one, max((call.number for call in _records(one, group)), default=0)) for one in members]
    most = max((number for _, number in last), default=0)
    behind = [one for one, number in last if number < most]
    return (_named(behind), _elsewhere(behind, members)) if behind else None


def _records(one: Rank, group: str) -> Sequence[Collective]:
    return one.records[group].records if group in one.records else ()


def _by_stacks(ranks: list[Rank]) -> tuple[list[int], str] | None:
    """Judge by the stacks alone: who is in no collective while others are."""
    others = [one for one in ranks if not _waits(one)]
    return (_named(others), _elsewhere(others, ranks)) if 0 < len(others) < len(ranks) else None


def _elsewhere(behind: list[Rank], ranks: list[Rank]) -> str:
    return f"{_say(behind, 'is', 'are')} behind: {_places(behind)}. {_others(ranks, behind)}"


def _others(ranks: list[Rank], behind: list[Rank]) -> str:
    waiting = _waiting([one for one in ranks if one not in behind])
    return f"{_sentence(waiting)}." if waiting else ""


def _waiting(ranks: list[Rank]) -> str:
    """Return where ranks wait, the most frequent place first: "ranks 0-2 wait in all_reduce 12 (...)"."""
    places: dict[str, list[Rank]] = {}
    for one in ranks:
        collective = one.collective
        if collective:
            text = f"{collective.operation} (collective {collective.number}) at {one.where}"
            places.setdefault(text, []).append(one)
    frequent = sorted(places.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{_say(found, 'waits', 'wait')} in {place}" for place, found in frequent[:3])


def _places(ranks: list[Rank]) -> str:
    """Return where ranks are, each place once, with the place of a child in which user code runs."""
    texts = []
    for one in ranks:
        inner = sorted({worker.where for worker in one.workers if worker.where})
        where = one.where or "it gave no stack"
        texts.append(f"{where} (its worker processes: {', '.join(inner[:3])})" if inner else where)
    return "; ".join(dict.fromkeys(texts))


def _named(ranks: list[Rank]) -> list[int]:
    return [one.rank for one in ranks]


def _names(ranks: list[Rank]) -> str:
    """Return "rank 3 (node1)", or "ranks 0-2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0].rank} (node{ranks[0].node})"
    return f"ranks {ranges(_named(ranks))}"


def ranges(numbers: list[int]) -> str:
    """Return numbers in order as "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
