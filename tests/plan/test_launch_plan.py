"""A plan from a spec and facts, or an error that names the correction."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from awsddp.compat.types import GpuType
from awsddp.errors import AwsddpError, CloudError, ConfigError
from awsddp.plan.launch_plan import check_untried_features, make_plan
from awsddp.plan.policy import least_policy
from awsddp.plan.records import Data, Facts, OwnGroup, Reservation, SaveTarget, Subnet, plan_to_document
from awsddp.settings.spec import AccessSection, ClusterSection, ClusterSpec, NetworkSection
from tests.support.plan_facts import DLAMI, FACTS, REFUSED, ZONES, plan


def test_the_price_counts_machines_disks_and_addresses() -> None:
    made = plan(instance_type="g6.48xlarge", disk_gb=200)
    node_usd = 13.3504 + 200 * 0.08 / 730 + 0.005
    assert made.price_usd_per_hour == pytest.approx(2 * node_usd, abs=1e-4)
    assert (made.price.date, made.price.source) == ("2026-07-20", "list price of us-east-1")


def test_prices_of_another_region_are_a_warning() -> None:
    assert any("us-east-1" in text for text in plan(replace(FACTS, region="eu-west-1")).warnings)


@pytest.mark.parametrize(("root_gb", "disk", "expected"), [(75, None, 200), (140, None, 240), (75, 75, 75)])
def test_the_disk_has_room_for_the_image_and_files(root_gb: int, disk: int | None, expected: int) -> None:
    assert plan(replace(FACTS, image=replace(DLAMI, root_gb=root_gb)), disk_gb=disk).disk_gb == expected


def test_lost_nodes_are_replaced_under_their_own_numbers() -> None:
    spec = ClusterSpec(name="demo", cluster=ClusterSection(nodes=4))
    made = make_plan(spec, FACTS, numbers=(3, 1))
    run = made.request("RunInstances").parameters
    assert (run["MinCount"], run["MaxCount"]) == (2, 2)
    tags = {tag["Key"]: tag["Value"] for tag in run["TagSpecifications"][0]["Tags"]}
    assert tags["awsddp:nodes"] == "1,3"
    assert made.nodes == 4


def test_pretended_gpus_are_a_warning() -> None:
    made = plan(replace(FACTS, image=replace(DLAMI, tags={"awsddp:gpus": "pretended"})))
    assert made.pretended
    assert any("gloo on the CPU" in text for text in made.warnings)


def test_rehearsed_gpus_are_a_warning_with_the_number_of_ranks() -> None:
    made = plan(replace(FACTS, image=replace(DLAMI, tags={"awsddp:gpus": "rehearsed"})))
    assert made.pretended
    assert plan_to_document(made)["rehearsed"]
    assert any("nccl as gloo; a job has one rank per GPU, 16 in total" in text for text in made.warnings)


ARM = GpuType(name="g5g.xlarge", gpu="T4g", gpus=1, memory_gb=16, vcpus=4, cpu="arm64")
HELD = Reservation(id="cr-1", instance_type="p4d.24xlarge", zone="us-east-1a", free=2, state="active")
RESERVED = replace(FACTS, reservation=HELD)


@pytest.mark.parametrize(
    ("facts", "settings", "kind", "fragments"),
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
        (FACTS, {"instance_type": "p5en.48xlarge"}, CloudError, ("no zone in this region", "--region")),
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
            replace(FACTS, group=OwnGroup(id="sg-own", vpc="vpc-2")),
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
def test_an_impossible_launch_is_refused_with_the_key_and_the_correction(
    facts: Facts, settings: dict[str, Any], kind: type[AwsddpError], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        plan(facts, **settings)
    for text in fragments:
        assert text in str(caught.value)


def test_a_budget_is_an_earlier_expiry() -> None:
    whole, limited = plan(FACTS), plan(FACTS, budget_usd=100.0)
    price = whole.price_usd_per_hour
    assert price is not None
    assert limited.expires_s == int(100 / price * 3600) < whole.expires_s
    assert plan_to_document(limited)["price_until_expiry_usd"] == pytest.approx(100.0, abs=0.01)
    assert any("the budget of $100.00 lasts 3 h 44 min" in text for text in limited.warnings)
    assert replace(plan(FACTS, budget_usd=10_000.0), budget=None) == whole


SPOT = replace(
    FACTS,
    spot_prices={"g5.48xlarge": {"us-east-1a": 5.0, "us-east-1b": 5.5, "us-east-1c": 6.0}},
    highest_spot_prices={"g5.48xlarge": {"us-east-1a": 9.0, "us-east-1b": 7.0, "us-east-1c": 6.0}},
)


def test_a_spot_budget_assumes_the_highest_price_of_7_days_in_the_zones_that_are_tried() -> None:
    settings: dict[str, Any] = {"instance_type": "g5.48xlarge", "spot": True, "budget_usd": 100.0}
    price = plan(SPOT, **settings).price
    made = plan(SPOT, **settings)
    rate = 2 * 9.0 + price.disks + price.addresses
    assert (price.machines, made.expires_s) == (2 * 6.0, int(100 / rate * 3600))
    assert str(made.budget) == (
        f"$100.00 at up to ${rate:.2f} per hour, the highest spot price of the last 7 days"
    )
    assert plan_to_document(made)["budget"]["usd_per_hour"] == pytest.approx(rate, abs=1e-4)
    narrow = plan(SPOT, capacity={"zones": ("us-east-1b", "us-east-1c")}, **settings)
    assert narrow.budget is not None
    assert narrow.budget.usd_per_hour == pytest.approx(rate - 2 * 2.0, abs=1e-4)


def test_spot_nodes_are_a_warning_unless_results_are_saved() -> None:
    saved = replace(SPOT, saving=SaveTarget(uri="s3://results/runs", region=SPOT.region))
    spec = ClusterSpec(cluster=ClusterSection(spot=True), access=AccessSection(instance_profile="training"))
    warnings = [make_plan(spec, facts).warnings for facts in (SPOT, saved)]
    assert [any(text.startswith("spot nodes") for text in texts) for texts in warnings] == [True, False]


@pytest.mark.parametrize("history", [{}, {"us-east-1a": 9.0}])
def test_a_spot_budget_assumes_the_on_demand_price_without_price_history(
    history: dict[str, float],
) -> None:
    facts = replace(SPOT, highest_spot_prices={"g5.48xlarge": history})
    settings: dict[str, Any] = {"instance_type": "g5.48xlarge", "budget_usd": 100.0}
    spot, on_demand = plan(facts, spot=True, **settings), plan(facts, **settings)
    assert spot.expires_s == on_demand.expires_s
    assert "the on-demand price: the spot prices of the last 7 days are unknown" in str(spot.budget)
    assert str(on_demand.budget) == f"$100.00 at ${on_demand.price_usd_per_hour:.2f} per hour"


def test_spent_money_reduces_the_budget() -> None:
    spec = ClusterSpec(name="demo", cluster=ClusterSection(budget_usd=100.0))
    whole, remaining = make_plan(spec, FACTS), make_plan(spec, FACTS, spent_usd=40.0)
    assert remaining.expires_s == pytest.approx(whole.expires_s * 0.6, abs=1)
    with pytest.raises(ConfigError, match=r"\$100\.00 \(\$99\.50 spent\) at \$26\.\d\d per hour"):
        make_plan(spec, FACTS, spent_usd=99.5)


def test_a_v100_is_launched_with_a_custom_image() -> None:
    image = replace(DLAMI, name="my image with driver 535")
    assert plan(replace(FACTS, image=image), instance_type="p3dn.24xlarge").kind.gpu == "V100"


def test_a_family_that_the_release_notes_do_not_list_is_a_warning() -> None:
    assert any("g7e" in text for text in plan(instance_type="g7e.48xlarge").warnings)


def test_lost_nodes_are_replaced_in_the_zone_of_the_others() -> None:
    made = make_plan(ClusterSpec(name="demo"), FACTS, numbers=(1,), zone="us-east-1c")
    assert list(made.zones) == ["us-east-1c"]


@pytest.mark.parametrize(
    ("facts", "settings", "feature"),
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
def test_an_untried_feature_is_planned_and_not_launched(
    facts: Facts, settings: dict[str, Any], feature: str
) -> None:
    made = plan(facts, **settings)
    assert any(feature in text and "capacity.experimental=true" in text for text in made.warnings)
    with pytest.raises(ConfigError, match=feature):
        check_untried_features(made)
    capacity = {**settings.get("capacity", {}), "experimental": True}
    check_untried_features(plan(facts, **{**settings, "capacity": capacity}))


def test_nodes_are_not_launched_into_a_cluster_that_ends_before_they_are_ready() -> None:
    assert plan(FACTS, expires="60s").expires_s == 60
    with pytest.raises(ConfigError, match=r"cluster\.expires: the cluster ends in 59\.0 s") as refused:
        plan(FACTS, expires="59s")
    assert refused.value.next.startswith("awsddp up --expires 24h ")
    spec = ClusterSpec(cluster=ClusterSection(expires="0s"))
    assert make_plan(spec, FACTS, numbers=()).expires_s == 0, "nothing is launched"


def test_a_deprecated_image_is_a_warning() -> None:
    old = replace(DLAMI, deprecated="2026-01-02T00:00:00.000Z")
    assert any("deprecated since 2026-01-02" in text for text in plan(replace(FACTS, image=old)).warnings)


def test_the_policy_allows_ssh_sessions_with_own_nodes_only() -> None:
    spec = ClusterSpec(name="demo", network=NetworkSection(jump="ssm"))
    statements = {statement["Sid"]: statement for statement in least_policy(spec)["Statement"]}
    before = {statement["Sid"] for statement in least_policy(ClusterSpec(name="demo"))["Statement"]}
    nodes, document, sessions = (statements[name] for name in statements if name not in before)
    assert (nodes["Action"], nodes["Resource"]) == (["ssm:StartSession"], ["arn:*:ec2:*:*:instance/*"])
    assert nodes["Condition"]["StringEquals"] == {"aws:ResourceTag/awsddp:owner": "${aws:userid}"}
    assert (document["Action"], document["Resource"]) == (
        ["ssm:StartSession"],
        ["arn:*:ssm:*:*:document/AWS-StartSSHSession"],
    )
    assert all("session/${aws:user" in resource for resource in sessions["Resource"])


def test_the_disk_has_room_for_data_that_fits_no_instance_store() -> None:
    data = Data(name="d", source="s3://b/d", bytes=5 * 10**12, region="eu-west-1", requester_pays=True)
    facts = replace(FACTS, data=(data, Data(name="e", source="s3://e", why="AccessDenied")))
    large, small = plan(facts, instance_type="g6.48xlarge"), plan(facts, instance_type="g6.12xlarge")
    before = plan(instance_type="g6.48xlarge").disk_gb
    assert (large.disk_gb, small.disk_gb) == (before, DLAMI.root_gb + 100 + 5000)
    assert plan(facts, instance_type="g6.12xlarge", disk_gb=250).disk_gb == 250
    warnings = "\n".join(large.warnings)
    assert "d is in eu-west-1" in warnings and "$200.00 ($0.02 per GB" in warnings
    assert "you pay for reading data d" in warnings and "e is not known: AccessDenied" in warnings
