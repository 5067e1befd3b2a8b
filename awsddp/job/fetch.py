"""fetch: download and verify a job's results, then release the nodes, so that they may terminate.

Files that stay on the nodes are reported with the reason and the next step.
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
from awsddp.agent_client.calls import call_each_node
from awsddp.agent_client.job_reports import encode_job
from awsddp.errors import AwsddpError, Interrupted, NodeError, NotFoundError
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import find_job_on_nodes, query_jobs
from awsddp.model.documents import FetchDocument, NodeFiles, sort_by_node
from awsddp.model.events import Event
from awsddp.model.node_answers import Manifest, ResultFile
from awsddp.model.records import ACTIVE, OLDER_JOBS, JobRecord
from awsddp.session.connect import NoReachableNodes, connect_reachable, preconnected_cluster
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.cost import record_fetch_cost
from awsddp.session.locate import find_cluster
from awsddp.session.next_steps import completing_errors
from awsddp.settings.values import parse_size
from awsddp.state import TAG_CHANGE_S
from awsddp.storage.excludes import exclude_patterns
from awsddp.storage.local_names import assign_local_names, find_excess_files, matches_sample
from awsddp.storage.results_dir import (
    find_fetched_job,
    find_unfetched_parts,
    list_older_jobs,
    refuse_other_job,
    write_loss_plot,
)
from awsddp.storage.saved_job import (
    FilesChanged,
    IncompleteUpload,
    download_saved_job,
    is_s3_uri,
    verify_in_s3,
)
from awsddp.util.formatting import files_text, node_name, size_text
from awsddp.util.parallel import NodesFailed, results_or_raise, run_in_thread

FETCH_S = 600.0
"""How long another client on this machine may take to fetch the same results."""
FRESH_S = 2.0
"""The maximum age of node tags that are used without another read. Older tags are read again, and so are tags
that another client on this machine may have changed."""
MANIFEST_S = 300.0
"""How long a node may take to list its results."""
MAX_NAMED = 10
"""The maximum number of files that a message names."""
ALL_RESULTS = "all results"
CHANGE_OWNER = (
    "awsddp exec 'sudo find ~/awsddp/work ! -user $USER -exec chown -h $USER {} +'   # then fetch again"
)


def fetch(
    session: Session,
    *,
    job: str | None = None,
    refetch: bool = False,
    start: Callable[[], object],
) -> FetchDocument:
    """Fetch the results of the job that `resolve_name` finds (by default, the last job); return the `fetch`
    document.

    No node is needed for results that are already fetched, unless `refetch` is set. If the results are on
    stopped nodes, `start` is called to start the nodes, and the document then has the field `started`. To
    refuse, `start` raises an exception. Results are fetched from S3 if the nodes cannot be reached but S3 has
    all results, if the job has no nodes any more, or if its nodes are lost during the fetch. If a part is
    missing, the other parts are fetched. Then NodeError (or, for S3, FilesChanged) is raised, and the error's
    `result` is the document. Raises NoReachableNodes, or NotFoundError for an unknown job.
    """
    if is_s3_uri(job):
        return _fetch_saved(session, job)
    job = JobRegistry(session).resolve_name(job)
    try:
        return _fetch(session, job, refetch)
    except (NotFoundError, NoReachableNodes) as error:
        view = None if refetch else JobRegistry(session).find(job)
        saved = view and view.job.save_to and f"{view.job.save_to}/{view.job.job}"
        if view and saved and (isinstance(error, NotFoundError) or verify_in_s3(session, view.job)):
            session.say(f"{error.message}: fetching {saved}")
            rows = view.history.rows if view.history else ()
            is_local = session.local or any(row.target == "local" for row in rows)
            return fetch(replace(session, local=is_local), job=saved, start=start)
        stopped = error.stopped if isinstance(error, NoReachableNodes) else ()
        if not stopped or not {job, OLDER_JOBS} & {None, *stopped}:
            raise
    except NodesFailed as error:  # another client may have ended the nodes
        view = JobRegistry(session).find(job)
        if view and verify_in_s3(session, view.job):
            saved = f"{view.job.save_to}/{view.job.job}"
            session.say(f"{error.message}: fetching {saved}")
            return fetch(session, job=saved, start=start)
        if _has_no_live_node(session):
            failed = "the nodes were ended while their results were fetched"
            why = "another client terminated the nodes; unless it discarded the results, it has fetched them"
            raise NodeError(failed, why, "awsddp jobs") from error
        raise
    start()
    return structs.replace(_fetch(session, job, refetch), started=True)


def _has_no_live_node(session: Session) -> bool:
    """Return True if AWS lists no live nodes in the cluster."""
    try:
        with find_cluster(session) as cluster:
            return cluster.listing is None or not cluster.listing.live
    except AwsddpError:
        return False


def fetch_jobs(
    session: Session,
    names: Sequence[str],
    *,
    fetch_one: Callable[[str | None], FetchDocument],
    on_document: Callable[[FetchDocument], object],
) -> list[FetchDocument]:
    """Fetch the results of several jobs, each with `fetch_one`; "all" means all jobs that the nodes report.

    `on_document` receives each document when its job is done. If the fetch of one job fails, the other jobs
    are still fetched; the first error is raised at the end.
    """
    if "all" in names:
        with preconnected_cluster(session) as cluster:
            names = [job.job for job in query_jobs(cluster)]
    failed: AwsddpError | None = None
    documents = []
    for name in dict.fromkeys(names):
        try:
            with completing_errors(session):
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
        failed.result = None  # the failure has been reported
        raise failed
    return documents


def _fetch_saved(session: Session, uri: str) -> FetchDocument:
    try:
        job, fetched = download_saved_job(session, uri, all_results=True)
    except (FilesChanged, IncompleteUpload) as error:
        write_loss_plot(session.results / error.job.job)
        error.result = _document(session, error.fetched, error.job.job)
        raise
    write_loss_plot(session.results / job.job)
    return _document(session, fetched, job.job)


def _fetch(session: Session, job: str | None, refetch: bool) -> FetchDocument:
    last = job or next((view.job.job for view in reversed(JobRegistry(session).own_jobs)), None)
    fetched_job = find_fetched_job(session, last) if last is not None and not refetch else None
    try:
        with preconnected_cluster(session) as cluster:
            if fetched_job is not None and job not in (None, *cluster.unfetched_jobs):
                return _already_fetched(session, fetched_job)
            with connect_reachable(cluster) as connected:
                chosen = find_job_on_nodes(connected, job)
                fetched = fetch_from_nodes(connected, chosen)
                session.folder.save_jobs(chosen)
                lost = find_unfetched_parts(connected, chosen)
    except (NotFoundError, NoReachableNodes) as error:
        if fetched_job is None or (isinstance(error, NoReachableNodes) and job is None and error.stopped):
            raise
        return _already_fetched(session, fetched_job)
    result = _document(session, fetched, chosen.job)
    if lost:
        why = "\n".join(lost.values())
        incomplete = NodeError(f"a part of the results of {chosen.job} is missing", why, "awsddp status")
        incomplete.result = result
        raise incomplete
    return result


def _document(session: Session, fetched: Mapping[int, NodeFiles], job: str) -> FetchDocument:
    return FetchDocument(nodes=sort_by_node(fetched), job=job, home=str(session.results / job))


def _already_fetched(session: Session, job: JobRecord) -> FetchDocument:
    session.say(f"the results of {job.job} are already fetched")
    return _document(session, {}, job.job)


def fetch_from_nodes(
    connected: ConnectedCluster, job: JobRecord, *, wait_for_uploads: bool = True
) -> dict[int, NodeFiles]:
    """Fetch a job's results from the reachable nodes, verify them, then release the nodes.

    job.json in the results folder lists the missing nodes. Because of a lock, only one client on this machine
    fetches results at a time. If the results exceed job.results_limit, `session.confirms` decides. With
    `wait_for_uploads`, the nodes of a job that saves to S3 are released only after the job's last upload.
    Raises Unfetched if files of the job stay on the nodes, NodeError if a node does not send a file that it
    listed, or ConfigError if the disk is full or the folder belongs to another job.
    """
    refuse_other_job(connected.session, job)
    lost = find_unfetched_parts(connected, job)
    job = replace(job, missing=tuple(lost))
    with connected.session.folder.lock("fetch", part="results", wait_s=FETCH_S):
        connected.session.folder.save_jobs(job)
        return _fetch_and_release(connected, job, lost, waits=wait_for_uploads and job.save_to is not None)


def _fetch_and_release(
    connected: ConnectedCluster, job: JobRecord, lost: Mapping[int, str], *, waits: bool
) -> dict[int, NodeFiles]:
    from awsddp.aws.power import release, unfetched_of
    from awsddp.nodes.download import pull, rsync_transfer

    session = connected.session
    folder = session.results / job.job
    nodes, began = connected.fleet.nodes_of_job(job), time.monotonic()
    holders = [node for node in connected.cluster.nodes if node.node in nodes]
    tagged = (
        run_in_thread(unfetched_of, connected.cluster.aws, holders)
        if holders and job.state not in ACTIVE
        else None
    )
    selected = select_results(connected, job, nodes, folder)

    def job_json(changed: Sequence[ResultFile]) -> dict[str, bytes]:
        # A file that differs from its description counts as growing if the job runs, or else as unfetched.
        rerun = f"awsddp fetch {job.job}   # again, once nothing writes to it"
        pending = selected.growing if job.state in ACTIVE else selected.unfetched
        why = "it changed while it was fetched"
        pending += [UnfetchedFile(file.node, file.path, file.size, why, rerun) for file in changed]
        missing = sorted({*job.missing, *(file.node for file in selected.unfetched)})
        return {"job.json": encode_job(replace(job, missing=tuple(missing)))}

    def look(nodes: Collection[int]) -> dict[tuple[int, str], ResultFile]:
        manifests, failures = _query_manifests(connected, job, nodes, at_once=0)
        results_or_raise({**manifests, **failures})
        files = ((node, file) for node, manifest in manifests.items() for file in manifest.files)
        return {(node, file.path): file for node, file in files}

    fetched = pull(
        selected.wanted,
        folder,
        transfer=rsync_transfer(session.folder.ssh_config),
        list_files=look,
        matches_sample=matches_sample,
        accept_grown=job.state in ACTIVE,
        last_files=job_json,
        on_event=session.on_event,
    )
    record_fetch_cost(connected.cluster, job.job, sum(files.bytes for files in fetched.values()))
    write_loss_plot(folder)
    report_growing_files(session, job, selected.growing)
    if selected.unfetched:
        raise _unfetched_error(job, selected.unfetched, lost)
    if tagged is not None:
        if waits:
            from awsddp.job.save_to_s3 import abort_uploads, wait_until_saved

            if wait_until_saved(connected, job):
                abort_uploads(connected.cluster, [job])
        with session.folder.lock("train", part="tags", wait_s=TAG_CHANGE_S) as free_s:
            # The lock file's timestamp may be up to 10 ms late.
            is_fresh = time.monotonic() - began < min(free_s - 0.1, FRESH_S)
            older = list_older_jobs(connected, tagged.result())
            release(
                connected.cluster.aws,
                holders,
                job.job,
                tagged=tagged.result() if is_fresh else None,
                older=older,
            )
    return fetched


class UnfetchedFile(NamedTuple):
    """Holds an unfetched file's path on its node, its size in bytes, the reason, and the next step."""

    node: int
    path: str
    size: int
    why: str
    remedy: str = ""


@dataclass(kw_only=True)
class Selected:
    """The files and links to fetch, by node, and the files that will stay unfetched.

    `growing` has the files that the running job was writing or has removed. These files are fetched later.
    """

    wanted: dict[int, list[ResultFile]]
    unfetched: list[UnfetchedFile] = field(default_factory=list)
    growing: list[UnfetchedFile] = field(default_factory=list)


class Unfetched(NodeError):
    """A part of a job's results is still on the nodes; the rest was fetched."""


def select_results(
    connected: ConnectedCluster, job: JobRecord, nodes: Sequence[int], target: Path
) -> Selected:
    """Request each node's list of results, and return the files to fetch into `target` and all other files.

    If the results exceed job.results_limit, `session.confirms` decides. The names of skipped files are
    reported, but only the number of files that job.exclude matches. If a node does not list its results, all
    its results count as unfetched. Raises NodeError if no node lists its results.
    """
    manifests, failures = _query_manifests(connected, job, nodes)
    if failures and not manifests:
        results_or_raise(failures)
    selected = Selected(wanted={node: [] for node in manifests})
    described = assign_local_names(manifests)
    targets = {file.target for file in described if file.target is not None}
    files = [
        file for file in described if _is_in(targets, file.home) or not _is_synced(connected.session, file)
    ]
    _select_files(job, _apply_limit(connected.session, job, files, target, selected), selected)
    rerun = f"awsddp fetch {job.job}   # again, once the node answers"
    selected.unfetched += _report_skipped(connected.session, manifests)
    selected.unfetched += [
        UnfetchedFile(node, ALL_RESULTS, 0, error.message, rerun) for node, error in failures.items()
    ]
    return selected


def _is_in(targets: Collection[str], path: str) -> bool:
    """Return True if `path` is the target of a link in the results, or lies under such a target."""
    return any(path == target or path.startswith(f"{target}/") for target in targets)


def _is_synced(session: Session, file: ResultFile) -> bool:
    """Return True if a file equals its copy in the project (for example, after a chown -R on the node)."""
    if file.digest is None:
        return False
    path = Path(session.job_spec.sync.workdir, file.home.partition("/")[2])
    with contextlib.suppress(OSError):
        return path.stat().st_size == file.size and digest(path) == file.digest
    return False


def report_growing_files(session: Session, job: JobRecord, growing: Sequence[UnfetchedFile]) -> None:
    """Report the files that a running job has not finished."""
    for node in sorted({file.node for file in growing}):
        paths = [file.path for file in growing if file.node == node]
        more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
        text = f"not fetched yet, because {job.job} still writes: {', '.join(paths[:MAX_NAMED])}{more}"
        session.on_event(Event(text, node_name(node)))


class Ephemeral(NodeError):
    """Unfetched results are on instance store, which a stop erases."""


def refuse_ephemeral_results(connected: ConnectedCluster, jobs: Sequence[JobRecord]) -> None:
    """Raise Ephemeral if unfetched results of these jobs are on instance store."""
    for job in jobs:
        manifests, failures = _query_manifests(connected, job, connected.fleet.nodes_of_job(job), at_once=0)
        results_or_raise({**manifests, **failures})
        ephemeral = [
            UnfetchedFile(node, file.path, file.size, "empty after a stop")
            for node, manifest in manifests.items()
            for file in manifest.files
            if file.ephemeral
        ]
        if ephemeral:
            raise Ephemeral(
                f"a stop would lose results of {job.job}, which are on instance store",
                _list_files(ephemeral),
                f"awsddp fetch {job.job}   # once it has ended; then stop\n"
                "awsddp down   # fetch the results, then terminate the nodes",
            )


def _unfetched_error(
    job: JobRecord, unfetched: Sequence[UnfetchedFile], lost: Mapping[int, str]
) -> Unfetched:
    """Return the error for unfetched files, with the next steps and with the reasons in `lost`."""
    sizes = [file.size for file in unfetched if file.path != ALL_RESULTS]
    parts = [files_text(len(sizes), sum(sizes))] if sizes else []
    parts += [f"everything on {node_name(file.node)}" for file in unfetched if file.path == ALL_RESULTS]
    exclude = f"awsddp fetch {job.job} -o 'job.exclude=[\"PATTERN\"]'   # leave them on the nodes"
    return Unfetched(
        f"{' and '.join(parts)} of the results of {job.job} are not fetched",
        "\n".join((_list_files(unfetched), *lost.values())),
        "\n".join(dict.fromkeys([*(file.remedy for file in unfetched), exclude])),
    )


def _list_files(unfetched: Sequence[UnfetchedFile]) -> str:
    sizes = [f" ({size_text(file.size)})" if file.size else "" for file in unfetched]  # 0: unknown
    lines = [
        f"{node_name(file.node)}: {file.path}{size}: {file.why}"
        for file, size in zip(unfetched[:MAX_NAMED], sizes, strict=False)
    ]
    return "\n".join(
        lines + ([f"and {len(unfetched) - MAX_NAMED} more"] if len(unfetched) > MAX_NAMED else [])
    )


def _query_manifests(
    connected: ConnectedCluster, job: JobRecord, used: Collection[int], **more: Any
) -> tuple[dict[int, Manifest], dict[int, NodeError]]:
    """Return the lists that the nodes sent, and the errors of the nodes that sent no list."""
    request = make_manifest_request(connected.session, job, **more)
    answers = call_each_node(connected.fleet, dict.fromkeys(used, request), timeout_s=MANIFEST_S)
    failures = {node: answer for node, answer in answers.items() if isinstance(answer, NodeError)}
    return results_or_raise(
        {node: answer for node, answer in answers.items() if node not in failures}
    ), failures


def make_manifest_request(session: Session, job: JobRecord, **more: Any) -> messages.Manifest:
    """Return the request for the list of a job's results. `more` sets further fields of messages.Manifest."""
    job_settings = session.job_spec.job
    ranks = [(rank.rank, rank.node) for rank in job.ranks]
    exclude = exclude_patterns(job_settings.exclude)
    return messages.Manifest(job=job.job, ranks=ranks, outputs=job_settings.outputs, exclude=exclude, **more)


def _apply_limit(
    session: Session, job: JobRecord, files: list[ResultFile], target: Path, selected: Selected
) -> list[ResultFile]:
    """Return the files to fetch; files above job.results_limit stay unfetched unless the user agrees."""
    limit = session.job_spec.job.results_limit
    excess = find_excess_files(files, parse_size(limit), results=target)
    if not excess or session.confirms(
        f"The results of {job.job} exceed job.results_limit ({limit}) by "
        f"{files_text(len(excess), sum(file.size for file in excess))}.\nFetch all of them?"
    ):
        return files
    left_out, limit_gb = {file.home for file in excess}, math.ceil(sum(file.size for file in excess) / 1e9)
    why = f"does not fit in job.results_limit ({limit}); smaller files are fetched first"
    remedy = (
        f"awsddp fetch {job.job} --output PATH   # one of them, or a folder\n"
        f"awsddp fetch {job.job} -o job.results_limit={limit_gb}GB   # all of them"
    )
    selected.unfetched += [
        UnfetchedFile(file.node, file.path, file.size, why, remedy) for file in reversed(excess)
    ]
    return [file for file in files if file.home not in left_out]


def _select_files(job: JobRecord, files: list[ResultFile], selected: Selected) -> None:
    """Add each file to `selected.growing` if a running job is writing it, or else to `selected.wanted`."""
    for file in files:
        if job.state in ACTIVE and file.writing:
            selected.growing.append(UnfetchedFile(file.node, file.path, file.size, ""))
        else:
            selected.wanted[file.node].append(file)


def _report_skipped(session: Session, manifests: Mapping[int, Manifest]) -> list[UnfetchedFile]:
    """Report the files that stay on the nodes, and return the job's own files.

    Only the number of excluded files is reported.
    """
    files = sum(manifest.excluded.files for manifest in manifests.values())
    if files:
        size = sum(manifest.excluded.size for manifest in manifests.values())
        session.say(f"not fetched because of job.exclude: {files_text(files, size)}")
    skipped = [(node, file) for node, manifest in manifests.items() for file in manifest.skipped]
    left_out = [(node, file) for node, file in skipped if not file.owed]
    for node, file in left_out[:MAX_NAMED]:
        session.on_event(Event(f"not fetched: {file.path}: {file.why}", node_name(node)))
    if len(left_out) > MAX_NAMED:
        session.say(f"not fetched: {len(left_out) - MAX_NAMED} more files")
    return [
        UnfetchedFile(node, file.path, file.size, file.why, CHANGE_OWNER)
        for node, file in skipped
        if file.owed
    ]
