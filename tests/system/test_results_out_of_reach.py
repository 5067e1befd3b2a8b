"""`down` of a cluster with unfetched results: it fetches them; only a user at a terminal can discard them."""

import os
import pty
import subprocess
import sys

import pytest

from tests.support.lab import Lab
from tests.system.test_reservations import make_client


@pytest.fixture
def stopped(records: Lab) -> Lab:
    """A cluster of two stopped nodes with the unfetched results of job `late`."""
    assert records.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    ec2 = make_client(records)
    nodes = [node["instance_id"] for node in records.json("status")["nodes"]]
    ec2.create_tags(Resources=nodes, Tags=[{"Key": "awsddp:unfetched", "Value": "late"}])
    ec2.stop_instances(InstanceIds=nodes)
    ec2.get_waiter("instance_stopped").wait(InstanceIds=nodes, WaiterConfig={"Delay": 1})
    return records


def run_and_answer(lab: Lab, *answers: str, args: tuple[str, ...] = ("down",)) -> tuple[int, str]:
    """Run a command on a terminal and answer its questions; return its exit code and its output."""
    ours, theirs = pty.openpty()
    client = subprocess.Popen(
        [sys.executable, "-m", "awsddp", *args],
        cwd=lab.project,
        env=lab.environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output, waiting = "", list(answers)
    while True:
        try:
            output += os.read(ours, 4096).decode()
        except OSError:
            break
        if waiting and output.count("[y/N]") > len(answers) - len(waiting):
            os.write(ours, f"{waiting.pop(0)}\n".encode())
    os.close(ours)
    return client.wait(timeout=60), output


@pytest.mark.prove
def test_down_discards_unreachable_results_only_if_a_user_confirms_it(stopped: Lab) -> None:
    refused = stopped.json("down", "-y", code=6)["error"]
    assert "results of late are not fetched" in refused["message"]
    assert refused["why"] == "node0 is stopped, node1 is stopped"
    assert refused["next"].splitlines()[0].startswith("awsddp up ")
    assert "awsddp down --discard" in refused["next"]

    code, output = run_and_answer(stopped, args=("down", "-y"))  # -y answers questions, and discards nothing
    assert (code, "[y/N]" in output) == (6, False)
    code, output = run_and_answer(stopped, "n")
    assert (code, "nothing was terminated" in output) == (130, True)
    code, output = run_and_answer(stopped, "y", "n")
    assert (code, output.count("[y/N]"), "lose these results?" in output) == (6, 2, True)
    assert stopped.json("status")["state"] == "stopped"
    code, output = run_and_answer(stopped, "y", "y")
    assert code == 0
    assert "2 instances terminated" in output
    assert stopped.json("status")["state"] == "absent"


@pytest.mark.prove
def test_down_on_a_machine_without_the_key_refuses_to_discard_results(stopped: Lab) -> None:
    stopped.environ, before = stopped.environ | {"AWSDDP_HOME": str(stopped.root / "other")}, stopped.environ
    stopped.environ["AWSDDP_LOCAL"] = str(stopped.home)
    try:
        refused = stopped.json("down", "--local", "-y", "-c", "default", code=6)["error"]
        assert "no key" in refused["why"]
        assert stopped.run("down", "--local", "-y", "-c", "default", "--discard").returncode == 0
    finally:
        stopped.environ = before
