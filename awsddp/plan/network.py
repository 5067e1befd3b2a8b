"""Plan the network: SSH source addresses, network interfaces, the placement group and the route to S3."""

import ipaddress
import re
from collections.abc import Iterable

from awsddp.compat.types import GPU_TYPES, GpuType
from awsddp.errors import ConfigError
from awsddp.model.records import Node
from awsddp.plan.records import Efa, Facts, Subnet
from awsddp.settings import ec2_limits
from awsddp.settings.spec import SSM, ClusterSpec
from awsddp.util.formatting import node_name

# The widest block that counts as a user's own network: 10.0.0.0/8, or the IPv6 block that a provider gets.
WIDEST = {4: 8, 6: 19}
_GROUP = re.compile(r"sg-[0-9a-f]{8,17}")


def ssh_cidrs(spec: ClusterSpec, callers: Iterable[str]) -> tuple[str, ...]:
    """Return the blocks and groups to which SSH is open: `network.ssh_cidr`, or else this machine's
    addresses.

    Returns () for connections through Systems Manager. Raises ConfigError for an invalid block.
    """
    if spec.network.jump == SSM and not spec.network.ssh_cidr:
        return ()
    requested = spec.network.ssh_cidr or tuple(callers)
    if not requested:
        raise _unknown_source(spec)
    cidrs = []
    for text in requested:
        if _GROUP.fullmatch(text):
            cidrs.append(text)
            continue
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise ConfigError(
                f"network.ssh_cidr: invalid address block {text!r}",
                str(error),
                "use 203.0.113.0/24, or sg-... for the members of a security group",
            ) from error
        if network.prefixlen < WIDEST[network.version]:
            world = "the whole world" if network.prefixlen == 0 else "a large part of the world"
            raise ConfigError(
                f"network.ssh_cidr: {text} opens port 22 to {world}",
                "a host that can connect to a node's port can attack it",
                "name your own network, such as 203.0.113.0/24, or omit network.ssh_cidr",
            )
        cidrs.append(str(network))
    ec2_limits.check_rules(cidrs)
    return tuple(cidrs)


_BY_ROLE = "Systems Manager identifies a node by its role, with the policy AmazonSSMManagedInstanceCore"


def check_session(spec: ClusterSpec) -> None:
    """Raise ConfigError if new nodes would lack the role that Systems Manager needs to reach them.

    https://docs.aws.amazon.com/systems-manager/latest/userguide/setup-instance-permissions.html
    """
    if spec.network.jump == SSM and not spec.access.instance_profile:
        raise ConfigError(
            'network.jump = "ssm" needs access.instance_profile',
            _BY_ROLE,
            "-o access.instance_profile=NAME   # docs/networks.md shows how to make one",
        )


def check_profiles(spec: ClusterSpec, nodes: Iterable[Node], *, region: str) -> None:
    """Raise ConfigError if existing nodes lack the role that Systems Manager needs to reach them."""
    without = [node for node in nodes if not node.profile]
    if spec.network.jump == SSM and without:
        name = (spec.access.instance_profile or "NAME").rpartition("/")[2]
        names = ", ".join(node_name(node.node) for node in without)
        raise ConfigError(
            f"network.jump: {names} without an instance profile",
            _BY_ROLE,
            f"for i in {' '.join(node.instance_id for node in without)}; do aws ec2 "
            f"associate-iam-instance-profile --instance-id $i --iam-instance-profile Name={name} "
            f"--region {region}; done   # docs/networks.md shows how to make one; then awsddp up again",
        )


def _unknown_source(spec: ClusterSpec) -> ConfigError:
    """Return the error for a cluster whose SSH source address is unknown."""
    why, example = "no service returned this machine's public address", "203.0.113.7/32"
    if spec.network.jump:
        why = f"network.jump is set: SSH connects from {spec.network.jump}, not from this machine"
        example = "10.0.0.5/32   # the jump host's address in the VPC, or its security group, sg-..."
    elif spec.network.address == "private":
        why = "network.address is private, so SSH does not connect from this machine's public address"
        example = "10.0.0.0/16   # the VPN's block"
    return ConfigError("unknown source address for SSH", why, f"set it: -o network.ssh_cidr={example}")


def choose_efa(spec: ClusterSpec, kind: GpuType) -> Efa:
    """Return how many EFA interfaces a node gets, and the reason.

    Raises ConfigError if EFA is requested but the node cannot get an EFA interface. AWS gives a public
    address only to an instance with one interface:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    most = kind.efa
    if not spec.capacity.efa:
        why = "capacity.efa asks for it" if most else f"{kind.name} supports none"
        return Efa(count=0, most=most, why=why)
    if not most:
        larger = [other.name for other in GPU_TYPES.values() if other.family == kind.family and other.efa]
        raise ConfigError(
            f"capacity.efa: {kind.name} supports no EFA interface",
            "",
            f"--instance-type {larger[0]}" if larger else "omit capacity.efa",
        )
    if kind.cards == 1 or spec.network.address == "private":
        return Efa(count=1 if kind.cards == 1 else most, most=most, why="its maximum")
    if kind.cards > most:
        raise ConfigError(
            f"capacity.efa: with a public address {kind.name} supports no EFA interface",
            "its first network card has no EFA, and AWS gives a public address to one interface only",
            "use a VPN and -o network.address=private, or omit capacity.efa",
        )
    return Efa(count=1, most=most, why=f"a public address allows one; network.address=private allows {most}")


def choose_placement(spec: ClusterSpec, facts: Facts, kind: GpuType) -> tuple[dict[str, str] | None, str]:
    """Return the nodes' placement group (None: no group) and the reason.

    A group reduces latency between nodes. Instances in a reservation or a capacity block have a fixed
    placement, so AWS would refuse to launch them into a group and report a lack of capacity.
    """
    nodes = spec.cluster.nodes
    if facts.reservation is not None:
        return None, f"none: the machines of {facts.reservation.id} have a fixed placement"
    if nodes < 2:
        return None, "none: a single node"
    if kind.gpus == 0:
        return None, "none: no GPUs"
    if not spec.capacity.placement_group:
        return None, "none: capacity.placement_group is false"
    condition = "" if spec.capacity.efa else " if AWS has room for them"
    return {"$ref": "name"}, f"cluster: the {nodes} nodes are placed close together{condition}"


def check_group(facts: Facts) -> list[str]:
    """Return warnings about the user's own security group.

    Raises ConfigError if the group is in another VPC.
    """
    group = facts.group
    if group is None:
        return []
    if facts.subnets and group.vpc != facts.subnets[0].vpc:
        raise ConfigError(
            f"network.security_group: {group.id} is in {group.vpc}, "
            f"but the subnet {facts.subnets[0].id} is in {facts.subnets[0].vpc}",
            "a security group belongs to one VPC",
            "name a group and a subnet in the same VPC",
        )
    return [f"network.security_group: {group.id} {lack}" for lack in group.lacks]


def is_reachable(spec: ClusterSpec, subnet: Subnet) -> bool:
    """Return True unless the subnet's routes show that a node's public address could not be reached."""
    return spec.network.address != "public" or subnet.route not in ("private", "none")


def is_within(source: str, block: str) -> bool:
    """Return True if a rule for `block` allows `source`; both are address blocks or security groups."""
    if source.startswith("sg-") or block.startswith("sg-"):
        return source == block
    inner, outer = ipaddress.ip_network(source), ipaddress.ip_network(block)
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]


def check_route(spec: ClusterSpec, subnet: Subnet, *, region: str) -> list[str]:
    """Return warnings about a subnet's routes. Raises ConfigError if SSH could not reach its nodes."""
    if not is_reachable(spec, subnet):
        subject = f"network.subnet: {subnet.id}" if spec.network.subnet else f"the default VPC {subnet.vpc}"
        raise ConfigError(
            f"{subject} has no route to an internet gateway",
            "a public address would be unreachable",
            "name a public subnet, or use a VPN and -o network.address=private",
        )
    warnings = [f"{subnet.id} has no default route: the nodes cannot install anything"] * (
        subnet.route == "none"
    )
    if not subnet.reaches_s3:
        warnings.append(
            f"{subnet.id} has neither a default route nor an endpoint for S3, so the nodes cannot reach S3: "
            f"aws ec2 create-vpc-endpoint --vpc-id {subnet.vpc} --service-name com.amazonaws.{region}.s3 "
            f"--route-table-ids {subnet.table} --region {region}"
        )
    return warnings
