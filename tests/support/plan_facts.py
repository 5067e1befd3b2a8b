"""Facts of an account, and plans made from them."""

from dataclasses import replace
from typing import Any

from awsddp.compat.types import QUOTA_G, QUOTA_P
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import Facts, Image, LaunchPlan, Subnet
from awsddp.settings.spec import CapacitySection, ClusterSection, ClusterSpec, NetworkSection

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


DLAMI = Image(
    id="ami-0123456789abcdef0",
    name="Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
    created="2026-08-22T00:00:00.000Z",
    architecture="x86_64",
    root_device="/dev/sda1",
    root_gb=75,
    ssh_user="ubuntu",
)


FACTS = Facts(
    region="us-east-1",
    target="aws",
    owner="AIDAEXAMPLE",
    offers={
        "g4dn.metal": ZONES,
        "g5.48xlarge": ZONES,
        "g6.12xlarge": ZONES,
        "g6.48xlarge": ("us-east-1b", "us-east-1c"),
        "g7e.48xlarge": ZONES,
        "p3dn.24xlarge": ZONES,
        "p4d.24xlarge": ("us-east-1a",),
        "p5.48xlarge": ZONES,
    },
    image=DLAMI,
    subnets=tuple(
        Subnet(id=f"subnet-{zone[-1]}", zone=zone, vpc="vpc-1", free_addresses=4000) for zone in ZONES
    ),
    quotas={QUOTA_P[0]: 384.0, QUOTA_G[0]: 768.0},
    callers=("203.0.113.7/32",),
)


def plan(
    facts: Facts = FACTS,
    *,
    cidr: tuple[str, ...] = (),
    tags: dict[str, str] | None = None,
    network: dict[str, Any] | None = None,
    capacity: dict[str, Any] | None = None,
    **cluster: Any,
) -> LaunchPlan:
    spec = ClusterSpec(
        name="demo",
        cluster=ClusterSection(**cluster),
        network=NetworkSection(ssh_cidr=cidr, **(network or {})),
        capacity=CapacitySection(**(capacity or {})),
        tags=tags or {},
    )
    return make_plan(spec, facts)


_UNKNOWN = "InvalidInstanceType: The following supplied instance types do not exist"


REFUSED = replace(
    FACTS, described=dict.fromkeys(("p2.8xlarge", "p3.8xlarge", "g6.48xlrage", "G6.48XLARGE"), _UNKNOWN)
)
