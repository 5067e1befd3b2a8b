"""sync: send the project folder to every node."""

from collections.abc import Callable

from awsddp.model.documents import Kept, PathSize, SyncDocument, sort_by_node
from awsddp.nodes.project_files import list_project_files
from awsddp.session.connect import connect, list_jobs_on_nodes, ready_cluster
from awsddp.session.context import Session


def sync(session: Session, *, confirm: Callable[[str], None]) -> SyncDocument:
    """Send the project folder to all nodes and return the `sync` document.

    `confirm` is called for each running job, because the job's files would change. If `confirm` raises an
    exception, nothing is sent. Raises ConfigError for an invalid folder, or NodeError for nodes that did not
    receive the files.
    """
    from awsddp.nodes.sync import push

    listing = list_project_files(session.job_spec, awsddp_home=session.home, on_event=session.on_event)
    with ready_cluster(session) as cluster, connect(cluster) as connected:
        jobs = (
            list_jobs_on_nodes(connected) if cluster.unfetched_jobs else ()
        )  # a job that runs has unfetched results
        for job in jobs:
            if job.state == "running":
                confirm(f"Job {job.job} runs on the nodes: its files change while it reads them.")
        with session.folder.lock("sync", wait_s=60):
            sent = sort_by_node(push(listing, connected.fleet, on_event=session.on_event))
    excluded: dict[str, list[str]] = {}
    for path, pattern in listing.ignored:
        excluded.setdefault(pattern, []).append(path)
    return SyncDocument(
        nodes=sent,
        files=tuple(entry.path for entry in listing.entries),
        largest=tuple(PathSize(path=path, bytes=size) for path, size in listing.largest(5)),
        kept=tuple(Kept(by=pattern, paths=tuple(paths)) for pattern, paths in excluded.items()),
    )
