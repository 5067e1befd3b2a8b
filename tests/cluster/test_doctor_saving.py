"""The checks before a launch for a job that saves to S3: bucket, role, its rights, and network."""

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


MODELS = Loader()  # reads the service models once for all plans


@pytest.fixture
def new_session(records: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """A function that returns a session whose job saves to S3; the endpoint of AWS is the local cloud's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", records.info.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", records.info.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", records.info.secret_access_key)
    monkeypatch.setattr("botocore.session.create_loader", lambda path=None: MODELS)

    def make_session(save_to: str, overrides: dict[str, Any] | None = None, **fields: Any) -> Session:
        settings = load("demo", environ={}, overrides={**SMALL, "job.save_to": save_to, **(overrides or {})})
        return Session(name="demo", home=tmp_path / "home", settings=settings, **fields)

    return make_session


@pytest.fixture
def bucket(records: Cloud) -> str:
    name = f"results-{uuid.uuid4().hex[:8]}"
    records.client("s3").create_bucket(Bucket=name)
    return name


def make_profile(records: Cloud, *statements: dict[str, Any]) -> str:
    """Create an instance profile with a role of this policy, and return its name."""
    iam, name = records.client("iam"), f"role-{uuid.uuid4().hex[:8]}"
    iam.create_instance_profile(InstanceProfileName=name)
    iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    iam.put_role_policy(RoleName=name, PolicyName="s3", PolicyDocument=document)
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    return name


def list_rights(session: Session, without: str = "") -> list[dict[str, Any]]:
    """Return the statements that `doctor --iam-policy nodes` prints, without one right."""
    text = json.dumps(role_policy(session.spec, session.job_spec)["Statement"])
    statements: list[dict[str, Any]] = json.loads(text.replace(without or "no right", "s3:GetBucketLocation"))
    return statements


def catch_plan_error(session: Session) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        plan(session)
    assert error.value.why and error.value.next
    return error.value


def test_plan_refuses_a_bucket_that_does_not_exist_or_is_in_another_region(
    records: Cloud, new_session: Callable[..., Session]
) -> None:
    name = f"results-{uuid.uuid4().hex[:8]}"
    role = make_profile(records, *list_rights(new_session(f"s3://{name}/runs")))
    error = catch_plan_error(new_session(f"s3://{name}/runs", {PROFILE: role}))
    assert (error.message, error.next.partition("   #")[0]) == (
        f"there is no bucket {name}",
        f"aws s3 mb s3://{name} --region us-east-1",
    )
    location = {"LocationConstraint": "eu-west-1"}
    records.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration=location)
    error = catch_plan_error(new_session(f"s3://{name}/runs", {PROFILE: role}))
    assert error.message == f"bucket {name} is in eu-west-1, the nodes are in us-east-1"
    assert "$0.02 per GB" in error.why


MORE = [
    pytest.param(right, marks=pytest.mark.prove)
    for right in ("s3:ListBucket", "s3:GetObject", "s3:AbortMultipartUpload")
]


@pytest.mark.parametrize("missing", ["", "s3:PutObject", *MORE])
def test_plan_warns_of_a_right_that_the_role_lacks(
    records: Cloud, new_session: Callable[..., Session], bucket: str, missing: str
) -> None:
    uri = f"s3://{bucket}/runs"
    role = make_profile(records, *list_rights(new_session(uri), missing))
    planned: LaunchPlan = plan(new_session(uri, {PROFILE: role}))
    warnings = [text for text in planned.warnings if "has no permission" in text]
    assert [text.partition(" in s3://")[0] for text in warnings] == (
        [f"the role of {role} has no permission {missing}"] if missing else []
    )
    assert planned.uses["place for results"] == uri


def test_doctor_warns_if_incomplete_uploads_stay_and_its_command_corrects_it(
    records: Cloud, new_session: Callable[..., Session], bucket: str
) -> None:
    s3, session = records.client("s3"), new_session(f"s3://{bucket}/runs")
    session = new_session(f"s3://{bucket}/runs", {PROFILE: make_profile(records, *list_rights(session))})

    def list_hints() -> list[str]:
        checks = check_before_launch(session).checks
        assert [check for check in checks if check.ok is False] == []
        return [check.hint for check in checks if check.name == "warning" and bucket in check.value]

    other = {"Status": "Enabled", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
    rules = {"Rules": [{**other, "Filter": {"Prefix": "elsewhere/"}}]}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
    [hint] = list_hints()
    [advised] = [json.loads(part) for part in hint.split("'") if part.startswith("{")]
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=advised)
    assert list_hints() == []


def test_plan_warns_of_a_subnet_that_does_not_reach_s3(
    records: Cloud, new_session: Callable[..., Session], bucket: str
) -> None:
    ec2, uri = records.client("ec2"), f"s3://{bucket}/runs"
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    request = {"VpcId": vpc, "CidrBlock": "10.77.0.0/24", "AvailabilityZone": "us-east-1a"}
    subnet = ec2.create_subnet(**request)["Subnet"]["SubnetId"]
    network = {"network.subnet": subnet, "network.address": "private"}
    session = new_session(uri, {**network, PROFILE: make_profile(records, *list_rights(new_session(uri)))})

    def list_warnings(session: Session) -> list[str]:
        return [text for text in plan(session).warnings if "endpoint for S3" in text]

    filters = [{"Name": "vpc-id", "Values": [vpc]}]
    tables = [table["RouteTableId"] for table in ec2.describe_route_tables(Filters=filters)["RouteTables"]]
    for service, is_named in (("dynamodb", True), ("s3", False)):
        name = f"com.amazonaws.us-east-1.{service}"
        ec2.create_vpc_endpoint(VpcId=vpc, ServiceName=name, RouteTableIds=tables)
        assert [subnet in text and tables[0] in text for text in list_warnings(session)] == [True] * is_named


def test_a_rehearsal_creates_the_bucket_and_role_of_a_saved_job_and_reports_it(
    records: Cloud, new_session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWSDDP_LOCAL", str(records.home))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    name, texts = f"results-{uuid.uuid4().hex[:8]}", list[str]()
    session = new_session(f"s3://{name}/runs", local=True, on_event=lambda event: texts.append(event.text))
    for _ in "once", "again":
        assert plan(session).uses["instance profile"] == "awsddp-local"
    assert [check for check in check_before_launch(session).checks if check.ok is False] == []
    created = [text for text in texts if text.startswith("created in the local cloud")]
    assert len(created) == 1
    assert f"bucket {name}" in created[0]
    plan(new_session(f"s3://{name}/other", local=True))
    iam, role = records.client("iam"), {"RoleName": "awsddp-local"}
    names = iam.list_role_policies(**role)["PolicyNames"]
    text = json.dumps([iam.get_role_policy(**role, PolicyName=policy)["PolicyDocument"] for policy in names])
    assert f"{name}/runs/*" in text, "a job that saves to the first URI may be running"
    assert f"{name}/other/*" in text


def test_nodes_in_loopback_mode_cannot_save_to_s3(new_session: Callable[..., Session]) -> None:
    local = Target(name="local", endpoint="http://127.0.0.1:1", node_s3="http://127.0.0.1:1")
    aws: Any = object()
    with pytest.raises(ConfigError, match="loopback mode cannot save to s3://bucket/runs") as error:
        prepare_local_saving(
            LocatedCluster(session=new_session("s3://bucket/runs"), target=local, aws_client=aws)
        )
    assert error.value.next.startswith("awsddp local stop && awsddp local start ")
