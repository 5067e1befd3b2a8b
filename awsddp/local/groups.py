"""Security groups as nftables rules: what EC2 lets into and out of an instance, in the node's own namespace.

Stateful, default closed, the union of all rules of all groups of the instance
(https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html). Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from awsddp.local.network import METADATA_ADDRESS


def ruleset(groups: Collection[Any], members: Mapping[str, list[str]]) -> str:
    """The whole ruleset of a node; loading it replaces the one before at once.

    :param groups: the node's security groups, as moto has them.
    :param members: the addresses in each group, by its id: the peers of a rule that names the group.
    """
    lines = ["table inet groups", "delete table inet groups", "table inet groups {"]
    ingress = [rule for group in groups for rule in group.ingress_rules]
    egress = [rule for group in groups for rule in group.egress_rules]
    lines += _chain("input", "iif", "saddr", {_match(rule, "saddr", members) for rule in ingress})
    lines += _chain("output", "oif", "daddr", {_match(rule, "daddr", members) for rule in egress})
    return "\n".join([*lines, "}", ""])


def _chain(hook: str, interface: str, side: str, matches: set[str]) -> list[str]:
    return [
        f" chain {hook} {{",
        f"  type filter hook {hook} priority 0; policy drop;",
        "  ct state established,related accept",
        f"  {interface} lo accept",
        f"  ip {side} {METADATA_ADDRESS} accept",  # EC2's groups do not hold the metadata service
        *(f"  {match} accept" for match in sorted(matches - {""})),
        " }",
    ]


def _match(rule: Any, side: str, members: Mapping[str, list[str]]) -> str:
    """What a permission lets pass, "" where it lets nobody (IPv4)."""
    protocol, network = rule.ip_protocol or "-1", rule.ip_range.get("CidrIp")
    named = members.get((rule.source_group or {}).get("GroupId", ""), [])
    peers = {*named, network} if network else {*named}
    if not peers:
        return ""
    source = "" if "0.0.0.0/0" in peers else f"ip {side} {{ {', '.join(sorted(peers))} }} "
    if protocol == "-1":
        return source.strip() or "meta nfproto ipv4"
    if protocol in ("tcp", "udp"):
        low, high = rule.from_port or 0, 65535 if rule.to_port is None else rule.to_port
        ports = f"{low}-{high}" if low != high else str(low)
        return f"{source}meta nfproto ipv4 {protocol} dport {ports}"
    if protocol == "icmp":
        kind = "" if rule.from_port in (None, -1) else f" icmp type {rule.from_port}"
        return f"{source}ip protocol icmp{kind}"
    return f"{source}ip protocol {protocol}"
