"""The Python API in a local cloud: consent, errors, events, and the time of its import."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import awsddp
from tests.support.lab import Lab


def test_plan_up_status_and_down_print_nothing(active_lab: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    events: list[awsddp.Event] = []
    cluster = awsddp.Cluster("demo", local=True, on_event=events.append)
    plan = cluster.plan(nodes=3, instance_type="g6.12xlarge")
    assert plan.price_usd_per_hour == plan.launch.price_usd_per_hour
    assert "<td>3 x g6.12xlarge, 4 GPUs each</td>" in plan._repr_html_()
    assert cluster.up(plan)["state"] == "ready"
    reopened = awsddp.Cluster("demo")
    assert [node["node"] for node in reopened.status()["nodes"]] == [0, 1, 2]
    assert reopened.up(nodes=2)["state"] == "ready"
    with pytest.raises(awsddp.ConfigError, match="cluster demo already exists"), awsddp.run("demo"):
        pass
    assert cluster.down()["state"] == "absent"
    assert {event.who for event in events} >= {"", "node0"}
    assert capfd.readouterr() == ("", "")


def test_events_of_up_and_down_arrive_on_the_thread_that_calls_them(active_lab: Lab) -> None:
    threads: dict[threading.Thread, list[str]] = {}

    def on_event(event: awsddp.Event) -> None:
        threads.setdefault(threading.current_thread(), []).append(event.text)

    cluster = awsddp.Cluster("called", local=True, on_event=on_event)
    cluster.up(nodes=2)
    cluster.status()
    cluster.down()
    (texts,) = threads.values()
    assert list(threads) == [threading.current_thread()]
    kinds = {re.sub(r" \S+ (?=imported|made)", " ", text) for text in texts}
    assert kinds >= {"key pair imported", "security group made", "placement group made"}


def test_an_error_recommends_commands_that_select_its_cluster(active_lab: Lab) -> None:
    cluster = awsddp.Cluster("missing", local=True)
    for call in (cluster.jobs, cluster.train, lambda: cluster.job("j")):
        with pytest.raises(awsddp.NotFoundError) as refused:
            call()
        assert refused.value.next.startswith("awsddp -c missing up --local")


def test_unknown_keyword_and_invalid_name_are_errors_of_the_command_line(active_lab: Lab) -> None:
    with pytest.raises(awsddp.UsageError, match="unknown keyword 'node'") as refused:
        awsddp.Cluster("demo", local=True).plan(node=2)  # type: ignore[call-arg]
    assert refused.value.next == "did you mean 'nodes'?"
    with pytest.raises(awsddp.ConfigError):
        awsddp.Cluster("no name")


def test_up_needs_consent_to_a_price_unless_the_cloud_is_local(active_lab: Lab) -> None:
    from awsddp.api.cluster import consent

    local = awsddp.Cluster("priced", local=True)
    plan = local.plan(nodes=2)
    remote = awsddp.Cluster("priced")
    consent(local.session, None)(plan.launch)
    with pytest.raises(awsddp.UsageError, match="needs consent to a price") as refused:
        consent(remote.session, None)(plan.launch)
    assert "max_price_usd" in refused.value.next
    price = plan.price_usd_per_hour
    assert price is not None
    consent(awsddp.Cluster("priced", max_price_usd=price).session, None)(plan.launch)
    with pytest.raises(awsddp.UsageError, match="the price is now"):
        consent(awsddp.Cluster("priced", max_price_usd=price - 1).session, None)(plan.launch)


@pytest.mark.prove
def test_a_cluster_reads_nothing_before_its_first_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster = awsddp.Cluster("late", local=True)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "later"))
    assert cluster.folder.path == tmp_path / "later/clusters/late"


def test_methods_work_on_any_thread(active_lab: Lab) -> None:
    states: list[str] = []
    threads = [
        threading.Thread(
            target=lambda name: states.append(awsddp.Cluster(name, local=True).up(nodes=2)["state"]),
            args=(name,),
        )
        for name in ("one", "two")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["ready", "ready"]
    for name in ("one", "two"):
        awsddp.Cluster(name, local=True).down()


def test_importing_awsddp_takes_at_most_half_as_long_again_as_click() -> None:
    def measure_import(module: str) -> float:
        command = [sys.executable, "-X", "importtime", "-c", f"import {module}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
        (row,) = [line for line in lines if line.rpartition("|")[2].rstrip() == f" {module}"]
        return float(re.findall(r"\d+", row)[1])

    pairs = [(measure_import("awsddp"), measure_import("click")) for _ in range(3)]
    assert min(package for package, _ in pairs) <= 1.5 * min(click for _, click in pairs)


def test_the_package_is_typed_and_lists_its_names() -> None:
    assert Path(awsddp.__file__).with_name("py.typed").is_file()
    for name in dir(awsddp):
        assert getattr(awsddp, name) is not None
