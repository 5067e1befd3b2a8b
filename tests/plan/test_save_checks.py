"""Where results are saved: what refuses a launch, and what only a warning can say."""

from dataclasses import replace

import pytest
from msgspec import structs

from awsddp.errors import ConfigError
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import LaunchPlan, SaveTarget
from awsddp.settings.spec import AccessSection, ClusterSection, ClusterSpec, NetworkSection
from tests.support.plan_facts import FACTS

ROLE = "arn:aws:iam::123456789012:role/trainers"
THERE = SaveTarget(uri="s3://results/runs", region="us-east-1")


def plan(
    saving: SaveTarget, *, profile: str | None = "trainers", role: str | None = ROLE, nodes: int = 1
) -> LaunchPlan:
    spec = ClusterSpec(
        name="demo", cluster=ClusterSection(nodes=1), access=AccessSection(instance_profile=profile)
    )
    return make_plan(spec, replace(FACTS, saving=saving, role=role), numbers=range(nodes))


@pytest.mark.parametrize(
    ("saving", "profile", "role", "told"),
    [
        (THERE, None, None, ("nodes without a role cannot save to s3://results/runs", "=NAME   # docs")),
        (THERE, "trainers", "", ("trainers has no role", "--instance-profile-name trainers --role-name")),
        (
            replace(THERE, region=""),
            "trainers",
            ROLE,
            ("no bucket results", "aws s3 mb s3://results --region us-east-1 "),
        ),
        (
            replace(THERE, region="eu-west-1"),
            "trainers",
            ROLE,
            ("is in eu-west-1, the nodes are in us-east-1", "$0.02 per GB", "--region eu-west-1"),
        ),
    ],
)
def test_nodes_that_could_not_save_are_not_launched(
    saving: SaveTarget, profile: str | None, role: str | None, told: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(saving, profile=profile, role=role)
    assert [text for text in told if text not in str(caught.value)] == []
    assert plan(saving, profile=profile, role=role, nodes=0).warnings is not None, "of nodes that are there"


def test_what_may_not_be_asked_is_in_nobodys_way() -> None:
    planned = plan(replace(THERE, region=None), role=None)
    assert planned.uses["place for results"] == THERE.uri
    assert [text for text in planned.warnings if "role" in text] == []


def test_a_right_that_the_roles_policies_do_not_give_is_a_warning() -> None:
    told = plan(replace(THERE, lacks=("s3:PutObject",))).warnings
    assert any(text.startswith("the role of trainers has no right s3:PutObject in s3://") for text in told)


def test_a_subnet_without_a_way_to_s3_is_named_with_the_call_that_makes_one() -> None:
    lone = structs.replace(FACTS.subnets[1], route="none", table="rtb-1", reaches_s3=False)
    network = NetworkSection(subnet=lone.id, address="private", ssh_cidr=("10.0.0.0/16",))
    told = make_plan(ClusterSpec(name="demo", network=network), replace(FACTS, subnets=(lone,))).warnings
    named = "--vpc-id vpc-1 --service-name com.amazonaws.us-east-1.s3 --route-table-ids rtb-1 "
    assert [text for text in told if text.startswith(lone.id) and named in text] != []
