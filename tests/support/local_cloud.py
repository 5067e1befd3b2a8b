"""One local cloud with hosts and one with records only, for the whole test session."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from awsddp.local import control
from tests.support import waiting

PYTORCH = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="systemd-nspawn and namespaces are root's")


@dataclass
class Cloud:
    """A running local cloud, and boto3 clients of it that have only its endpoint and credentials."""

    home: Path
    info: control.LocalInfo

    def client(self, service: str, **changes: Any) -> Any:
        settings = {
            "endpoint_url": self.info.endpoint,
            "region_name": self.info.region,
            "aws_access_key_id": self.info.access_key_id,
            "aws_secret_access_key": self.info.secret_access_key,
            "config": Config(retries={"total_max_attempts": 1}),
        }
        return boto3.client(service, **{**settings, **changes})

    @property
    def image(self) -> str:
        return str(self.client("ssm").get_parameter(Name=PYTORCH)["Parameter"]["Value"])

    def request(self, **changes: Any) -> dict[str, Any]:
        """Return the parameters of a valid RunInstances."""
        return {
            "ImageId": self.image,
            "InstanceType": "g4dn.12xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            **changes,
        }

    def instances(self, *ids: str) -> list[dict[str, Any]]:
        pages = self.client("ec2").describe_instances(InstanceIds=list(ids))["Reservations"]
        instances = [instance for page in pages for instance in page["Instances"]]
        return sorted(instances, key=lambda instance: ids.index(instance["InstanceId"]) if ids else 0)

    def wait(self, state: str, *ids: str) -> list[dict[str, Any]]:
        until(lambda: {instance["State"]["Name"] for instance in self.instances(*ids)} == {state})
        return self.instances(*ids)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL, and start it again."""
        os.kill(control.find_cloud(self.home).pid, 9)
        self.info = control.start(self.home)


def add_fault(info: control.LocalInfo, operation: str, effect: str, **choices: Any) -> list[dict[str, Any]]:
    """Add a fault to an operation or a node; return all active faults."""
    order = {"add": {"operation": operation, "effect": effect, **choices}}
    return [msgspec.to_builtins(fault) for fault in control.send_command(info, order).faults]


def clear_fault(info: control.LocalInfo, number: int | None = None) -> list[dict[str, Any]]:
    """Remove one fault, or all; return the remaining ones."""
    return [msgspec.to_builtins(fault) for fault in control.send_command(info, {"clear": number}).faults]


until = partial(waiting.until, seconds=60)
"""`waiting.until` with the time that a host takes to start."""


def error_code_of(call: Callable[..., Any], **parameters: Any) -> str:
    """Return the error code of a call that must fail."""
    with pytest.raises(ClientError) as caught:
        call(**parameters)
    return str(caught.value.response["Error"]["Code"])


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("records")
    yield Cloud(home, control.start(home, mode="records"))
    control.stop(home)


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    home = tmp_path_factory.mktemp("cloud")
    yield Cloud(home, control.start(home))
    control.stop(home)


def find_leftovers(home: Path) -> dict[str, list[str]]:
    """Return the processes, mounts, interfaces, files etc. of a local cloud on this machine, by kind."""
    from awsddp.local.machine import CloudPaths

    paths = CloudPaths(home)
    loops = subprocess.run(["losetup", "--list"], capture_output=True, text=True).stdout.splitlines()
    ps = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True).stdout.splitlines()
    leftovers = {
        "processes": [line for line in ps if str(home) in line or paths.tag in line],
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(home) in line],
        "namespaces": [path.name for path in Path("/run/netns").glob(f"*{paths.tag}*")],
        "interfaces": [path.name for path in Path("/sys/class/net").glob(f"*{paths.tag}*")],
        "disks": [line for line in loops if str(home) in line],
        "cgroups": [path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/{paths.cgroup}")],
        "machines": [str(path) for path in Path("/run/systemd/nspawn").glob(f"*/*{paths.tag}*")],
        "files": [str(path) for path in home.rglob("*")],
    }
    return {kind: names for kind, names in leftovers.items() if names}
