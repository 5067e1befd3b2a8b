"""Security groups as rules: pure."""

import pytest

from awsddp.local.groups import Rule, ruleset


def lines(rule: Rule) -> list[str]:
    text = ruleset(ingress=[rule], egress=[])
    return [line.strip() for line in text.splitlines() if line.strip().endswith("accept")][3:-3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            Rule("tcp", 22, 22, ("10.77.0.1/32",)),
            ["ip saddr { 10.77.0.1/32 } meta nfproto ipv4 tcp dport 22 accept"],
        ),
        (Rule("tcp", 0, 65535, ("0.0.0.0/0",)), ["meta nfproto ipv4 tcp dport 0-65535 accept"]),
        (
            Rule("udp", 5000, 5009, ("10.0.0.0/8",)),
            ["ip saddr { 10.0.0.0/8 } meta nfproto ipv4 udp dport 5000-5009 accept"],
        ),
        (Rule("-1", None, None, ("10.77.0.5", "10.77.0.4")), ["ip saddr { 10.77.0.4, 10.77.0.5 } accept"]),
        (Rule("-1", None, None, ("0.0.0.0/0",)), ["meta nfproto ipv4 accept"]),
        (Rule("icmp", -1, -1, ("10.0.0.0/8",)), ["ip saddr { 10.0.0.0/8 } ip protocol icmp accept"]),
        (Rule("icmp", 8, -1, ("0.0.0.0/0",)), ["ip protocol icmp icmp type 8 accept"]),
        (Rule("-1", None, None, ()), []),
    ],
)
def test_a_permission_becomes_the_rule_that_means_it(rule: Rule, expected: list[str]) -> None:
    assert lines(rule) == expected


def test_without_permissions_only_answers_loopback_and_metadata_pass() -> None:
    assert ruleset(ingress=[], egress=[]) == (
        "table inet groups\ndelete table inet groups\ntable inet groups {\n"
        " chain input {\n  type filter hook input priority 0; policy drop;\n"
        "  ct state established,related accept\n  iif lo accept\n"
        "  ip saddr 169.254.169.254 accept\n }\n"
        " chain output {\n  type filter hook output priority 0; policy drop;\n"
        "  ct state established,related accept\n  oif lo accept\n"
        "  ip daddr 169.254.169.254 accept\n }\n}\n"
    )
