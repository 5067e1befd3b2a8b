"""Where a cluster is looked for: where its record says, whatever is set now; nothing else ends its record.

The class is drawn: the place of the record, what is set or missing now, and the verb that asks.
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
from tests.support.seed import SEED, drawn
from tests.system.test_reservations import make_client

PLACES = {"local": "the local cloud", "aws": "us-east-1"}
QUICK = 2


@dataclass(frozen=True)
class Now:
    """What is set when a verb asks: awsddp.toml, variables (None: unset), options, a daemon that died."""

    toml: str = ""
    environ: dict[str, str | None] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    daemon_dies: bool = False


NO_KEYS: dict[str, str | None] = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
NOWS = {
    "nothing": Now(),
    "region in awsddp.toml": Now(toml='[cluster]\nregion = "eu-west-1"\n'),
    "profile in awsddp.toml": Now(toml='[cluster]\nprofile = "work"\n'),
    "AWSDDP_CLUSTER_REGION": Now(environ={"AWSDDP_CLUSTER_REGION": "eu-west-1"}),
    "AWS_REGION": Now(environ={"AWS_REGION": "eu-west-1"}),
    "AWSDDP_LOCAL": Now(environ={"AWSDDP_LOCAL": "/nonexistent/elsewhere"}),
    "no credentials": Now(environ=NO_KEYS),
    "no credentials, region in awsddp.toml": Now(toml='[cluster]\nregion = "eu-west-1"\n', environ=NO_KEYS),
    "daemon died": Now(daemon_dies=True),
    "--region": Now(options=("--region", "eu-west-1")),
    "--profile": Now(options=("--profile", "work")),
    "--local": Now(options=("--local",)),
}
VERBS = {
    "status": ("status",),
    "down": ("down",),  # without -y, nobody answers its question: exit 2, and nothing ends
    "plan": ("plan",),
    "ssh": ("ssh",),
    "stop": ("stop",),
    "jobs": ("jobs",),
    "fetch": ("fetch",),
}
CASES = [case for case in itertools.product(PLACES, NOWS, VERBS) if case[:2] != ("aws", "daemon died")]
ELSEWHERE = {("local", "--region"), ("local", "--profile"), ("aws", "--region"), ("aws", "--local")}
MUST = [("local", "profile in awsddp.toml", "down"), ("aws", "region in awsddp.toml", "down")]


class Land:
    """One home with a cluster `local` in the local cloud and one `aws` in what it takes for AWS."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.environ = lab, dict(lab.environ)
        told = lab.json("local", "status")
        self.environ |= {
            "AWS_ENDPOINT_URL": told["endpoint"],
            "AWS_ACCESS_KEY_ID": told["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": told["secret_access_key"],
        }
        self.profile = lab.root / "aws-config"
        self.profile.write_text("[profile work]\nregion = eu-west-1\n")
        self.environ["AWS_CONFIG_FILE"] = str(self.profile)
        lab.environ = self.environ
        self.ids = {place: self.launch(place) for place in PLACES}

    def launch(self, place: str) -> str:
        where = ("--local",) if place == "local" else ("--region", "us-east-1")
        size = ("--nodes", "1", "--instance-type", "g6.xlarge", "-o", "network.ssh_cidr=203.0.113.7/32")
        for _ in range(1 if place == "local" else 2):  # one of this name ended here before
            self.lab.run("-c", place, *where, "down", "-y")
            shown = self.lab.run("-c", place, *where, "up", *size, "-y")
            assert shown.returncode == 0, shown.stderr
        return str(self.lab.json("status", "-c", place)["nodes"][0]["instance_id"])

    def ask(self, place: str, now: Now, *words: str) -> subprocess.CompletedProcess[str]:
        """Ask as a user does to whom `now` happened."""
        if now.daemon_dies:
            os.kill(int(CloudPaths(self.lab.home).daemon_lock.read_text()), signal.SIGKILL)
        (self.lab.project / "awsddp.toml").write_text(now.toml)
        changed = self.environ | now.environ
        self.lab.environ = {key: value for key, value in changed.items() if value is not None}
        if place == "local":  # nothing of AWS is needed for it
            self.lab.environ = {k: v for k, v in self.lab.environ.items() if not k.startswith("AWS_")} | {
                k: v for k, v in now.environ.items() if v is not None
            }
        try:
            return self.lab.run(words[0], "--json", "-c", place, *now.options, *words[1:])
        finally:
            self.lab.environ = dict(self.environ)

    def check(self, place: str, now: str, verb: str) -> None:
        """Hold one case against the promise."""
        shown = self.ask(place, NOWS[now], *VERBS[verb])
        case = f"{place}, {now}, {verb}: {shown.returncode}\n{shown.stdout}{shown.stderr}"
        assert (self.lab.home / "clusters" / place / "key").exists(), case
        document: Any = json.loads(shown.stdout)
        error = document.get("error", {}) if isinstance(document, dict) else {}
        assert "absent" not in str(document) and error.get("kind") not in ("not_found", "internal"), case
        if shown.returncode:
            assert error["message"] and error["next"], case
        if verb == "status" and shown.returncode == 0:
            assert [node["instance_id"] for node in document["nodes"]] == [self.ids[place]], case
        if verb == "down":
            assert shown.returncode != 0, case
        if (place, now) in ELSEWHERE:
            assert shown.returncode == 3, case
            assert error["message"].startswith(f"cluster {place} is in {PLACES[place]}, not in "), case
            assert f"awsddp -c {place} down" in error["next"], case
        elif verb in ("status", "down") and not (place == "aws" and (now == "--profile" or "cred" in now)):
            assert shown.returncode == (0 if verb == "status" else 2), case

    def living(self) -> set[str]:
        pages = make_client(self.lab).describe_instances()["Reservations"]
        found = [one for page in pages for one in page["Instances"]]
        return {one["InstanceId"] for one in found if one["State"]["Name"] == "running"}


@pytest.fixture(scope="module")
def land(records: Lab) -> Iterator[Land]:
    before = records.environ
    made = Land(records)
    yield made
    for place in PLACES:  # what is set now hides nothing from the `down` that means it
        asked = NOWS["profile in awsddp.toml"] if place == "local" else NOWS["AWSDDP_CLUSTER_REGION"]
        assert made.ids[place] in made.living()
        ended = made.ask(place, asked, "down", "-y")
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["terminated"] == [made.ids[place]]
        assert not (records.home / "clusters" / place).exists()
    assert made.living() == set()
    records.environ = before
    (records.project / "awsddp.toml").unlink()


def test_no_setting_hides_a_cluster_or_ends_its_record(land: Land) -> None:
    rest = [case for case in CASES if case not in MUST and case[2] not in ("jobs", "fetch")]
    for case in (*MUST, *random.Random(SEED).sample(rest, QUICK)):
        land.check(*case)


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES)
def test_no_setting_hides_a_cluster_from_any_verb(land: Land, place: str) -> None:
    # `jobs` and `fetch` wait for a node that answers; the search is the same.
    slow = {case for case in CASES if case[2] in ("jobs", "fetch") and case[:2] not in ELSEWHERE}
    cases = [case for case in CASES if case[0] == place and (case not in slow or case[1] == "nothing")]
    for case in drawn(cases, len(cases) // 3, what=f"settings of {place}"):
        land.check(*case)


def test_a_folder_is_retired_only_where_its_place_has_nothing(records: Lab, tmp_path: Path) -> None:
    assert records.run("-c", "gone", "up", "--local", "--nodes", "1", "-y").returncode == 0
    folder = records.home / "clusters" / "gone"
    nodes = [node["instance_id"] for node in records.json("status", "-c", "gone")["nodes"]]
    before = records.environ
    records.environ = before | {"AWSDDP_LOCAL": str(tmp_path)}  # another local cloud, which has nothing
    try:
        assert records.json("status", "-c", "gone")["nodes"][0]["instance_id"] == nodes[0]
    finally:
        records.environ = before
    make_client(records).terminate_instances(InstanceIds=nodes)
    assert folder.exists()
    ended = records.json("down", "-c", "gone", "-y")
    assert (ended["state"], ended["terminated"], ended["looked"]) == ("absent", [], ["the local cloud"])
    assert not folder.exists()
