"""`down` of a cluster whose results are not home: they come first; only a person at a terminal loses them."""

import os
import pty
import subprocess
import sys

import pytest

from tests.support.lab import Lab
from tests.system.test_reservations import make_client


@pytest.fixture
def owing(records: Lab) -> Lab:
    """A cluster of two machines that are stopped, and hold the results of job `late`."""
    assert records.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    ec2 = make_client(records)
    nodes = [node["instance_id"] for node in records.json("status")["nodes"]]
    ec2.create_tags(Resources=nodes, Tags=[{"Key": "awsddp:unfetched", "Value": "late"}])
    ec2.stop_instances(InstanceIds=nodes)
    ec2.get_waiter("instance_stopped").wait(InstanceIds=nodes, WaiterConfig={"Delay": 1})
    return records


def answered(lab: Lab, *answers: str, words: tuple[str, ...] = ("down",)) -> tuple[int, str]:
    """Start `awsddp down` on a terminal and answer its questions; return its exit code and what it showed."""
    ours, theirs = pty.openpty()
    client = subprocess.Popen(
        [sys.executable, "-m", "awsddp", *words],
        cwd=lab.project,
        env=lab.environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown, waiting = "", list(answers)
    while True:
        try:
            shown += os.read(ours, 4096).decode()
        except OSError:
            break
        if waiting and shown.count("[y/N]") > len(answers) - len(waiting):
            os.write(ours, f"{waiting.pop(0)}\n".encode())
    os.close(ours)
    return client.wait(timeout=60), shown


@pytest.mark.prove
def test_results_out_of_reach_are_lost_only_when_a_person_says_so(owing: Lab) -> None:
    refused = owing.json("down", "-y", code=6)["error"]
    assert "results of late are not fetched" in refused["message"]
    assert refused["why"] == "node0 is stopped, node1 is stopped"
    assert refused["next"].splitlines()[0].startswith("awsddp up ")
    assert "awsddp down --discard" in refused["next"]

    code, shown = answered(owing, words=("down", "-y"))  # -y answers questions; it loses nothing
    assert (code, "[y/N]" in shown) == (6, False)
    code, shown = answered(owing, "n")
    assert (code, "nothing was terminated" in shown) == (130, True)
    code, shown = answered(owing, "y", "n")
    assert (code, shown.count("[y/N]"), "lose these results?" in shown) == (6, 2, True)
    assert owing.json("status")["state"] == "stopped"
    code, shown = answered(owing, "y", "y")
    assert code == 0
    assert "2 instances terminated" in shown
    assert owing.json("status")["state"] == "absent"


@pytest.mark.prove
def test_another_machine_has_no_key_to_results_and_says_what_they_cost(owing: Lab) -> None:
    owing.environ, before = owing.environ | {"AWSDDP_HOME": str(owing.root / "other")}, owing.environ
    owing.environ["AWSDDP_LOCAL"] = str(owing.home)
    try:
        refused = owing.json("down", "--local", "-y", "-c", "default", code=6)["error"]
        assert "no key" in refused["why"]
        assert owing.run("down", "--local", "-y", "-c", "default", "--discard").returncode == 0
    finally:
        owing.environ = before
