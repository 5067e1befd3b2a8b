"""A table of launches: settings and facts, and the plan and the requests that result.

Each case has keys of awsddp.toml, facts (`FACTS`, with changes), the expected plan, and how its RunInstances
differs from that of a launch without settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import structs

from awsddp.compat.types import GPU_TYPES, QUOTA_G, QUOTA_P, SPOT_G, SPOT_P5
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import (
    Facts,
    Image,
    LaunchPlan,
    OwnGroup,
    Reservation,
    Subnet,
    plan_to_document,
    resource_names,
)
from awsddp.plan.requests import RequestValues
from awsddp.settings.loader import load

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
PLAIN = (
    "ImportKeyPair",
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "AuthorizeSecurityGroupEgress",
)
DLAMI = Image(
    id="ami-1",
    name="Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
    created="2026-08-22T00:00:00.000Z",
    architecture="x86_64",
    root_device="/dev/sda1",
    root_gb=75,
    ssh_user="ubuntu",
    owner="amazon",
)
AMAZON_LINUX = replace(
    DLAMI,
    id="ami-2",
    name="Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Amazon Linux 2023) 20260822",
    root_device="/dev/xvda",
    ssh_user="ec2-user",
)
ARM64 = replace(
    DLAMI,
    id="ami-4",
    name="Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
    architecture="arm64",
)
OWN_IMAGE = replace(DLAMI, id="ami-3", name="ours, driver 535", root_gb=300)
FACTS = Facts(
    region="us-east-1",
    target="aws",
    owner="AIDA",
    offers=dict.fromkeys(GPU_TYPES, ZONES) | {"p5.48xlarge": ("us-east-1b",)},
    image=DLAMI,
    subnets=tuple(
        Subnet(id=f"subnet-{zone[-1]}", zone=zone, vpc="vpc-1", free_addresses=250) for zone in ZONES
    ),
    quotas={code: 2000.0 for code, _ in (QUOTA_P, QUOTA_G, SPOT_G, SPOT_P5)},
    callers=("203.0.113.7/32",),
)
SPOT = replace(
    FACTS,
    spot_prices={"g5.12xlarge": {"us-east-1a": 2.4, "us-east-1b": 1.9, "us-east-1c": 3.0}},
)
OWN_SUBNET = replace(
    FACTS,
    subnets=(Subnet(id="subnet-own", zone="us-east-1c", vpc="vpc-9", free_addresses=20, route="internet"),),
)
PRIVATE_SUBNET = replace(
    OWN_SUBNET, subnets=(structs.replace(OWN_SUBNET.subnets[0], route="private"),), callers=()
)
CLOSED = {"network.address": "private", "network.ssh_cidr": "10.0.0.0/8"}
VPN = {"IpRanges": [{"CidrIp": "10.0.0.0/8"}]}
RESERVED = Reservation(id="cr-1", instance_type="p5.48xlarge", zone="us-east-1a", free=2, state="active")
UNKNOWN = replace(GPU_TYPES["g6.4xlarge"], name="g8.4xlarge", price_usd_per_hour=None)
BLOCK = structs.replace(
    RESERVED, id="cr-2", reservation_type="capacity-block", ends=datetime(2026, 12, 1, 11, 30, tzinfo=UTC)
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings (`spec`), facts, the expected plan, and the expected differences of RunInstances (`run`).

    `ssh` is the source that may reach port 22, `login` the SSH user.
    """

    spec: Mapping[str, object] = field(default_factory=dict)
    facts: Facts = FACTS
    kind: str
    nodes: int = 2
    market: str = "on-demand"
    zones: tuple[str, ...] = ZONES
    machines_usd: float | None = None
    efa: tuple[int, int] = (0, 0)
    makes: tuple[str, ...] = (*PLAIN, "CreatePlacementGroup")
    run: Mapping[str, Any] = field(default_factory=dict)
    ssh: Mapping[str, Any] = field(default_factory=lambda: {"IpRanges": [{"CidrIp": "203.0.113.7/32"}]})
    login: str = "ubuntu"
    others: tuple[str, ...] = ()
    uses: Mapping[str, str] = field(default_factory=dict)


def nic(
    *, public: bool | None = True, subnet: str = "subnet-x", group: str = "sg-1", **more: Any
) -> dict[str, Any]:
    """Return an interface of a request; without AssociatePublicIpAddress if `public` is None."""
    address = {} if public is None else {"AssociatePublicIpAddress": public}
    return {
        "DeviceIndex": 0,
        "SubnetId": subnet,
        "Groups": [group],
        "DeleteOnTermination": True,
        **address,
        **more,
    }


def efa_nics(first: str, cards: int) -> list[dict[str, Any]]:
    return [
        nic(public=None, NetworkCardIndex=0, InterfaceType=first),
        *(
            nic(public=None, DeviceIndex=1, NetworkCardIndex=card, InterfaceType="efa-only")
            for card in range(1, cards)
        ),
    ]


def of_type(name: str, usd: float, efa: int, **more: Any) -> Case:
    """Return a case that sets the instance type, and `more`."""
    nodes = more.get("nodes", 2)
    return Case(
        spec={"cluster.instance_type": name} | more.pop("spec", {}),
        kind=name,
        machines_usd=usd * nodes,
        efa=(0, efa),
        **more,
    )


def disk(gb: int, device: str = "/dev/sda1", **more: Any) -> list[dict[str, Any]]:
    ebs = {"VolumeSize": gb, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True, **more}
    return [{"DeviceName": device, "Ebs": ebs}]


def target(reservation: str) -> dict[str, Any]:
    return {"CapacityReservationTarget": {"CapacityReservationId": reservation}}


ALONE = PLAIN
ON_AMAZON_LINUX: dict[str, Any] = {
    "login": "ec2-user",
    "run": {"ImageId": "ami-2", "BlockDeviceMappings": disk(200, "/dev/xvda")},
}
ONE_TIME = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
CASES = {
    # each family
    "no settings": Case(kind="g6.48xlarge", machines_usd=2 * 13.3504, efa=(0, 1)),
    "g4dn": of_type("g4dn.12xlarge", 3.912, 1),
    "g4dn, the smallest": of_type("g4dn.xlarge", 0.526, 0),
    "g4dn on bare metal": of_type("g4dn.metal", 7.824, 1),
    "g5": of_type("g5.48xlarge", 16.288, 1),
    "g6": of_type("g6.12xlarge", 4.6016, 1),
    "g6e": of_type("g6e.48xlarge", 30.13118, 4),
    "gr6": of_type("gr6.8xlarge", 2.4464, 1),
    "g7, with an unknown price": Case(
        spec={"cluster.instance_type": "g7.48xlarge"}, kind="g7.48xlarge", efa=(0, 2)
    ),
    "g7e": of_type("g7e.48xlarge", 33.14432, 4),
    "g5g": of_type("g5g.xlarge", 0.42, 0, facts=replace(FACTS, image=ARM64), run={"ImageId": "ami-4"}),
    "g6f": of_type("g6f.xlarge", 0.2375, 0, facts=replace(FACTS, image=AMAZON_LINUX), **ON_AMAZON_LINUX),
    "gr6f": of_type("gr6f.4xlarge", 1.066, 0, facts=replace(FACTS, image=AMAZON_LINUX), **ON_AMAZON_LINUX),
    "p3dn, with a custom image": of_type(
        "p3dn.24xlarge",
        31.212,
        1,
        facts=replace(FACTS, image=OWN_IMAGE),
        spec={"cluster.image": "ami-3"},
        run={"ImageId": "ami-3", "BlockDeviceMappings": disk(400)},
    ),
    "p4d": of_type("p4d.24xlarge", 21.957642, 4),
    "p4de": of_type("p4de.24xlarge", 27.44705, 4),
    "p5, offered in one zone": of_type("p5.48xlarge", 55.04, 32, zones=("us-east-1b",)),
    "p5en": of_type("p5en.48xlarge", 63.296, 16),
    "p6-b200": of_type("p6-b200.48xlarge", 113.9328, 8),
    "p5e, with an unknown price": Case(
        spec={"cluster.instance_type": "p5e.48xlarge"}, kind="p5e.48xlarge", efa=(0, 32)
    ),
    "one that the table lacks: as EC2 describes it": Case(
        spec={"cluster.instance_type": UNKNOWN.name},
        facts=replace(
            FACTS,
            described={UNKNOWN.name: UNKNOWN},
            offers={**FACTS.offers, UNKNOWN.name: ZONES},
            prices={UNKNOWN.name: 1.5},
        ),
        kind=UNKNOWN.name,
        machines_usd=3.0,
    ),
    # how many, which GPUs
    "one node alone": of_type("g5.xlarge", 1.006, 0, nodes=1, spec={"cluster.nodes": 1}, makes=ALONE, run={}),
    "64 nodes": of_type("g5.xlarge", 1.006, 0, nodes=64, spec={"cluster.nodes": 64}),
    "gpus by name and count": Case(
        spec={"cluster.gpus": "A100:8"}, kind="p4d.24xlarge", machines_usd=2 * 21.957642, efa=(0, 4)
    ),
    "gpus with their memory": Case(
        spec={"cluster.gpus": "A100-80GB:8"}, kind="p4de.24xlarge", machines_usd=2 * 27.44705, efa=(0, 4)
    ),
    "gpus of any number": Case(
        spec={"cluster.gpus": "l4"}, kind="g6.xlarge", machines_usd=2 * 0.8048, efa=(0, 0)
    ),
    # prices and money
    "the current price of AWS": Case(
        spec={"cluster.instance_type": "g5.xlarge"},
        facts=replace(FACTS, prices={"g5.xlarge": 0.9}, price_date="2026-11-21"),
        kind="g5.xlarge",
        machines_usd=1.8,
    ),
    "within the budget": of_type(
        "g5.xlarge", 1.006, 0, spec={"cluster.budget_usd": 60, "cluster.max_price_usd": 2.5}
    ),
    # spot
    "spot, the cheapest zone first": Case(
        spec={"cluster.instance_type": "g5.12xlarge", "cluster.spot": True},
        facts=SPOT,
        kind="g5.12xlarge",
        market="spot",
        zones=("us-east-1b", "us-east-1a", "us-east-1c"),
        machines_usd=6.0,
        efa=(0, 1),
        run={"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": ONE_TIME}},
    ),
    "spot, the zones in the order given": Case(
        spec={
            "cluster.instance_type": "g5.12xlarge",
            "cluster.spot": True,
            "capacity.zones": '["us-east-1c", "us-east-1a"]',
        },
        facts=SPOT,
        kind="g5.12xlarge",
        market="spot",
        zones=("us-east-1c", "us-east-1a"),
        machines_usd=6.0,
        efa=(0, 1),
        run={"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": ONE_TIME}},
    ),
    "spot, then on demand": Case(
        spec={"cluster.instance_type": "g5.12xlarge", "cluster.spot": "first"},
        facts=SPOT,
        kind="g5.12xlarge",
        market="spot",
        zones=("us-east-1b", "us-east-1a", "us-east-1c"),
        machines_usd=6.0,
        efa=(0, 1),
        run={"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": ONE_TIME}},
        others=("g5.12xlarge on-demand",),
    ),
    # fail-over
    "one zone": of_type("g5.xlarge", 1.006, 0, spec={"capacity.zones": "us-east-1c"}, zones=("us-east-1c",)),
    "other types after the first": of_type(
        "p4d.24xlarge",
        21.957642,
        4,
        spec={"cluster.instance_type": "p4d.24xlarge,g5.48xlarge,g6.48xlarge"},
        others=("g5.48xlarge on-demand", "g6.48xlarge on-demand"),
    ),
    "several types, the first of them retired": Case(
        spec={"cluster.instance_type": "p2.8xlarge,g6.48xlarge"},
        kind="g6.48xlarge",
        machines_usd=2 * 13.3504,
        efa=(0, 1),
    ),
    # reservations and blocks
    "a reservation names type and zone": Case(
        spec={"capacity.reservation": "cr-1"},
        facts=replace(FACTS, reservation=RESERVED, quotas={}),
        kind="p5.48xlarge",
        zones=("us-east-1a",),
        machines_usd=2 * 55.04,
        efa=(0, 32),
        makes=PLAIN,
        run={"CapacityReservationSpecification": target("cr-1")},
        uses={"reservation": "cr-1"},
    ),
    "a capacity block": Case(
        spec={"capacity.reservation": "cr-2"},
        facts=replace(FACTS, reservation=BLOCK, quotas={}),
        kind="p5.48xlarge",
        market="capacity-block",
        zones=("us-east-1a",),
        machines_usd=0.0,
        efa=(0, 32),
        makes=PLAIN,
        run={
            "InstanceMarketOptions": {"MarketType": "capacity-block"},
            "CapacityReservationSpecification": target("cr-2"),
        },
        uses={"reservation": "cr-2"},
    ),
    # EFA
    "EFA on one card keeps its public address": Case(
        spec={"cluster.instance_type": "g6.48xlarge", "capacity.efa": True},
        kind="g6.48xlarge",
        machines_usd=2 * 13.3504,
        efa=(1, 1),
        run={"NetworkInterfaces": [nic(NetworkCardIndex=0, InterfaceType="efa")]},
    ),
    "EFA, one of four with a public address": Case(
        spec={"cluster.instance_type": "p4d.24xlarge", "capacity.efa": True},
        kind="p4d.24xlarge",
        machines_usd=2 * 21.957642,
        efa=(1, 4),
        run={"NetworkInterfaces": [nic(NetworkCardIndex=0, InterfaceType="efa")]},
    ),
    **{
        f"EFA on {cards} cards": Case(
            spec={"cluster.instance_type": name, "capacity.efa": True, **CLOSED},
            kind=name,
            zones=("us-east-1b",) if name == "p5.48xlarge" else ZONES,
            machines_usd=2 * usd,
            efa=(cards, cards),
            ssh=VPN,
            run={"NetworkInterfaces": efa_nics("efa", cards)},
        )
        for name, usd, cards in (
            ("g6e.24xlarge", 15.06559, 2),
            ("p4d.24xlarge", 21.957642, 4),
            ("p6-b200.48xlarge", 113.9328, 8),
            ("p5en.48xlarge", 63.296, 16),
            ("p5.48xlarge", 55.04, 32),
        )
    },
    "EFA on 16 of 17 cards, the first without": Case(
        spec={
            "cluster.instance_type": "p6-b300.48xlarge",
            "capacity.efa": True,
            "cluster.image": "ami-3",
            **CLOSED,
        },
        facts=replace(FACTS, image=OWN_IMAGE),
        kind="p6-b300.48xlarge",
        machines_usd=2 * 142.416,
        efa=(16, 16),
        ssh=VPN,
        run={
            "ImageId": "ami-3",
            "BlockDeviceMappings": disk(400),
            "NetworkInterfaces": efa_nics("interface", 17),
        },
    ),
    # network and access
    "private addresses": of_type(
        "g5.xlarge", 1.006, 0, spec=CLOSED, ssh=VPN, run={"NetworkInterfaces": [nic(public=False)]}
    ),
    "over a jump host, by the block of its address": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"network.jump": "me@bastion:2222", "network.ssh_cidr": "10.0.0.5/32"},
        ssh={"IpRanges": [{"CidrIp": "10.0.0.5/32"}]},
    ),
    "private, over a jump host, by its group": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"network.jump": "bastion", **CLOSED, "network.ssh_cidr": "sg-0a1b2c3d"},
        ssh={"UserIdGroupPairs": [{"GroupId": "sg-0a1b2c3d"}]},
        run={"NetworkInterfaces": [nic(public=False)]},
    ),
    "a custom subnet": of_type(
        "g5.xlarge", 1.006, 0, facts=OWN_SUBNET, spec={"network.subnet": "subnet-own"}, zones=("us-east-1c",)
    ),
    "a custom private subnet": of_type(
        "g5.xlarge",
        1.006,
        0,
        facts=PRIVATE_SUBNET,
        spec={"network.subnet": "subnet-own", **CLOSED},
        zones=("us-east-1c",),
        ssh=VPN,
        run={"NetworkInterfaces": [nic(public=False)]},
    ),
    "a custom security group": of_type(
        "g5.xlarge",
        1.006,
        0,
        facts=replace(FACTS, group=OwnGroup(id="sg-own", vpc="vpc-1")),
        spec={"network.security_group": "sg-own"},
        makes=("ImportKeyPair", "CreatePlacementGroup"),
        run={"NetworkInterfaces": [nic(group="sg-own")]},
        uses={"security group": "sg-own"},
    ),
    "a custom key pair": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"access.key_file": "~/.ssh/mine"},
        makes=(*PLAIN[1:], "CreatePlacementGroup"),
        run={"KeyName": "mine"},
        uses={"key pair": "mine"},
    ),
    "custom resources only": of_type(
        "g5.xlarge",
        1.006,
        0,
        facts=replace(OWN_SUBNET, group=OwnGroup(id="sg-own", vpc="vpc-9")),
        spec={
            "access.key_file": "~/.ssh/mine.pem",
            "access.instance_profile": "nodes",
            "network.subnet": "subnet-own",
            "network.security_group": "sg-own",
        },
        zones=("us-east-1c",),
        makes=("CreatePlacementGroup",),
        run={
            "KeyName": "mine",
            "IamInstanceProfile": {"Name": "nodes"},
            "NetworkInterfaces": [nic(group="sg-own")],
        },
        uses={
            "key pair": "mine",
            "security group": "sg-own",
            "instance profile": "nodes",
        },
    ),
    "a custom login name": of_type("g5.xlarge", 1.006, 0, spec={"access.user": "admin"}, login="admin"),
    "an instance profile by name": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"access.instance_profile": "nodes"},
        run={"IamInstanceProfile": {"Name": "nodes"}},
        uses={"instance profile": "nodes"},
    ),
    "an instance profile by ARN": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"access.instance_profile": "arn:aws:iam::1:instance-profile/nodes"},
        run={"IamInstanceProfile": {"Arn": "arn:aws:iam::1:instance-profile/nodes"}},
        uses={"instance profile": "arn:aws:iam::1:instance-profile/nodes"},
    ),
    "a KMS key": of_type(
        "g5.xlarge",
        1.006,
        0,
        spec={"access.kms_key": "alias/ours"},
        run={"BlockDeviceMappings": disk(200, KmsKeyId="alias/ours")},
        uses={"KMS key": "alias/ours"},
    ),
    # image and disk
    "Amazon Linux has another root device": of_type(
        "g5.xlarge",
        1.006,
        0,
        facts=replace(FACTS, image=AMAZON_LINUX),
        run={"ImageId": "ami-2", "BlockDeviceMappings": disk(200, "/dev/xvda")},
        login="ec2-user",
    ),
    "a custom disk size": of_type(
        "g5.xlarge", 1.006, 0, spec={"cluster.disk_gb": 1000}, run={"BlockDeviceMappings": disk(1000)}
    ),
}


def plan_case(case: Case) -> LaunchPlan:
    spec, _ = load("demo", environ={}, overrides={"tags.team": "vision", **case.spec})
    return make_plan(spec, case.facts)


LABELS = {
    "ImportKeyPair": "key pair",
    "CreateSecurityGroup": "security group",
    "CreatePlacementGroup": "placement group",
}


def list_created(case: Case) -> list[str]:
    """Return descriptions of what RunInstances creates."""
    sent = {**plain_launch(case), **case.run}
    nics, [disk] = sent["NetworkInterfaces"], sent["BlockDeviceMappings"]
    several = "s" * (case.nodes > 1)
    many = case.nodes * len(nics)
    made = [
        f"{case.nodes} instance{several}",
        f"{case.nodes} disk{several} of {disk['Ebs']['VolumeSize']} GB",
        f"{many} network interface{'s' * (many > 1)}",
    ]
    addresses = [f"{case.nodes} public address{'es' * (case.nodes > 1)}"]
    return made + (addresses if case.spec.get("network.address") != "private" else [])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_has_the_expected_plan(case: Case) -> None:
    made = plan_case(case)
    assert (made.instance_type, made.nodes, made.market) == (case.kind, case.nodes, case.market)
    assert (made.zones, made.ssh_user) == (case.zones, case.login)
    assert made.price.machines == (None if case.machines_usd is None else pytest.approx(case.machines_usd))
    assert (made.efa.count, made.efa.most) == case.efa
    assert tuple(request.operation for request in made.requests) == (*case.makes, "RunInstances")
    assert tuple(f"{other.instance_type} {other.market}" for other in made.alternatives) == case.others
    shown = plan_to_document(made)
    one_subnet = {"subnet": made.subnets[0].id} if len(case.zones) == 1 else {}
    assert shown["uses"] == {**one_subnet, "tags": "team=vision", **case.uses}
    assert shown["makes"] == [
        *(LABELS[operation] for operation in case.makes if operation in LABELS),
        *list_created(case),
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_case_has_the_expected_requests(case: Case) -> None:
    ids = {
        **resource_names("demo", "0a1b2c3d"),
        "security_group": "sg-1",
        "subnet": "subnet-x",
        "client_token": "token",
    }
    secrets = {"user_data": "#cloud-config\n", "public_key": "ssh-ed25519 AAAA awsddp"}
    values = RequestValues(ids=ids, secrets=secrets, now=datetime(2026, 11, 21, 8, 45, tzinfo=UTC))
    sent = map(values.resolve, plan_case(case).requests)
    made = list_requests(case)
    assert [(request.operation, request.parameters) for request in sent] == [
        *((operation, made[operation]) for operation in case.makes),
        ("RunInstances", {**plain_launch(case), **case.run}),
    ]


OWN_TAGS = {
    "awsddp:cluster": "demo",
    "awsddp:id": "0a1b2c3d",
    "awsddp:owner": "AIDA",
    "awsddp:created": "2026-11-21T08:45:00Z",
    "team": "vision",
}


def tagged(kind: str, tags: Mapping[str, str]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def list_requests(case: Case) -> dict[str, Any]:
    """Return the requests before RunInstances, by operation."""
    name, inside = "awsddp-demo-0a1b2c3d", {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}
    login = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, **case.ssh}
    return {
        "ImportKeyPair": {
            "KeyName": name,
            "PublicKeyMaterial": "ssh-ed25519 AAAA awsddp",
            "TagSpecifications": [tagged("key-pair", OWN_TAGS)],
        },
        "CreateSecurityGroup": {
            "GroupName": name,
            "Description": "awsddp cluster demo",
            "VpcId": case.facts.subnets[0].vpc,
            "TagSpecifications": [tagged("security-group", OWN_TAGS)],
        },
        "AuthorizeSecurityGroupIngress": {"GroupId": "sg-1", "IpPermissions": [inside, login]},
        "AuthorizeSecurityGroupEgress": {"GroupId": "sg-1", "IpPermissions": [inside]},
        "CreatePlacementGroup": {
            "GroupName": name,
            "Strategy": "cluster",
            "TagSpecifications": [tagged("placement-group", OWN_TAGS)],
        },
    }


def plain_launch(case: Case) -> dict[str, Any]:
    """Return the parameters of RunInstances of a launch without settings."""
    own_tags = {"Name": "awsddp-demo", **OWN_TAGS}
    numbers = {1: "0", 2: "0,1", 64: "0-63"}[case.nodes]
    instance = {**own_tags, "awsddp:nodes": numbers, "awsddp:expires": "2026-11-22T08:45:00Z"}
    tags = {"instance": instance, "volume": own_tags, "network-interface": own_tags}
    if case.market == "spot":
        tags["spot-instances-request"] = own_tags
    placement = (
        {"Placement": {"GroupName": "awsddp-demo-0a1b2c3d"}} if "CreatePlacementGroup" in case.makes else {}
    )
    return {
        "ClientToken": "token",
        "ImageId": "ami-1",
        "InstanceType": case.kind,
        "MinCount": case.nodes,
        "MaxCount": case.nodes,
        "KeyName": "awsddp-demo-0a1b2c3d",
        "UserData": "#cloud-config\n",
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        },
        "BlockDeviceMappings": disk(200),
        "NetworkInterfaces": [nic()],
        **placement,
        "TagSpecifications": [tagged(kind, pairs) for kind, pairs in tags.items()],
    }


def test_the_cases_have_every_family_and_every_number_of_efa_interfaces() -> None:
    families = {GPU_TYPES[case.kind].family for case in CASES.values() if case.kind in GPU_TYPES}
    assert families == {kind.family for kind in GPU_TYPES.values()}
    assert {case.efa[0] for case in CASES.values()} == {0, *(kind.efa for kind in GPU_TYPES.values())}
    assert len(CASES) >= 40
