"""Security groups as nftables rules: what EC2 lets into and out of an instance, in the node's own namespace.

Stateful, default closed, the union of all rules of all groups of the instance
(https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from awsddp.local.network import METADATA_ADDRESS


@dataclass(frozen=True)
class Rule:
    """One permission, its peers resolved to addresses and networks (IPv4)."""

    protocol: str
    from_port: int | None
    to_port: int | None
    peers: tuple[str, ...]


def ruleset(*, ingress: Iterable[Rule], egress: Iterable[Rule]) -> str:
    """The whole ruleset of a node; loading it replaces the one before at once."""
    lines = ["table inet groups", "delete table inet groups", "table inet groups {"]
    lines += _chain("input", "iif", "saddr", ingress)
    lines += _chain("output", "oif", "daddr", egress)
    return "\n".join([*lines, "}", ""])


def _chain(hook: str, interface: str, side: str, rules: Iterable[Rule]) -> list[str]:
    matches = sorted({line for rule in rules if rule.peers for line in _matches(rule, side)})
    return [
        f" chain {hook} {{",
        f"  type filter hook {hook} priority 0; policy drop;",
        "  ct state established,related accept",
        f"  {interface} lo accept",
        f"  ip {side} {METADATA_ADDRESS} accept",  # EC2's groups do not hold the metadata service
        *(f"  {match} accept" for match in matches),
        " }",
    ]


def _matches(rule: Rule, side: str) -> list[str]:
    peers = "" if "0.0.0.0/0" in rule.peers else f"ip {side} {{ {', '.join(sorted(set(rule.peers)))} }} "
    if rule.protocol == "-1":
        return [peers.strip() or "meta nfproto ipv4"]
    if rule.protocol in ("tcp", "udp"):
        low, high = rule.from_port or 0, 65535 if rule.to_port is None else rule.to_port
        ports = f"{low}-{high}" if low != high else str(low)
        return [f"{peers}meta nfproto ipv4 {rule.protocol} dport {ports}"]
    if rule.protocol == "icmp":
        kind = "" if rule.from_port in (None, -1) else f" icmp type {rule.from_port}"
        return [f"{peers}ip protocol icmp{kind}"]
    return [f"{peers}ip protocol {rule.protocol}"]
