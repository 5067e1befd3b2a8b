"""A job's events: start the notifier on its nodes, and send events that the nodes cannot send."""

import base64
import ipaddress
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from awsddp.agent.messages import Launch, TakeEvent
from awsddp.agent.notify.events import make_plain
from awsddp.agent_client.calls import call_nodes_separately
from awsddp.agent_client.program import NOTIFIER_MODULES, node_program
from awsddp.errors import AwsddpError
from awsddp.model.node_answers import TakenEvent
from awsddp.model.records import JobRecord
from awsddp.session.context import ConnectedCluster, Session
from awsddp.session.cost import compute_bill
from awsddp.session.notify import send_event

BUDGET_SHARE = 0.8
"""The share of the budget at which the event "budget" is sent."""
_TAKE_S = 10.0
_MAX_EVENTS = 20
LAST_EVENTS_S = 15.0
"""How long a client that has followed a job waits until the job's last events are sent."""


def add_notifiers(connected: ConnectedCluster, launches: Mapping[int, Launch]) -> None:
    """Add the notifier to the launch requests if notify.url is set. Nodes without internet get no URL."""
    session, record = connected.session, connected.cluster.record
    notify = session.job_spec.notify
    if notify.url is None:
        return
    if doubt := describe_doubt(session, internet=record.internet):
        session.say(f"notify.url: {doubt}")
    launch = next(iter(launches.values()))
    order = {"job": launch.job, "cluster": session.name, "launch": launch.launch}
    message = {
        "order": {**order, "budget_at": find_budget_time(connected)},
        "url": notify.url if record.internet or is_private(notify.host) else None,
        "format": notify.format,
    }
    argv, stdin = node_program("python3", NOTIFIER_MODULES, message)
    for launch in launches.values():
        launch.notify = {"argv": argv, "stdin": base64.b64encode(stdin).decode()}


def describe_doubt(session: Session, *, internet: bool | None) -> str:
    """Return why nodes may not reach `notify.url` (`internet`: do they have internet access?), or ""."""
    spec, host = session.spec, session.job_spec.notify.host
    if internet is False and not is_private(host):
        return (
            f"the nodes have no internet access, so only a client that follows a job sends events to {host}"
        )
    if spec.network.address == "private" or session.job_spec.env.packages_from == "client":
        return f"if the nodes do not reach {host}, a client that follows a job sends its events"
    return ""


def is_private(host: str) -> bool:
    """Return True for a private IP address, which nodes without internet access may reach."""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return False


def find_budget_time(connected: ConnectedCluster) -> float | None:
    """Return the Unix time at which BUDGET_SHARE of the budget is spent at the present price.

    Return None without a budget, or if the share is already spent or the price is unknown.
    """
    cluster = connected.cluster
    budget_usd = cluster.record.asked.get("cluster.budget_usd") or 0.0
    bill = compute_bill(cluster, cluster.own_listing) if budget_usd else None
    if bill is None or bill.cost_usd is None or not bill.price_usd_per_hour:
        return None
    left_usd = BUDGET_SHARE * budget_usd - bill.cost_usd
    seconds = left_usd / bill.price_usd_per_hour * 3600
    return datetime.now(UTC).timestamp() + seconds if seconds > 0 else None


def send_left_events(connected: ConnectedCluster, job: JobRecord, *, wait_s: float = 0.0) -> None:
    """Send the events of a job that its nodes cannot send; wait for events that the nodes still send.

    Does nothing if notify.url is not set. Failures are reported.
    """
    if connected.session.job_spec.notify.url is None:
        return
    until = time.monotonic() + wait_s
    while _send_from_nodes(connected, job) and time.monotonic() < until:
        time.sleep(1.0)


def _send_from_nodes(connected: ConnectedCluster, job: JobRecord) -> int:
    """Send all events that nodes give to this client, and return how many events are left on nodes."""
    requests = {node: TakeEvent(job=job.job) for node in connected.fleet.nodes_of_job(job)}
    left = 0
    for _ in range(_MAX_EVENTS):  # a hostile node could give events without end
        if not requests:
            break
        answers = call_nodes_separately(connected.fleet, requests, timeout_s=_TAKE_S)
        taken = {node: answer for node, answer in answers.items() if not isinstance(answer, AwsddpError)}
        left += sum(answer.left for answer in taken.values() if answer.event is None)
        requests = {
            node: TakeEvent(job=job.job, settled=_send(connected, answer))
            for node, answer in taken.items()
            if answer.event is not None
        }
    return left


def _send(connected: ConnectedCluster, taken: TakenEvent) -> tuple[str, str, str]:
    """Send an event, and return its id and the outcome."""
    assert taken.event is not None
    event = {**msgspec.to_builtins(taken.event), "text": make_plain(taken.event.text)}
    outcome = send_event(connected.session, event)
    return taken.event.id, *outcome
