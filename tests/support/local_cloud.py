"""One local cloud with hosts and one of records for the whole room."""

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
    """A running local cloud and its clients, with nothing of ours but endpoint and credentials."""

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
        """A launch that is accepted."""
        return {
            "ImageId": self.image,
            "InstanceType": "g4dn.12xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            **changes,
        }

    def instances(self, *ids: str) -> list[dict[str, Any]]:
        pages = self.client("ec2").describe_instances(InstanceIds=list(ids))["Reservations"]
        found = [instance for page in pages for instance in page["Instances"]]
        return sorted(found, key=lambda instance: ids.index(instance["InstanceId"]) if ids else 0)

    def wait(self, state: str, *ids: str) -> list[dict[str, Any]]:
        until(lambda: {one["State"]["Name"] for one in self.instances(*ids)} == {state})
        return self.instances(*ids)

    def kill(self) -> None:
        """Ends the daemon as nothing else does, and starts it again."""
        os.kill(control.find_cloud(self.home).pid, 9)
        self.info = control.start(self.home)


def fault_add(info: control.LocalInfo, operation: str, effect: str, **choices: Any) -> list[dict[str, Any]]:
    """Make calls of an operation go wrong, or a node; all faults in force."""
    order = {"add": {"operation": operation, "effect": effect, **choices}}
    return [msgspec.to_builtins(one) for one in control.send_command(info, order).faults]


def fault_clear(info: control.LocalInfo, number: int | None = None) -> list[dict[str, Any]]:
    """Take one fault away, or all; those that stay."""
    return [msgspec.to_builtins(one) for one in control.send_command(info, {"clear": number}).faults]


until = partial(waiting.until, seconds=60)
"""Wait as `waiting.until`, for as long as a host may take to start."""


def refusal(call: Callable[..., Any], **parameters: Any) -> str:
    """The code with which a call was refused."""
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


def left_over(home: Path) -> dict[str, list[str]]:
    """All that a local cloud may leave on a machine, by its name."""
    from awsddp.local.machine import CloudPaths

    place = CloudPaths(home)
    loops = subprocess.run(["losetup", "--list"], capture_output=True, text=True).stdout.splitlines()
    ps = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True).stdout.splitlines()
    found = {
        "processes": [line for line in ps if str(home) in line or place.tag in line],
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(home) in line],
        "namespaces": [path.name for path in Path("/run/netns").glob(f"*{place.tag}*")],
        "interfaces": [path.name for path in Path("/sys/class/net").glob(f"*{place.tag}*")],
        "disks": [line for line in loops if str(home) in line],
        "cgroups": [path for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/{place.cgroup}")],
        "machines": [str(path) for path in Path("/run/systemd/nspawn").glob(f"*/*{place.tag}*")],
        "files": [str(path) for path in home.rglob("*")],
    }
    return {kind: names for kind, names in found.items() if names}
