"""Before a launch, for a job that saves to S3: its bucket, its role and its rights there, its way to S3."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.loaders import Loader

from awsddp.cluster.doctor import check_before_launch
from awsddp.cluster.plan import plan
from awsddp.errors import ConfigError
from awsddp.job.save_to_s3 import prepare_local_saving
from awsddp.model.records import Target
from awsddp.plan.policy import role_policy
from awsddp.plan.records import LaunchPlan
from awsddp.session.context import LocatedCluster, Session
from awsddp.settings.loader import load
from tests.support.local_cloud import Cloud

SMALL = {
    "cluster.region": "us-east-1",
    "cluster.nodes": 1,
    "cluster.instance_type": "g5.xlarge",
    "network.ssh_cidr": "203.0.113.7/32",
}
PROFILE = "access.instance_profile"


MODELS = Loader()  # the models of the services are read once for all plans


@pytest.fixture
def job(records: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Ask for a cluster whose job saves to S3: on AWS, which is the local cloud's endpoint here."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", records.info.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", records.info.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", records.info.secret_access_key)
    monkeypatch.setattr("botocore.session.create_loader", lambda path=None: MODELS)

    def made(place: str, asked: dict[str, Any] | None = None, **more: Any) -> Session:
        settings = load("demo", environ={}, overrides={**SMALL, "job.save_to": place, **(asked or {})})
        return Session(name="demo", home=tmp_path / "home", settings=settings, **more)

    return made


@pytest.fixture
def bucket(records: Cloud) -> str:
    name = f"results-{uuid.uuid4().hex[:8]}"
    records.client("s3").create_bucket(Bucket=name)
    return name


def profile(records: Cloud, *statements: dict[str, Any]) -> str:
    """Make an instance profile with a role of this policy."""
    iam, name = records.client("iam"), f"role-{uuid.uuid4().hex[:8]}"
    iam.create_instance_profile(InstanceProfileName=name)
    iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_role_policy(RoleName=name, PolicyName="s3", PolicyDocument=document)
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return name


def rights(asked: Session, without: str = "") -> list[dict[str, Any]]:
    """Return the statements that `doctor --iam-policy nodes` prints, less one right."""
    found = json.dumps(role_policy(asked.spec, asked.job_spec)["Statement"])
    statements: list[dict[str, Any]] = json.loads(
        found.replace(without or "no right", "s3:GetBucketLocation")
    )
    return statements


def refusal(asked: Session) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(asked)
    assert caught.value.why and caught.value.next
    return caught.value


def test_a_bucket_that_is_not_there_or_is_elsewhere_is_refused_before_a_launch(
    records: Cloud, job: Callable[..., Session]
) -> None:
    name = f"results-{uuid.uuid4().hex[:8]}"
    role = profile(records, *rights(job(f"s3://{name}/runs")))
    told = refusal(job(f"s3://{name}/runs", {PROFILE: role}))
    assert (told.message, told.next.partition("   #")[0]) == (
        f"there is no bucket {name}",
        f"aws s3 mb s3://{name} --region us-east-1",
    )
    place = {"LocationConstraint": "eu-west-1"}
    records.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration=place)
    told = refusal(job(f"s3://{name}/runs", {PROFILE: role}))
    assert told.message == f"bucket {name} is in eu-west-1, the nodes are in us-east-1"
    assert "$0.02 per GB" in told.why


MORE = [
    pytest.param(right, marks=pytest.mark.prove)
    for right in ("s3:ListBucket", "s3:GetObject", "s3:AbortMultipartUpload")
]


@pytest.mark.parametrize("lacking", ["", "s3:PutObject", *MORE])
def test_a_right_that_the_role_lacks_is_named(
    records: Cloud, job: Callable[..., Session], bucket: str, lacking: str
) -> None:
    place = f"s3://{bucket}/runs"
    role = profile(records, *rights(job(place), lacking))
    planned: LaunchPlan = plan(job(place, {PROFILE: role}))
    told = [text for text in planned.warnings if "has no right" in text]
    assert [text.partition(" in s3://")[0] for text in told] == (
        [f"the role of {role} has no right {lacking}"] if lacking else []
    )
    assert planned.uses["place for results"] == place


def test_doctor_warns_of_uploads_that_stay_and_its_line_ends_them(
    records: Cloud, job: Callable[..., Session], bucket: str
) -> None:
    s3, asked = records.client("s3"), job(f"s3://{bucket}/runs")
    asked = job(f"s3://{bucket}/runs", {PROFILE: profile(records, *rights(asked))})

    def hints() -> list[str]:
        checks = check_before_launch(asked).checks
        assert [one for one in checks if one.ok is False] == []
        return [one.hint for one in checks if one.name == "warning" and bucket in one.value]

    other = {"Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    rules = {"Rules": [{**other, "Filter": {"Prefix": "elsewhere/"}}]}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    [hint] = hints()
    [words] = [json.loads(part) for part in hint.split("'") if part.startswith("{")]
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=words)
    assert hints() == []


def test_a_subnet_from_which_s3_is_not_reached_is_named(
    records: Cloud, job: Callable[..., Session], bucket: str
) -> None:
    ec2, place = records.client("ec2"), f"s3://{bucket}/runs"
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    made = {"VpcId": vpc, "CidrBlock": "10.77.0.0/24", "AvailabilityZone": "us-east-1a"}
    subnet = ec2.create_subnet(**made)["Subnet"]["SubnetId"]
    alone = {"network.subnet": subnet, "network.address": "private"}
    asked = job(place, {**alone, PROFILE: profile(records, *rights(job(place)))})

    def told(of: Session) -> list[str]:
        return [text for text in plan(of).warnings if "endpoint for S3" in text]

    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = [one["RouteTableId"] for one in ec2.describe_route_tables(Filters=filters)["RouteTables"]]
    for service, is_named in (("dynamodb", True), ("s3", False)):
        name = f"com.amazonaws.us-east-1.{service}"
        ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=name, RouteTableIds=tables)
        assert [subnet in text and tables[0] in text for text in told(asked)] == [True] * is_named


def test_a_rehearsal_makes_what_saving_needs_and_says_so(
    records: Cloud, job: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWSDDP_LOCAL", str(records.home))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    name, said = f"results-{uuid.uuid4().hex[:8]}", list[str]()
    asked = job(f"s3://{name}/runs", local=True, on_event=lambda event: said.append(event.text))
    for _ in "once", "again":
        assert plan(asked).uses["instance profile"] == "awsddp-local"
    assert [one for one in check_before_launch(asked).checks if one.ok is False] == []
    told = [text for text in said if text.startswith("made in the local cloud")]
    assert len(told) == 1
    assert f"bucket {name}" in told[0]
    plan(job(f"s3://{name}/other", local=True))
    iam, role = records.client("iam"), {"RoleName": "awsddp-local"}
    names = iam.list_role_policies(**role)["PolicyNames"]
    rights = json.dumps([iam.get_role_policy(**role, PolicyName=one)["PolicyDocument"] for one in names])
    assert f"{name}/runs/*" in rights, "a job of the first place may be running"
    assert f"{name}/other/*" in rights


def test_nodes_in_loopback_mode_have_no_role_to_save_with(job: Callable[..., Session]) -> None:
    here = Target(name="local", endpoint="http://127.0.0.1:1", node_s3="http://127.0.0.1:1")
    aws: Any = object()
    with pytest.raises(ConfigError, match="loopback mode cannot save to s3://bucket/runs") as caught:
        prepare_local_saving(LocatedCluster(session=job("s3://bucket/runs"), target=here, aws_client=aws))
    assert caught.value.next.startswith("awsddp local stop && awsddp local start ")
