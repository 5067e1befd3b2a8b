"""logs: show the lines that a job prints, live or from its fetched logs."""

from collections.abc import Callable, Collection

from awsddp.agent_client.logs import last_lines
from awsddp.errors import NotFoundError
from awsddp.job.follow import JobFollower, fetch_followed_job, make_merger, map_ranks_to_nodes
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import find_job_on_nodes
from awsddp.model.documents import JobDocument
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import NoReachableNodes, connect_reachable, preconnected_cluster
from awsddp.session.context import Session
from awsddp.session.next_steps import complete_commands
from awsddp.storage.results_dir import find_fetched_job, find_unfetched_parts, make_job_result, read_job
from awsddp.storage.saved_job import download_saved_job, is_s3_uri
from awsddp.util.formatting import node_name


def logs(
    session: Session,
    *,
    job: str | None,
    follow: bool,
    ranks: Collection[int] = (),
    last: int | None = None,
    on_lines: Callable[[bytes], None],
) -> JobDocument:
    """Pass the lines of a job's `ranks` (all ranks if empty) to `on_lines`, and return the `train` document.

    `last` is the maximum number of earlier lines to pass. With `follow`, continue to the job's end and fetch
    its results. The lines of a fetched job are read on this machine. If a part of them is missing, the
    reachable nodes send their lines. Raises NotFoundError for an unknown job or rank, NoReachableNodes if no
    node is reachable, and the errors of `fetch_followed_job`. A note with the job's state is added to a
    KeyboardInterrupt.
    """
    fetched = download_saved_job(session, job)[0] if is_s3_uri(job) else None
    job = fetched.job if fetched else JobRegistry(session).resolve_name(job)
    if fetched or (job is not None and (fetched := find_fetched_job(session, job))):
        return _replay(session, fetched, ranks, last, on_lines)
    try:
        with preconnected_cluster(session) as cluster, connect_reachable(cluster) as connected:
            chosen = find_job_on_nodes(connected, job)
            session.folder.save_jobs(chosen)
            merger = make_merger(session, chosen, _check_ranks(chosen, ranks))
            merger.tail = last
            try:
                if last is not None:
                    lines: list[bytes] = []
                    watch = JobFollower(
                        connected, chosen, merger=merger, on_lines=lines.append, to_the_end=False
                    )
                    chosen, connected = watch.run(), watch.connected
                    merger.clear_ended()
                    on_lines(last_lines(lines, last))
                if follow or last is None:
                    watch = JobFollower(
                        connected, chosen, merger=merger, on_lines=on_lines, to_the_end=follow
                    )
                    chosen, connected = watch.run(), watch.connected
                if follow:
                    return fetch_followed_job(connected, chosen)
            except KeyboardInterrupt as stop:
                state = f"has ended ({chosen.state}). Its results: awsddp fetch {chosen.job}"
                if chosen.state in ACTIVE:
                    state = f"keeps running. Follow it again: awsddp logs -f {job or ''}".rstrip()
                stop.add_note(complete_commands(session, f"{chosen.job} {state}"))
                raise
            for text in find_unfetched_parts(connected, chosen).values():
                session.say(text)
            session.folder.save_jobs(chosen)
            return make_job_result(session, chosen)
    except (NotFoundError, NoReachableNodes) as error:
        view = JobRegistry(session).find(job)
        if view is None or read_job(folder := session.results / view.job.job) is None:
            raise
        session.say(f"{error.message}; job {view.job.job} is shown from {folder}")
        return _replay(session, view.job, ranks, last, on_lines)


def _check_ranks(job: JobRecord, ranks: Collection[int]) -> Collection[int] | None:
    """Return `ranks`, or None if `ranks` is empty.

    Raises NotFoundError for ranks that the job does not have.
    """
    missing = [f"rank {rank}" for rank in ranks if rank not in (nodes := map_ranks_to_nodes(job))]
    if missing:
        node_names = ", ".join(map(node_name, sorted(set(nodes.values()))))
        raise NotFoundError(
            f"job {job.job} has no {', no '.join(missing)}",
            f"the job has {len(nodes)} ranks, on {node_names}",
        )
    return ranks or None


def _replay(
    session: Session,
    job: JobRecord,
    ranks: Collection[int],
    last: int | None,
    on_lines: Callable[[bytes], None],
) -> JobDocument:
    """Pass a job's fetched lines to `on_lines`."""
    merger = make_merger(session, job, _check_ranks(job, ranks))
    merger.tail = last
    output: list[bytes] = []
    for lines in merger.replay():
        (on_lines if last is None else output.append)(lines)
    output.append(merger.finish())
    on_lines(output[0] if last is None else last_lines(output, last))
    return make_job_result(session, job)
