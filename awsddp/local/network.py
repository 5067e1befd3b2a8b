"""The nodes' network: a bridge in its own namespace, and veths to the machine and to each node.

Docker's rules (br_netfilter) would block a bridge in the machine's own namespace; a bridge in another
namespace needs no rule in the machine's firewall. Nodes cannot reach other networks: they have no default
route, and the bridge drops every packet whose source or destination is outside the block.

A node's security groups are nftables rules in its namespace. The rules are stateful, and traffic that no rule
allows is dropped. The rules that apply are the union of the rules in all of the instance's groups
(https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html).
"""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from awsddp.errors import LocalCloudError
from awsddp.local.machine import CloudPaths, run

BLOCKS = tuple(ipaddress.IPv4Network(f"10.{second}.0.0/16") for second in range(77, 128))
NAMESPACES = Path("/run/netns")
LOOPBACK_BLOCKS = tuple(ipaddress.IPv4Network(f"127.{second}.0.0/16") for second in range(77, 128))
METADATA_ADDRESS = "169.254.169.254"
SLOW_NETWORK = "1 mbytes/second burst 64 kbytes"
"""The limit in each direction for a slow network, in nftables' syntax."""


def run_ip(*lines: str, namespace: str | None = None) -> None:
    """Run lines with `ip -batch`, in a network namespace or in the machine's own namespace."""
    options = () if namespace is None else ("-n", namespace)
    run("ip", *options, "-batch", "-", text="\n".join(lines) + "\n")


def list_free_blocks() -> list[ipaddress.IPv4Network]:
    """Return the address blocks to which this machine has no route."""
    routes = json.loads(run("ip", "-4", "-json", "route", "show", "table", "all") or "[]")
    taken = []
    for route in routes:
        with suppress(ValueError):
            taken.append(ipaddress.IPv4Network(route["dst"], strict=False))
    return [block for block in BLOCKS if not any(map(block.overlaps, taken))]


def take_block(blocks: Iterable[ipaddress.IPv4Network]) -> tuple[ipaddress.IPv4Network, socket.socket]:
    """Reserve the first block that no other local cloud on this machine has. Return the block and a socket.

    The block stays reserved until the socket is closed.

    :raises LocalCloudError: all blocks are taken.
    """
    for block in blocks:
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0awsddp-local-{block.network_address}")
        except OSError:
            holder.close()
            continue
        return block, holder
    raise LocalCloudError(
        "no address block is free for the local cloud",
        why="each /16 that it could use is taken by another local cloud or by a route of this machine",
        next_step="awsddp local stop",
    )


def open_switch(
    paths: CloudPaths, block: ipaddress.IPv4Network | None
) -> tuple[ipaddress.IPv4Network, socket.socket]:
    """Create the bridge if it does not exist; return its block, and the socket that reserves the block.

    :param block: the block that an earlier start used, or None to take the next free one.
    :raises LocalCloudError: the block is in use by another local cloud.
    """
    exists = (NAMESPACES / paths.switch).exists() and Path("/sys/class/net", paths.interface).exists()
    is_complete = block is not None and exists
    if not is_complete:
        close_network(paths)
    block, holder = take_block(list_free_blocks() if block is None else [block])
    if not is_complete:
        try:
            _create_switch(paths, block)
        except LocalCloudError:
            close_network(paths)
            raise
    return block, holder


def _create_switch(paths: CloudPaths, block: ipaddress.IPv4Network) -> None:
    name, interface = paths.switch, paths.interface
    run_ip(
        f"netns add {name}",
        f"link add {interface} type veth peer name machine netns {name}",
        f"addr add {block[1]}/16 dev {interface}",
        f"link set {interface} up",
    )
    run_ip(
        "link set lo up",
        "link add vpc type bridge",
        "link set vpc up",
        "link set machine master vpc up",
        f"addr add {METADATA_ADDRESS}/32 dev vpc",
        f"route add {block} dev vpc",
        namespace=name,
    )
    # Debian's kernel may lack nftables' bridge family. Even without these rules, nodes cannot reach other
    # networks, because they have no default route.
    with suppress(LocalCloudError):
        border = (
            "table bridge border {\n chain forward {\n  type filter hook forward priority 0; policy accept;\n"
            f"  ip daddr != {block} drop\n  ip saddr != {block} drop\n  ether type ip6 drop\n }}\n}}\n"
        )
        run("ip", "netns", "exec", name, "nft", "-f", "-", text=border)


def make_mac_address(address: str) -> str:
    """Return the MAC address for an IP. The same IP always gets the same MAC address, so that ARP caches stay
    valid if a host is recreated."""
    return "02:0a:" + ":".join(f"{int(byte):02x}" for byte in address.split("."))


def plug_in(paths: CloudPaths, instance_id: str, address: str) -> None:
    """Create a node's namespace, whose interface `ens5` is connected to the bridge."""
    name, port = paths.machine_name(instance_id), _port(instance_id)
    run_ip(f"netns add {name}")
    run_ip(
        f"link add {port} type veth peer name ens5 address {make_mac_address(address)} netns {name}",
        f"link set {port} master vpc up",
        namespace=paths.switch,
    )
    run_ip(
        "link set lo up",
        f"addr add {address}/16 dev ens5",
        "link set ens5 up",
        f"route add {METADATA_ADDRESS}/32 dev ens5",
        namespace=name,
    )


def unplug(paths: CloudPaths, instance_id: str) -> None:
    """Remove a node's port on the bridge and its namespace, if they exist.

    The port is deleted explicitly, because a namespace exists as long as a socket refers to it. A namespace
    that kept its port would still answer at the node's address, which another node may have by then.
    """
    name = paths.machine_name(instance_id)
    with suppress(LocalCloudError):
        run("ip", "-n", paths.switch, "link", "del", _port(instance_id))
    if (NAMESPACES / name).exists():
        run("ip", "netns", "del", name)


def _port(instance_id: str) -> str:
    return f"v{instance_id[-12:]}"


def load_rules(paths: CloudPaths, instance_id: str, ruleset: str) -> None:
    """Apply an nftables ruleset in a node's namespace, atomically."""
    run("ip", "netns", "exec", paths.machine_name(instance_id), "nft", "-f", "-", text=ruleset)


def list_namespaces(paths: CloudPaths) -> list[str]:
    """Return this local cloud's network namespaces: its bridge's and its nodes'."""
    return [path.name for path in NAMESPACES.glob(f"{paths.switch}*")]


def close_network(paths: CloudPaths) -> None:
    """Remove all of this local cloud's namespaces and interfaces."""
    for name in list_namespaces(paths):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if Path("/sys/class/net", paths.interface).exists():
        subprocess.run(["ip", "link", "del", paths.interface], capture_output=True)


def make_group_rules(groups: Collection[Any], members: Mapping[str, list[str]]) -> str:
    """Return the ruleset for a node's security groups; loading it atomically replaces the earlier ruleset.

    :param groups: the node's security groups, as moto's objects.
    :param members: {group id: addresses in the group}; the addresses are the peers of rules that name the
        group.
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
        f"  ip {side} {METADATA_ADDRESS} accept",  # EC2's groups do not apply to the metadata service
        *(f"  {match} accept" for match in sorted(matches - {""})),
        " }",
    ]


def _match(rule: Any, side: str, members: Mapping[str, list[str]]) -> str:
    """Return the nftables match for a permission, or "" if the permission allows no IPv4 address."""
    protocol, network = rule.ip_protocol or "-1", rule.ip_range.get("CidrIp")
    group_members = members.get((rule.source_group or {}).get("GroupId", ""), [])
    peers = {*group_members, network} if network else {*group_members}
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


def make_fault_rules(effects: frozenset[str]) -> str:
    """Return the ruleset for a node's faults; loading it replaces the earlier ruleset.

    Packets are dropped, not rejected, so that connections continue once the fault ends.
    """
    chains = ""
    for hook, side, peer in (("input", "iif", "saddr"), ("output", "oif", "daddr")):
        verdicts = []
        if "cut" in effects or (hook == "output" and "one-way" in effects):
            verdicts.append("drop")
        if "slow-network" in effects:
            verdicts.append(f"limit rate over {SLOW_NETWORK} drop")
        if verdicts:
            dropped = "".join(f"  {side} != lo {verdict}\n" for verdict in verdicts)
            chains += (
                f" chain {hook} {{\n  type filter hook {hook} priority -10;\n"
                f"  ip {peer} {METADATA_ADDRESS} accept\n{dropped} }}\n"
            )
    return f"table inet faults\ndelete table inet faults\ntable inet faults {{\n{chains}}}\n"
