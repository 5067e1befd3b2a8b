"""sync: send the working folder to every node. Files that a node made stay."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from awsddp.parallel import both
from awsddp.report import Event
from awsddp.resources import BUNDLED, train_folder
from awsddp.verbs.cluster import ClusterHandle
from awsddp.verbs.context import Context

if TYPE_CHECKING:
    from awsddp.nodes.listing import Listing
    from awsddp.nodes.results import Fetched
    from awsddp.nodes.sync import Sent
    from awsddp.nodes.transport import Fleet

LARGE_BYTES = 100e6


def sync(ctx: Context, *, confirm: Callable[[str], None]) -> dict[str, Any]:
    """Send the working folder, and return what went as the `sync` document.

    `confirm` is called if a job runs, whose code would change, and raises to
    refuse. Raises ConfigError for an invalid folder, NodeError for nodes that did not receive the files.
    """
    listing = listed(ctx)
    with ClusterHandle.ready(ctx) as cluster, cluster.connect() as fleet:
        for job in cluster.jobs() if cluster.unfetched else ():  # the tags tell: no request without need
            if job.state == "running":
                confirm(f"Job {job.job} runs on the nodes: its files change while it reads them.")
        with ctx.folder.lock("sync", wait_s=60):
            return {**document(send(ctx, fleet, listing)), **_contents(listing)}


def _contents(listing: "Listing") -> dict[str, Any]:
    """Return the files of the folder, the largest ones, and what each ignore file or key keeps here."""
    kept: dict[str, list[str]] = {}
    for path, by in listing.kept:
        kept.setdefault(by, []).append(path)
    return {
        "files": [entry.path for entry in listing.entries],
        "largest": [{"path": path, "bytes": size} for path, size in listing.largest(5)],
        "kept": [{"by": by, "paths": paths} for by, paths in kept.items()],
    }


def listed(ctx: Context) -> "Listing":
    """Return what to send of the working folder; say so if it is large. Raises ConfigError."""
    listing = found_here(ctx)
    if listing.size > LARGE_BYTES:
        largest = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in listing.largest())
        ctx.say(f"{listing.size / 1e6:.0f} MB go to each node; the largest: {largest}")
    for path, why in listing.skipped:
        ctx.on_event(Event(f"not sent: {path}: {why}"))
    return listing


def found_here(ctx: Context) -> "Listing":
    """Return what to send of the working folder. Raises ConfigError."""
    from awsddp.nodes.listing import files_to_send

    job = ctx.job
    return files_to_send(
        Path(job.sync.workdir), job.sync.ignore, results=job.job.results, exclude=(ctx.home,)
    )


def send(
    ctx: Context,
    fleet: "Fleet",
    listing: "Listing",
    *,
    folder: str = "work",
    nodes: Collection[int] | None = None,
    bundled: bool = False,
) -> "dict[int, Sent]":
    """Send a folder to nodes (all), and with `bundled` the programs that ship with awsddp."""
    from awsddp.nodes.listing import files_to_send
    from awsddp.nodes.sync import push

    config = ctx.folder.ssh_config
    work = partial(push, listing, fleet, ssh_config=config, folder=folder, nodes=nodes, on_event=ctx.on_event)
    if not bundled:
        return work()
    programs = files_to_send(train_folder())
    sent, _ = both(work, lambda: push(programs, fleet, ssh_config=config, folder=BUNDLED, nodes=nodes))
    return sent


def document(
    moved: "Mapping[int, Sent | Fetched]", *, job: str | None = None, home: str | None = None
) -> dict[str, Any]:
    """Return what was sent, or fetched of a job, as the document of `sync` and `fetch`."""
    nodes = [{"node": node, "files": one.files, "bytes": one.bytes} for node, one in sorted(moved.items())]
    return {"nodes": nodes, "job": job, "home": home}
