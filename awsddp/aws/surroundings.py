"""Reads what a cluster is put into: subnets and their way out, what is the user's own, a reservation."""

from collections.abc import Iterable
from typing import Any

from awsddp.aws.clusters import SOURCES
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.errors import ConfigError
from awsddp.plan.network import within
from awsddp.plan.records import Group, Reservation, Subnet


def subnets(aws: Aws, asked: str | None) -> tuple[Subnet, ...]:
    """Return the requested subnet, else those of the default VPC, each with its route to the internet.

    Raises ConfigError, CloudError.
    """
    filters = [{"Name": "default-for-az", "Values": ["true"]}, {"Name": "state", "Values": ["available"]}]
    if asked:
        found = [_one(aws, "DescribeSubnets", {"SubnetIds": [asked]}, key="network.subnet", what="subnet")]
    else:
        found = aws.pages("DescribeSubnets", {"Filters": filters})
    routes = _routes(aws, {str(subnet["VpcId"]) for subnet in found})
    return tuple(
        Subnet(
            id=subnet["SubnetId"],
            zone=subnet["AvailabilityZone"],
            vpc=subnet["VpcId"],
            free_addresses=int(subnet.get("AvailableIpAddressCount", 0)),
            route=routes.get(subnet["SubnetId"], routes.get(subnet["VpcId"])),
        )
        for subnet in sorted(found, key=lambda subnet: str(subnet["SubnetId"]))
    )


def _routes(aws: Aws, vpcs: set[str]) -> dict[str, Any]:
    """Return where default routes lead, by subnet, and by VPC for subnets without a table of their own."""
    if not vpcs:
        return {}
    filters = [{"Name": "vpc-id", "Values": sorted(vpcs)}]
    try:
        tables = aws.pages("DescribeRouteTables", {"Filters": filters})
    except Refused:
        return {}  # no launch depends on it
    found: dict[str, Any] = {}
    for table in tables:
        for association in table.get("Associations", []):
            key = table["VpcId"] if association.get("Main") else association.get("SubnetId")
            if key:
                found[str(key)] = _way_out(table.get("Routes", []))
    return found


def _way_out(routes: Iterable[dict[str, Any]]) -> str:
    default = [
        route
        for route in routes
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State", "active") == "active"
    ]
    if any(str(route.get("GatewayId", "")).startswith("igw-") for route in default):
        return "internet"
    return "private" if default else "none"


def own_group(aws: Aws, asked: str | None, *, cidrs: tuple[str, ...], efa: bool) -> Group | None:
    """Return the user's own security group and what a cluster needs that it does not allow.

    `cidrs` are the addresses that SSH will come from. Raises ConfigError, CloudError.
    """
    if asked is None:
        return None
    found = _group(aws, asked, key="network.security_group")
    lacks = []
    if not _inside(found["IpPermissions"], asked):
        lacks.append("does not let its own members in: the ranks cannot reach each other")
    if efa and not _inside(found["IpPermissionsEgress"], asked):
        lacks.append("does not let traffic out to itself by name, which EFA needs")
    closed = [cidr for cidr in cidrs if not _lets_in(found["IpPermissions"], cidr)]
    if closed:
        lacks.append(f"does not let {', '.join(closed)} in at port 22, where SSH will come from")
    return Group(id=found["GroupId"], vpc=found["VpcId"], lacks=tuple(lacks))


def _inside(permissions: Iterable[dict[str, Any]], group: str) -> bool:
    """Whether all traffic with the group's own members is allowed."""
    return any(
        permission.get("IpProtocol") == "-1"
        and any(pair.get("GroupId") == group for pair in permission.get("UserIdGroupPairs", []))
        for permission in permissions
    )


def check_sources(aws: Aws, asked: Iterable[str]) -> None:
    """Look for the security groups among those who may come in. Raises ConfigError, CloudError."""
    for group in asked:
        if group.startswith("sg-"):
            _group(aws, group, key="network.ssh_cidr")


def _lets_in(permissions: Iterable[dict[str, Any]], cidr: str) -> bool:
    """Whether a group's rules let a block of addresses, or the members of a group, in at port 22."""
    for permission in permissions:
        low, high = permission.get("FromPort", 0), permission.get("ToPort", 65535)
        if permission.get("IpProtocol") not in ("tcp", "-1") or not low <= 22 <= high:
            continue
        if any(within(cidr, item[by]) for kind, by in SOURCES for item in permission.get(kind, [])):
            return True
    return False


def own_key(aws: Aws, asked: str | None) -> str:
    """Return the public half of the user's own key pair, "" if EC2 does not return it.

    Raises ConfigError where there is none, CloudError.
    """
    if asked is None:
        return ""
    named = {"KeyNames": [asked], "IncludePublicKey": True}
    found = _one(aws, "DescribeKeyPairs", named, key="access.key_file", what="key pair")
    return str(found.get("PublicKey", ""))


def check_profile(aws: Aws, asked: str | None) -> None:
    """Look for the user's own instance profile, where that may be read; EC2 takes two minutes to say no.

    Raises ConfigError where there is none.
    """
    if not asked:
        return
    name = {"InstanceProfileName": asked.rpartition("/")[2]}
    try:
        found = aws.call("GetInstanceProfile", name, service="iam")["InstanceProfile"]["Arn"]
    except Refused as refusal:
        if refusal.code != "NoSuchEntity":
            return  # the launch will tell
        found = ""
    if not found or (asked.startswith("arn:") and found != asked):
        raise ConfigError(
            f"access.instance_profile: no instance profile {asked!r} in this account",
            f"the one of this name is {found}" if found else "",
            "aws iam list-instance-profiles   # name one of these, or omit access.instance_profile",
        )


def check_disk_key(aws: Aws, asked: str | None) -> None:
    """Look whether the user's own KMS key can encrypt disks, where that may be read: with one that cannot
    instances end as they begin.

    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
    Raises ConfigError.
    """
    if asked is None:
        return
    why = ""
    try:
        found = aws.call("DescribeKey", {"KeyId": asked}, service="kms")["KeyMetadata"]
        if found["KeyState"] != "Enabled":
            why = f"it is {found['KeyState']}; aws kms enable-key --key-id {found['KeyId']} enables it"
        elif found.get("KeySpec", "SYMMETRIC_DEFAULT") != "SYMMETRIC_DEFAULT":
            why = f"it is a key for {found['KeyUsage']}, disks take symmetric ones alone"
    except Refused as refusal:
        if refusal.code in ("NotFoundException", "InvalidArnException"):
            why = refusal.why
    if why:
        raise ConfigError(
            f"access.kms_key: {asked} cannot encrypt disks in {aws.region}",
            why,
            "name another, by its id, alias (alias/...) or ARN, or omit access.kms_key",
        )


def reservation(aws: Aws, asked: str | None) -> Reservation | None:
    """Return the requested capacity reservation or block. Raises ConfigError, CloudError."""
    if asked is None:
        return None
    named = {"CapacityReservationIds": [asked]}
    key, what = "capacity.reservation", "capacity reservation"
    found = _one(aws, "DescribeCapacityReservations", named, key=key, what=what)
    ends = found.get("EndDate")
    return Reservation(
        id=found["CapacityReservationId"],
        instance_type=found["InstanceType"],
        zone=found["AvailabilityZone"],
        free=int(found.get("AvailableInstanceCount", 0)),
        state=found.get("State", ""),
        platform=found["InstancePlatform"],
        tenancy=found.get("Tenancy", "default"),
        block=found.get("ReservationType") == "capacity-block",
        ends=ends.strftime("%Y-%m-%d %H:%M UTC") if ends else "",
    )


def _group(aws: Aws, asked: str, *, key: str) -> dict[str, Any]:
    return _one(aws, "DescribeSecurityGroups", {"GroupIds": [asked]}, key=key, what="security group")


def _one(aws: Aws, operation: str, named: dict[str, Any], *, key: str, what: str) -> dict[str, Any]:
    """Return what a call describes that names one thing, first of its parameters, as `key` has it.

    Raises ConfigError where it does not exist, CloudError.
    """
    try:
        [found] = aws.call(operation, named)[operation.removeprefix("Describe")]
    except (Refused, ValueError) as error:
        if isinstance(error, Refused) and not error.code.endswith(("NotFound", "Malformed")):
            raise
        [asked] = next(iter(named.values()))
        why = error.why if isinstance(error, Refused) else ""
        next_step = f"name one of {aws.region}, or omit {key}"
        raise ConfigError(f"{key}: no {what} {asked!r} in {aws.region}", why, next_step) from error
    return dict(found)
