"""Read the account's resources that a cluster uses: subnets, routes, reservations, groups, keys, roles."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient, Reply, S, Shape
from awsddp.aws.clusters import Permission, SecurityGroup
from awsddp.errors import ConfigError
from awsddp.plan.network import is_within
from awsddp.plan.policy import SAVE
from awsddp.plan.records import InternetRoute, OwnGroup, Reservation, Subnet
from awsddp.settings.values import parse_s3_uri
from awsddp.util.parallel import run_in_thread


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


def find_subnets(aws: AwsClient, subnet_id: str | None) -> tuple[Subnet, ...]:
    """Return the requested subnet, or the default VPC's subnets, each with its route to the internet.

    Raises CloudError, or ConfigError if the requested subnet does not exist.
    """
    if subnet_id:
        request = {"SubnetIds": [subnet_id]}
        described = [
            _describe_one(aws, Subnet, "DescribeSubnets", request, key="network.subnet", noun="subnet")
        ]
        routes = _routes(aws, vpc=described[0].vpc)
    else:
        reading = run_in_thread(
            _routes, aws
        )  # the routes of all VPCs, so that the call does not wait for the default VPC's id
        filters = [{"Name": "default-for-az", "Values": ["true"]}, {"Name": "state", "Values": ["available"]}]
        described = aws.read(Subnet, "DescribeSubnets", {"Filters": filters})
        routes = reading.result()
    return tuple(
        replace(subnet, **routes.get(subnet.id, routes.get(subnet.vpc, {})))
        for subnet in sorted(described, key=lambda subnet: subnet.id)
    )


def _routes(aws: AwsClient, *, vpc: str | None = None) -> dict[str, dict[str, str]]:
    """Return the route tables of `vpc` (None: all VPCs) and their default routes, as fields of Subnet.

    The keys are subnet ids. Subnets without a route table of their own share one entry, whose key is the
    VPC's id.
    """
    request = {"Filters": [{"Name": "vpc-id", "Values": [vpc]}]} if vpc else {}
    tables = none_if_refused(lambda: aws.read(_RouteTable, "DescribeRouteTables", request))
    return {
        table.vpc_id if association.main else association.subnet_id: {
            "route": _internet_route(table.routes),
            "table": table.route_table_id,
        }
        for table in tables or ()  # without these routes, a launch can continue
        for association in table.associations
    }


def _internet_route(routes: Iterable[_Route]) -> InternetRoute:
    active = [route for route in routes if route.state == "active"]
    default = [route for route in active if route.destination_cidr_block == "0.0.0.0/0"]
    if any(route.gateway_id.startswith("igw-") for route in default):
        return "internet"
    return "private" if default else "none"


class _Endpoint(Shape):
    vpc_id: str
    service_name: str
    state: str = "available"
    route_table_ids: tuple[str, ...] = ()
    private_dns_enabled: bool = False


def with_s3_routes(aws: AwsClient, subnets: tuple[Subnet, ...]) -> tuple[Subnet, ...]:
    """Return the subnets with `reaches_s3` set; a subnet without a default route reaches S3 only through a
    VPC endpoint.

    https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-s3.html
    """
    vpcs = sorted({subnet.vpc for subnet in subnets if subnet.route == "none"})
    if not vpcs:
        return subnets
    filters = [{"Name": "vpc-id", "Values": vpcs}]
    described = none_if_refused(lambda: aws.read(_Endpoint, "DescribeVpcEndpoints", {"Filters": filters}))
    if described is None:
        return subnets
    available = [endpoint for endpoint in described if endpoint.state.lower() == "available"]
    of_s3 = [endpoint for endpoint in available if endpoint.service_name.endswith(f".{aws.region}.s3")]
    tables = {table for endpoint in of_s3 for table in endpoint.route_table_ids}
    private_vpcs = {endpoint.vpc_id for endpoint in of_s3 if endpoint.private_dns_enabled}
    return tuple(
        replace(
            subnet,
            reaches_s3=subnet.route != "none" or subnet.table in tables or subnet.vpc in private_vpcs,
        )
        for subnet in subnets
    )


def read_own_group(aws: AwsClient, group_id: str, *, cidrs: tuple[str, ...], efa: bool) -> OwnGroup:
    """Return the user's own security group, with the needed traffic that its rules do not allow.

    `cidrs` are the source addresses for SSH. Raises CloudError, or ConfigError if the group does not exist.
    """
    group = _group(aws, group_id, key="network.security_group")
    lacks = []
    if not _allows_members(group.ip_permissions, group_id):
        lacks.append("does not allow traffic between its members, so the ranks cannot reach each other")
    if efa and not _allows_members(group.ip_permissions_egress, group_id):
        lacks.append("has no outbound rule for all traffic to the group itself, which EFA needs")
    closed = [cidr for cidr in cidrs if not _allows_ssh(group.ip_permissions, cidr)]
    if closed:
        lacks.append(f"does not allow SSH (port 22) from {', '.join(closed)}")
    return OwnGroup(id=group.group_id, vpc=group.vpc_id, lacks=tuple(lacks))


def _allows_members(permissions: Iterable[Permission], group: str) -> bool:
    """Return True if the group allows all traffic between its members."""
    return any(permission.ip_protocol == "-1" and group in permission.sources for permission in permissions)


def check_ssh_groups(aws: AwsClient, sources: Iterable[str]) -> None:
    """Check that each security group in `network.ssh_cidr` exists. Raises ConfigError or CloudError."""
    for group in sources:
        if group.startswith("sg-"):
            _group(aws, group, key="network.ssh_cidr")


def _allows_ssh(permissions: Iterable[Permission], cidr: str) -> bool:
    """Return True if the rules allow port 22 from an address block, or from a group's members."""
    return any(
        permission.ip_protocol in ("tcp", "-1")
        and (permission.from_port or 0) <= 22 <= (65535 if permission.to_port is None else permission.to_port)
        and any(is_within(cidr, source) for source in permission.sources)
        for permission in permissions
    )


class _KeyPair(Shape):
    public_key: str = ""


def read_own_key(aws: AwsClient, key_name: str) -> str:
    """Return the public key of the user's own key pair, or "" if EC2 does not return it.

    Raises CloudError, or ConfigError if the key pair does not exist.
    """
    request = {"KeyNames": [key_name], "IncludePublicKey": True}
    pair = _describe_one(aws, _KeyPair, "DescribeKeyPairs", request, key="access.key_file", noun="key pair")
    return pair.public_key


class _Profile(Shape):
    arn: str = ""
    roles: tuple[dict[str, Any], ...] = ()


def find_role(aws: AwsClient, requested: str) -> str | None:
    """Return the ARN of the role in the user's own instance profile ("": no role, None: it cannot be read).

    IAM is queried for the profile, because RunInstances reports a missing one only after two minutes. Raises
    ConfigError if the profile does not exist.
    """
    name, profile = {"InstanceProfileName": requested.rpartition("/")[2]}, _Profile()
    try:
        profile = _Profile.from_reply(aws.call("GetInstanceProfile", name, service="iam")["InstanceProfile"])
    except AwsRefused as refusal:
        if refusal.code != "NoSuchEntity":
            return None  # the launch reports the problem
    arn = profile.arn
    if not arn or (requested.startswith("arn:") and arn != requested):
        raise ConfigError(
            f"access.instance_profile: no instance profile {requested!r} in this account",
            f"the instance profile with this name is {arn}" if arn else "",
            "aws iam list-instance-profiles   # name one of these, or omit access.instance_profile",
        )
    return str(profile.roles[0]["Arn"]) if profile.roles else ""


def list_missing_actions(aws: AwsClient, role: str, uri: str) -> Iterator[str]:
    """Yield the S3 actions that saving results to `uri` needs but the role's policies do not allow.

    Yields nothing if the user is not allowed to simulate policies. The bucket's own policy could still allow
    these actions.

    https://docs.aws.amazon.com/IAM/latest/APIReference/API_SimulatePrincipalPolicy.html
    """
    bucket, above = parse_s3_uri(uri)
    prefix = f"{above}/job/".lstrip("/")
    context = {"ContextKeyName": "s3:prefix", "ContextKeyType": "string", "ContextKeyValues": [prefix]}
    arn = f"arn:{role.split(':')[1]}:s3:::{bucket}"
    for request in (
        {"ActionNames": ["s3:ListBucket"], "ResourceArns": [arn], "ContextEntries": [context]},
        {"ActionNames": list(SAVE), "ResourceArns": [f"{arn}/{prefix}job.json"]},
    ):
        parameters = {"PolicySourceArn": role, **request}
        call = partial(aws.call, "SimulatePrincipalPolicy", parameters, service="iam")
        for result in (none_if_refused(call) or {}).get("EvaluationResults", ()):
            if result["EvalDecision"] != "allowed":
                yield result["EvalActionName"]


class _Key(Shape):
    key_id: str
    key_state: str
    key_spec: str = "SYMMETRIC_DEFAULT"
    key_usage: str = ""


def check_disk_key(aws: AwsClient, key_id: str) -> None:
    """Raise ConfigError if the user's own KMS key cannot encrypt disks; accept a key that cannot be read.

    If a key cannot encrypt an instance's disks, the instance terminates while it starts:
    https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
    """
    why = ""
    try:
        key = _Key.from_reply(aws.call("DescribeKey", {"KeyId": key_id}, service="kms")["KeyMetadata"])
        if key.key_state != "Enabled":
            why = f"the key is {key.key_state}; aws kms enable-key --key-id {key.key_id} enables it"
        elif key.key_spec != "SYMMETRIC_DEFAULT":
            why = f"the key is for {key.key_usage}, but disks need a symmetric key"
    except AwsRefused as refusal:
        if refusal.code in ("NotFoundException", "InvalidArnException"):
            why = refusal.why
    if why:
        raise ConfigError(
            f"access.kms_key: {key_id} cannot encrypt disks in {aws.region}",
            why,
            "name another key by its id, alias (alias/...) or ARN, or omit access.kms_key",
        )


def find_reservation(aws: AwsClient, reservation_id: str) -> Reservation:
    """Return the requested capacity reservation or capacity block.

    Raises CloudError, or ConfigError if the reservation does not exist.
    """
    request, operation = {"CapacityReservationIds": [reservation_id]}, "DescribeCapacityReservations"
    key, noun = "capacity.reservation", "capacity reservation"
    return _describe_one(aws, Reservation, operation, request, key=key, noun=noun)


def _group(aws: AwsClient, group_id: str, *, key: str) -> SecurityGroup:
    request, noun = {"GroupIds": [group_id]}, "security group"
    return _describe_one(aws, SecurityGroup, "DescribeSecurityGroups", request, key=key, noun=noun)


def _describe_one(
    aws: AwsClient, shape: type[S], operation: str, request: Reply, *, key: str, noun: str
) -> S:
    """Return the one resource whose id is listed in the request's first parameter.

    The error message contains `key`, the setting that names the resource, and `noun`, the kind of resource.
    Raises CloudError, or ConfigError if the resource does not exist.
    """
    why = ""
    try:
        if matches := aws.read(shape, operation, request):
            return matches[0]
    except AwsRefused as refusal:
        if not refusal.code.endswith(("NotFound", "Malformed")):
            raise
        why = refusal.why
    [requested] = next(iter(request.values()))
    message = f"{key}: no {noun} {requested!r} in {aws.region}"
    raise ConfigError(message, why, f"name one in {aws.region}, or omit {key}")
