"""Send this machine's own events to `notify.url`: a job was recovered or given up, capacity has come."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from awsddp.agent.notify.events import make_event
from awsddp.agent.notify.outbox import Outbox
from awsddp.session.context import Session
from awsddp.state import make_folder

if TYPE_CHECKING:
    from awsddp.agent.notify.post import Outcome

RECOVERED, GIVEN_UP, CAPACITY = "recovered", "given_up", "capacity"
"""The names of this machine's events."""
_PAUSES_S = (1.0, 4.0)


def notify_event(session: Session, event: str, *, job: str | None, key: str, text: str) -> None:
    """Send an event to `notify.url`, if it is set, and report a failure. The event is sent at most twice.

    `text` follows "job JOB on cluster NAME", or "cluster NAME" if `job` is None. `key` identifies what
    happened within the cluster, such as a life's number: an event with the same key is sent only once, also
    by later commands on this machine.
    """
    if session.job_spec.notify.url is None:
        return
    record, cluster = session.folder.read(ignore_newer=True), session.name
    about = f"cluster {cluster}" if job is None else f"job {job} on cluster {cluster}"
    made = make_event(
        event,
        f"{about} {text}",
        key=f"{record.id if record is not None else ''} {job or ''} {key}",
        cluster=cluster,
        job=job,
        now=datetime.now(UTC).timestamp(),
    )
    try:
        folder = session.home / "events"  # stays when `down` removes the cluster's folder
        make_folder(folder)
        outbox = Outbox(folder / f"{cluster}.json")
        outbox.add([made])
        for left in outbox.open_events():  # an earlier command may have left events
            _deliver(session, outbox, left)
    except OSError as error:
        session.say(f"no event was sent to {session.job_spec.notify.host}: {error}")


def _deliver(session: Session, outbox: Outbox, event: dict[str, Any]) -> None:
    """Send an event of `outbox`, again after pauses if that fails, and report a failure."""
    for pause_s in (*_PAUSES_S, None):
        outcome = send_event(session, event, may_send=lambda: outbox.claim(event["id"]))
        outbox.settle(event["id"], *outcome)
        if not any(row["id"] == event["id"] for row in outbox.open_events()) or pause_s is None:
            break
        time.sleep(pause_s)
    if outcome.state != "delivered":
        name, host = event["event"], session.job_spec.notify.host
        session.say(f"the event {name} was not delivered to {host}: {outcome.why}")


def send_event(session: Session, event: dict[str, Any], *, may_send: Any = lambda: True) -> "Outcome":
    """Send an event to `notify.url`, which must be set; return the outcome. `may_send` is as in `post`."""
    from awsddp.agent.notify.post import encode_body, post

    notify = session.job_spec.notify
    assert notify.url is not None
    return post(notify.url, encode_body(event, notify.format), may_send=may_send)
