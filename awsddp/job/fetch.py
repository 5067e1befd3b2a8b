"""fetch: a job's results to this machine, verified; then the nodes are released, which may end them.

What stays on the nodes is named, with the reason and what to type.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from awsddp.agent import messages
from awsddp.agent.manifest import digest
from awsddp.agent_client.calls import answers_of
from awsddp.agent_client.job_reports import encode
from awsddp.errors import AwsddpError, Interrupted, NodeError, NotFoundError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import known_jobs, told_job
from awsddp.model.documents import FetchDocument, NodeFiles, in_order
from awsddp.model.events import Event
from awsddp.model.node_answers import Manifest, ResultFile
from awsddp.model.records import ACTIVE, MORE, JobRecord
from awsddp.session.connect import NoNodes, connect_reachable, preconnected_cluster
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.cost import note_fetched
from awsddp.session.locate import find_cluster
from awsddp.session.next_steps import advising
from awsddp.settings.values import size_of
from awsddp.state import TAGS_S
from awsddp.storage.excludes import exclude_patterns
from awsddp.storage.local_names import begins, name_at_home, over_limit
from awsddp.storage.results_dir import draw_loss, older_jobs, refuse_another, still_missing, whole_at_home
from awsddp.storage.saved_job import Changing, Lacking, brought, in_bucket, is_saved
from awsddp.util.format import amount, node_name, size_text
from awsddp.util.parallel import NodesFailed, soon, split

FETCH_S = 600.0
"""How long another client of this machine may take to fetch the same results."""
FRESH_S = 2.0
"""How old the nodes' tags may be that are written back, if no client of this machine has held them since."""
MANIFEST_S = 300.0
"""How long a node may take to list its results."""
NAMED = 10
"""How many files are named one by one."""
ALL = "all results"
READABLE = (
    "awsddp exec 'sudo find ~/awsddp/work ! -user $USER -exec chown -h $USER {} +'   # then fetch again"
)


def fetch(
    session: Session,
    *,
    job: str | None = None,
    anew: bool = False,
    start: Callable[[], object],
) -> FetchDocument:
    """Fetch the results of a job (`JobRegistry.name`; the last by default), and return the `fetch` document.

    Results that are here already need no node, unless `anew`. Nodes that stopped with results are started
    by `start` (it raises to refuse); the document then has `started`; but what is all in S3, or has no node
    any more, or loses its nodes meanwhile, comes from there. If a part is missing the rest is fetched, and
    NodeError, of S3 also Changing, is raised with the document as its `result`. Raises NotFoundError for an
    unknown job, NoNodes.
    """
    if is_saved(job):
        return _fetch_saved(session, job)
    job = JobRegistry(session).name(job)
    try:
        return _fetch(session, job, anew)
    except (NotFoundError, NoNodes) as error:
        known = None if anew else JobRegistry(session).find(job)
        saved = known and known.job.save_to and f"{known.job.save_to}/{known.job.job}"
        if known and saved and (isinstance(error, NotFoundError) or in_bucket(session, known.job)):
            session.say(f"{error.message}: fetching {saved}")
            rows = known.past.rows if known.past else ()
            is_local = session.local or any(row.target == "local" for row in rows)
            return fetch(replace(session, local=is_local), job=saved, start=start)
        stopped = error.stopped if isinstance(error, NoNodes) else ()
        if not stopped or not {job, MORE} & {None, *stopped}:
            raise
    except NodesFailed as error:  # another client may have ended them meanwhile
        known = JobRegistry(session).find(job)
        if known and in_bucket(session, known.job):
            saved = f"{known.job.save_to}/{known.job.job}"
            session.say(f"{error.message}: fetching {saved}")
            return fetch(session, job=saved, start=start)
        if _are_ended(session):
            failed = "the nodes were ended while their results were fetched"
            why = "another client did that, and fetched the results there unless it discarded them"
            raise NodeError(failed, why, "awsddp jobs") from error
        raise
    start()
    return structs.replace(_fetch(session, job, anew), started=True)


def _are_ended(session: Session) -> bool:
    """Tell whether AWS lists no node of the cluster that lives."""
    try:
        with find_cluster(session) as cluster:
            return cluster.listed is None or not cluster.listed.live
    except AwsddpError:
        return False


def fetch_jobs(
    session: Session,
    names: Sequence[str],
    *,
    fetch_one: Callable[[str | None], FetchDocument],
    on_document: Callable[[FetchDocument], object],
) -> list[FetchDocument]:
    """Fetch the results of several jobs, each with `fetch_one`; "all" means all that the nodes know.

    `on_document` gets each document as it is there. A job whose results cannot be fetched does not stop the
    others: the first such error is raised at the end.
    """
    if "all" in names:
        with preconnected_cluster(session) as cluster:
            names = [one.job for one in known_jobs(cluster)]
    failed: AwsddpError | None = None
    documents = []
    for name in dict.fromkeys(names):
        try:
            with advising(session):
                documents.append(fetch_one(name))
        except Interrupted:
            raise
        except AwsddpError as error:
            session.say(f"{name}: {error.summary}")
            failed = failed or error
            if error.result is None:
                continue
            documents.append(error.result)
        on_document(documents[-1])
    if failed is not None:
        failed.result = None  # it has been reported
        raise failed
    return documents


def _fetch_saved(session: Session, uri: str) -> FetchDocument:
    try:
        found, fetched = brought(session, uri, whole=True)
    except (Changing, Lacking) as error:
        draw_loss(session.results / error.job.job)
        error.result = _document(session, error.fetched, error.job.job)
        raise
    draw_loss(session.results / found.job)
    return _document(session, fetched, found.job)


def _fetch(session: Session, job: str | None, anew: bool) -> FetchDocument:
    last = job or next((one.job.job for one in reversed(JobRegistry(session).own)), None)
    kept = whole_at_home(session, last) if last is not None and not anew else None
    try:
        with preconnected_cluster(session) as cluster:
            if kept is not None and job not in (None, *cluster.unfetched):
                return _kept(session, kept)
            with connect_reachable(cluster) as connected:
                chosen = told_job(connected, job)
                fetched = bring(connected, chosen)
                session.folder.remember(chosen)
                lost = still_missing(connected, chosen)
    except (NotFoundError, NoNodes) as none:
        if kept is None or (isinstance(none, NoNodes) and job is None and none.stopped):
            raise
        return _kept(session, kept)
    result = _document(session, fetched, chosen.job)
    if lost:
        why = "\n".join(lost.values())
        error = NodeError(f"a part of the results of {chosen.job} is missing", why, "awsddp status")
        error.result = result
        raise error
    return result


def _document(session: Session, fetched: Mapping[int, NodeFiles], job: str) -> FetchDocument:
    return FetchDocument(nodes=in_order(fetched), job=job, home=str(session.results / job))


def _kept(session: Session, job: JobRecord) -> FetchDocument:
    session.say(f"the results of {job.job} are already fetched")
    return _document(session, {}, job.job)


def bring(connected: ConnectedCluster, job: JobRecord, *, waits: bool = True) -> dict[int, NodeFiles]:
    """Fetch a job's results from the nodes that can be reached now, verify them, then release the nodes.

    The job that is written beside them says what is missing. One client at a time does so. Those of a job
    that saves to S3 are released after its last upload (`waits`). Over
    job.results_limit `session.agree` decides. Raises Unfetched where something that the job made stays on the
    nodes, NodeError where a node does not send what it listed, ConfigError where the disk is full, or the
    folder another job's.
    """
    refuse_another(connected.session, job)
    lost = still_missing(connected, job)
    job = replace(job, missing=tuple(lost))
    with connected.session.folder.lock("fetch", part="results", wait_s=FETCH_S):
        connected.session.folder.remember(job)
        return _bring(connected, job, lost, waits=waits and job.save_to is not None)


def _bring(
    connected: ConnectedCluster, job: JobRecord, lost: Mapping[int, str], *, waits: bool
) -> dict[int, NodeFiles]:
    from awsddp.aws.power import release, unfetched_of
    from awsddp.nodes.download import by_rsync, pull

    session = connected.session
    folder = session.results / job.job
    nodes, began = connected.fleet.holders(job), time.monotonic()
    held = [node for node in connected.cluster.nodes if node.node in nodes]
    tagged = soon(unfetched_of, connected.cluster.aws, held) if held and job.state not in ACTIVE else None
    selected = select(connected, job, nodes, folder)

    def job_json(changed: Sequence[ResultFile]) -> dict[str, bytes]:
        # What came otherwise than described grows while the job runs, else it is owed.
        again = f"awsddp fetch {job.job}   # again, once nothing writes to it"
        late = selected.growing if job.state in ACTIVE else selected.owed
        why = "it changed while it was fetched"
        late += [Owed(one.node, one.path, one.size, why, again) for one in changed]
        missing = sorted({*job.missing, *(one.node for one in selected.owed)})
        return {"job.json": encode(replace(job, missing=tuple(missing)))}

    def look(nodes: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        listed, failures = _manifests(connected, job, nodes, at_once=0)
        split({**listed, **failures})
        return {(node, one.path): one for node, manifest in listed.items() for one in manifest.files}

    fetched = pull(
        selected.wanted,
        folder,
        transfer=by_rsync(session.folder.ssh_config),
        look=look,
        begins=begins,
        grown=job.state in ACTIVE,
        also=job_json,
        on_event=session.on_event,
    )
    note_fetched(connected.cluster, job.job, sum(one.bytes for one in fetched.values()))
    draw_loss(folder)
    say_growing(session, job, selected.growing)
    if selected.owed:
        raise _unfetched(job, selected.owed, lost)
    if tagged is not None:
        if waits:
            from awsddp.job.save_to_s3 import abort, wait_until_saved

            if wait_until_saved(connected, job):
                abort(connected.cluster, [job])
        with session.folder.lock("train", part="tags", wait_s=TAGS_S) as free_s:
            # A file's time is up to 10 ms late.
            fresh = time.monotonic() - began < min(free_s - 0.1, FRESH_S)
            older = older_jobs(connected, tagged.result())
            release(
                connected.cluster.aws, held, job.job, tagged=tagged.result() if fresh else None, older=older
            )
    return fetched


class Owed(NamedTuple):
    """What a job made and a node still holds: its path there, its size in bytes, why, and what to type."""

    node: int
    path: str
    size: int
    why: str
    remedy: str = ""


@dataclass(kw_only=True)
class Selected:
    """The files and links to fetch by node, and what the nodes still owe afterwards.

    `growing` are files that the job, which runs, was writing or has removed: they come later.
    """

    wanted: dict[int, list[ResultFile]]
    owed: list[Owed] = field(default_factory=list)
    growing: list[Owed] = field(default_factory=list)


class Unfetched(NodeError):
    """A part of a job's results is still on the nodes; the rest was fetched."""


def select(connected: ConnectedCluster, job: JobRecord, nodes: Sequence[int], target: Path) -> Selected:
    """Ask the nodes for a job's results, and return what is fetched into `target` and what is not.

    Over job.results_limit `session.agree` decides. What nobody owes is named, what job.exclude matches
    counted. A node that does not list its results owes them all. Raises NodeError if none does.
    """
    manifests, failures = _manifests(connected, job, nodes)
    if failures and not manifests:
        split(failures)
    selected = Selected(wanted={node: [] for node in manifests})
    described = name_at_home(manifests)
    targets = {one.target for one in described if one.target is not None}
    files = [one for one in described if _is_in(targets, one.home) or not _is_synced(connected.session, one)]
    _take(job, _within_limit(connected.session, job, files, target, selected), selected)
    again = f"awsddp fetch {job.job}   # again, once the node answers"
    selected.owed += _skipped(connected.session, manifests)
    selected.owed += [Owed(node, ALL, 0, error.message, again) for node, error in failures.items()]
    return selected


def _is_in(targets: Collection[str], home: str) -> bool:
    """Tell whether a link of the results leads to a file, or to a folder above it."""
    return any(home == target or home.startswith(f"{target}/") for target in targets)


def _is_synced(session: Session, one: ResultFile) -> bool:
    """Tell whether a file that the job may only have touched, as chown -R does, holds what is in the synced
    folder here.
    """
    if one.digest is None:
        return False
    path = Path(session.job_spec.sync.workdir, one.home.partition("/")[2])
    with contextlib.suppress(OSError):
        return path.stat().st_size == one.size and digest(path) == one.digest
    return False


def say_growing(session: Session, job: JobRecord, growing: Sequence[Owed]) -> None:
    """Name what a job that runs has not finished."""
    for node in sorted({one.node for one in growing}):
        paths = [one.path for one in growing if one.node == node]
        more = f" and {len(paths) - NAMED} more" if len(paths) > NAMED else ""
        text = f"not fetched, {job.job} still writes: {', '.join(paths[:NAMED])}{more}"
        session.on_event(Event(text, node_name(node)))


class Ephemeral(NodeError):
    """Results lie where a stop loses them."""


def refuse_ephemeral(connected: ConnectedCluster, jobs: Sequence[JobRecord]) -> None:
    """Raise Ephemeral if results of these jobs that are not fetched are on instance store."""
    for job in jobs:
        manifests, failures = _manifests(connected, job, connected.fleet.holders(job), at_once=0)
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


def _unfetched(job: JobRecord, owed: Sequence[Owed], lost: Mapping[int, str]) -> Unfetched:
    """Return the error that lists what the nodes still owe and how to get or leave it, and what is `lost`."""
    sizes = [one.size for one in owed if one.path != ALL]
    parts = [amount(len(sizes), sum(sizes))] if sizes else []
    parts += [f"everything on {node_name(one.node)}" for one in owed if one.path == ALL]
    exclude = f"awsddp fetch {job.job} -o 'job.exclude=[\"PATTERN\"]'   # leave them on the nodes"
    return Unfetched(
        f"{' and '.join(parts)} of the results of {job.job} are not fetched",
        "\n".join((_named(owed), *lost.values())),
        "\n".join(dict.fromkeys([*(one.remedy for one in owed), exclude])),
    )


def _named(owed: Sequence[Owed]) -> str:
    sizes = [f" ({size_text(one.size)})" if one.size else "" for one in owed]  # 0: it is not known
    lines = [
        f"{node_name(one.node)}: {one.path}{size}: {one.why}"
        for one, size in zip(owed[:NAMED], sizes, strict=False)
    ]
    return "\n".join(lines + ([f"and {len(owed) - NAMED} more"] if len(owed) > NAMED else []))


def _manifests(
    connected: ConnectedCluster, job: JobRecord, used: Collection[int], **more: Any
) -> tuple[dict[int, Manifest], dict[int, NodeError]]:
    """Return what the nodes list, and the errors of those that do not."""
    request = manifest_request(connected.session, job, **more)
    listed = answers_of(connected.fleet, dict.fromkeys(used, request), timeout_s=MANIFEST_S)
    failures = {node: one for node, one in listed.items() if isinstance(one, NodeError)}
    return split({node: one for node, one in listed.items() if node not in failures}), failures


def manifest_request(session: Session, job: JobRecord, **more: Any) -> messages.Manifest:
    """Return the request for the list of a job's results; `more` as for messages.Manifest."""
    asked = session.job_spec.job
    ranks = [(rank.rank, rank.node) for rank in job.ranks]
    exclude = exclude_patterns(asked.exclude)
    return messages.Manifest(job=job.job, ranks=ranks, outputs=asked.outputs, exclude=exclude, **more)


def _within_limit(
    session: Session, job: JobRecord, files: list[ResultFile], target: Path, selected: Selected
) -> list[ResultFile]:
    """Return what is fetched; what exceeds job.results_limit is owed, unless it is agreed to."""
    limit = session.job_spec.job.results_limit
    excess = over_limit(files, size_of(limit), results=target)
    if not excess or session.agree(
        f"The results of {job.job} exceed job.results_limit ({limit}) by "
        f"{amount(len(excess), sum(one.size for one in excess))}.\nFetch all of it?"
    ):
        return files
    left_out, enough = {one.home for one in excess}, math.ceil(sum(one.size for one in excess) / 1e9)
    why = f"over job.results_limit ({limit}), the smaller files came first"
    remedy = (
        f"awsddp fetch {job.job} --output PATH   # one of them, or a folder\n"
        f"awsddp fetch {job.job} -o job.results_limit={enough}GB   # all of them"
    )
    selected.owed += [Owed(one.node, one.path, one.size, why, remedy) for one in reversed(excess)]
    return [one for one in files if one.home not in left_out]


def _take(job: JobRecord, files: list[ResultFile], selected: Selected) -> None:
    """Select these files; but what a job that runs is writing grows."""
    for one in files:
        if job.state in ACTIVE and one.writing:
            selected.growing.append(Owed(one.node, one.path, one.size, ""))
        else:
            selected.wanted[one.node].append(one)


def _skipped(session: Session, manifests: Mapping[int, Manifest]) -> list[Owed]:
    """Report the files that stay on the nodes (those of job.exclude as a count); return what is owed."""
    files = sum(one.excluded.files for one in manifests.values())
    if files:
        size = sum(one.excluded.size for one in manifests.values())
        session.say(f"{amount(files, size)}: matched by job.exclude, stays on the nodes")
    skipped = [(node, one) for node, manifest in manifests.items() for one in manifest.skipped]
    named = [(node, one) for node, one in skipped if not one.owed]
    for node, one in named[:NAMED]:
        session.on_event(Event(f"not fetched: {one.path}: {one.why}", node_name(node)))
    if len(named) > NAMED:
        session.say(f"not fetched: {len(named) - NAMED} more files")
    return [Owed(node, one.path, one.size, one.why, READABLE) for node, one in skipped if one.owed]
