"""Network access to the nodes."""

from dataclasses import replace

import pytest

from awsddp.errors import ConfigError
from awsddp.plan.launch_plan import make_plan
from awsddp.settings.spec import AccessSection, ClusterSpec, NetworkSection
from tests.support.plan_facts import FACTS, plan


def test_two_ssh_blocks_are_two_rules() -> None:
    made = plan(cidr=("198.51.100.9/24", "2001:db8::/48"))
    assert made.ssh_cidrs == ("198.51.100.0/24", "2001:db8::/48")
    rules = made.request("AuthorizeSecurityGroupIngress").parameters["IpPermissions"]
    assert rules[1]["IpRanges"] == [{"CidrIp": "198.51.100.0/24"}]
    assert rules[2]["Ipv6Ranges"] == [{"CidrIpv6": "2001:db8::/48"}]


def test_systems_manager_opens_no_port_and_requires_a_role() -> None:
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
