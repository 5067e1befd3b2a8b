"""Which of a job's results are fetched now, and which stay on its nodes, with the reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from awsddp import answers
from awsddp.answers import Manifest, ResultFile
from awsddp.asking import answers_of, ask, holders
from awsddp.errors import AwsddpError, NodeError
from awsddp.jobs.files import NodeFile, exclude_patterns, name_at_home, over_limit
from awsddp.jobs.supervisor import requests
from awsddp.nodes.failures import split
from awsddp.nodes.results import Fetched
from awsddp.records import ACTIVE, HomeLink, JobRecord
from awsddp.report import Event, amount, node_name, size_text
from awsddp.values import size_of

if TYPE_CHECKING:
    from awsddp.cluster import Cluster
    from awsddp.nodes.transport import Fleet


MANIFEST_S = 300.0
"""How long a node may take to list its results."""


HASHED_A_SECOND = 20e6
"""Bytes that the slowest disk of a node hashes in a second."""


NAMED = 10
"""How many files are named one by one."""


ALL = "all results"


READABLE = "awsddp exec 'sudo chown -R $USER ~/awsddp/work'   # then fetch again"


class Owed(NamedTuple):
    """What a job made and a node still holds: its path there, its size in bytes, why, and what to type."""

    node: int
    path: str
    size: int
    why: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """The files to fetch by node, the links, and what the nodes still owe afterwards.

    `growing` are files that the job, which runs, was writing or has removed: they come later.
    """

    wanted: dict[int, list[ResultFile]]
    links: list[HomeLink]
    owed: list[Owed]
    growing: list[Owed]

    def after(self, job: JobRecord, fetched: Mapping[int, Fetched]) -> "Selected":
        """Return this with what came otherwise than described: it grows while the job runs, else is owed."""
        again = f"awsddp fetch {job.job}   # again, once nothing writes to it"
        changed = [
            Owed(node, one.path, one.size, "it changed while it was fetched", again)
            for node, came in fetched.items()
            for one in came.changed
        ]
        if job.state in ACTIVE:
            return replace(self, growing=[*self.growing, *changed])
        return replace(self, owed=[*self.owed, *changed])


class Unfetched(NodeError):
    """A part of a job's results is still on the nodes; the rest was fetched."""


def select(
    cluster: "Cluster", fleet: "Fleet", job: JobRecord, nodes: Sequence[int], target: Path
) -> Selected:
    """Ask the nodes for a job's results, and return what is fetched into `target` and what is not.

    Over job.results_limit `cluster.agree` decides. What nobody owes is named, what job.exclude matches
    counted. A node that does not list its results owes them all. Raises NodeError if none does.
    """
    manifests, failures = _manifests(cluster, fleet, job, nodes)
    if failures and not manifests:
        split(failures)
    files, links = name_at_home(manifests)
    files, excess = _within_limit(cluster, job, files, target)
    wanted, unreadable, growing = _hashed(fleet, job, files, list(manifests))
    again = f"awsddp fetch {job.job}   # again, once the node answers"
    unlisted = [Owed(node, ALL, 0, error.message, again) for node, error in failures.items()]
    owed = [*excess, *unreadable, *_skipped(cluster, manifests), *unlisted]
    return Selected(wanted=wanted, links=links, owed=owed, growing=growing)


def say_growing(cluster: "Cluster", job: JobRecord, growing: Sequence[Owed]) -> None:
    """Name what a job that runs has not finished."""
    for node in sorted({one.node for one in growing}):
        paths = [one.path for one in growing if one.node == node]
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        text = f"not fetched, {job.job} still writes: {', '.join(paths[:NAMED])}{more}"
        cluster.on_event(Event(text, node_name(node)))


class Ephemeral(NodeError):
    """Results lie where a stop loses them."""


def refuse_ephemeral(cluster: "Cluster", fleet: "Fleet", jobs: Sequence[JobRecord]) -> None:
    """Raise Ephemeral if results of these jobs that are not fetched are on instance store."""
    for job in jobs:
        manifests, failures = _manifests(cluster, fleet, job, holders(fleet, job))
        split({**manifests, **failures})
        lost = [
            Owed(node, file.path, file.size, "empty after a stop")
            for node, one in manifests.items()
            for file in one.files
            if file.ephemeral
        ]
        if lost:
            raise Ephemeral(
                f"a stop would lose results of {job.job}, which are on instance store",
                _named(lost),
                f"awsddp fetch {job.job}   # once it has ended; then stop\n"
                "awsddp down   # fetch the results, then terminate the nodes",
            )


def unfetched(job: JobRecord, selected: Selected) -> Unfetched:
    """Return the error that lists what the nodes still owe, and how to fetch or discard it."""
    sizes = [one.size for one in selected.owed if one.path != ALL]
    parts = [amount(len(sizes), sum(sizes))] if sizes else []
    parts += [f"everything on {node_name(one.node)}" for one in selected.owed if one.path == ALL]
    exclude = f"awsddp fetch {job.job} -o 'job.exclude=[\"PATTERN\"]'   # leave them on the nodes"
    return Unfetched(
        f"{' and '.join(parts)} of the results of {job.job} are not fetched",
        _named(selected.owed),
        "\n".join(dict.fromkeys([*(one.remedy for one in selected.owed), exclude])),
    )


def _named(owed: Sequence[Owed]) -> str:
    sizes = [f" ({size_text(one.size)})" if one.size else "" for one in owed]  # 0: it is not known
    lines = [
        f"{node_name(one.node)}: {one.path}{size}: {one.why}"
        for one, size in zip(owed[:NAMED], sizes, strict=False)
    ]
    return "\n".join(lines + ([f"and {len(owed) - NAMED} more"] if len(owed) > NAMED else []))


def _manifests(
    cluster: "Cluster", fleet: "Fleet", job: JobRecord, used: Sequence[int]
) -> tuple[dict[int, Manifest], dict[int, NodeError]]:
    """Return what the nodes list, and the errors of those that do not."""
    exclude = exclude_patterns(cluster.job_spec.job.exclude)
    request = requests.Manifest(job=job.job, outputs=cluster.job_spec.job.outputs, exclude=exclude)
    listed = answers_of(fleet, dict.fromkeys(used, request), timeout_s=MANIFEST_S)
    return manifests_of(job, listed)


def manifests_of(
    job: JobRecord, listed: Mapping[int, Manifest | AwsddpError]
) -> tuple[dict[int, Manifest], dict[int, NodeError]]:
    """Return the nodes' lists, their places checked, and the errors of nodes that list nothing."""
    manifests, failures = {}, {}
    for node, answer in listed.items():
        try:
            if isinstance(answer, AwsddpError):
                raise answer
            ranks = [rank.rank for rank in job.ranks if rank.node == node]
            manifests[node] = answers.manifest(answer, node=node, ranks=ranks)
        except NodeError as error:
            failures[node] = error
    return manifests, failures


def _within_limit(
    cluster: "Cluster", job: JobRecord, files: list[NodeFile], target: Path
) -> tuple[list[NodeFile], list[Owed]]:
    """Return what is fetched, and what exceeds job.results_limit, unless it is agreed to."""
    limit = cluster.job_spec.job.results_limit

    def is_home(one: NodeFile) -> bool:
        try:
            return (target / one.home).lstat().st_size == one.file.size
        except OSError:
            return False

    excess = over_limit(files, size_of(limit), is_home=is_home)
    if not excess or cluster.agree(
        f"The results of {job.job} exceed job.results_limit ({limit}) by "
        f"{amount(len(excess), sum(one.file.size for one in excess))}.\nFetch all of it?"
    ):
        return files, []
    left_out, enough = set(excess), math.ceil(sum(one.file.size for one in excess) / 1e9)
    why = f"over job.results_limit ({limit}), the smaller files came first"
    remedy = (
        f"awsddp fetch {job.job} --output PATH   # one of them, or a folder\n"
        f"awsddp fetch {job.job} -o job.results_limit={enough}GB   # all of them"
    )
    return [one for one in files if one not in left_out], [
        Owed(one.node, one.file.path, one.file.size, why, remedy) for one in reversed(excess)
    ]


def _hashed(
    fleet: "Fleet", job: JobRecord, files: list[NodeFile], used: Sequence[int]
) -> tuple[dict[int, list[ResultFile]], list[Owed], list[Owed]]:
    """Return what is fetched, with its hashes, what cannot be read, and what is being written.

    The nodes are asked for the hashes that did not come yet. Only a job that runs is taken to write.
    """
    runs = job.state in ACTIVE
    unhashed = {node: [one for one in files if one.node == node and one.file.sha256 is None] for node in used}
    wishes = {
        node: requests.Hashes(paths=[one.file.path for one in some])
        for node, some in unhashed.items()
        if some
    }
    slowest = max((sum(one.file.size for one in some) for some in unhashed.values()), default=0)
    told = ask(fleet, wishes, timeout_s=MANIFEST_S + slowest / HASHED_A_SECOND)
    found = {
        one.home: entry
        for node, answer in told.items()
        for one, entry in zip(unhashed[node], answer.hashes, strict=True)
    }
    wanted: dict[int, list[ResultFile]] = {node: [] for node in used}
    owed: list[Owed] = []
    growing: list[Owed] = []
    for one in files:
        entry = found.get(one.home)
        read = one.file if entry is None else entry
        is_half = read.writing and not one.home.startswith("logs/")
        if read.sha256 is None or (runs and is_half):
            why = entry.why if entry is not None else "it has no hash"
            (growing if runs else owed).append(Owed(one.node, one.file.path, one.file.size, why, READABLE))
            continue
        wanted[one.node].append(
            msgspec.structs.replace(one.file, home=one.home, size=read.size, sha256=read.sha256)
        )
    return wanted, owed, growing


def _skipped(cluster: "Cluster", manifests: Mapping[int, Manifest]) -> list[Owed]:
    """Report the files that stay on the nodes (those of job.exclude as a count); return what is owed."""
    files = sum(one.excluded.files for one in manifests.values())
    if files:
        size = sum(one.excluded.size for one in manifests.values())
        cluster.say(f"{amount(files, size)}: matched by job.exclude, stays on the nodes")
    skipped = [(node, one) for node, manifest in manifests.items() for one in manifest.skipped]
    named = [(node, one) for node, one in skipped if not one.owed]
    for node, one in named[:NAMED]:
        cluster.on_event(Event(f"not fetched: {one.path}: {one.why}", node_name(node)))
    if len(named) > NAMED:
        cluster.say(f"not fetched: {len(named) - NAMED} more files")
    return [Owed(node, one.path, one.size, one.why, READABLE) for node, one in skipped if one.owed]
