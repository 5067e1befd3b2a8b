"""Which instance type is chosen, in which zones, and what else is offered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from awsddp.compat.releases import PARTS_IMAGE
from awsddp.compat.types import QUOTA_G, QUOTA_P
from awsddp.errors import CloudError, ConfigError
from awsddp.model.records import TargetName
from awsddp.plan.records import Facts
from awsddp.plan.selection import list_offers
from awsddp.settings.loader import load
from awsddp.settings.spec import ClusterSection, ClusterSpec
from tests.support.plan_facts import DLAMI, FACTS, REFUSED, ZONES, plan


def test_the_cheapest_virtualised_type_with_eight_gpus_is_the_default() -> None:
    made = plan()
    assert (made.instance_type, made.nodes, made.kind.gpus, made.kind.gpu) == ("g6.48xlarge", 2, 8, "L4")
    assert list(made.zones) == ["us-east-1b", "us-east-1c"]
    assert len(made.choices) == 3
    assert made.instance_type not in {choice.instance_type for choice in made.choices}
    assert all(choice.gpus_per_node == 8 for choice in made.choices)
    assert made.warnings == ("prices are list prices of us-east-1 of 2026-07-20: AWS returned none",)
    assert not plan(replace(FACTS, prices={"g6.48xlarge": 13.0})).warnings


def test_a_type_that_does_not_fit_the_quota_is_skipped() -> None:
    made = plan(replace(FACTS, quotas={QUOTA_P[0]: 384.0, QUOTA_G[0]: 0.0}))
    assert made.instance_type == "p4d.24xlarge"
    assert {choice.instance_type: choice.fits_quota for choice in made.choices}["g5.48xlarge"] is False


def test_a_quota_that_cannot_be_read_is_a_warning() -> None:
    made = plan(replace(FACTS, quotas={}))
    assert made.instance_type == "g6.48xlarge"
    assert any("quota unreadable" in text and "384 vCPUs" in text for text in made.warnings)


def test_a_quota_that_is_too_small_is_refused_with_required_and_allowed_vcpus() -> None:
    with pytest.raises(CloudError) as caught:
        plan(nodes=5, instance_type="g6.48xlarge")
    assert "5 x g6.48xlarge need 960" in caught.value.why
    assert "L-DB2E81BA" in caught.value.why
    assert "768" in caught.value.why


@pytest.mark.parametrize(
    ("vcpus", "settings", "command"),
    [
        (64, {}, "--nodes 1 --instance-type g6.12xlarge   # 4 x L4 per node, $4.60 per hour"),
        (8, {}, "--nodes 2 --instance-type g4dn.xlarge   # 1 x T4 per node, $1.05 per hour"),
        (200, {}, "--nodes 1 --instance-type g6.48xlarge   # 8 x L4 per node, $13.35 per hour"),
        (200, {"instance_type": "g5.48xlarge"}, "--nodes 1 --instance-type g5.48xlarge   # 8 x A10G"),
        (8, {"gpus": "L4:8"}, "--nodes 2 --gpus L4:1   # 1 x L4 per node, $1.61 per hour"),
        (0, {}, "awsddp --local run"),
    ],
)
def test_a_quota_error_names_a_launch_that_the_quota_allows(
    vcpus: float, settings: dict[str, Any], command: str
) -> None:
    offered = dict.fromkeys(("g4dn.xlarge", "g6.xlarge", "g6.12xlarge", "g6.48xlarge", "g5.48xlarge"), ZONES)
    facts = replace(FACTS, offers=offered, quotas={QUOTA_G[0]: vcpus})
    with pytest.raises(CloudError) as caught:
        plan(facts, **settings)
    first, *others = caught.value.next.splitlines()
    assert command in first and others == ["awsddp doctor --request-quota   # request more from AWS"]
    if vcpus:  # the recommended launch is accepted
        options = dict(zip(*[iter(first.partition("#")[0].split()[2:])] * 2, strict=True))
        keywords = {key[2:].replace("-", "_"): value for key, value in options.items()}
        assert plan(facts, **{**keywords, "nodes": int(keywords["nodes"])}).nodes == int(keywords["nodes"])


def test_zones_without_free_addresses_are_skipped() -> None:
    full = tuple(
        structs.replace(subnet, free_addresses=1 if subnet.zone == "us-east-1b" else 9)
        for subnet in FACTS.subnets
    )
    assert list(plan(replace(FACTS, subnets=full)).zones) == ["us-east-1c"]


def test_a_subnet_with_exactly_enough_addresses_is_used() -> None:
    subnets = tuple(structs.replace(subnet, free_addresses=2) for subnet in FACTS.subnets)
    made = plan(replace(FACTS, subnets=subnets), nodes=2)
    assert list(made.zones) == ["us-east-1b", "us-east-1c"]


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
def test_an_impossible_number_of_gpus_is_refused_with_the_possible_numbers(
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
def test_a_fractional_gpu_without_a_driver_in_the_image_is_refused_with_the_image_to_use(
    gpus: str, target: TargetName, advice: str
) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.image: .* does not fit g6f\.large") as refused:
        plan(replace(L4, target=target), gpus=gpus, nodes=1)
    assert "NVIDIA's vGPU driver" in refused.value.why
    assert refused.value.next.startswith(advice)
    assert "--gpus" not in catch_error(L4, instance_type="g6f.large", nodes=1).next


def catch_error(facts: Facts, **cluster: Any) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        plan(facts, **cluster)
    return refused.value


def test_the_advised_image_has_the_driver_of_fractional_gpus() -> None:
    newest = replace(DLAMI, name=PARTS_IMAGE.replace("*", "20260808"))
    assert plan(replace(L4, image=newest), gpus="L4-3GB", nodes=1).instance_type == "g6f.large"


@pytest.mark.parametrize(
    ("gpus", "label"), [("L4-7GB", "L4-7GB"), ("L4-7GB:2", "2 x L4-7GB"), ("H200", "H200")]
)
def test_gpus_that_no_type_has_are_named_as_they_were_typed(gpus: str, label: str) -> None:
    with pytest.raises(CloudError, match=f"AWS offers no type with {label} in us-east-1"):
        plan(L4, gpus=gpus, nodes=1)


def test_a_retired_type_is_a_warning_and_the_next_type_is_chosen() -> None:
    made = plan(REFUSED, instance_type="p2.8xlarge, g6.48xlarge, g5.48xlarge")
    assert made.instance_type == "g6.48xlarge"
    assert [other.instance_type for other in made.alternatives] == ["g5.48xlarge"]
    assert any("p2.8xlarge" in text for text in made.warnings)


def test_fractional_gpus_and_other_architectures_are_chosen_only_by_name() -> None:
    assert plan(L4, gpus="L4", nodes=1).instance_type == "g6.xlarge"
    assert {choice.instance_type for choice in plan(L4, gpus="L4:8", nodes=1).choices} == {
        "g6.xlarge",
        "g6.12xlarge",
    }
    custom = replace(L4, image=replace(DLAMI, name="ours"))
    assert plan(custom, gpus="L4", nodes=1).instance_type == "g6.xlarge"
    assert plan(custom, gpus="L4-3GB", nodes=1).instance_type == "g6f.large"
    with pytest.raises(ConfigError, match=r"does not fit g6f\.large"):
        plan(L4, instance_type="g6f.large", nodes=1)


def test_offers_begin_with_the_cheapest_and_end_with_those_without_a_price() -> None:
    facts = replace(FACTS, offers={**FACTS.offers, "p5e.48xlarge": ZONES, "g6.xlarge": ZONES})
    listed = list_offers(facts, ClusterSpec())
    prices = [offer.price_usd_per_hour for offer in listed]
    assert (listed[0].instance_type, listed[-1].instance_type, prices[-1]) == (
        "g6.xlarge",
        "p5e.48xlarge",
        None,
    )
    assert prices[:-1] == sorted(prices[:-1], key=lambda price: price or 0)


def test_gpus_of_the_command_line_filter_the_offers_and_those_of_a_file_do_not(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text('[cluster]\ngpus = "A100:8"\n')
    for gpus, types in (
        ("L4", {"g6.xlarge", "g6.12xlarge", "g6.48xlarge"}),
        ("L4:4", {"g6.12xlarge"}),
        ("L4-3GB", {"g6f.large"}),
    ):
        typed, _ = load(file=file, environ={}, overrides={"cluster.gpus": gpus})
        assert {offer.instance_type for offer in list_offers(L4, typed)} == types
    saved, _ = load(file=file, environ={})
    assert {offer.instance_type for offer in list_offers(L4, saved)} == set(L4.offers)
    unknown, _ = load(environ={}, overrides={"cluster.gpus": "A100-3GB:2"})
    with pytest.raises(CloudError, match="no type with 2 x A100-3GB in us-east-1"):
        list_offers(L4, unknown)


def test_offers_have_price_zones_and_quota() -> None:
    spec = ClusterSpec(cluster=ClusterSection(nodes=4))
    listed = {choice.instance_type: choice for choice in list_offers(FACTS, spec)}
    assert set(listed) == set(FACTS.offers)
    assert listed["p5.48xlarge"].price_usd_per_hour == 55.04
    assert listed["p5.48xlarge"].zones == ZONES
    assert listed["p5.48xlarge"].fits_quota is False
    assert listed["g6.48xlarge"].fits_quota is True
