"""logs: the lines of a job, as they come or as they were fetched."""

from collections.abc import Callable, Collection

from awsddp.agent_client.logs import last_lines
from awsddp.errors import NotFoundError
from awsddp.job.follow import Watch, finish, merger_of, nodes_by_rank
from awsddp.job.registry import JobRegistry
from awsddp.job.reported import told_job
from awsddp.model.documents import JobDocument
from awsddp.model.records import ACTIVE, JobRecord
from awsddp.session.connect import NoNodes, connect_reachable, preconnected_cluster
from awsddp.session.context import Session
from awsddp.session.next_steps import advised
from awsddp.storage.results_dir import job_result, saved_job, still_missing, whole_at_home
from awsddp.storage.saved_job import brought, is_saved
from awsddp.util.format import node_name


def logs(
    session: Session,
    *,
    job: str | None,
    follow: bool,
    ranks: Collection[int] = (),
    last: int | None = None,
    on_lines: Callable[[bytes], None],
) -> JobDocument:
    """Show the lines of a job, of these `ranks` (none: all), and return the `train` document.

    `last` shows only so many of the lines so far. With `follow` to the job's end; then its results are
    fetched. A fetched job needs no node; a part that is missing is shown from the nodes that are reachable.
    Raises NotFoundError for an unknown job or rank, NoNodes if no node is reachable, and what `finish`
    raises. An interrupt gets a note on what becomes of the job.
    """
    kept = brought(session, job)[0] if is_saved(job) else None
    job = kept.job if kept else JobRegistry(session).name(job)
    if kept or (job is not None and (kept := whole_at_home(session, job))):
        return _replay(session, kept, ranks, last, on_lines)
    try:
        with preconnected_cluster(session) as cluster, connect_reachable(cluster) as connected:
            chosen = told_job(connected, job)
            session.folder.remember(chosen)
            merger = merger_of(session, chosen, _known(chosen, ranks))
            merger.tail = last
            try:
                if last is not None:
                    said: list[bytes] = []
                    watch = Watch(connected, chosen, merger=merger, on_lines=said.append, to_the_end=False)
                    chosen, connected = watch.run(), watch.connected
                    merger.again()
                    on_lines(last_lines(said, last))
                if follow or last is None:
                    watch = Watch(connected, chosen, merger=merger, on_lines=on_lines, to_the_end=follow)
                    chosen, connected = watch.run(), watch.connected
                if follow:
                    return finish(connected, chosen)
            except KeyboardInterrupt as stop:
                now = f"has ended ({chosen.state}). Its results: awsddp fetch {chosen.job}"
                if chosen.state in ACTIVE:
                    now = f"keeps running. Again: awsddp logs -f {job or ''}".rstrip()
                stop.add_note(advised(session, f"{chosen.job} {now}"))
                raise
            for text in still_missing(connected, chosen).values():
                session.say(text)
            session.folder.remember(chosen)
            return job_result(session, chosen)
    except (NotFoundError, NoNodes) as error:
        found = JobRegistry(session).find(job)
        if found is None or saved_job(folder := session.results / found.job.job) is None:
            raise
        session.say(f"{error.message}; job {found.job.job} is shown from {folder}")
        return _replay(session, found.job, ranks, last, on_lines)


def _known(job: JobRecord, ranks: Collection[int]) -> Collection[int] | None:
    """Return the ranks of a job that are shown, None for all. Raises NotFoundError for ranks it has not."""
    missing = [f"rank {rank}" for rank in ranks if rank not in (known := nodes_by_rank(job))]
    if missing:
        nodes = ", ".join(map(node_name, sorted(set(known.values()))))
        raise NotFoundError(
            f"job {job.job} has no {', no '.join(missing)}", f"it has {len(known)} ranks, on {nodes}"
        )
    return ranks or None


def _replay(
    session: Session,
    job: JobRecord,
    ranks: Collection[int],
    last: int | None,
    on_lines: Callable[[bytes], None],
) -> JobDocument:
    """Show the lines of a job that were fetched."""
    merger = merger_of(session, job, _known(job, ranks))
    merger.tail = last
    said: list[bytes] = []
    for lines in merger.replay():
        (on_lines if last is None else said.append)(lines)
    said.append(merger.finish())
    on_lines(said[0] if last is None else last_lines(said, last))
    return job_result(session, job)
