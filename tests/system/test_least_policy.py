"""The least policy: it allows every verb, no part of it is superfluous, and resources of others stay safe.

All verbs run in each configuration that adds to the policy or takes away from it, on a cloud that enforces
the policy and records the permission of each call. Changed policies are then evaluated against the records.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from moto.core.utils import get_service_model

import awsddp
from awsddp.aws.plan_facts import list_enabled_regions
from awsddp.cluster import inventory
from awsddp.cluster.doctor import check_before_launch as doctor
from awsddp.cluster.doctor import request_quota
from awsddp.cluster.down import down
from awsddp.cluster.plan import find_offers, plan
from awsddp.cluster.status import status
from awsddp.cluster.stop import stop
from awsddp.cluster.up import up
from awsddp.plan.policy import least_policy
from awsddp.session.context import Session
from awsddp.session.locate import aws_client_for, open_target
from awsddp.settings.loader import load
from tests.support.acts import run_fetch, run_train, status_all
from tests.support.iam import Need, allowed, enforce_policy
from tests.support.seed import draw_cases
from tests.support.world import REGION, Kill, World, agree

AWSDDP = Path(awsddp.__file__).parent
OTHER = "somebody else's"
ACCOUNT = "123456789012"
Settings = dict[str, Any]
NEAR = {"subnets": {"Filters": [{"Name": "availability-zone", "Values": [f"{REGION}a"]}]}}


def create_reservation(world: World) -> Settings:
    made = world.cloud.ec2.create_capacity_reservation(
        InstanceType="g5.xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=f"{REGION}a",
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    return {"capacity.reservation": made["CapacityReservation"]["CapacityReservationId"]}


def create_own_network(world: World) -> Settings:
    """Create a subnet, a security group and a key of the user, and return their settings."""
    ec2 = world.cloud.ec2
    [subnet] = ec2.describe_subnets(**NEAR["subnets"])["Subnets"]
    group = ec2.create_security_group(GroupName="own", Description="own", VpcId=subnet["VpcId"])["GroupId"]
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.0/24"}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[inside, ssh])
    (world.root / "own.pem").touch(mode=0o600)
    (world.root / "own.pem").write_text(ec2.create_key_pair(KeyName="own")["KeyMaterial"])
    return {
        "network.subnet": subnet["SubnetId"],
        "network.security_group": group,
        "access.key_file": str(world.root / "own.pem"),
    }


def create_disk_key(world: World, named: str) -> str:
    """Create a KMS key of the user, and return its "KeyId", its "Arn", or its new alias."""
    kms = world.cloud.client("kms")
    key = kms.create_key()["KeyMetadata"]
    if named in key:
        return str(key[named])
    kms.create_alias(AliasName=named, TargetKeyId=key["KeyId"])
    return named


def with_role(key: str, *, by_arn: bool) -> Callable[[World], Settings]:
    def create_role_and_key(world: World) -> Settings:
        profile = world.cloud.client("iam").create_instance_profile(
            InstanceProfileName="trainers", Path="/teams/" if by_arn else "/"
        )
        named = profile["InstanceProfile"]["Arn"] if by_arn else "trainers"
        return {"access.instance_profile": named, "access.kms_key": create_disk_key(world, key)}

    return create_role_and_key


def create_saving(world: World) -> Settings:
    """Create a subnet without internet, a bucket and a role, and return their settings."""
    ec2, iam = world.cloud.ec2, world.cloud.client("iam")
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    made = {"VpcId": vpc, "CidrBlock": "10.77.0.0/24", "AvailabilityZone": f"{REGION}b"}
    subnet = ec2.create_subnet(**made)["Subnet"]["SubnetId"]
    world.cloud.client("s3").create_bucket(Bucket="results")
    role, profile = {"RoleName": "trainers"}, {"InstanceProfileName": "trainers"}
    iam.create_role(**role, AssumeRolePolicyDocument="{}")
    iam.create_instance_profile(**profile)
    iam.add_role_to_instance_profile(**role, **profile)
    return {
        "network.subnet": subnet,
        "network.address": "private",
        "access.instance_profile": "trainers",
        "job.save_to": "s3://results/runs",
    }


PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
# Settings, or the function that creates their resources and returns them.
CONFIGURED: dict[str, Settings | Callable[[World], Settings]] = {
    "alone": {"cluster.nodes": 1},
    "spot": {"cluster.spot": True},
    # One node: nodes without GPUs are in no placement group, which the policy of an unknown type allows.
    "a type that is not in the table": {"cluster.instance_type": "c5.large", "cluster.nodes": 1},
    "a reservation": create_reservation,
    "an own network": create_own_network,
    "a role and a key for the disks": with_role("Arn", by_arn=False),
    "a role by its ARN and a key by its alias": with_role("alias/disks", by_arn=True),
    "a key by its id and an image by a parameter": lambda world: {
        "access.kms_key": create_disk_key(world, "KeyId"),
        "cluster.image": PARAMETER,
    },
    "results saved in S3": create_saving,
    "EFA": {
        "cluster.instance_type": "p5.48xlarge",
        "capacity.efa": True,
        "capacity.experimental": True,
        "network.address": "private",
    },
}


def run_plan(session: Session) -> dict[str, Any]:
    return {"type": plan(session).instance_type}


def run_regions(session: Session) -> dict[str, Any]:
    """Return the regions that `status --all` and `down --orphans` search without `--region`."""
    with open_target(session, session.folder.read()) as target:
        return {"regions": list_enabled_regions(aws_client_for(session, target))}


@dataclass(frozen=True)
class Run:
    """The policy of a configuration, and each permission that all verbs needed."""

    policy: dict[str, Any]
    needed: list[Need]


def run_all_verbs(world: World, requested: Settings) -> Run:
    """Run every verb under the policy of a configuration, with the leftovers of a broken launch.

    `doctor` tries a launch into the default group of the VPC, as its own does not exist: it must be denied.
    """
    merged = {"cluster.region": REGION, "cluster.instance_type": "g5.xlarge", "cluster.nodes": 2, **requested}
    spec, job = load("demo", environ={}, overrides=merged)
    policy = least_policy(spec, job)
    # The cloud itself evaluates the rights on S3, and its first user has all of them.
    policy["Statement"] = [row for row in policy["Statement"] if not row["Action"][0].startswith("s3:")]

    def run(verb: Any, settings: Settings = {}, **choices: Any) -> dict[str, Any]:  # noqa: B006
        outcome = world.run(verb, overrides={"cluster.nodes": 2, **requested, **settings}, **choices)
        assert outcome.code in (0, None), f"{verb.__name__}: {outcome.text}"
        return outcome.document

    with enforce_policy(policy, world.cloud.place.home) as before:
        for verb in (run_plan, find_offers, run_regions):
            run(verb)
        checks = run(doctor).checks
        assert [check for check in checks if check.ok is False] == []
        if not spec.capacity.reservation:
            many = {"cluster.instance_type": "p5.48xlarge", "cluster.nodes": 65}
            assert run(request_quota, many, confirm=agree)["request"]
        run(up, confirm=agree, kill=Kill("RunInstances", 1, "before it is sent"))
        world.clock.move(world.clock.read() + 3600)
        run(inventory.down_orphans, confirm=agree)
        run(up, confirm=agree)
        run(up, {"network.ssh_cidr": "198.51.100.7/32", "cluster.expires": "48h"}, confirm=agree)
        run(run_train)
        run(run_fetch)
        if not spec.cluster.spot:
            run(stop, confirm=agree)
            if "ec2:ModifyInstancePlacement" in json.dumps(policy):  # for a start without the placement group
                world.cloud.fault("StartInstances", "InsufficientInstanceCapacity", times=1)
            run(up, {"capacity.placement_group": "false"} if spec.capacity.efa else {}, confirm=agree)
        run(up, {"cluster.nodes": 1}, confirm=agree)
        run(status)
        run(status_all)
    leave_behind(world)
    with enforce_policy(policy, world.cloud.place.home) as after:
        run(down, confirm=agree)
    needs = {repr(need): need for need in (*before, *after) if not need.resource.endswith("/default")}
    return Run(policy, list(needs.values()))


def leave_behind(world: World) -> None:
    """Create a disk and an interface with the cluster's tags, as a launch that AWS aborts leaves them."""
    ec2 = world.cloud.ec2
    tags = world.cloud.live_instances()[0]["Tags"]
    ec2.create_volume(
        AvailabilityZone=f"{REGION}a", Size=1, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    [subnet] = ec2.describe_subnets(**NEAR["subnets"])["Subnets"]
    ec2.create_network_interface(
        SubnetId=subnet["SubnetId"], TagSpecifications=[{"ResourceType": "network-interface", "Tags": tags}]
    )


def list_shorter(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the policy without each statement, action, resource and value of a condition, in turn."""

    def list_paths(part: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        match part:
            case dict():
                for key, value in part.items():
                    yield from list_paths(value, (*path, key))
            case list():
                yield from ((*path, index) for index in range(len(part)))
            case _:
                yield path

    for index, statement in enumerate(policy["Statement"]):
        parts = {key: statement[key] for key in ("Action", "Resource", "Condition") if key in statement}
        for path in ((), *list_paths(parts, ())):
            less = copy.deepcopy(policy)
            *parents, key = ("Statement", index, *path)
            part: Any = less
            for parent in parents:
                part = part[parent]
            if isinstance(part, list):
                del part[key]
            else:
                part[key] = []
            yield " ".join(map(str, (statement["Sid"], *path))), less


def list_wider(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the policy without each condition in turn: it then allows more."""
    for index, statement in enumerate(policy["Statement"]):
        for operator, pairs in statement.get("Condition", {}).items():
            for key in pairs:
                more = copy.deepcopy(policy)
                del more["Statement"][index]["Condition"][operator][key]
                yield f"{statement['Sid']} {operator} {key}", more


def list_misuses(need: Need) -> Iterator[tuple[str, Need]]:
    """Yield the need by key with one value of its context missing or that of somebody else."""
    for key, value in need.context.items():
        if key != "aws:userid":
            for wrong in (None, [OTHER] if isinstance(value, list) else OTHER):
                yield key, replace(need, context={**need.context, key: wrong})


def check_policy(finished: Run) -> None:
    """Check that the policy allows what was needed and nothing of others, and has no superfluous part."""
    policy, needed = finished.policy, finished.needed
    assert [need for need in needed if not allowed(policy, need)] == []
    idle = [name for name, less in list_shorter(policy) if all(allowed(less, need) for need in needed)]
    assert idle == []
    wrong = [(key, bad) for need in needed for key, bad in list_misuses(need)]
    assert [bad for key, bad in wrong if key.endswith("/awsddp:owner") and allowed(policy, bad)] == []
    denied = [bad for _, bad in wrong if not allowed(policy, bad)]
    useless = [name for name, more in list_wider(policy) if not any(allowed(more, bad) for bad in denied)]
    assert useless == []


def list_operations() -> set[str]:
    """Return every operation that the program calls by name."""
    files = (path for path in AWSDDP.rglob("*.py") if path.relative_to(AWSDDP).parts[0] != "local")
    code = "".join(path.read_text() for path in files)
    models = map(get_service_model, ("ec2", "ssm", "service-quotas", "pricing"))
    of_aws = {name for model in models for name in model.operation_names}
    return of_aws & set(re.findall(r'"([A-Z][A-Za-z]+)"', code))


@pytest.mark.prove
def test_the_least_policy_allows_every_verb_and_has_no_superfluous_part(world: World) -> None:
    finished = run_all_verbs(world, {})
    check_policy(finished)
    called = {need.action.partition(":")[2] for need in finished.needed}
    assert list_operations() - called == {
        "DescribeCapacityReservations",
        "DescribeInstanceTypes",
        "DescribeSpotPriceHistory",
        "DescribeVpcEndpoints",
        "GetParameters",
    }, "these belong to configurations below"


@pytest.mark.prove
@pytest.mark.parametrize("name", draw_cases(list(CONFIGURED), 3, label="configured"))
def test_the_least_policy_of_a_configuration_allows_what_it_needs_alone(world: World, name: str) -> None:
    configured = CONFIGURED[name]
    check_policy(run_all_verbs(world, configured(world) if callable(configured) else configured))
