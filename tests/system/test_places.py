"""A cluster is searched where its record says, whatever the settings are; nothing else ends its record.

A case is drawn: the place of the record, the settings that changed or are missing, and the verb.
"""

import itertools
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from awsddp.local.machine import CloudPaths
from tests.support.lab import Lab
from tests.support.seed import SEED, draw_cases
from tests.system.test_reservations import make_client

PLACES = {"local": "the local cloud", "aws": "us-east-1"}
QUICK = 2


@dataclass(frozen=True)
class Setup:
    """The settings of a command: awsddp.toml, variables (None: unset), options, a daemon that died."""

    toml: str = ""
    environ: dict[str, str | None] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    daemon_dies: bool = False


NO_KEYS: dict[str, str | None] = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
SETUPS = {
    "nothing": Setup(),
    "region in awsddp.toml": Setup(toml='[cluster]\nregion = "eu-west-1"\n'),
    "profile in awsddp.toml": Setup(toml='[cluster]\nprofile = "work"\n'),
    "AWSDDP_CLUSTER_REGION": Setup(environ={"AWSDDP_CLUSTER_REGION": "eu-west-1"}),
    "AWS_REGION": Setup(environ={"AWS_REGION": "eu-west-1"}),
    "AWSDDP_LOCAL": Setup(environ={"AWSDDP_LOCAL": "/nonexistent/elsewhere"}),
    "no credentials": Setup(environ=NO_KEYS),
    "no credentials, region in awsddp.toml": Setup(toml='[cluster]\nregion = "eu-west-1"\n', environ=NO_KEYS),
    "daemon died": Setup(daemon_dies=True),
    "--region": Setup(options=("--region", "eu-west-1")),
    "--profile": Setup(options=("--profile", "work")),
    "--local": Setup(options=("--local",)),
}
VERBS = {
    "status": ("status",),
    "down": ("down",),  # its question needs -y: exit 2, and nothing is terminated
    "plan": ("plan",),
    "ssh": ("ssh",),
    "stop": ("stop",),
    "jobs": ("jobs",),
    "fetch": ("fetch",),
}
CASES = [case for case in itertools.product(PLACES, SETUPS, VERBS) if case[:2] != ("aws", "daemon died")]
ELSEWHERE = {("local", "--region"), ("local", "--profile"), ("aws", "--region"), ("aws", "--local")}
MUST = [("local", "profile in awsddp.toml", "down"), ("aws", "region in awsddp.toml", "down")]


class TwoClouds:
    """A client with a cluster `local` in the local cloud and a cluster `aws` in what it takes for AWS."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.environ = lab, dict(lab.environ)
        cloud = lab.json("local", "status")
        self.environ |= {
            "AWS_ENDPOINT_URL": cloud["endpoint"],
            "AWS_ACCESS_KEY_ID": cloud["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": cloud["secret_access_key"],
        }
        self.profile = lab.root / "aws-config"
        self.profile.write_text("[profile work]\nregion = eu-west-1\n")
        self.environ["AWS_CONFIG_FILE"] = str(self.profile)
        lab.environ = self.environ
        self.ids = {place: self.launch(place) for place in PLACES}

    def launch(self, place: str) -> str:
        target = ("--local",) if place == "local" else ("--region", "us-east-1")
        size = ("--nodes", "1", "--instance-type", "g6.xlarge", "-o", "network.ssh_cidr=203.0.113.7/32")
        for _ in range(1 if place == "local" else 2):  # the second of its name
            self.lab.run("-c", place, *target, "down", "-y")
            result = self.lab.run("-c", place, *target, "up", *size, "-y")
            assert result.returncode == 0, result.stderr
        return str(self.lab.json("status", "-c", place)["nodes"][0]["instance_id"])

    def run(self, place: str, setup: Setup, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a command with the settings of `setup`."""
        if setup.daemon_dies:
            os.kill(int(CloudPaths(self.lab.home).daemon_lock.read_text()), signal.SIGKILL)
        (self.lab.project / "awsddp.toml").write_text(setup.toml)
        changed = self.environ | setup.environ
        self.lab.environ = {key: value for key, value in changed.items() if value is not None}
        if place == "local":  # it needs no setting of AWS
            self.lab.environ = {k: v for k, v in self.lab.environ.items() if not k.startswith("AWS_")} | {
                k: v for k, v in setup.environ.items() if v is not None
            }
        try:
            return self.lab.run(args[0], "--json", "-c", place, *setup.options, *args[1:])
        finally:
            self.lab.environ = dict(self.environ)

    def check(self, place: str, setup: str, verb: str) -> None:
        """Check one case."""
        result = self.run(place, SETUPS[setup], *VERBS[verb])
        case = f"{place}, {setup}, {verb}: {result.returncode}\n{result.stdout}{result.stderr}"
        assert (self.lab.home / "clusters" / place / "key").exists(), case
        document: Any = json.loads(result.stdout)
        error = document.get("error", {}) if isinstance(document, dict) else {}
        assert "absent" not in str(document) and error.get("kind") not in ("not_found", "internal"), case
        if result.returncode:
            assert error["message"] and error["next"], case
        if verb == "status" and result.returncode == 0:
            assert [node["instance_id"] for node in document["nodes"]] == [self.ids[place]], case
        if verb == "down":
            assert result.returncode != 0, case
        if (place, setup) in ELSEWHERE:
            assert result.returncode == 3, case
            assert error["message"].startswith(f"cluster {place} is in {PLACES[place]}, not in "), case
            assert f"awsddp -c {place} down" in error["next"], case
        elif verb in ("status", "down") and not (
            place == "aws" and (setup == "--profile" or "cred" in setup)
        ):
            assert result.returncode == (0 if verb == "status" else 2), case

    def list_running(self) -> set[str]:
        pages = make_client(self.lab).describe_instances()["Reservations"]
        nodes = [node for page in pages for node in page["Instances"]]
        return {node["InstanceId"] for node in nodes if node["State"]["Name"] == "running"}


@pytest.fixture(scope="module")
def clouds(records: Lab) -> Iterator[TwoClouds]:
    before = records.environ
    clouds = TwoClouds(records)
    yield clouds
    for place in PLACES:  # no setting hides a cluster from its `down`
        setup = SETUPS["profile in awsddp.toml"] if place == "local" else SETUPS["AWSDDP_CLUSTER_REGION"]
        assert clouds.ids[place] in clouds.list_running()
        ended = clouds.run(place, setup, "down", "-y")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["terminated"] == [clouds.ids[place]]
        assert not (records.home / "clusters" / place).exists()
    assert clouds.list_running() == set()
    records.environ = before
    (records.project / "awsddp.toml").unlink()


def test_no_setting_hides_a_cluster_or_ends_its_record(clouds: TwoClouds) -> None:
    others = [case for case in CASES if case not in MUST and case[2] not in ("jobs", "fetch")]
    for case in (*MUST, *random.Random(SEED).sample(others, QUICK)):
        clouds.check(*case)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES)
def test_no_setting_hides_a_cluster_from_any_verb(clouds: TwoClouds, place: str) -> None:
    # `jobs` and `fetch` wait for a node that answers; the search is the same.
    slow = {case for case in CASES if case[2] in ("jobs", "fetch") and case[:2] not in ELSEWHERE}
    cases = [case for case in CASES if case[0] == place and (case not in slow or case[1] == "nothing")]
    for case in draw_cases(cases, len(cases) // 3, label=f"settings of {place}"):
        clouds.check(*case)


def test_down_archives_a_folder_only_once_its_own_cloud_has_nothing(records: Lab, tmp_path: Path) -> None:
    assert records.run("-c", "gone", "up", "--local", "--nodes", "1", "-y").returncode == 0
    folder = records.home / "clusters" / "gone"
    nodes = [node["instance_id"] for node in records.json("status", "-c", "gone")["nodes"]]
    before = records.environ
    records.environ = before | {"AWSDDP_LOCAL": str(tmp_path)}  # another local cloud, which is empty
    try:
        assert records.json("status", "-c", "gone")["nodes"][0]["instance_id"] == nodes[0]
    finally:
        records.environ = before
    make_client(records).terminate_instances(InstanceIds=nodes)
    assert folder.exists()
    ended = records.json("down", "-c", "gone", "-y")
    assert (ended["state"], ended["terminated"], ended["looked"]) == ("absent", [], ["the local cloud"])
    assert not folder.exists()
