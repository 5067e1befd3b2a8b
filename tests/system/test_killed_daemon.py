"""The daemon of the local cloud killed with -9 at random moments while a client launches and terminates."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from awsddp.errors import LocalCloudError
from awsddp.local import control
from awsddp.local.machine import CloudPaths
from tests.support.local_cloud import Cloud, find_leftovers, needs_root
from tests.support.seed import FULL, SEED

GONE = ("shutting-down", "terminated")


class Killer(threading.Thread):
    """Kills the daemon `times` times, each time at a random moment after its restart."""

    def __init__(self, home: Path, times: int, longest_s: float) -> None:
        super().__init__()
        self.home, self.times, self.longest_s = home, times, longest_s
        self.done = 0

    def run(self) -> None:
        moments = random.Random(SEED)
        while self.done < self.times:
            time.sleep(moments.uniform(0.0, self.longest_s))
            try:
                os.kill(int(CloudPaths(self.home).daemon_lock.read_text()), signal.SIGKILL)
                self.done += 1
            except (ValueError, ProcessLookupError, FileNotFoundError):
                continue


def call_until_answered(cloud: Cloud, operation: str, **parameters: Any) -> Any:
    """Repeat a call until the daemon answers; restart the daemon as the next command would."""
    while True:
        try:
            cloud.info = control.start(cloud.home)
            return getattr(cloud.client("ec2"), operation)(**parameters)
        except (BotoCoreError, ResponseParserError, LocalCloudError):
            continue
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise


def list_instances(cloud: Cloud) -> set[str]:
    pages = call_until_answered(cloud, "describe_instances")["Reservations"]
    instances = [instance for page in pages for instance in page["Instances"]]
    return {instance["InstanceId"] for instance in instances if instance["State"]["Name"] not in GONE}


def launch_and_terminate(cloud: Cloud, image: str, killer: Killer) -> int:
    """Launch and terminate two instances until the killer is done; return the number of rounds."""
    rounds = 0
    while killer.is_alive():
        made = call_until_answered(
            cloud,
            "run_instances",
            ImageId=image,
            InstanceType="g4dn.12xlarge",
            MinCount=2,
            MaxCount=2,
            ClientToken=f"round-{rounds}",
        )["Instances"]
        ids = {instance["InstanceId"] for instance in made}
        assert len(ids) == 2
        assert list_instances(cloud) == ids, "lost or duplicated"
        states: set[str] = set()
        while states != {"running"}:
            page = call_until_answered(cloud, "describe_instances", InstanceIds=sorted(ids))["Reservations"]
            states = {instance["State"]["Name"] for instance in page[0]["Instances"]}
            assert states <= {"pending", "running"}
            time.sleep(0.05)
        call_until_answered(cloud, "terminate_instances", InstanceIds=sorted(ids))
        assert list_instances(cloud) == set()
        rounds += 1
    return rounds


@pytest.mark.prove
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("mode", "kills", "longest_s"),
    [
        ("records", 50 if FULL else 20, 2.5),
        pytest.param(None, 50 if FULL else 12, 8.0, marks=needs_root, id="nspawn"),
    ],
)
def test_a_daemon_killed_repeatedly_neither_loses_nor_duplicates_instances(
    tmp_path: Path, mode: str | None, kills: int, longest_s: float
) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode=mode))
    try:
        killer = Killer(tmp_path, kills, longest_s)
        image = cloud.image
        assert image
        killer.start()
        rounds = launch_and_terminate(cloud, image, killer)
        killer.join()
        assert rounds > 0
        cloud.info = control.start(tmp_path)
        ids = [instance["InstanceId"] for instance in cloud.instances()]
        assert len(ids) == len(set(ids)) == 2 * rounds
        cloud.wait("terminated", *ids)
        assert list((tmp_path / "local/nodes").glob("*")) == []
    finally:
        control.stop(tmp_path)
    assert find_leftovers(tmp_path) == {}
