"""The files of the project that go to the nodes."""

from typing import TYPE_CHECKING

from awsddp.model.events import Event

if TYPE_CHECKING:
    from awsddp.nodes.project_files import Listing
    from awsddp.session.context import Cluster


def listed_files(cluster: "Cluster") -> "Listing":
    """Return what to send of the working folder. Raises ConfigError."""
    from awsddp.nodes.project_files import project_files

    listing = project_files(cluster.job_spec, home=cluster.home)
    for path, why in listing.skipped:
        cluster.on_event(Event(f"not sent: {path}: {why}"))
    return listing
