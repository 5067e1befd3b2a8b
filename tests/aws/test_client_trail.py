"""The audit trail: each call with AWS's own request id, and no secret in it."""

import json
import stat
from pathlib import Path

import pytest

from awsddp import __version__
from awsddp.aws.api_errors import AwsRefused
from awsddp.aws.client import AwsClient, Trail
from awsddp.aws.waits import Clock
from awsddp.state import ClusterFolder
from tests.support.moto_cloud import SECRETS, Cloud, Launcher, plan_for


def test_the_trail_has_every_call_with_its_request_id_and_no_secret(
    aws: AwsClient, cloud: Cloud, clock: Clock, tmp_path: Path
) -> None:
    folder = ClusterFolder(tmp_path, "demo")
    watched = AwsClient(cloud.target, on_call=Trail(folder.path))
    plan = plan_for(watched)
    assert not folder.path.exists()
    folder.append_event("begins")
    Launcher(watched)(plan)
    text = (folder.path / "calls.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["operation"] for line in lines].count("RunInstances") == 1
    assert sorted(line["operation"] for line in lines) == sorted(name for name, _ in cloud.requests)
    assert all(line["request_id"] for line in lines if line["service"] in ("ec2", "sts"))
    assert all(secret not in text for secret in SECRETS.values())
    assert "[REDACTED]" in text
    assert stat.S_IMODE((folder.path / "calls.jsonl").stat().st_mode) == 0o600


def test_the_trail_has_the_code_of_an_error(aws: AwsClient, cloud: Cloud, tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path, "demo")
    folder.append_event("begins")
    cloud.fail("DescribeInstances", "UnauthorizedOperation")
    with pytest.raises(AwsRefused):
        AwsClient(cloud.target, on_call=Trail(folder.path)).call("DescribeInstances", {})
    [line] = (folder.path / "calls.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "UnauthorizedOperation"


def test_the_user_agent_names_awsddp(aws: AwsClient, cloud: Cloud) -> None:
    aws.call("DescribeRegions", {})
    assert f"awsddp/{__version__}" in cloud.agents[-1]
