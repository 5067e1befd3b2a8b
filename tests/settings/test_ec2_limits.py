"""The limits of EC2 that hold for settings."""

from dataclasses import replace

from awsddp.aws.power import TAG
from awsddp.settings import ec2_limits
from tests.support.plan_facts import FACTS, plan


def test_the_maximum_of_user_tags_leaves_room_for_the_tags_of_awsddp() -> None:
    tags = {f"k{number}": "v" for number in range(ec2_limits.MAX_TAGS - ec2_limits.OWN_TAGS)}
    launch = plan(replace(FACTS, host="laptop"), tags=tags).request("RunInstances").parameters
    [instance] = [row for row in launch["TagSpecifications"] if row["ResourceType"] == "instance"]
    assert len(instance["Tags"]) + len([TAG]) == ec2_limits.MAX_TAGS
