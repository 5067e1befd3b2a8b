"""A launch that fails over between zones, types, regions and markets; failed attempts leave nothing."""

from pathlib import Path
from typing import Any

import pytest
from moto.ec2.models.instances import Instance

from awsddp.aws.client import AwsClient
from awsddp.aws.clusters import describe, tagged
from awsddp.aws.instances import resume_launch
from awsddp.aws.plan_facts import gather_facts
from awsddp.aws.waits import Clock
from awsddp.cluster.launch import launch, plan_everywhere
from awsddp.errors import AwsddpError, CapacityError, CloudError, ConfigError
from awsddp.model.events import Event
from awsddp.model.records import Node
from awsddp.plan.records import LaunchPlan
from awsddp.session.context import LocatedCluster, Session
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder, Record
from tests.support.moto_cloud import REGION, Cloud, find_cluster

NONE = "InsufficientInstanceCapacity"


class Launches:
    """Plans and launches a spec as `up` does, with its own home."""

    def __init__(self, home: Path, aws: AwsClient, cloud: Cloud) -> None:
        self.home, self.aws, self.cloud = home, aws, cloud
        self.texts: list[str] = []

    def context(self, **keys: Any) -> Session:
        overrides = {key.replace("__", "."): value for key, value in keys.items()}
        spec, job = load("demo", environ={}, overrides=overrides)
        return Session(name="demo", home=self.home, settings=(spec, job), on_event=self.record_text)

    def record_text(self, event: Event) -> None:
        self.texts.append(event.text)

    def plan(self, session: Session) -> LaunchPlan:
        facts = gather_facts(self.aws, session.spec, caller_address="10.77.0.1", target="local")
        return plan_everywhere(self.cluster(session), facts)

    def cluster(self, session: Session) -> LocatedCluster:
        return LocatedCluster(session=session, target=self.cloud.target, aws_client=self.aws)

    def __call__(self, **keys: Any) -> tuple[Record, tuple[Node, ...]]:
        session = self.context(**keys)
        launched = launch(self.cluster(session), self.plan(session))
        return launched.record, launched.nodes


@pytest.fixture
def up(tmp_path: Path, aws: AwsClient, cloud: Cloud) -> Launches:
    cloud.add_image(
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
        region="eu-west-1",
    )
    return Launches(tmp_path, aws, cloud)


def find_remaining(aws: AwsClient) -> object:
    return find_cluster(aws, "demo", aws.identity().user_id)


def list_attempted_types(cloud: Cloud) -> list[str]:
    return [form["InstanceType"] for form in cloud.requests_of("RunInstances")]


def test_other_types_are_tried_where_the_first_has_no_capacity(up: Launches, cloud: Cloud) -> None:
    cloud.fail("RunInstances", NONE, NONE, status=500)
    record, nodes = up(cluster__instance_type="p4d.24xlarge,g5.48xlarge", capacity__zones="us-east-1a")
    assert list_attempted_types(cloud) == ["p4d.24xlarge", "p4d.24xlarge", "g5.48xlarge"]
    assert {node.instance_type for node in nodes} == {"g5.48xlarge"}
    assert record.instance_type == "g5.48xlarge"
    assert record.price_usd_per_hour == pytest.approx(2 * (16.288 + 0.005 + 200 * 0.08 / 730), abs=1e-3)
    assert any("no 2 x p4d.24xlarge" in text for text in up.texts)


def test_other_regions_are_tried_and_nothing_is_left_in_the_first(
    up: Launches, cloud: Cloud, aws: AwsClient
) -> None:
    cloud.fail("RunInstances", NONE, NONE, status=500)
    record, nodes = up(
        capacity__zones="us-east-1a", capacity__regions='["eu-west-1"]', cluster__instance_type="g5.xlarge"
    )
    assert record.target.region == "eu-west-1"
    assert {node.zone[:-1] for node in nodes} == {"eu-west-1"}
    assert find_remaining(aws) is None
    other_region = AwsClient(record.target)
    cluster = find_cluster(other_region, "demo", aws.identity().user_id)
    assert cluster is not None
    assert len(cluster.live) == 2
    assert len(cluster.leftovers) == 3


def test_spot_first_falls_back_to_on_demand(up: Launches, cloud: Cloud) -> None:
    cloud.fail("RunInstances", "SpotMaxPriceTooLow", "SpotMaxPriceTooLow")
    _, nodes = up(
        capacity__zones="us-east-1a",
        cluster__spot="first",
        cluster__instance_type="g5.xlarge",
    )
    first, _, third = cloud.requests_of("RunInstances")
    assert first["InstanceMarketOptions.MarketType"] == "spot"
    assert "InstanceMarketOptions.MarketType" not in third
    assert not any(node.spot for node in nodes)


def test_without_capacity_anywhere_each_attempt_is_reported_and_nothing_is_left(
    up: Launches, cloud: Cloud, aws: AwsClient
) -> None:
    cloud.fail("RunInstances", *[NONE] * 8, status=500)
    with pytest.raises(CapacityError) as error:
        up(
            capacity__zones='["us-east-1a", "us-east-1b"]',
            cluster__instance_type="p4d.24xlarge,g5.48xlarge",
        )
    assert list_attempted_types(cloud) == ["p4d.24xlarge"] * 4 + ["g5.48xlarge"] * 4
    assert "p4d.24xlarge" in error.value.why
    assert "g5.48xlarge" in error.value.why
    assert find_remaining(aws) is None


def test_retry_until_up_repeats_until_there_is_capacity(up: Launches, cloud: Cloud, clock: Clock) -> None:
    cloud.fail("RunInstances", *[NONE] * 5, status=500)
    _, nodes = up(
        capacity__zones="us-east-1a",
        capacity__placement_group="false",
        cluster__instance_type="g5.xlarge",
        capacity__retry_until_up="true",
    )
    assert len(nodes) == 2
    assert len({form["ClientToken"] for form in cloud.requests_of("RunInstances")}) == 6
    assert clock.monotonic() > 150


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("code", ["UnauthorizedOperation", "PendingVerification"])
def test_an_error_that_other_types_do_not_avoid_ends_the_launch_and_leaves_nothing(
    up: Launches, cloud: Cloud, aws: AwsClient, code: str
) -> None:
    cloud.fail("RunInstances", *[code] * 30)
    with pytest.raises(CloudError):
        up(cluster__instance_type="p4d.24xlarge,g5.48xlarge")
    assert set(list_attempted_types(cloud)) == {"p4d.24xlarge"}
    assert find_remaining(aws) is None


@pytest.mark.parametrize("code", ["InsufficientHostCapacity", "InsufficientCapacity", "VolumeLimitExceeded"])
def test_other_error_codes_for_capacity_and_limits_leave_nothing(
    up: Launches, cloud: Cloud, aws: AwsClient, code: str
) -> None:
    cloud.fail("RunInstances", *[code] * 9, status=500 if code == "InsufficientCapacity" else 400)
    with pytest.raises(AwsddpError) as error:
        up(
            capacity__zones="us-east-1a",
            capacity__placement_group="false",
            cluster__instance_type="g5.48xlarge",
        )
    assert error.value.kind == ("quota" if code == "VolumeLimitExceeded" else "capacity")
    assert list_attempted_types(cloud) == ["g5.48xlarge"]
    assert find_remaining(aws) is None


@pytest.mark.usefixtures("clock")
def test_a_failed_cleanup_does_not_hide_why_the_launch_failed(up: Launches, cloud: Cloud) -> None:
    cloud.fail("RunInstances", "VcpuLimitExceeded")
    cloud.fail("DeleteSecurityGroup", *["UnauthorizedOperation"] * 30)
    with pytest.raises(CloudError, match="quota is too small"):
        up(cluster__instance_type="g5.xlarge")
    assert any("sg-" in text and "left in us-east-1" in text for text in up.texts)


def test_after_a_full_spot_quota_the_same_type_is_tried_on_demand(up: Launches, cloud: Cloud) -> None:
    cloud.fail("RunInstances", "MaxSpotInstanceCountExceeded")
    _, nodes = up(cluster__spot="first", cluster__instance_type="g5.xlarge,g6.xlarge")
    first, second = cloud.requests_of("RunInstances")
    assert first["InstanceMarketOptions.MarketType"] == "spot"
    assert "InstanceMarketOptions.MarketType" not in second
    assert [first["InstanceType"], second["InstanceType"]] == ["g5.xlarge"] * 2
    assert not any(node.spot for node in nodes)


def test_if_each_quota_is_full_the_error_is_the_quota_and_nothing_is_left(
    up: Launches, cloud: Cloud, aws: AwsClient
) -> None:
    cloud.fail("RunInstances", "VcpuLimitExceeded", "VcpuLimitExceeded")
    with pytest.raises(CloudError) as error:
        up(cluster__instance_type="p4d.24xlarge,g5.48xlarge,g6.48xlarge")
    assert error.value.kind == "quota"
    assert list_attempted_types(cloud) == ["p4d.24xlarge", "g5.48xlarge"]
    assert find_remaining(aws) is None


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("code", ["UnauthorizedOperation", "Unsupported"])
def test_instances_that_could_not_be_numbered_are_kept_with_the_intent_for_the_next_up(
    up: Launches, cloud: Cloud, aws: AwsClient, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    index = property(lambda _: 0, lambda *_: None)
    monkeypatch.setattr(Instance, "ami_launch_index", index, raising=False)
    cloud.fail("CreateTags", *[code] * 60)
    context = up.context(cluster__instance_type="g5.xlarge")
    cluster = up.cluster(context)
    with pytest.raises(CloudError, match="their numbers could not be written") as error:
        launch(cluster, up.plan(context))
    assert error.value.kind == "unavailable" and "awsddp up " in error.value.next
    record = context.folder.read()
    assert record is not None and record.intent is not None and record.intent.host_key
    assert len(cloud.requests_of("RunInstances")) == 1
    cluster = find_cluster(aws, "demo", aws.identity().user_id)
    assert cluster is not None and len(cluster.live) == 2
    cloud.faults.clear()
    resumed = resume_launch(aws, record.intent, on_event=print)
    assert resumed is not None and {node.instance_id for node in resumed} == {
        node.instance_id for node in cluster.live
    }


def test_a_region_that_cannot_be_cleaned_up_is_reported(up: Launches, cloud: Cloud) -> None:
    cloud.fail("RunInstances", "VcpuLimitExceeded")
    context = up.context(cluster__instance_type="g5.xlarge")
    plan = up.plan(context)
    cloud.fail("DescribeSecurityGroups", *["UnauthorizedOperation"] * 9)
    with pytest.raises(CloudError, match="quota is too small"):
        launch(up.cluster(context), plan)
    assert any("not cleaned up in us-east-1: permission denied" in text for text in up.texts)
    assert any(text.endswith("; try again later: awsddp down --orphans") for text in up.texts)


def test_a_region_without_a_possible_launch_is_skipped_with_a_warning(up: Launches) -> None:
    session = up.context(
        cluster__instance_type="g5.xlarge", capacity__regions='["eu-west-1", "eu-central-2"]'
    )
    plan = up.plan(session)
    assert [other.region for other in plan.alternatives] == ["eu-west-1"]
    assert any("eu-central-2" in text for text in plan.warnings)


def test_the_users_key_file_is_linked_and_never_imported(
    up: Launches, cloud: Cloud, aws: AwsClient, tmp_path: Path
) -> None:
    aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})
    key_file = tmp_path / "mine.pem"
    key_file.write_text("private")
    up(cluster__instance_type="g5.xlarge", access__key_file=str(key_file))
    assert cloud.requests_of("ImportKeyPair") == []
    assert cloud.requests_of("RunInstances")[0]["KeyName"] == "mine"
    folder = ClusterFolder(up.home, "demo")
    assert folder.key.resolve() == key_file
    folder.archive("0a1b2c3d")
    assert key_file.read_text() == "private"


def test_a_key_pair_that_does_not_exist_is_refused(up: Launches, aws: AwsClient) -> None:
    aws.call("CreateKeyPair", {"KeyName": "mine", "KeyType": "ed25519"})
    with pytest.raises(ConfigError, match=r"access\.key_file: no key pair 'none'"):
        up(access__key_file="none.pem")


def test_instances_of_a_launch_are_all_in_one_zone(up: Launches, aws: AwsClient) -> None:
    _, nodes = up(cluster__nodes=4, cluster__instance_type="g5.xlarge")
    assert len({node.zone for node in describe(aws, tagged("awsddp:cluster", "demo"))}) == 1
    assert len(nodes) == 4
    assert aws.region == REGION
