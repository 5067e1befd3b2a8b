"""sync: send the working folder to every node."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from awsddp.model.documents import Kept, PathSize, SyncDocument
from awsddp.model.node_order import in_order
from awsddp.session.connect import told_jobs
from awsddp.session.project import listed_files

if TYPE_CHECKING:
    from awsddp.session.context import Cluster


def sync(cluster: "Cluster", *, confirm: Callable[[str], None]) -> SyncDocument:
    """Send the working folder, and return what went as the `sync` document.

    `confirm` is called if a job runs, whose code would change, and raises to
    refuse. Raises ConfigError for an invalid folder, NodeError for nodes that did not receive the files.
    """
    from awsddp.nodes.sync import push

    listing = listed_files(cluster)
    with cluster.ready() as cluster, cluster.connect() as fleet:
        for job in told_jobs(cluster) if cluster.unfetched else ():  # the tags tell: no request without need
            if job.state == "running":
                confirm(f"Job {job.job} runs on the nodes: its files change while it reads them.")
        with cluster.folder.lock("sync", wait_s=60):
            sent = in_order(push(listing, fleet, on_event=cluster.on_event))
    kept: dict[str, list[str]] = {}
    for path, by in listing.kept:
        kept.setdefault(by, []).append(path)
    return SyncDocument(
        nodes=sent,
        files=tuple(entry.path for entry in listing.entries),
        largest=tuple(PathSize(path=path, bytes=size) for path, size in listing.largest(5)),
        kept=tuple(Kept(by=by, paths=tuple(paths)) for by, paths in kept.items()),
    )
