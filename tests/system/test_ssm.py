"""`network.jump = "ssm"` on two real local nodes: no port is open, and sessions start in the nodes."""

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.lab import Lab
from tests.support.local_cloud import needs_root
from tests.support.ssm import FakeAwsCli
from tests.system.test_jump_host import is_reachable

pytestmark = [needs_root, pytest.mark.prove]
SSM = """\
[cluster]
nodes = 2
instance_type = "g4dn.xlarge"
[network]
address = "private"
jump = "ssm"
[access]
instance_profile = "trainers"
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab with a local cloud, an instance profile, and awsddp.toml."""
    root = Path(tempfile.mkdtemp(prefix="ssm-"))
    made = Lab(root)
    result = made.run("local", "start")
    assert result.returncode == 0, result.stderr
    make_client(made, "iam").create_instance_profile(InstanceProfileName="trainers")
    made.script("awsddp.toml", SSM)
    made.script("train.py", 'import os\nopen("made.txt", "w").write(os.environ["RANK"])\nprint("ran")\n')
    yield made
    made.close()
    shutil.rmtree(root)


def make_client(lab: Lab, service: str) -> Any:
    info = control.find_cloud(lab.home)
    assert info is not None
    return boto3.client(
        service,
        endpoint_url=info.endpoint,
        region_name=info.region,
        aws_access_key_id=info.access_key_id,
        aws_secret_access_key=info.secret_access_key,
    )


def report_nodes(lab: Lab, aws: FakeAwsCli, stop: threading.Event) -> None:
    """Report nodes to Systems Manager once they exist, as their agents do."""
    paths = CloudPaths(lab.home)
    while not stop.wait(0.2):
        names = [path.name for path in Path("/run/netns").glob(f"{paths.machine_name('i-')}*")]
        aws.set_targets({f"i-{name.rpartition('-i-')[2]}": ("127.0.0.1", name) for name in names})


def test_missing_settings_of_ssm_are_reported_before_any_launch(lab: Lab) -> None:
    result = lab.run("up", "--local", "-y", "-o", "access.instance_profile=")
    assert (result.returncode, "needs access.instance_profile" in result.stderr) == (3, True)
    lab.environ["PATH"] = f"{Path(shutil.which('aws') or '/').parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    result = lab.run("up", "--local", "-y")
    assert (result.returncode, "session-manager-plugin not found" in result.stderr) == (3, True)
    assert "session-manager-plugin.deb" in result.stderr
    assert lab.json("local", "status")["instances"] == []


@pytest.mark.timeout(600)
def test_a_running_cluster_keeps_its_open_port_until_sessions_can_reach_it(lab: Lab) -> None:
    open_port = ("-o", "network.address=public", "-o", "network.jump=", "-o", "access.instance_profile=")
    (node,) = lab.json("up", "--local", "-y", "--nodes", "1", *open_port)["nodes"]
    sessions = ("-o", "network.jump=ssm", "-o", "access.instance_profile=trainers")
    result = lab.run("up", "--local", "-y", *sessions)
    assert (result.returncode, "node0 without an instance profile" in result.stderr) == (3, True), result
    assert f"for i in {node['instance_id']}; do " in result.stderr
    assert " aws ec2 associate-iam-instance-profile" in result.stderr
    make_client(lab, "ec2").associate_iam_instance_profile(
        InstanceId=node["instance_id"], IamInstanceProfile={"Name": "trainers"}
    )
    lab.environ["PATH"] = f"{Path(shutil.which('aws') or '/').parent}:/usr/bin:/bin:/usr/sbin:/sbin"
    result = lab.run("up", "--local", "-y", *sessions)
    assert (result.returncode, "session-manager-plugin not found" in result.stderr) == (3, True), result
    assert lab.run("exec", *open_port[2:4], "--", "true").returncode == 0


def test_all_connections_go_through_sessions_and_no_port_is_open(lab: Lab) -> None:
    aws = FakeAwsCli(lab.root / "ssm")
    lab.environ["PATH"] = f"{aws.bin}:{os.environ['PATH']}"
    plan = lab.run("plan", "--local").stdout
    assert "private, through ssm; SSH from nowhere: no port is open" in " ".join(plan.split())
    stop = threading.Event()
    reporting = threading.Thread(target=report_nodes, args=(lab, aws, stop))
    reporting.start()
    try:
        up = lab.json("up", "--local", "-y")
        assert up["state"] == "ready"
        assert not any(is_reachable(node["private_ip"]) for node in up["nodes"])
        job = lab.json("train", "train.py", "--world-size", "2", "--name", "one")
        assert job["state"] == "succeeded"
        assert (lab.project / "runs/one/node1/made.txt").read_text() == "1"
        shell = lab.run("ssh", "--node", "1", "--", "echo $SSH_CONNECTION")
        assert (shell.returncode, shell.stdout.split()[:1]) == (0, ["127.0.0.1"]), shell.stderr
        lab.json("down", "-y")
    finally:
        stop.set()
        reporting.join()
    ids = {node["instance_id"] for node in up["nodes"]}
    expected = [
        [
            *("ssm", "start-session", "--target", key, "--document-name", "AWS-StartSSHSession"),
            *("--parameters", "portNumber=22", "--region", up["region"]),
        ]
        for key in sorted(ids)
    ]
    assert [call for call in expected if call not in aws.calls] == []
    assert [call for call in aws.calls if call not in expected] == []
