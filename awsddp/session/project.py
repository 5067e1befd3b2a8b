"""The files of the project that go to the nodes."""

from typing import TYPE_CHECKING

from awsddp.model.events import Event
from awsddp.session.context import Session

if TYPE_CHECKING:
    from awsddp.nodes.project_files import Listing


def listed_files(session: Session) -> "Listing":
    """Return what to send of the working folder. Raises ConfigError."""
    from awsddp.nodes.project_files import project_files

    listing = project_files(session.job_spec, home=session.home)
    for path, why in listing.skipped:
        session.on_event(Event(f"not sent: {path}: {why}"))
    return listing
