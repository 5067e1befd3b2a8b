"""The limits of EC2 that hold for settings."""

from dataclasses import replace

from awsddp.aws.power import TAG
from awsddp.settings import ec2_limits
from tests.support.plan_facts import FACTS, plan


def test_most_tags_of_a_users_own_leave_room_for_those_that_awsddp_writes() -> None:
    own = {f"k{number}": "v" for number in range(ec2_limits.MAX_TAGS - ec2_limits.OWN_TAGS)}
    launch = plan(replace(FACTS, host="laptop"), tags=own).request("RunInstances").parameters
    [instance] = [one for one in launch["TagSpecifications"] if one["ResourceType"] == "instance"]
    assert len(instance["Tags"]) + len([TAG]) == ec2_limits.MAX_TAGS
