"""The S3 target of results: what refuses a launch, and what is a warning."""

from dataclasses import replace

import pytest
from msgspec import structs

from awsddp.errors import ConfigError
from awsddp.plan.launch_plan import make_plan
from awsddp.plan.records import LaunchPlan, SaveTarget
from awsddp.settings.spec import AccessSection, ClusterSection, ClusterSpec, NetworkSection
from tests.support.plan_facts import FACTS

ROLE = "arn:aws:iam::123456789012:role/trainers"
TARGET = SaveTarget(uri="s3://results/runs", region="us-east-1")


def plan(
    saving: SaveTarget, *, profile: str | None = "trainers", role: str | None = ROLE, nodes: int = 1
) -> LaunchPlan:
    spec = ClusterSpec(
        name="demo", cluster=ClusterSection(nodes=1), access=AccessSection(instance_profile=profile)
    )
    return make_plan(spec, replace(FACTS, saving=saving, role=role), numbers=range(nodes))


@pytest.mark.parametrize(
    ("saving", "profile", "role", "fragments"),
    [
        (TARGET, None, None, ("nodes without a role cannot save to s3://results/runs", "=NAME   # docs")),
        (TARGET, "trainers", "", ("trainers has no role", "--instance-profile-name trainers --role-name")),
        (
            replace(TARGET, region=""),
            "trainers",
            ROLE,
            ("no bucket results", "aws s3 mb s3://results --region us-east-1 "),
        ),
        (
            replace(TARGET, region="eu-west-1"),
            "trainers",
            ROLE,
            ("is in eu-west-1, the nodes are in us-east-1", "$0.02 per GB", "--region eu-west-1"),
        ),
    ],
)
def test_nodes_that_could_not_save_are_not_launched(
    saving: SaveTarget, profile: str | None, role: str | None, fragments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(saving, profile=profile, role=role)
    assert [text for text in fragments if text not in str(caught.value)] == []
    assert plan(saving, profile=profile, role=role, nodes=0).warnings is not None, "no node is launched"


def test_a_bucket_whose_region_is_unknown_is_accepted() -> None:
    planned = plan(replace(TARGET, region=None), role=None)
    assert planned.uses["place for results"] == TARGET.uri
    assert [text for text in planned.warnings if "role" in text] == []


def test_a_permission_that_the_role_lacks_is_a_warning() -> None:
    texts = plan(replace(TARGET, lacks=("s3:PutObject",))).warnings
    assert any(
        text.startswith("the role of trainers has no permission s3:PutObject in s3://") for text in texts
    )


def test_a_subnet_without_a_route_to_s3_is_a_warning_with_the_command_for_an_endpoint() -> None:
    subnet = structs.replace(FACTS.subnets[1], route="none", table="rtb-1", reaches_s3=False)
    network = NetworkSection(subnet=subnet.id, address="private", ssh_cidr=("10.0.0.0/16",))
    texts = make_plan(ClusterSpec(name="demo", network=network), replace(FACTS, subnets=(subnet,))).warnings
    command = "--vpc-id vpc-1 --service-name com.amazonaws.us-east-1.s3 --route-table-ids rtb-1 "
    assert [text for text in texts if text.startswith(subnet.id) and command in text] != []
