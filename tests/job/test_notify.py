"""A job's launch starts its notifiers, and a client sends what nodes without internet cannot send."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from awsddp.agent_client.rank_layout import layout_ranks
from awsddp.job import notify, submit
from awsddp.job.notify import find_budget_time, send_left_events
from awsddp.model.records import JobRecord
from awsddp.session.context import ConnectedCluster, Session
from awsddp.settings.loader import load
from tests.session.test_notify import notifying
from tests.settings.test_loader_secrets import find_files_with
from tests.support.folder_nodes import World
from tests.support.waiting import until
from tests.support.webhook import Webhook, serve_webhook


def start(world: World, hook: Webhook) -> tuple[ConnectedCluster, JobRecord]:
    """Start a job that ends at once, whose events go to `hook`."""
    (world.project / "w.py").write_text("print()\n")
    session = notifying(world, hook.url)
    job = replace(session.job_spec.job, script="w.py")
    session = session.with_settings(job_spec=replace(session.job_spec, job=job))
    connected = world.connected(session)
    ranks = layout_ranks([0, 1], gpus=0, world_size=2)
    listing: Any = None
    return connected, submit.submit_job(connected, ranks, listing)


def test_node_with_internet_sends_the_end_and_no_file_has_the_url(world: World) -> None:
    with serve_webhook() as hook:
        connected, job = start(world, hook)
        until(lambda: world.homes.document(0, job.job)["state"] == "succeeded")
        send_left_events(connected, job, wait_s=10)
        assert hook.events == ["ended"]
        assert not list(find_files_with("s3cret", *world.homes.homes, world.folder.root))


def test_client_sends_for_nodes_without_internet_and_the_launch_says_so(world: World) -> None:
    world.folder.write(replace(world.record, internet=False))
    with serve_webhook(host="localhost") as hook:
        connected, job = start(world, hook)
        assert any(
            "only a client that follows a job sends events to localhost" in text for text in world.events
        )
        until(lambda: not any(document["state"] == "running" for document in documents(world, job)))
        until(lambda: sent(connected, job, hook))
        send_left_events(connected, job)
        assert hook.events == ["ended"]


def sent(connected: ConnectedCluster, job: JobRecord, hook: Webhook) -> bool:
    send_left_events(connected, job)
    return bool(hook.bodies)


def documents(world: World, job: JobRecord) -> list[dict[str, Any]]:
    return [world.homes.document(node, job.job) for node in (0, 1)]


@pytest.mark.parametrize(
    ("host", "internet", "settings", "doubt"),
    [
        ("hooks.example", True, {}, ""),
        ("hooks.example", None, {}, ""),
        ("hooks.example", False, {}, "the nodes have no internet access"),
        ("10.0.0.1", False, {}, ""),
        ("hooks.example", True, {"network.address": "private"}, "if the nodes do not reach hooks.example"),
        ("hooks.example", True, {"env.packages_from": "client"}, "if the nodes do not reach hooks.example"),
    ],
)
def test_doubt_says_who_sends_if_nodes_may_not_reach_the_url(
    host: str, internet: bool | None, settings: dict[str, Any], doubt: str
) -> None:
    loaded = load(environ={"AWSDDP_NOTIFY_URL": f"https://{host}/x"}, overrides=settings)
    found = notify.describe_doubt(Session(name="default", settings=loaded), internet=internet)
    assert found.startswith(doubt) and bool(found) == bool(doubt)


@pytest.mark.parametrize(
    ("budget", "cost", "price", "hours"),
    [(10.0, 2.0, 2.0, 3.0), (10.0, 8.5, 2.0, None), (None, 2.0, 2.0, None), (10.0, None, None, None)],
)
def test_budget_time_is_when_four_fifths_are_spent(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    budget: float | None,
    cost: float | None,
    price: float | None,
    hours: float | None,
) -> None:
    world.folder.write(replace(world.record, asked={"cluster.budget_usd": budget} if budget else {}))

    class Bill:
        cost_usd, price_usd_per_hour = cost, price

    monkeypatch.setattr(notify, "compute_bill", lambda *_: Bill())
    found = find_budget_time(world.connected())
    if hours is None:
        assert found is None
    else:
        assert found == pytest.approx((datetime.now(UTC) + timedelta(hours=hours)).timestamp(), abs=5)
