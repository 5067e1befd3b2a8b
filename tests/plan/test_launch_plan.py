"""From a spec and facts to a plan, or to a refusal that names what would be right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from awsddp.aws.power import TAG
from awsddp.compat.releases import PARTS_IMAGE
from awsddp.compat.types import QUOTA_G, QUOTA_P, GpuType
from awsddp.errors import AwsddpError, CloudError, ConfigError
from awsddp.model.records import TargetName
from awsddp.plan.launch_plan import make_plan, refuse_untried
from awsddp.plan.policy import least_policy
from awsddp.plan.records import Data, Facts, Group, Image, LaunchPlan, Reservation, Saving, Subnet, document
from awsddp.plan.selection import offers
from awsddp.settings import ec2_limits
from awsddp.settings.loader import load
from awsddp.settings.spec import AccessSection, CapacitySection, ClusterSection, ClusterSpec, NetworkSection

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


def test_most_tags_of_a_users_own_leave_room_for_those_that_awsddp_writes() -> None:
    own = {f"k{number}": "v" for number in range(ec2_limits.TAGS - ec2_limits.OWN_TAGS)}
    launch = plan(replace(FACTS, host="laptop"), tags=own).request("RunInstances").parameters
    [instance] = [one for one in launch["TagSpecifications"] if one["ResourceType"] == "instance"]
    assert len(instance["Tags"]) + len([TAG]) == ec2_limits.TAGS


def test_without_a_type_the_cheapest_virtualised_one_with_eight_gpus_is_taken() -> None:
    made = plan()
    assert (made.instance_type, made.nodes, made.kind.gpus, made.kind.gpu) == ("g6.48xlarge", 2, 8, "L4")
    assert list(made.zones) == ["us-east-1b", "us-east-1c"]
    assert len(made.choices) == 3
    assert made.instance_type not in {choice.instance_type for choice in made.choices}
    assert all(choice.gpus_per_node == 8 for choice in made.choices)
    assert made.warnings == ("prices are list prices of us-east-1 of 2026-07-20: AWS returned none",)
    assert not plan(replace(FACTS, prices={"g6.48xlarge": 13.0})).warnings


def test_a_type_that_does_not_fit_the_quota_is_passed_over() -> None:
    made = plan(replace(FACTS, quotas={QUOTA_P[0]: 384.0, QUOTA_G[0]: 0.0}))
    assert made.instance_type == "p4d.24xlarge"
    assert {choice.instance_type: choice.fits_quota for choice in made.choices}["g5.48xlarge"] is False


def test_a_quota_that_cannot_be_read_is_a_warning() -> None:
    made = plan(replace(FACTS, quotas={}))
    assert made.instance_type == "g6.48xlarge"
    assert any("quota unreadable" in text and "384 vCPUs" in text for text in made.warnings)


def test_a_quota_that_is_too_small_is_refused_with_need_and_have() -> None:
    with pytest.raises(CloudError) as caught:
        plan(nodes=5, instance_type="g6.48xlarge")
    assert "5 x g6.48xlarge need 960" in caught.value.why
    assert "L-DB2E81BA" in caught.value.why
    assert "768" in caught.value.why


@pytest.mark.parametrize(
    ("vcpus", "asked", "command"),
    [
        (64, {}, "--nodes 1 --instance-type g6.12xlarge   # 4 x L4 per node, $4.60 per hour"),
        (8, {}, "--nodes 2 --instance-type g4dn.xlarge   # 1 x T4 per node, $1.05 per hour"),
        (200, {}, "--nodes 1 --instance-type g6.48xlarge   # 8 x L4 per node, $13.35 per hour"),
        (200, {"instance_type": "g5.48xlarge"}, "--nodes 1 --instance-type g5.48xlarge   # 8 x A10G"),
        (8, {"gpus": "L4:8"}, "--nodes 2 --gpus L4:1   # 1 x L4 per node, $1.61 per hour"),
        (0, {}, "awsddp --local run"),
    ],
)
def test_a_quota_that_is_too_small_names_what_it_allows(
    vcpus: float, asked: dict[str, Any], command: str
) -> None:
    offered = dict.fromkeys(("g4dn.xlarge", "g6.xlarge", "g6.12xlarge", "g6.48xlarge", "g5.48xlarge"), ZONES)
    facts = replace(FACTS, offers=offered, quotas={QUOTA_G[0]: vcpus})
    with pytest.raises(CloudError) as caught:
        plan(facts, **asked)
    first, *rest = caught.value.next.splitlines()
    assert command in first and rest == ["awsddp doctor --request-quota   # request more from AWS"]
    if vcpus:  # what is recommended is accepted
        words = dict(zip(*[iter(first.partition("#")[0].split()[2:])] * 2, strict=True))
        kept = {key[2:].replace("-", "_"): word for key, word in words.items()}
        assert plan(facts, **{**kept, "nodes": int(kept["nodes"])}).nodes == int(kept["nodes"])


def test_the_price_counts_machines_disks_and_addresses() -> None:
    made = plan(instance_type="g6.48xlarge", disk_gb=200)
    one = 13.3504 + 200 * 0.08 / 730 + 0.005
    assert made.price_usd_per_hour == pytest.approx(2 * one, abs=1e-4)
    assert (made.price.date, made.price.source) == ("2026-07-20", "list price of us-east-1")


def test_prices_of_another_region_are_told_as_such() -> None:
    assert any("us-east-1" in text for text in plan(replace(FACTS, region="eu-west-1")).warnings)


@pytest.mark.parametrize(("root_gb", "asked", "expected"), [(75, None, 200), (140, None, 240), (75, 75, 75)])
def test_the_disk_holds_the_image_and_room_to_work(root_gb: int, asked: int | None, expected: int) -> None:
    assert plan(replace(FACTS, image=replace(DLAMI, root_gb=root_gb)), disk_gb=asked).disk_gb == expected


def test_lost_nodes_are_replaced_under_their_own_numbers() -> None:
    spec = ClusterSpec(name="demo", cluster=ClusterSection(nodes=4))
    made = make_plan(spec, FACTS, numbers=(3, 1))
    run = made.request("RunInstances").parameters
    assert (run["MinCount"], run["MaxCount"]) == (2, 2)
    tags = {tag["Key"]: tag["Value"] for tag in run["TagSpecifications"][0]["Tags"]}
    assert tags["awsddp:nodes"] == "1,3"
    assert made.nodes == 4


def test_zones_without_room_are_passed_over() -> None:
    full = tuple(
        structs.replace(subnet, free_addresses=1 if subnet.zone == "us-east-1b" else 9)
        for subnet in FACTS.subnets
    )
    assert list(plan(replace(FACTS, subnets=full)).zones) == ["us-east-1c"]


def test_a_subnet_with_exactly_enough_addresses_has_room() -> None:
    subnets = tuple(structs.replace(subnet, free_addresses=2) for subnet in FACTS.subnets)
    made = plan(replace(FACTS, subnets=subnets), nodes=2)
    assert list(made.zones) == ["us-east-1b", "us-east-1c"]


def test_pretended_gpus_are_told() -> None:
    made = plan(replace(FACTS, image=replace(DLAMI, tags={"awsddp:gpus": "pretended"})))
    assert made.pretended
    assert any("gloo on the CPU" in text for text in made.warnings)


def test_rehearsed_gpus_are_told_with_the_ranks_that_a_job_has() -> None:
    made = plan(replace(FACTS, image=replace(DLAMI, tags={"awsddp:gpus": "rehearsed"})))
    assert made.pretended
    assert document(made)["rehearsed"]
    assert any("nccl as gloo; a job has a rank for each, 16 in total" in text for text in made.warnings)


def test_two_ssh_blocks_are_two_rules() -> None:
    made = plan(cidr=("198.51.100.9/24", "2001:db8::/48"))
    assert made.ssh_cidrs == ("198.51.100.0/24", "2001:db8::/48")
    rules = made.request("AuthorizeSecurityGroupIngress").parameters["IpPermissions"]
    assert rules[1]["IpRanges"] == [{"CidrIp": "198.51.100.0/24"}]
    assert rules[2]["Ipv6Ranges"] == [{"CidrIpv6": "2001:db8::/48"}]


ARM = GpuType(name="g5g.xlarge", gpu="T4g", gpus=1, memory_gb=16, vcpus=4, cpu="arm64")
HELD = Reservation(id="cr-1", instance_type="p4d.24xlarge", zone="us-east-1a", free=2, state="active")
RESERVED = replace(FACTS, reservation=HELD)
_UNKNOWN = "InvalidInstanceType: The following supplied instance types do not exist"
REFUSED = replace(
    FACTS, described=dict.fromkeys(("p2.8xlarge", "p3.8xlarge", "g6.48xlrage", "G6.48XLARGE"), _UNKNOWN)
)


@pytest.mark.parametrize(
    ("facts", "asked", "kind", "told"),
    [
        (
            REFUSED,
            {"instance_type": "p2.8xlarge"},
            CloudError,
            ("2025-03-30", "K80", "g6.48xlarge", "EC2 says"),
        ),
        (REFUSED, {"instance_type": "p3.8xlarge"}, CloudError, ("2026-05-01", "V100", "g6.12xlarge")),
        (REFUSED, {"instance_type": "g6.48xlrage"}, ConfigError, ("cluster.instance_type", "'g6.48xlarge'")),
        (REFUSED, {"instance_type": "G6.48XLARGE"}, ConfigError, ("mean 'g6.48xlarge'",)),
        (FACTS, {"instance_type": "p5en.48xlarge"}, CloudError, ("no zone of this region", "--region")),
        (FACTS, {"instance_type": "p3dn.24xlarge"}, ConfigError, ("V100", "--image")),
        (FACTS, {"disk_gb": 50}, ConfigError, ("cluster.disk_gb", "75")),
        (FACTS, {"cidr": ("0.0.0.0/0",)}, ConfigError, ("network.ssh_cidr", "whole world")),
        (FACTS, {"cidr": ("0.0.0.0/1", "128.0.0.0/1")}, ConfigError, ("network.ssh_cidr", "the world")),
        (FACTS, {"cidr": ("2000::/3",)}, ConfigError, ("network.ssh_cidr", "the world")),
        (FACTS, {"cidr": ("10.0.0.0/33",)}, ConfigError, ("network.ssh_cidr", "203.0.113.0/24")),
        (FACTS, {"tags": {"awsddp:id": "x"}}, ConfigError, ("tags.awsddp:id",)),
        (FACTS, {"tags": {"AWS:id": "x"}}, ConfigError, ("tags.AWS:id", "reserved for AWS")),
        (FACTS, {"tags": {"k" * 129: "x"}}, ConfigError, ("129 characters", "128")),
        (FACTS, {"tags": {"k": "v" * 257}}, ConfigError, ("257 characters", "256")),
        (FACTS, {"tags": {"k": "a\nb"}}, ConfigError, ("tags.k", "control character")),
        (FACTS, {"tags": {f"k{n}": "" for n in range(42)}}, ConfigError, ("42 tags", "50", "leave out 1")),
        (FACTS, {"cidr": tuple(f"10.0.{n}.0/24" for n in range(60))}, ConfigError, ("60 IPv4", "at most 60")),
        (FACTS, {"cidr": ("2a00::/32",) * 59 + ("sg-12345678",)}, ConfigError, ("60 IPv6", "at most 60")),
        (replace(FACTS, callers=()), {}, ConfigError, ("network.ssh_cidr",)),
        (FACTS, {"gpus": "A100:3"}, CloudError, ("3 x A100", "--offers")),
        (FACTS, {"gpus": "K80:8"}, CloudError, ("8 x K80", "2025-03-30")),
        (FACTS, {"gpus": "eight"}, ConfigError, ("cluster.gpus", "A100:8", "L40S")),
        (
            FACTS,
            {"gpus": "A100:8", "instance_type": "g6.48xlarge"},
            ConfigError,
            ("cluster.gpus", "8 x L4", "--gpus L4:8"),
        ),
        (
            FACTS,
            {"capacity": {"zones": ("eu-west-1a",)}},
            ConfigError,
            ("capacity.zones", "--region eu-west-1"),
        ),
        (
            FACTS,
            {"instance_type": "p4d.24xlarge", "capacity": {"zones": ("us-east-1b",)}},
            ConfigError,
            ("capacity.zones", "-o capacity.zones=us-east-1a"),
        ),
        (RESERVED, {"instance_type": "g6.48xlarge"}, ConfigError, ("capacity.reservation", "p4d.24xlarge")),
        (RESERVED, {"nodes": 3}, ConfigError, ("capacity.reservation", "2 free", "--nodes 2")),
        (
            replace(FACTS, reservation=structs.replace(HELD, state="expired")),
            {},
            ConfigError,
            ("capacity.reservation", "expired"),
        ),
        (
            replace(FACTS, reservation=structs.replace(HELD, platform="Windows")),
            {},
            ConfigError,
            ("capacity.reservation", "Windows", "Linux/UNIX"),
        ),
        (
            replace(FACTS, reservation=structs.replace(HELD, tenancy="dedicated")),
            {},
            ConfigError,
            ("capacity.reservation", "dedicated"),
        ),
        (RESERVED, {"spot": True}, ConfigError, ("capacity.reservation", "--spot")),
        (
            replace(FACTS, offers={"g6.xlarge": ZONES}),
            {"instance_type": "g6.xlarge", "capacity": {"efa": True}},
            ConfigError,
            ("capacity.efa", "g6.8xlarge"),
        ),
        (
            replace(FACTS, offers={"p6-b300.48xlarge": ZONES}, image=replace(DLAMI, name="ours"), quotas={}),
            {"instance_type": "p6-b300.48xlarge", "capacity": {"efa": True}},
            ConfigError,
            ("capacity.efa", "network.address=private"),
        ),
        (
            replace(FACTS, callers=()),
            {"network": {"address": "private"}},
            ConfigError,
            ("network.address", "network.ssh_cidr"),
        ),
        (
            replace(FACTS, subnets=(structs.replace(FACTS.subnets[1], route="none"),)),
            {"network": {"subnet": "subnet-b"}},
            ConfigError,
            ("network.subnet", "internet gateway", "network.address=private"),
        ),
        (
            replace(FACTS, subnets=(Subnet(id="subnet-1", zone="us-east-1e", vpc="v", free_addresses=9),)),
            {"network": {"subnet": "subnet-1"}},
            ConfigError,
            ("network.subnet", "us-east-1e", "us-east-1b"),
        ),
        (
            replace(FACTS, group=Group(id="sg-own", vpc="vpc-2")),
            {"network": {"security_group": "sg-own"}},
            ConfigError,
            ("network.security_group", "vpc-1", "vpc-2"),
        ),
        (FACTS, {"budget_usd": 2.0}, ConfigError, ("cluster.budget_usd", "$2.00", "5 min", "--budget")),
        (FACTS, {"max_price_usd": 20.0}, ConfigError, ("cluster.max_price_usd", "$26.75", "--nodes")),
        (replace(FACTS, offers={}), {}, CloudError, ("us-east-1", "--instance-type")),
        (replace(FACTS, subnets=()), {}, CloudError, ("subnet", "create-default-vpc")),
        (
            replace(FACTS, described={ARM.name: ARM}, offers={"g5g.xlarge": ZONES}),
            {"instance_type": "g5g.xlarge"},
            ConfigError,
            ("cluster.image", "arm64", "--image"),
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_place_and_the_remedy(
    facts: Facts, asked: dict[str, Any], kind: type[AwsddpError], told: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        plan(facts, **asked)
    for text in told:
        assert text in str(caught.value)


def test_a_budget_is_an_earlier_expiry() -> None:
    whole, limited = plan(FACTS), plan(FACTS, budget_usd=100.0)
    price = whole.price_usd_per_hour
    assert price is not None
    assert limited.expires_s == int(100 / price * 3600) < whole.expires_s
    assert document(limited)["price_until_expiry_usd"] == pytest.approx(100.0, abs=0.01)
    assert any("the budget of $100.00 lasts 3 h 44 min" in text for text in limited.warnings)
    assert replace(plan(FACTS, budget_usd=10_000.0), budget=None) == whole


SPOT = replace(
    FACTS,
    spot_prices={"g5.48xlarge": {"us-east-1a": 5.0, "us-east-1b": 5.5, "us-east-1c": 6.0}},
    highest_spot_prices={"g5.48xlarge": {"us-east-1a": 9.0, "us-east-1b": 7.0, "us-east-1c": 6.0}},
)


def test_a_budget_on_spot_assumes_the_highest_price_of_the_last_7_days_in_the_zones_that_are_tried() -> None:
    wish: dict[str, Any] = {"instance_type": "g5.48xlarge", "spot": True, "budget_usd": 100.0}
    now = plan(SPOT, **wish).price
    made = plan(SPOT, **wish)
    rate = 2 * 9.0 + now.disks + now.addresses
    assert (now.machines, made.expires_s) == (2 * 6.0, int(100 / rate * 3600))
    assert str(made.budget) == (
        f"$100.00 at up to ${rate:.2f} per hour, the highest spot price of the last 7 days"
    )
    assert document(made)["budget"]["usd_per_hour"] == pytest.approx(rate, abs=1e-4)
    narrow = plan(SPOT, capacity={"zones": ("us-east-1b", "us-east-1c")}, **wish)
    assert narrow.budget is not None
    assert narrow.budget.usd_per_hour == pytest.approx(rate - 2 * 2.0, abs=1e-4)


def test_spot_nodes_are_warned_of_unless_results_are_saved() -> None:
    saved = replace(SPOT, saving=Saving(place="s3://results/runs", region=SPOT.region))
    spec = ClusterSpec(cluster=ClusterSection(spot=True), access=AccessSection(instance_profile="training"))
    warned = [make_plan(spec, facts).warnings for facts in (SPOT, saved)]
    assert [any(text.startswith("spot nodes") for text in texts) for texts in warned] == [True, False]


@pytest.mark.parametrize("known", [{}, {"us-east-1a": 9.0}])
def test_a_budget_on_spot_assumes_the_on_demand_price_where_no_history_is_known(
    known: dict[str, float],
) -> None:
    facts = replace(SPOT, highest_spot_prices={"g5.48xlarge": known})
    wish: dict[str, Any] = {"instance_type": "g5.48xlarge", "budget_usd": 100.0}
    spot, on_demand = plan(facts, spot=True, **wish), plan(facts, **wish)
    assert spot.expires_s == on_demand.expires_s
    assert "the on-demand price: the spot prices of the last 7 days are unknown" in str(spot.budget)
    assert str(on_demand.budget) == f"$100.00 at ${on_demand.price_usd_per_hour:.2f} per hour"


def test_what_a_cluster_has_cost_is_no_longer_in_its_budget() -> None:
    spec = ClusterSpec(name="demo", cluster=ClusterSection(budget_usd=100.0))
    whole, rest = make_plan(spec, FACTS), make_plan(spec, FACTS, spent_usd=40.0)
    assert rest.expires_s == pytest.approx(whole.expires_s * 0.6, abs=1)
    with pytest.raises(ConfigError, match=r"\$100\.00 \(\$99\.50 spent\) at \$26\.\d\d per hour"):
        make_plan(spec, FACTS, spent_usd=99.5)


def test_a_v100_is_launched_with_an_image_of_ones_own() -> None:
    own = replace(DLAMI, name="my image with driver 535")
    assert plan(replace(FACTS, image=own), instance_type="p3dn.24xlarge").kind.gpu == "V100"


def test_a_family_that_the_release_notes_do_not_list_is_a_warning() -> None:
    assert any("g7e" in text for text in plan(instance_type="g7e.48xlarge").warnings)


def test_what_was_listed_and_cannot_be_had_is_told_and_the_next_is_taken() -> None:
    made = plan(REFUSED, instance_type="p2.8xlarge, g6.48xlarge, g5.48xlarge")
    assert made.instance_type == "g6.48xlarge"
    assert [other.instance_type for other in made.alternatives] == ["g5.48xlarge"]
    assert any("p2.8xlarge" in text for text in made.warnings)


def test_lost_nodes_are_replaced_in_the_zone_of_the_others() -> None:
    made = make_plan(ClusterSpec(name="demo"), FACTS, numbers=(1,), zone="us-east-1c")
    assert list(made.zones) == ["us-east-1c"]


@pytest.mark.parametrize(
    ("facts", "asked", "told"),
    [
        (
            FACTS,
            {
                "instance_type": "p4d.24xlarge",
                "cidr": ("10.0.0.0/8",),
                "network": {"address": "private"},
                "capacity": {"efa": True},
            },
            "EFA on several network cards",
        ),
        (
            replace(FACTS, reservation=structs.replace(HELD, reservation_type="capacity-block")),
            {},
            "capacity blocks",
        ),
    ],
)
def test_what_nobody_has_tried_is_planned_and_not_launched(
    facts: Facts, asked: dict[str, Any], told: str
) -> None:
    made = plan(facts, **asked)
    assert any(told in text and "capacity.experimental=true" in text for text in made.warnings)
    with pytest.raises(ConfigError, match=told):
        refuse_untried(made)
    capacity = {**asked.get("capacity", {}), "experimental": True}
    refuse_untried(plan(facts, **{**asked, "capacity": capacity}))


L4 = replace(
    FACTS,
    offers=dict.fromkeys(("g6.xlarge", "g6.12xlarge", "g6.48xlarge", "g6f.large", "g5g.xlarge"), ZONES),
)


@pytest.mark.parametrize(
    ("gpus", "nodes", "advice"),
    [
        ("L4:2", 1, "--gpus L4:4 --nodes 1;"),
        ("L4:3", 2, "--gpus L4:4 --nodes 2;"),
        ("L4:16", 1, "--gpus L4:8 --nodes 2;"),
    ],
)
def test_gpus_in_a_number_that_no_node_has_are_refused_with_the_numbers_that_there_are(
    gpus: str, nodes: int, advice: str
) -> None:
    with pytest.raises(CloudError) as caught:
        plan(L4, gpus=gpus, nodes=nodes)
    assert caught.value.why == "a node has 1, 4 or 8 x L4"
    assert f"try: {advice}" in caught.value.next


@pytest.mark.parametrize("gpus", ["L4-3GB", "L4-3GB:1"])
@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("local", "--gpus L4   # whole GPUs"),
        ("aws", f"--gpus L4   # whole GPUs\n--image '{PARTS_IMAGE}'   #"),
    ],
)
def test_parts_of_a_gpu_that_the_image_does_not_drive_are_refused_with_the_image_and_what_to_type(
    gpus: str, target: TargetName, advice: str
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.image: .* does not fit g6f\.large") as refused:
        plan(replace(L4, target=target), gpus=gpus, nodes=1)
    assert "NVIDIA's vGPU driver" in refused.value.why
    assert refused.value.next.startswith(advice)
    assert "--gpus" not in refusal_of(L4, instance_type="g6f.large", nodes=1).next


def refusal_of(facts: Facts, **cluster: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        plan(facts, **cluster)
    return refused.value


def test_the_image_that_is_advised_for_parts_of_a_gpu_drives_them() -> None:
    newest = replace(DLAMI, name=PARTS_IMAGE.replace("*", "20260808"))
    assert plan(replace(L4, image=newest), gpus="L4-3GB", nodes=1).instance_type == "g6f.large"


@pytest.mark.parametrize(
    ("gpus", "said"), [("L4-7GB", "L4-7GB"), ("L4-7GB:2", "2 x L4-7GB"), ("H200", "H200")]
)
def test_gpus_that_no_type_has_are_named_as_they_were_typed(gpus: str, said: str) -> None:
    with pytest.raises(CloudError, match=f"AWS offers no type with {said} in us-east-1"):
        plan(L4, gpus=gpus, nodes=1)


def test_nodes_are_not_launched_into_a_cluster_that_ends_before_they_are_ready() -> None:
    assert plan(FACTS, expires="60s").expires_s == 60
    with pytest.raises(ConfigError, match=r"cluster\.expires: the cluster ends in 59\.0 s") as refused:
        plan(FACTS, expires="59s")
    assert refused.value.next.startswith("awsddp up --expires 24h ")
    spec = ClusterSpec(cluster=ClusterSection(expires="0s"))
    assert make_plan(spec, FACTS, numbers=()).expires_s == 0, "nothing is launched"


def test_a_part_of_a_gpu_and_another_architecture_are_only_taken_by_name() -> None:
    assert plan(L4, gpus="L4", nodes=1).instance_type == "g6.xlarge"
    assert {choice.instance_type for choice in plan(L4, gpus="L4:8", nodes=1).choices} == {
        "g6.xlarge",
        "g6.12xlarge",
    }
    own = replace(L4, image=replace(DLAMI, name="ours"))
    assert plan(own, gpus="L4", nodes=1).instance_type == "g6.xlarge"
    assert plan(own, gpus="L4-3GB", nodes=1).instance_type == "g6f.large"
    with pytest.raises(ConfigError, match=r"does not fit g6f\.large"):
        plan(L4, instance_type="g6f.large", nodes=1)


def test_offers_begin_with_the_cheapest_and_end_with_those_without_a_price() -> None:
    facts = replace(FACTS, offers={**FACTS.offers, "p5e.48xlarge": ZONES, "g6.xlarge": ZONES})
    listed = offers(facts, ClusterSpec())
    prices = [one.price_usd_per_hour for one in listed]
    assert (listed[0].instance_type, listed[-1].instance_type, prices[-1]) == (
        "g6.xlarge",
        "p5e.48xlarge",
        None,
    )
    assert prices[:-1] == sorted(prices[:-1], key=lambda price: price or 0)


def test_gpus_on_the_command_line_choose_among_the_offers_and_those_of_a_file_do_not(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text('[cluster]\ngpus = "A100:8"\n')
    for gpus, types in (
        ("L4", {"g6.xlarge", "g6.12xlarge", "g6.48xlarge"}),
        ("L4:4", {"g6.12xlarge"}),
        ("L4-3GB", {"g6f.large"}),
    ):
        typed, _ = load(file=file, environ={}, overrides={"cluster.gpus": gpus})
        assert {one.instance_type for one in offers(L4, typed)} == types
    saved, _ = load(file=file, environ={})
    assert {one.instance_type for one in offers(L4, saved)} == set(L4.offers)
    strange, _ = load(environ={}, overrides={"cluster.gpus": "A100-3GB:2"})
    with pytest.raises(CloudError, match="no type with 2 x A100-3GB in us-east-1"):
        offers(L4, strange)


def test_what_can_be_had_is_listed_with_price_zones_and_quota() -> None:
    four = ClusterSpec(cluster=ClusterSection(nodes=4))
    listed = {choice.instance_type: choice for choice in offers(FACTS, four)}
    assert set(listed) == set(FACTS.offers)
    assert listed["p5.48xlarge"].price_usd_per_hour == 55.04
    assert listed["p5.48xlarge"].zones == ZONES
    assert listed["p5.48xlarge"].fits_quota is False
    assert listed["g6.48xlarge"].fits_quota is True


def test_the_document_tells_the_price_by_part_and_why() -> None:
    made = document(plan(instance_type="g6.48xlarge", expires="10h"))
    parts = made["price_parts"]
    assert made["price_usd_per_hour"] == pytest.approx(sum(parts.values()), abs=1e-4)
    assert made["price_until_expiry_usd"] == pytest.approx(made["price_usd_per_hour"] * 10, abs=0.01)
    assert (made["why"], made["market"]) == ("requested", "on-demand")
    assert made["efa"] == {"count": 0, "most": 1, "why": "capacity.efa asks for it"}
    assert (made["memory_gb"], made["network_gbit"], made["vcpus"]) == (768, "100", 192)
    assert (made["image"]["torch"], made["image"]["cuda"], made["image"]["driver"]) == ("2.12", "13.0", 595)
    assert made["quota"] == "384 of 768 vCPUs (Running On-Demand G and VT instances, L-DB2E81BA)"


def test_a_deprecated_image_is_a_warning() -> None:
    old = replace(DLAMI, deprecated="2026-01-02T00:00:00.000Z")
    assert any("deprecated since 2026-01-02" in text for text in plan(replace(FACTS, image=old)).warnings)


def test_through_systems_manager_no_port_is_open_and_a_role_is_needed() -> None:
    spec = ClusterSpec(
        name="demo",
        network=NetworkSection(jump="ssm"),
        access=AccessSection(instance_profile="trainers"),
    )
    made = make_plan(spec, replace(FACTS, callers=()))
    assert (made.jump, made.ssh_cidrs) == ("ssm", ())
    rules = made.request("AuthorizeSecurityGroupIngress").parameters["IpPermissions"]
    assert [rule["IpProtocol"] for rule in rules] == ["-1"], "only the group's own members"
    with pytest.raises(ConfigError, match=r"access\.instance_profile") as refused:
        make_plan(replace(spec, access=AccessSection()), FACTS)
    assert "AmazonSSMManagedInstanceCore" in refused.value.why


def test_the_policy_allows_ssh_sessions_with_ones_own_nodes_and_nothing_else() -> None:
    spec = ClusterSpec(name="demo", network=NetworkSection(jump="ssm"))
    statements = {one["Sid"]: one for one in least_policy(spec)["Statement"]}
    before = {one["Sid"] for one in least_policy(ClusterSpec(name="demo"))["Statement"]}
    own, document, sessions = (statements[name] for name in statements if name not in before)
    assert (own["Action"], own["Resource"]) == (["ssm:StartSession"], ["arn:*:ec2:*:*:instance/*"])
    assert own["Condition"]["StringEquals"] == {"aws:ResourceTag/awsddp:owner": "${aws:userid}"}
    assert (document["Action"], document["Resource"]) == (
        ["ssm:StartSession"],
        ["arn:*:ssm:*:*:document/AWS-StartSSHSession"],
    )
    assert all("session/${aws:user" in resource for resource in sessions["Resource"])


def test_the_disk_has_room_for_data_that_no_instance_store_has() -> None:
    data = Data(name="d", source="s3://b/d", bytes=5 * 10**12, region="eu-west-1", requester_pays=True)
    facts = replace(FACTS, data=(data, Data(name="e", source="s3://e", why="AccessDenied")))
    large, small = plan(facts, instance_type="g6.48xlarge"), plan(facts, instance_type="g6.12xlarge")
    before = plan(instance_type="g6.48xlarge").disk_gb
    assert (large.disk_gb, small.disk_gb) == (before, DLAMI.root_gb + 100 + 5000)
    assert plan(facts, instance_type="g6.12xlarge", disk_gb=250).disk_gb == 250
    told = "\n".join(large.warnings)
    assert "d lies in eu-west-1" in told and "$200.00, $0.02 per GB" in told
    assert "you pay for reading data d" in told and "e is not known: AccessDenied" in told
