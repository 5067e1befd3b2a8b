"""The local cloud: from RunInstances to a verified login on every node, and what a node takes of memory.

    python benchmarks/local_boot.py [--nodes 2 8] [--times 3]

One line for each size and time: seconds from the call to the last node's `ssh ... true` with a host key that
was put into the user data and is checked strictly, and the resident memory of a node's processes. As root.
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
            ec2, request = prepared(info, folder)
            for nodes in chosen.nodes:
                results = [
                    measured(ec2, request, nodes, folder, CloudPaths(home)) for _ in range(chosen.times)
                ]
                seconds = [result[0] for result in results]
                each = ", ".join(f"{one:.1f}" for one in seconds)
                print(
                    f"{nodes} nodes: {statistics.median(seconds):.1f} s to a verified login on all "
                    f"({each}), {results[-1][1]:.0f} MB a node ({info.mode})"
                )
        finally:
            control.stop(home)


def prepared(info: control.LocalInfo, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Makes keys and a group; returns the client and the request."""
    given = {
        "endpoint_url": info.endpoint,
        "region_name": info.region,
        "aws_access_key_id": info.access_key_id,
        "aws_secret_access_key": info.secret_access_key,
    }
    ec2: Any = boto3.client("ec2", **given)
    ssm: Any = boto3.client("ssm", **given)
    for key in ("login", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    ec2.import_key_pair(KeyName="bench", PublicKeyMaterial=(folder / "login.pub").read_bytes())
    group = ec2.create_security_group(GroupName="bench", Description="-")["GroupId"]
    ec2.authorize_security_group_ingress(
        GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp=f"{info.caller_address}/32"
    )
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


def measured(
    ec2: Any, request: dict[str, Any], nodes: int, folder: Path, place: CloudPaths
) -> tuple[float, float]:
    """Launches, logs in everywhere, ends it; returns seconds and megabytes a node."""
    began = time.monotonic()
    launched = ec2.run_instances(**request, MinCount=nodes, MaxCount=nodes)["Instances"]
    waiting = {one["PrivateIpAddress"] for one in launched}
    while waiting:
        waiting = {address for address in waiting if not logged_in(address, folder)}
    seconds = time.monotonic() - began
    ids = [one["InstanceId"] for one in launched]
    megabytes = sum(proportional_mb(pid) for one in ids for pid in cgroups.list_processes(place, one)) / nodes
    ec2.terminate_instances(InstanceIds=ids)
    while any(path.name in ids for path in place.nodes.glob("*")):
        time.sleep(0.1)
    return seconds, megabytes


def logged_in(address: str, folder: Path) -> bool:
    known = folder / f"known-{address}"
    known.write_text(f"{address} {(folder / 'host.pub').read_text()}")
    options = [
        "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={known}",
        "ConnectTimeout=1",
        "BatchMode=yes",
    ]
    words = [word for option in options for word in ("-o", option)]
    line = ["ssh", "-F", "none", "-i", str(folder / "login"), *words, f"ubuntu@{address}", "true"]
    return subprocess.run(line, capture_output=True).returncode == 0


def proportional_mb(pid: int) -> float:
    """A process's share of memory: what it shares with others counts in part (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
