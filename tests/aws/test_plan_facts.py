"""The facts that are read before a plan, and the errors of AWS."""

from contextlib import suppress

import pytest
from moto.core import DEFAULT_ACCOUNT_ID

from awsddp.aws import plan_facts as facts_module
from awsddp.aws.client import AwsClient, Call
from awsddp.aws.plan_facts import gather_facts, list_enabled_regions
from awsddp.compat.types import GPU_TYPES, QUOTA_G, QUOTA_P
from awsddp.errors import AwsddpError, CapacityError, CloudError, ConfigError
from awsddp.model.records import Target
from awsddp.plan.records import resource_names
from awsddp.settings.spec import ClusterSpec, NetworkSection
from tests.support.http_answers import BAD_ANSWERS, CUT, serve_bytes
from tests.support.moto_cloud import IDS, Cloud, Launcher, plan_for, spec


def test_facts_have_image_offers_subnets_and_quotas(aws: AwsClient, cloud: Cloud) -> None:
    facts = gather_facts(aws, spec(), caller_address="10.77.0.1", target="local")
    assert facts.region == "us-east-1"
    assert facts.image.pretends
    assert facts.image.ssh_user == "ubuntu"
    assert "us-east-1a" in facts.offers["g6.48xlarge"]
    assert facts.callers == ("10.77.0.1/32",)
    assert {subnet.zone for subnet in facts.subnets} >= {"us-east-1a", "us-east-1b"}
    assert facts.quotas == {QUOTA_P[0]: None, QUOTA_G[0]: None}


def test_gathering_facts_changes_nothing(aws: AwsClient, cloud: Cloud) -> None:
    gather_facts(aws, spec(instance_type="p2.8xlarge"), caller_address="10.77.0.1")
    assert {name for name, _ in cloud.requests} <= {
        "GetCallerIdentity",
        "DescribeInstanceTypeOfferings",
        "DescribeInstanceTypes",
        "DescribeImages",
        "DescribeInstances",
        "DescribeRouteTables",
        "DescribeSubnets",
        "GetServiceQuota",
        "GetProducts",
    }


def test_a_plan_counts_the_used_vcpus_of_a_quota_without_its_own_cluster(
    aws: AwsClient, cloud: Cloud, launcher: Launcher
) -> None:
    cloud.quotas[QUOTA_G[0]] = 16.0
    launcher(plan_for(aws, instance_type="g5.xlarge"))  # 2 x 4 vCPUs
    off = launcher(plan_for(aws, instance_type="g6.xlarge", nodes=1), ids=resource_names("demo", "ffffffff"))
    aws.call("StopInstances", {"InstanceIds": [node.instance_id for node in off]})
    plan = plan_for(aws, instance_type="g5.xlarge")
    assert "8 of 16 vCPUs, of which 8 are in use" in plan.quota
    with pytest.raises(CloudError) as caught:
        plan_for(aws, instance_type="g5.2xlarge")
    assert caught.value.kind == "quota"
    assert "allows 16 vCPUs in us-east-1, of which 8 are in use" in caught.value.why
    assert "awsddp up --nodes 2 --instance-type" in caught.value.next
    facts = gather_facts(aws, spec(), caller_address="10.77.0.1", cluster_id=IDS["cluster_id"])
    assert facts.used_vcpus == {}


def test_instances_that_may_not_be_listed_use_no_vcpus(aws: AwsClient, cloud: Cloud) -> None:
    cloud.fail("DescribeInstances", "UnauthorizedOperation")
    assert gather_facts(aws, spec(), caller_address="10.77.0.1").used_vcpus == {}


def test_a_request_for_p2_is_refused_with_its_successor(aws: AwsClient) -> None:
    with pytest.raises(CloudError) as caught:
        plan_for(aws, instance_type="p2.8xlarge")
    assert "2025-03-30" in caught.value.why
    assert "InvalidInstanceType" in caught.value.why
    assert "g6.48xlarge" in caught.value.next


def test_a_type_the_table_lacks_is_described_by_ec2(aws: AwsClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(GPU_TYPES, "g7.48xlarge")
    plan = plan_for(aws, instance_type="g7.48xlarge")
    assert (plan.kind.gpus, plan.kind.gpu) == (8, "RTX PRO 4500")
    assert plan.price_usd_per_hour is None
    assert "unknown price for g7.48xlarge" in plan.warnings


def test_images_are_found_by_id_name_and_parameter(aws: AwsClient, cloud: Cloud) -> None:
    old = cloud.add_image("My Training Image 1")
    new = cloud.add_image("My Training Image 2 (Amazon Linux 2023)", parameter="/team/image")
    for image, expected in (
        (old, old),
        ("My Training Image *", new),
        ("/team/image", new),
        ("resolve:ssm:/team/image", new),
    ):
        facts = gather_facts(aws, spec(image=image), caller_address="10.77.0.1")
        assert facts.image.id == expected
    assert facts.image.ssh_user == "ec2-user"


def test_deprecated_images_are_requested_only_if_no_other_image_has_the_name(
    aws: AwsClient, cloud: Cloud
) -> None:
    image = cloud.add_image("My Training Image")
    for pattern, count in (("My Training *", 1), ("No Such *", 2)):
        cloud.requests.clear()
        with suppress(ConfigError):
            assert gather_facts(aws, spec(image=pattern), caller_address="10.77.0.1").image.id == image
        sent = cloud.requests_of("DescribeImages")
        assert [form.get("IncludeDeprecated") for form in sent] == [None, "true"][:count]


def test_the_newest_torch_is_chosen_before_the_newest_image(aws: AwsClient, cloud: Cloud) -> None:
    name = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch {} (Ubuntu 24.04) {}"
    new = cloud.add_image(name.format("2.13", "20260901"))
    cloud.add_image(name.format("2.9", "20261101"))
    assert gather_facts(aws, spec(image=name.format("*", "*")), caller_address="10.77.0.1").image.id == new


NAME = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch {} (Ubuntu {}) {}"


def test_the_default_image_is_the_newest_of_the_table_and_needs_no_ssm_permission(
    aws: AwsClient, cloud: Cloud
) -> None:
    image = cloud.add_image(NAME.format("2.13", "26.04", "20260829"))
    cloud.add_image(NAME.format("2.13.0", "24.04", "20260830"))  # a pair that the table lacks
    unknown = NAME.format("2.99", "28.04", "20260901")
    cloud.add_image(unknown)
    cloud.fail("GetParameters", "AccessDeniedException")
    plan = plan_for(aws, instance_type="g6.xlarge")
    assert plan.image.id == image
    assert (plan.image.shown.torch, plan.image.shown.cuda, plan.image.shown.driver) == ("2.13", "13.0", 595)
    assert f"a newer image is not known to this version of awsddp: {unknown}" in plan.warnings
    assert not cloud.requests_of("GetParameters")


def test_an_image_with_amazons_name_of_another_owner_is_not_the_default(aws: AwsClient, cloud: Cloud) -> None:
    before = gather_facts(aws, spec(), caller_address="10.77.0.1").image.id
    copied = cloud.add_image(NAME.format("2.13", "26.04", "20260829"))
    cloud.backend.amis[copied].owner_alias = None
    cloud.backend.amis[copied].owner_id = DEFAULT_ACCOUNT_ID
    assert gather_facts(aws, spec(), caller_address="10.77.0.1").image.id == before


def test_an_image_with_a_torch_that_the_table_lacks_is_used_with_a_warning(
    aws: AwsClient, cloud: Cloud
) -> None:
    cloud.add_image(NAME.format("2.99", "28.04", "20260901"))
    plan = plan_for(aws, instance_type="g6.xlarge", image=NAME.format("*", "*", "*"))
    assert plan.image.shown.torch == "2.99"
    assert any("does not know PyTorch 2.99's image" in warning for warning in plan.warnings)


def test_an_image_name_without_a_known_login_user_is_a_warning(aws: AwsClient, cloud: Cloud) -> None:
    cloud.add_image("My Training Image 1")
    plan = plan_for(aws, instance_type="g6.xlarge", image="My Training *")
    assert plan.ssh_user == "ubuntu"
    assert any("access.user=NAME" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("answers", "filters", "price"),
    [
        ("none to ANY_OF", ["ANY_OF", "TERM_MATCH"], ("AWS Pricing API", 9.0)),
        ("to all", ["ANY_OF"], ("AWS Pricing API", 9.0)),
        ("none", ["ANY_OF", "TERM_MATCH"], ("list price of us-east-1", 0.8048)),
        ("denied", ["ANY_OF"], ("list price of us-east-1", 0.8048)),
    ],
)
def test_a_price_is_requested_for_one_type_if_a_request_for_many_has_no_answer(
    aws: AwsClient, cloud: Cloud, answers: str, filters: list[str], price: tuple[str, float]
) -> None:
    cloud.prices = {} if answers == "none" else {"g6.xlarge": 9.0}
    cloud.supports_any_of = answers != "none to ANY_OF"
    if answers == "denied":
        cloud.fail("GetProducts", "AccessDeniedException")
    plan = plan_for(aws, instance_type="g6.xlarge", nodes=1)
    assert (plan.price.source, plan.price.machines) == price
    assert cloud.price_filters == ([] if answers == "denied" else filters)
    assert len(cloud.requests_of("GetProducts")) == len(filters)
    assert len(",".join(GPU_TYPES)) <= 1024  # what the model allows as a filter's value


@pytest.mark.parametrize("image", ["ami-0123456789abcdef0", "No Such Image*", "/no/such/parameter"])
def test_a_missing_image_is_named_by_its_key(aws: AwsClient, image: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gather_facts(aws, spec(image=image), caller_address="10.77.0.1")
    assert "cluster.image" in caught.value.message
    assert image in caught.value.message


def test_the_client_address_is_requested_only_if_it_is_not_configured(
    aws: AwsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []

    def answer(source: str) -> str | None:
        sources.append(source)
        return "203.0.113.7"

    monkeypatch.setattr(facts_module, "_ask_address", answer)
    restricted = ClusterSpec(name="demo", network=NetworkSection(ssh_cidr=("198.51.100.0/24",)))
    assert gather_facts(aws, restricted, caller_address=None).callers == ()
    assert gather_facts(aws, spec(), caller_address="10.77.0.1").callers == ("10.77.0.1/32",)
    assert sources == []
    assert gather_facts(aws, spec(), caller_address=None).callers == ("203.0.113.7/32",)
    assert sorted(sources) == sorted(facts_module.ADDRESS_SOURCES)


@pytest.mark.parametrize("raw", [*BAD_ANSWERS, CUT.replace(b"99", b"6") + b"<html>"])
def test_a_truncated_or_invalid_answer_is_no_address(raw: bytes) -> None:
    with serve_bytes(raw) as source:
        assert facts_module._ask_address(source) is None
    with serve_bytes(CUT.replace(b"99", b"12") + b"203.0.113.7\n") as source:
        assert facts_module._ask_address(source) == "203.0.113.7"


def test_the_enabled_regions_are_listed(aws: AwsClient) -> None:
    assert {"us-east-1", "eu-central-1"} <= set(list_enabled_regions(aws))


def test_a_start_without_capacity_is_sent_once(aws: AwsClient, cloud: Cloud) -> None:
    cloud.fail("StartInstances", "InsufficientInstanceCapacity", status=500)
    with pytest.raises(CapacityError):
        aws.call("StartInstances", {"InstanceIds": ["i-0123456789abcdef0"]})
    assert len(cloud.requests_of("StartInstances")) == 1


def test_every_call_is_reported_with_its_request_id_and_no_secret(cloud: Cloud) -> None:
    calls: list[Call] = []
    aws = AwsClient(cloud.target, on_call=calls.append)
    cloud.fail("RunInstances", "Unsupported")
    with pytest.raises(AwsddpError):
        aws.call("RunInstances", {"UserData": "hidden", "MinCount": 1, "MaxCount": 1, "ImageId": "ami-1"})
    aws.identity()
    call, identity = calls
    assert call.operation == "RunInstances"
    assert call.parameters["UserData"] == "[REDACTED]"
    assert "hidden" not in str(call)
    assert call.error == "Unsupported"
    assert identity.operation == "GetCallerIdentity"
    assert identity.request_id


def test_an_error_without_credentials_names_the_command_to_configure_them() -> None:
    with pytest.raises(CloudError) as caught:
        AwsClient(Target(region="us-east-1")).identity()
    assert "no AWS credentials" in caught.value.message
    assert "aws configure" in caught.value.next


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Target(), "no AWS region"),
        (Target(region="US East; rm -rf"), "unknown AWS region"),
        (Target(region="us-east-1", profile="nobody"), "nobody"),
    ],
)
def test_an_invalid_region_or_profile_is_a_configuration_error(target: Target, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AwsClient(target).identity()
    assert text in str(caught.value)


def test_a_target_with_keys_ignores_a_missing_profile(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert AwsClient(cloud.target).identity().user_id
