"""Reads what a cluster is put into: subnets and their way out, what is the user's own, a reservation, S3."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from awsddp.aws.api_errors import Refused, unless_refused
from awsddp.aws.client import Aws, Reply, S, Shape
from awsddp.aws.clusters import Permission, SecurityGroup
from awsddp.errors import ConfigError
from awsddp.plan.network import within
from awsddp.plan.policy import SAVE
from awsddp.plan.records import Group, Reservation, Subnet, WayOut
from awsddp.settings.values import s3_place
from awsddp.util.parallel import soon


class _Association(Shape):
    main: bool = False
    subnet_id: str = ""


class _Route(Shape):
    destination_cidr_block: str = ""
    gateway_id: str = ""
    state: str = "active"


class _RouteTable(Shape):
    vpc_id: str
    route_table_id: str = ""
    associations: tuple[_Association, ...] = ()
    routes: tuple[_Route, ...] = ()


def subnets(aws: Aws, asked: str | None) -> tuple[Subnet, ...]:
    """Return the requested subnet, else those of the default VPC, each with its route to the internet.

    Raises ConfigError, CloudError.
    """
    if asked:
        named = {"SubnetIds": [asked]}
        found = [_one(aws, Subnet, "DescribeSubnets", named, key="network.subnet", what="subnet")]
        routes = _routes(aws, vpc=found[0].vpc)
    else:
        reading = soon(_routes, aws)  # those of all VPCs: which one is the default need not be known first
        filters = [{"Name": "default-for-az", "Values": ["true"]}, {"Name": "state", "Values": ["available"]}]
        found = aws.read(Subnet, "DescribeSubnets", {"Filters": filters})
        routes = reading.result()
    return tuple(
        replace(subnet, **routes.get(subnet.id, routes.get(subnet.vpc, {})))
        for subnet in sorted(found, key=lambda subnet: subnet.id)
    )


def _routes(aws: Aws, *, vpc: str | None = None) -> dict[str, dict[str, str]]:
    """Return route tables and where their default routes lead, by subnet, and by VPC for subnets without a
    table of their own: those of one VPC, or of all."""
    asked = {"Filters": [{"Name": "vpc-id", "Values": [vpc]}]} if vpc else {}
    tables = unless_refused(lambda: aws.read(_RouteTable, "DescribeRouteTables", asked))
    return {
        table.vpc_id if one.main else one.subnet_id: {
            "route": _way_out(table.routes),
            "table": table.route_table_id,
        }
        for table in tables or ()  # no launch depends on it
        for one in table.associations
    }


def _way_out(routes: Iterable[_Route]) -> WayOut:
    default = [one for one in routes if one.destination_cidr_block == "0.0.0.0/0" and one.state == "active"]
    if any(route.gateway_id.startswith("igw-") for route in default):
        return "internet"
    return "private" if default else "none"


class _Endpoint(Shape):
    vpc_id: str
    service_name: str
    state: str = "available"
    route_table_ids: tuple[str, ...] = ()
    private_dns_enabled: bool = False


def with_s3(aws: Aws, found: tuple[Subnet, ...]) -> tuple[Subnet, ...]:
    """Return the subnets, of those without a way out each with whether it reaches S3 by an endpoint.

    https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-s3.html
    """
    vpcs = sorted({subnet.vpc for subnet in found if subnet.route == "none"})
    if not vpcs:
        return found
    filters = [{"Name": "vpc-id", "Values": vpcs}]
    described = unless_refused(lambda: aws.read(_Endpoint, "DescribeVpcEndpoints", {"Filters": filters}))
    if described is None:
        return found
    ready = [one for one in described if one.state.lower() == "available"]
    ours = [one for one in ready if one.service_name.endswith(f".{aws.region}.s3")]
    ways = {way for one in ours for way in one.route_table_ids}
    ways |= {one.vpc_id for one in ours if one.private_dns_enabled}
    return tuple(
        replace(one, reaches_s3=one.route != "none" or one.table in ways or one.vpc in ways) for one in found
    )


def own_group(aws: Aws, asked: str, *, cidrs: tuple[str, ...], efa: bool) -> Group:
    """Return the user's own security group and what a cluster needs that it does not allow.

    `cidrs` are the addresses that SSH will come from. Raises ConfigError, CloudError.
    """
    found = _group(aws, asked, key="network.security_group")
    lacks = []
    if not _inside(found.ip_permissions, asked):
        lacks.append("does not let its own members in: the ranks cannot reach each other")
    if efa and not _inside(found.ip_permissions_egress, asked):
        lacks.append("does not let traffic out to itself by name, which EFA needs")
    closed = [cidr for cidr in cidrs if not _lets_in(found.ip_permissions, cidr)]
    if closed:
        lacks.append(f"does not let {', '.join(closed)} in at port 22, where SSH will come from")
    return Group(id=found.group_id, vpc=found.vpc_id, lacks=tuple(lacks))


def _inside(permissions: Iterable[Permission], group: str) -> bool:
    """Whether all traffic with the group's own members is allowed."""
    return any(one.ip_protocol == "-1" and group in one.sources for one in permissions)


def check_sources(aws: Aws, asked: Iterable[str]) -> None:
    """Look for the security groups among those who may come in. Raises ConfigError, CloudError."""
    for group in asked:
        if group.startswith("sg-"):
            _group(aws, group, key="network.ssh_cidr")


def _lets_in(permissions: Iterable[Permission], cidr: str) -> bool:
    """Whether a group's rules let a block of addresses, or the members of a group, in at port 22."""
    return any(
        one.ip_protocol in ("tcp", "-1")
        and (one.from_port or 0) <= 22 <= (65535 if one.to_port is None else one.to_port)
        and any(within(cidr, source) for source in one.sources)
        for one in permissions
    )


class _KeyPair(Shape):
    public_key: str = ""


def own_key(aws: Aws, asked: str) -> str:
    """Return the public half of the user's own key pair, "" if EC2 does not return it.

    Raises ConfigError where there is none, CloudError.
    """
    named = {"KeyNames": [asked], "IncludePublicKey": True}
    return _one(aws, _KeyPair, "DescribeKeyPairs", named, key="access.key_file", what="key pair").public_key


class _Profile(Shape):
    arn: str = ""
    roles: tuple[dict[str, Any], ...] = ()


def role_of(aws: Aws, asked: str) -> str | None:
    """Return the ARN of the role of the user's own instance profile, "" for one without; None where that may
    not be read. EC2 takes two minutes to say that there is none.

    Raises ConfigError where there is none.
    """
    name, profile = {"InstanceProfileName": asked.rpartition("/")[2]}, _Profile()
    try:
        profile = _Profile.of(aws.call("GetInstanceProfile", name, service="iam")["InstanceProfile"])
    except Refused as refusal:
        if refusal.code != "NoSuchEntity":
            return None  # the launch will tell
    found = profile.arn
    if not found or (asked.startswith("arn:") and found != asked):
        raise ConfigError(
            f"access.instance_profile: no instance profile {asked!r} in this account",
            f"the one of this name is {found}" if found else "",
            "aws iam list-instance-profiles   # name one of these, or omit access.instance_profile",
        )
    return str(profile.roles[0]["Arn"]) if profile.roles else ""


def lacking(aws: Aws, role: str, place: str) -> Iterator[str]:
    """Yield the actions that saving results at a place needs and the role's policies do not allow, as far as
    IAM may be asked; a policy of the bucket may allow them.

    https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html
    """
    bucket, above = s3_place(place)
    prefix = f"{above}/job/".lstrip("/")
    context = {"ContextKeyName": "s3:prefix", "ContextKeyType": "string", "ContextKeyValues": [prefix]}
    arn = f"arn:{role.split(':')[1]}:s3:::{bucket}"
    for asked in (
        {"ActionNames": ["s3:ListBucket"], "ResourceArns": [arn], "ContextEntries": [context]},
        {"ActionNames": list(SAVE), "ResourceArns": [f"{arn}/{prefix}job.json"]},
    ):
        call = partial(aws.call, "SimulatePrincipalPolicy", {"PolicySourceArn": role, **asked}, service="iam")
        for one in (unless_refused(call) or {}).get("EvaluationResults", ()):
            if one["EvalDecision"] != "allowed":
                yield one["EvalActionName"]


class _Key(Shape):
    key_id: str
    key_state: str
    key_spec: str = "SYMMETRIC_DEFAULT"
    key_usage: str = ""


def check_disk_key(aws: Aws, asked: str) -> None:
    """Look whether the user's own KMS key can encrypt disks, where that may be read: with one that cannot
    instances end as they begin.

    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
    Raises ConfigError.
    """
    why = ""
    try:
        found = _Key.of(aws.call("DescribeKey", {"KeyId": asked}, service="kms")["KeyMetadata"])
        if found.key_state != "Enabled":
            why = f"it is {found.key_state}; aws kms enable-key --key-id {found.key_id} enables it"
        elif found.key_spec != "SYMMETRIC_DEFAULT":
            why = f"it is a key for {found.key_usage}, disks take symmetric ones alone"
    except Refused as refusal:
        if refusal.code in ("NotFoundException", "InvalidArnException"):
            why = refusal.why
    if why:
        raise ConfigError(
            f"access.kms_key: {asked} cannot encrypt disks in {aws.region}",
            why,
            "name another, by its id, alias (alias/...) or ARN, or omit access.kms_key",
        )


def reservation(aws: Aws, asked: str) -> Reservation:
    """Return the requested capacity reservation or block. Raises ConfigError, CloudError."""
    named, operation = {"CapacityReservationIds": [asked]}, "DescribeCapacityReservations"
    key, what = "capacity.reservation", "capacity reservation"
    return _one(aws, Reservation, operation, named, key=key, what=what)


def _group(aws: Aws, asked: str, *, key: str) -> SecurityGroup:
    named, what = {"GroupIds": [asked]}, "security group"
    return _one(aws, SecurityGroup, "DescribeSecurityGroups", named, key=key, what=what)


def _one(aws: Aws, shape: type[S], operation: str, named: Reply, *, key: str, what: str) -> S:
    """Return what a call describes that names one thing, first of its parameters, as `key` has it.

    Raises ConfigError where it does not exist, CloudError.
    """
    why = ""
    try:
        if found := aws.read(shape, operation, named):
            return found[0]
    except Refused as refusal:
        if not refusal.code.endswith(("NotFound", "Malformed")):
            raise
        why = refusal.why
    [asked] = next(iter(named.values()))
    message = f"{key}: no {what} {asked!r} in {aws.region}"
    raise ConfigError(message, why, f"name one of {aws.region}, or omit {key}")
