"""The daemon killed with -9 at random moments while a client launches and terminates."""

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
from tests.support.local_cloud import Cloud, left_over, needs_root
from tests.support.seed import FULL, SEED

GONE = ("shutting-down", "terminated")


class Killer(threading.Thread):
    """Kills the daemon `times` times, each at a random moment after it lives again."""

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


def patient(cloud: Cloud, operation: str, **parameters: Any) -> Any:
    """Repeats a call until the daemon answers, reviving it as the next command would."""
    while True:
        try:
            cloud.info = control.start(cloud.home)
            return getattr(cloud.client("ec2"), operation)(**parameters)
        except (BotoCoreError, ResponseParserError, LocalCloudError):
            continue
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500:
                raise


def alive(cloud: Cloud) -> set[str]:
    pages = patient(cloud, "describe_instances")["Reservations"]
    found = [one for page in pages for one in page["Instances"]]
    return {one["InstanceId"] for one in found if one["State"]["Name"] not in GONE}


def work(cloud: Cloud, image: str, killer: Killer) -> int:
    """Launches two and ends them, again and again while the killer is about; returns how often."""
    rounds = 0
    while killer.is_alive():
        made = patient(
            cloud,
            "run_instances",
            ImageId=image,
            InstanceType="g4dn.12xlarge",
            MinCount=2,
            MaxCount=2,
            ClientToken=f"round-{rounds}",
        )["Instances"]
        ids = {one["InstanceId"] for one in made}
        assert len(ids) == 2
        assert alive(cloud) == ids, "lost or doubled"
        states: set[str] = set()
        while states != {"running"}:
            page = patient(cloud, "describe_instances", InstanceIds=sorted(ids))["Reservations"]
            states = {one["State"]["Name"] for one in page[0]["Instances"]}
            assert states <= {"pending", "running"}
            time.sleep(0.05)
        patient(cloud, "terminate_instances", InstanceIds=sorted(ids))
        assert alive(cloud) == set()
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
def test_a_daemon_killed_again_and_again_loses_and_doubles_nothing(
    tmp_path: Path, mode: str | None, kills: int, longest_s: float
) -> None:
    cloud = Cloud(tmp_path, control.start(tmp_path, mode=mode))
    try:
        killer = Killer(tmp_path, kills, longest_s)
        image = cloud.image
        assert image
        killer.start()
        rounds = work(cloud, image, killer)
        killer.join()
        assert rounds > 0
        cloud.info = control.start(tmp_path)
        ids = [one["InstanceId"] for one in cloud.instances()]
        assert len(ids) == len(set(ids)) == 2 * rounds
        cloud.wait("terminated", *ids)
        assert list((tmp_path / "local/nodes").glob("*")) == []
    finally:
        control.stop(tmp_path)
    assert left_over(tmp_path) == {}
