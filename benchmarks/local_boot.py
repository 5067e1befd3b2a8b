"""Seconds from the local cloud's RunInstances to a verified login on every node, and memory per node.

    python benchmarks/local_boot.py [--nodes 2 8] [--times 3]

Needs root. Each line has two figures for one number of nodes: the seconds from the call until `ssh ... true`
has ended on every node, and the memory (PSS) of a node's processes. ssh checks the host key from the user
data strictly.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3

from awsddp.local import cgroups, control
from awsddp.local.machine import CloudPaths

PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, home = Path(name), Path(name, "home")
        info = control.start(home)
        try:
            ec2, request = prepare(info, folder)
            for nodes in chosen.nodes:
                results = [
                    measure(ec2, request, nodes, folder, CloudPaths(home)) for _ in range(chosen.times)
                ]
                seconds = [result[0] for result in results]
                each = ", ".join(f"{value:.1f}" for value in seconds)
                print(
                    f"{nodes} nodes: {statistics.median(seconds):.1f} s to a verified login on all "
                    f"({each}), {results[-1][1]:.0f} MB a node ({info.mode})"
                )
        finally:
            control.stop(home)


def prepare(info: control.LocalInfo, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Create keys and a security group; return the EC2 client and the launch request."""
    connection = {
        "endpoint_url": info.endpoint,
        "region_name": info.region,
        "aws_access_key_id": info.access_key_id,
        "aws_secret_access_key": info.secret_access_key,
    }
    ec2: Any = boto3.client("ec2", **connection)
    ssm: Any = boto3.client("ssm", **connection)
    for key in ("login", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    ec2.import_key_pair(KeyName="bench", PublicKeyMaterial=(folder / "login.pub").read_bytes())
    group = ec2.create_security_group(GroupName="bench", Description="-")["GroupId"]
    caller = {"CidrIp": f"{info.caller_address}/32"}
    rule = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [caller]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
    keys = {
        "ed25519_private": (folder / "host").read_text(),
        "ed25519_public": (folder / "host.pub").read_text().strip(),
    }
    request = {
        "ImageId": ssm.get_parameter(Name=PARAMETER)["Parameter"]["Value"],
        "InstanceType": "g4dn.12xlarge",
        "KeyName": "bench",
        "SecurityGroupIds": [group],
        "UserData": f"#cloud-config\n{json.dumps({'ssh_keys': keys})}",
    }
    return ec2, request


def measure(
    ec2: Any, request: dict[str, Any], nodes: int, folder: Path, paths: CloudPaths
) -> tuple[float, float]:
    """Launch nodes, log in to each, terminate them; return seconds and megabytes per node."""
    began = time.monotonic()
    launched = ec2.run_instances(**request, MinCount=nodes, MaxCount=nodes)["Instances"]
    waiting = {instance["PrivateIpAddress"] for instance in launched}
    while waiting:
        waiting = {address for address in waiting if not can_log_in(address, folder)}
    seconds = time.monotonic() - began
    ids = [instance["InstanceId"] for instance in launched]
    megabytes = sum(proportional_mb(pid) for key in ids for pid in cgroups.list_processes(paths, key)) / nodes
    ec2.terminate_instances(InstanceIds=ids)
    while any(path.name in ids for path in paths.nodes.glob("*")):
        time.sleep(0.1)
    return seconds, megabytes


def can_log_in(address: str, folder: Path) -> bool:
    known_hosts = folder / f"known-{address}"
    known_hosts.write_text(f"{address} {(folder / 'host.pub').read_text()}")
    options = [
        "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={known_hosts}",
        "ConnectTimeout=1",
        "BatchMode=yes",
    ]
    arguments = [argument for option in options for argument in ("-o", option)]
    line = ["ssh", "-F", "none", "-i", str(folder / "login"), *arguments, f"ubuntu@{address}", "true"]
    return subprocess.run(line, capture_output=True).returncode == 0


def proportional_mb(pid: int) -> float:
    """Return a process's proportional share of memory (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
