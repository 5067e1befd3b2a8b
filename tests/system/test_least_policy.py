"""The least policy: every verb passes under it, nothing can be left out of it, and others' things stay safe.

Each configuration that adds to the policy, or takes away, is driven by all verbs against a cloud that is held
to its policy. What each call needed is written down there; evaluated again it answers what would be denied.
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
from tests.support.acts import fetched, status_all, trained
from tests.support.iam import Need, allowed, held_to
from tests.support.seed import drawn
from tests.support.world import REGION, Kill, World, yes

AWSDDP = Path(awsddp.__file__).parent
OTHER = "somebody else's"
ACCOUNT = "123456789012"
Settings = dict[str, Any]
NEAR = {"subnets": {"Filters": [{"Name": "availability-zone", "Values": [f"{REGION}a"]}]}}


def reserved(world: World) -> Settings:
    made = world.cloud.ec2.create_capacity_reservation(
        InstanceType="g5.xlarge",
        InstancePlatform="Linux/UNIX",
        AvailabilityZone=f"{REGION}a",
        InstanceCount=2,
        InstanceMatchCriteria="targeted",
    )
    return {"capacity.reservation": made["CapacityReservation"]["CapacityReservationId"]}


def own_network(world: World) -> Settings:
    """Return a subnet, a group and a key of the user's own."""
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


def disk_key(world: World, named: str) -> str:
    """Make a KMS key of the user's own, and return its "KeyId" or its "Arn", or the alias that it gets."""
    kms = world.cloud.client("kms")
    key = kms.create_key()["KeyMetadata"]
    if named in key:
        return str(key[named])
    kms.create_alias(AliasName=named, TargetKeyId=key["KeyId"])
    return named


def with_role(key: str, *, by_arn: bool) -> Callable[[World], Settings]:
    def made(world: World) -> Settings:
        profile = world.cloud.client("iam").create_instance_profile(
            InstanceProfileName="trainers", Path="/teams/" if by_arn else "/"
        )
        named = profile["InstanceProfile"]["Arn"] if by_arn else "trainers"
        return {"access.instance_profile": named, "access.kms_key": disk_key(world, key)}

    return made


def saved(world: World) -> Settings:
    """Return a subnet without a way out, and where its nodes would save by their role."""
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
# What is configured, or what makes it in the account and returns it.
CONFIGURED: dict[str, Settings | Callable[[World], Settings]] = {
    "alone": {"cluster.nodes": 1},
    "spot": {"cluster.spot": True},
    # Alone: nodes without GPUs stand in no placement group, which the policy of an unknown type covers.
    "a type that is not in the table": {"cluster.instance_type": "c5.large", "cluster.nodes": 1},
    "a reservation": reserved,
    "an own network": own_network,
    "a role and a key for the disks": with_role("Arn", by_arn=False),
    "a role by its ARN and a key by its alias": with_role("alias/disks", by_arn=True),
    "a key by its id and an image by a parameter": lambda world: {
        "access.kms_key": disk_key(world, "KeyId"),
        "cluster.image": PARAMETER,
    },
    "results saved in S3": saved,
    "EFA": {
        "cluster.instance_type": "p5.48xlarge",
        "capacity.efa": True,
        "capacity.experimental": True,
        "network.address": "private",
    },
}


def planned(session: Session) -> dict[str, Any]:
    return {"type": plan(session).instance_type}


def regions(session: Session) -> dict[str, Any]:
    """What `status --all` and `down --orphans` read where no region is named."""
    with open_target(session, session.folder.read()) as target:
        return {"regions": list_enabled_regions(aws_client_for(session, target))}


@dataclass(frozen=True)
class Driven:
    """A configuration that all verbs were driven with: its policy, and each permission that was needed."""

    policy: dict[str, Any]
    needed: list[Need]


def drive(world: World, asked: Settings) -> Driven:
    """Drive every verb under the policy of a configuration; what a launch left behind is in the way, too.

    `doctor` asks for a launch into the VPC's default group, as its own is not there: that is to be denied.
    """
    everything = {"cluster.region": REGION, "cluster.instance_type": "g5.xlarge", "cluster.nodes": 2, **asked}
    spec, job = load("demo", environ={}, overrides=everything)
    policy = least_policy(spec, job)
    # Who may do what with S3 is evaluated by the cloud itself, and its first user may do everything.
    policy["Statement"] = [one for one in policy["Statement"] if not one["Action"][0].startswith("s3:")]

    def run(verb: Any, said: Settings = {}, **choices: Any) -> dict[str, Any]:  # noqa: B006
        outcome = world.run(verb, asked={"cluster.nodes": 2, **asked, **said}, **choices)
        assert outcome.code in (0, None), f"{verb.__name__}: {outcome.told}"
        return outcome.document

    with held_to(policy, world.cloud.place.home) as first:
        for verb in (planned, find_offers, regions):
            run(verb)
        checks = run(doctor).checks
        assert [check for check in checks if check.ok is False] == []
        if not spec.capacity.reservation:
            many = {"cluster.instance_type": "p5.48xlarge", "cluster.nodes": 65}
            assert run(request_quota, many, confirm=yes)["request"]
        run(up, confirm=yes, kill=Kill("RunInstances", 1, "before it is sent"))
        world.clock.move(world.clock.read() + 3600)
        run(inventory.down_orphans, confirm=yes)
        run(up, confirm=yes)
        run(up, {"network.ssh_cidr": "198.51.100.7/32", "cluster.expires": "48h"}, confirm=yes)
        run(trained)
        run(fetched)
        if not spec.cluster.spot:
            run(stop, confirm=yes)
            if "ec2:ModifyInstancePlacement" in json.dumps(policy):  # for a start without the placement group
                world.cloud.fault("StartInstances", "InsufficientInstanceCapacity", times=1)
            run(up, {"capacity.placement_group": "false"} if spec.capacity.efa else {}, confirm=yes)
        run(up, {"cluster.nodes": 1}, confirm=yes)
        run(status)
        run(status_all)
    leave_behind(world)
    with held_to(policy, world.cloud.place.home) as last:
        run(down, confirm=yes)
    asked_for = {repr(need): need for need in (*first, *last) if not need.resource.endswith("/default")}
    return Driven(policy, list(asked_for.values()))


def leave_behind(world: World) -> None:
    """Make a disk and an interface, tagged as ours, as a launch that AWS broke off leaves them."""
    ec2 = world.cloud.ec2
    tags = world.cloud.living()[0]["Tags"]
    ec2.create_volume(
        AvailabilityZone=f"{REGION}a", Size=1, TagSpecifications=[{"ResourceType": "volume", "Tags": tags}]
    )
    [subnet] = ec2.describe_subnets(**NEAR["subnets"])["Subnets"]
    ec2.create_network_interface(
        SubnetId=subnet["SubnetId"], TagSpecifications=[{"ResourceType": "network-interface", "Tags": tags}]
    )


def shorter(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the policy without each statement, action, resource and value of a condition, in turn."""

    def values(where: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        match where:
            case dict():
                for key, value in where.items():
                    yield from values(value, (*path, key))
            case list():
                yield from ((*path, index) for index in range(len(where)))
            case _:
                yield path

    for index, statement in enumerate(policy["Statement"]):
        parts = {key: statement[key] for key in ("Action", "Resource", "Condition") if key in statement}
        for path in ((), *values(parts, ())):
            less = copy.deepcopy(policy)
            *way, last = ("Statement", index, *path)
            where: Any = less
            for step in way:
                where = where[step]
            if isinstance(where, list):
                del where[last]
            else:
                where[last] = []
            yield " ".join(map(str, (statement["Sid"], *path))), less


def wider(policy: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the policy without each condition in turn: it then allows more."""
    for index, statement in enumerate(policy["Statement"]):
        for operator, pairs in statement.get("Condition", {}).items():
            for key in pairs:
                more = copy.deepcopy(policy)
                del more["Statement"][index]["Condition"][operator][key]
                yield f"{statement['Sid']} {operator} {key}", more


def misused(need: Need) -> Iterator[tuple[str, Need]]:
    """Yield by key the same act where one thing is not as it was: not there, somebody else's, for another."""
    for key, value in need.context.items():
        if key != "aws:userid":
            for wrong in (None, [OTHER] if isinstance(value, list) else OTHER):
                yield key, replace(need, context={**need.context, key: wrong})


def check(driven: Driven) -> None:
    """All passes, nothing of others; any part less denies something, a condition less allows something."""
    policy, needed = driven.policy, driven.needed
    assert [need for need in needed if not allowed(policy, need)] == []
    idle = [name for name, less in shorter(policy) if all(allowed(less, need) for need in needed)]
    assert idle == []
    wrong = [(key, bad) for need in needed for key, bad in misused(need)]
    assert [bad for key, bad in wrong if key.endswith("/awsddp:owner") and allowed(policy, bad)] == []
    kept_out = [bad for _, bad in wrong if not allowed(policy, bad)]
    useless = [name for name, more in wider(policy) if not any(allowed(more, bad) for bad in kept_out)]
    assert useless == []


def operations() -> set[str]:
    """Return every operation that the program names as one that it calls."""
    files = (path for path in AWSDDP.rglob("*.py") if path.relative_to(AWSDDP).parts[0] != "local")
    code = "".join(path.read_text() for path in files)
    models = map(get_service_model, ("ec2", "ssm", "service-quotas", "pricing"))
    known = {name for model in models for name in model.operation_names}
    return known & set(re.findall(r'"([A-Z][A-Za-z]+)"', code))


@pytest.mark.prove
def test_every_verb_passes_under_a_policy_of_which_nothing_can_be_left_out(world: World) -> None:
    driven = drive(world, {})
    check(driven)
    called = {need.action.partition(":")[2] for need in driven.needed}
    assert operations() - called == {
        "DescribeCapacityReservations",
        "DescribeInstanceTypes",
        "DescribeSpotPriceHistory",
        "DescribeVpcEndpoints",
        "GetParameters",
    }, "these belong to configurations below"


@pytest.mark.prove
@pytest.mark.parametrize("name", drawn(list(CONFIGURED), 3, what="configured"))
def test_so_it_is_with_each_thing_that_can_be_configured(world: World, name: str) -> None:
    asked = CONFIGURED[name]
    check(drive(world, asked(world) if callable(asked) else asked))
