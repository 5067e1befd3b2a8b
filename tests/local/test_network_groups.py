"""Firewall rules made from security groups."""

from types import SimpleNamespace
from typing import Any

import pytest

from awsddp.local.network import make_group_rules

MEMBERS = {"sg-1": ["10.77.0.5", "10.77.0.4"], "sg-2": []}


def rule(protocol: str | None, low: int | None, high: int | None, *, peer: str) -> Any:
    """Return a rule in moto's form, whose peer is a network or a group."""
    network = {} if peer in MEMBERS else {"CidrIp": peer}
    group = {"GroupId": peer} if peer in MEMBERS else None
    return SimpleNamespace(
        ip_protocol=protocol, from_port=low, to_port=high, ip_range=network, source_group=group
    )


def lines(rule: Any) -> list[str]:
    text = make_group_rules([SimpleNamespace(ingress_rules=[rule], egress_rules=[])], MEMBERS)
    return [line.strip() for line in text.splitlines() if line.strip().endswith("accept")][3:-3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            rule("tcp", 22, 22, peer="10.77.0.1/32"),
            ["ip saddr { 10.77.0.1/32 } meta nfproto ipv4 tcp dport 22 accept"],
        ),
        (rule("tcp", 0, 65535, peer="0.0.0.0/0"), ["meta nfproto ipv4 tcp dport 0-65535 accept"]),
        (
            rule("udp", 5000, 5009, peer="10.0.0.0/8"),
            ["ip saddr { 10.0.0.0/8 } meta nfproto ipv4 udp dport 5000-5009 accept"],
        ),
        (rule("-1", None, None, peer="sg-1"), ["ip saddr { 10.77.0.4, 10.77.0.5 } accept"]),
        (rule("-1", None, None, peer="0.0.0.0/0"), ["meta nfproto ipv4 accept"]),
        (rule("icmp", -1, -1, peer="10.0.0.0/8"), ["ip saddr { 10.0.0.0/8 } ip protocol icmp accept"]),
        (rule("icmp", 8, -1, peer="0.0.0.0/0"), ["ip protocol icmp icmp type 8 accept"]),
        (rule("-1", None, None, peer="sg-2"), []),
    ],
)
def test_a_permission_becomes_its_nftables_rule(rule: Any, expected: list[str]) -> None:
    assert lines(rule) == expected


def test_without_permissions_only_answers_loopback_and_metadata_pass() -> None:
    assert make_group_rules([], {}) == (
        "table inet groups\ndelete table inet groups\ntable inet groups {\n"
        " chain input {\n  type filter hook input priority 0; policy drop;\n"
        "  ct state established,related accept\n  iif lo accept\n"
        "  ip saddr 169.254.169.254 accept\n }\n"
        " chain output {\n  type filter hook output priority 0; policy drop;\n"
        "  ct state established,related accept\n  oif lo accept\n"
        "  ip daddr 169.254.169.254 accept\n }\n}\n"
    )
