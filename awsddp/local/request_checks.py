"""A table of requests that EC2 refuses and moto accepts. A request gets the error of the first row that
applies."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.utils import get_service_model
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.iam.models import iam_backends

from awsddp.compat.types import Market
from awsddp.local import offers
from awsddp.local.ec2_http import Refusal, get_records
from awsddp.local.offers import Call
from awsddp.settings import ec2_limits

# The cloud-config keys that hosts support: https://docs.cloud-init.io/en/latest/reference/modules.html
USER_DATA_KEYS = frozenset({"ssh_keys", "ssh_deletekeys", "ssh_pwauth", "write_files", "bootcmd", "runcmd"})


Checks = dict[str, Callable[[Call], Any]]
"""Refusals, each with a check that returns a true value if the refusal applies to a call.

The refusal's text is formatted with the call and its parameters. The check can return a dict of further
values for the text.
"""


def check_call(call: Call) -> None:
    """Check a call against all rows, unless it repeats an earlier launch.

    :raises ServiceException: the call is refused, or a named resource does not exist (then moto's error).
    """
    request, arguments, backend = call.request, call.arguments, call.backend
    if request.action == "RunInstances":
        if arguments.get("ClientToken") in get_records(backend, "launches"):
            return
        _ = call.image
        backend.describe_key_pairs([arguments.get("KeyName")])
    if request.action in ("CreateTags", "DeleteTags"):
        ids = arguments.get("Resources", ())
        backend.get_multi_instances_by_id([key for key in ids if key.startswith("i-")])
    for row, is_refused in ROWS.items():
        operations, code, text = row.split(": ", 2)
        if re.fullmatch(operations, request.action) and (result := is_refused(call)):
            values = result if isinstance(result, dict) else {}
            raise Refusal(code, text.format(call=call, **arguments, **values))


def _bad_text(names: str, pattern: str, call: Call) -> dict[str, str] | None:
    """Return the first parameter whose name matches `names` and whose value does not match `pattern`."""
    for name, value in call.request.parameters.items():
        if re.fullmatch(names, name) and not re.fullmatch(pattern, value):
            return {"name": name, "value": value[:300]}
    return None


def _tags(call: Call) -> list[dict[str, str]]:
    """Return the tags that a call sets: its own tags, then those in each tag specification."""
    specs = (call.arguments, *call.arguments.get("TagSpecifications", ()))
    return [{tag.get("Key", ""): tag.get("Value", "") for tag in spec.get("Tags", ())} for spec in specs]


def _long_filter(call: Call) -> bool:
    filters = call.arguments.get("Filters", ())
    return any(len(row.get("Values", ())) > ec2_limits.MAX_FILTER_VALUES for row in filters)


def _bad_tag(call: Call) -> dict[str, str] | None:
    for key, value in (pair for tags in _tags(call) for pair in tags.items()):
        if fault := ec2_limits.find_tag_fault(key, value):
            return {"key": key[:200], "fault": fault}
    return None


def _too_many_tags(call: Call) -> bool:
    existing = [call.backend.tags.get(key, {}).keys() for key in call.arguments.get("Resources", [""])]
    return any(len(keys | tags.keys()) > ec2_limits.MAX_TAGS for keys in existing for tags in _tags(call))


def _too_many_rules(call: Call) -> bool:
    """Return True if a group would have too many rules; a rule that names a group counts once for IPv4 and
    once for IPv6."""
    group = call.backend.get_security_group_from_id(call.arguments.get("GroupId", ""))
    if group is None:
        return False
    rules = group.ingress_rules if call.request.action.endswith("Ingress") else group.egress_rules
    added = call.arguments.get("IpPermissions", ())
    counts = [
        sum(bool(rule.source_group or rule.ip_range.get(key)) for rule in rules)
        + sum(len(row.get(kind, ())) + len(row.get("UserIdGroupPairs", ())) for row in added)
        for kind, key in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6"))
    ]
    return max(counts) > ec2_limits.MAX_RULES


def _used_subnet(call: Call) -> bool:
    return any(nic.subnet.id == call.arguments.get("SubnetId") for nic in call.backend.enis.values())


def _used_vpc(call: Call) -> bool:
    vpc_id = call.arguments.get("VpcId", "")
    gateways = call.backend.describe_internet_gateways(filters={"attachment.vpc-id": [vpc_id]})
    groups = call.backend.groups.get(vpc_id, {}).values()
    return bool(gateways) or any(group.name != "default" for group in groups)


def _used_interface(call: Call) -> Any:
    return getattr(call.backend.enis.get(call.arguments.get("NetworkInterfaceId")), "instance", None)


def _used_group(call: Call) -> bool:
    """Return True if an interface, or a rule of another group, uses the group."""
    group_id = call.arguments.get("GroupId", "")
    users = {group.id for eni in call.backend.enis.values() for group in eni.group_set}
    users |= {
        rule.source_group.get("GroupId")
        for group in call.backend.describe_security_groups()
        for rule in (*group.ingress_rules, *group.egress_rules)
        if group.id != group_id
    }
    return group_id in users


def _unknown_profile(call: Call) -> dict[str, str] | None:
    profiles = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.values()
    for key, text in call.arguments.get("IamInstanceProfile", {}).items():
        if text not in {row.name if key == "Name" else row.arn for row in profiles}:
            return {"value": text[:300], "key": key.lower(), "what": "ARN" if key == "Arn" else "name"}
    return None


def _unsupported_interfaces(call: Call) -> bool:
    """Return True if an additional interface is not efa-only, because hosts have one network interface."""
    kinds = [(nic.get("InterfaceType"), nic.get("NetworkCardIndex")) for nic in call.nics]
    return any(kind != ("efa-only", card) for card, kind in enumerate(kinds) if card > 0)


def _unknown_group(call: Call) -> dict[str, str] | None:
    """Return the first unknown security group, which moto would create."""
    ids = [*call.arguments.get("SecurityGroupIds", ())]
    ids += [key for nic in call.nics for key in nic.get("Groups", ())]
    unknown = [key for key in ids if call.backend.get_security_group_from_id(key) is None]
    return {"group": unknown[0]} if unknown else None


def _small_disk(call: Call) -> dict[str, int] | None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_EbsBlockDevice.html"""
    least = call.image.ebs_snapshot.volume.size
    sizes = [disk.get("Ebs", {}).get("VolumeSize", least) for disk in call.disks]
    return {"size": min(sizes), "least": least} if sizes and min(sizes) < least else None


def _list_types() -> list[str]:
    shape: Any = get_service_model("ec2").shape_for("InstanceType")
    return list(shape.enum)


def _wrong_architecture(call: Call) -> dict[str, str] | None:
    supported = INSTANCE_TYPES[call.type]["ProcessorInfo"]["SupportedArchitectures"]
    return None if call.image.architecture in supported else {"supported": ",".join(supported)}


def _unsupported_by_hosts(call: Call) -> dict[str, str] | None:
    """Return the requested features that hosts do not support in a launch, such as a subnet that is not
    routed."""
    if call.backend.tags[call.image.id].get("awsddp:hosts") == "none":
        return None
    data, subnet = call.user_data or b"", call.subnet
    block = IPv4Network(call.backend.default_vpc.cidr_block)
    unsupported = [f"{key} of the user data" for key in _cloud_config(data) if key not in USER_DATA_KEYS]
    if data and not data.startswith((b"#!", b"#cloud-config")):
        unsupported = ["user data that is neither a script nor a cloud-config"]
    if not IPv4Network(subnet.cidr_block).subnet_of(block):
        unsupported = [f"a launch into {subnet.cidr_block} ({subnet.id}): only {block} is routed"]
    return {"what": ", ".join(unsupported)} if unsupported else None


def _cloud_config(data: bytes) -> dict[str, Any]:
    """Return the cloud-config in user data, or {} if the text cannot be parsed. cloud-init reports such an
    error itself."""
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    config = None
    with suppress(yaml.YAMLError, ValueError):
        config = yaml.safe_load(data) if data.startswith(b"#cloud-config") else None
    return config if isinstance(config, dict) else {}


def _used_placement_group(call: Call) -> bool:
    alive = [row for row in call.backend.all_instances() if row.state != "terminated"]
    return any(row.placement.group_name == call.group for row in alive)


def _unknown_reservation(call: Call) -> dict[str, str] | None:
    ids = [call.named_reservation, call.arguments.get("CapacityReservationId")]
    ids += call.arguments.get("CapacityReservationIds", ())
    unknown = [key for key in ids if key and key not in offers.get_reservations(call.backend)]
    return {"id": unknown[0]} if unknown else None


def _wrong_state(call: Call) -> dict[str, str] | None:
    change, wrong_states = _WRONG_STATES[call.request.action]
    instances = call.backend.get_multi_instances_by_id(call.arguments.get("InstanceIds", ()))
    ids = [row.id for row in instances if row.state in wrong_states]
    return {"id": ids[0], "change": change} if ids else None


def _list_unreserved(call: Call) -> list[Any]:
    """Return the call's stopped instances whose reservation has no capacity for all of them."""
    instances = call.backend.get_multi_instances_by_id(call.arguments.get("InstanceIds", ()))
    stopped = [row for row in instances if row.state == "stopped"]
    counts = Counter(row.capacity_reservation_id for row in stopped)
    free = {key: row.available_instance_count for key, row in offers.get_reservations(call.backend).items()}
    full = {key for key, count in counts.items() if count > free.get(key, 0)}
    return [row for row in stopped if row.capacity_reservation_id in full]


def _full_reservation(call: Call) -> bool:
    """Return True if a reservation is full or does not match the launch; EC2 has the same error code for both
    cases.

    https://github.com/hashicorp/terraform-provider-aws/issues/32458
    """
    if call.request.action == "RunInstances":
        return bool(call.named_reservation) and call.reservation is None
    return any(hasattr(row, "capacity_reservation_specification") for row in _list_unreserved(call))


def _over_quota(call: Call, *, market: Market = "on-demand") -> dict[str, float] | None:
    """Return the quota, if any, that new reservations and instances outside a reservation would exceed."""
    if (market == "spot") != ("InstanceMarketOptions" in call.arguments):
        return None
    if call.request.action == "RunInstances" and call.reservation is not None:
        return None
    counts = Counter({call.type: call.arguments.get("InstanceCount", call.arguments["MaxCount"])})
    if call.request.action == "StartInstances":
        counts = Counter(row.instance_type for row in _list_unreserved(call))
    for instance_type, count in counts.items():
        limit = offers.find_exceeded_quota(call.backend, instance_type, count, market=market)
        if limit is not None:
            return {"limit": limit}
    return None


_WRONG_STATES = {
    "StopInstances": ("stopped", ("shutting-down", "terminated")),
    "StartInstances": ("started", ("shutting-down", "terminated", "stopping")),
    "RebootInstances": ("rebooted", ("shutting-down", "terminated", "stopping", "stopped")),
}
_INVALID = "InvalidParameterValue: Value ({value}) for parameter"
_LACKING = "UnsupportedOperation: The local cloud does not carry out"
_NAMING = r"(Create|Import)\w+"
_NAMES = "KeyName|GroupName|GroupDescription"
_TAGGING = "(?!Describe|Get|List|DeleteTags).*"
_USING = "(Run|Start)Instances|CreateCapacityReservation"
_LAUNCH: Checks = {
    "InvalidParameterValue: Value ({MinCount}) for parameter minCount is invalid. It must be at least 1 and "
    "at most maxCount ({MaxCount}).": lambda call: (
        not 1 <= call.arguments["MinCount"] <= call.arguments["MaxCount"]
    ),
    "InvalidParameterValue: Invalid BASE64 encoding of user data.": lambda call: call.user_data is None,
    f"InvalidParameterValue: User data is limited to {ec2_limits.MAX_USER_DATA_BYTES} bytes": (
        lambda call: len(call.user_data or b"") > ec2_limits.MAX_USER_DATA_BYTES
    ),
    f"{_INVALID} iamInstanceProfile.{{key}} is invalid. Invalid IAM Instance Profile {{what}}": (
        _unknown_profile
    ),
    "InvalidParameterCombination: Network interfaces and an instance-level security groups may not be "
    "specified on the same request": lambda call: (
        call.nics and {"SecurityGroupIds", "SecurityGroups"} & call.arguments.keys()
    ),
    "InvalidParameterCombination: The associatePublicIPAddress parameter cannot be specified when launching "
    "with multiple network interfaces.": lambda call: (
        len(call.nics) > 1 and any(nic.get("AssociatePublicIpAddress") for nic in call.nics)
    ),
    f"{_LACKING} further network interfaces, except an efa-only one on each further card.": (
        _unsupported_interfaces
    ),
    "InvalidGroup.NotFound: The security group '{group}' does not exist": _unknown_group,
    f"{_LACKING} more than one EBS volume (BlockDeviceMapping).": (
        lambda call: any(disk.get("DeviceName") != call.image.root_device_name for disk in call.disks)
    ),
    "InvalidBlockDeviceMapping: Volume of size {size}GB is smaller than snapshot "
    "'{call.image.ebs_snapshot.id}', expect size>= {least}GB": _small_disk,
    "InvalidParameterValue: Invalid value '{call.type}' for InstanceType.": (
        lambda call: call.type not in _list_types()
    ),
    "Unsupported: The requested configuration is currently not supported. Please check the documentation for "
    "supported configurations.": lambda call: not call.offered_zones,
    "InvalidParameterValue: The architecture '{supported}' of the specified instance type does not match the "
    "architecture '{call.image.architecture}' of the specified AMI. Specify an instance type and an AMI that "
    "have matching architectures, and try again.": _wrong_architecture,
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html
    "InvalidParameterValue: Value ({call.price}) for parameter price is invalid. It is not a number.": (
        lambda call: call.price is not None and not re.fullmatch(r"\d*\.?\d+", call.price)
    ),
    "SpotMaxPriceTooLow: Your Spot request price of {call.price} is lower than the minimum required Spot "
    "request fulfillment price of {call.least_price:.6f}.": lambda call: (
        call.price is not None and float(call.price) < call.least_price
    ),
    f"{_LACKING} {{what}}.": _unsupported_by_hosts,
}
ROWS: Checks = {
    ".*: FilterLimitExceeded: The maximum number of filter values specified on a single call is "
    f"{ec2_limits.MAX_FILTER_VALUES}": _long_filter,
    f"{_NAMING}: {_INVALID} {{name}} is invalid. Length exceeds maximum of 255.": (
        partial(_bad_text, _NAMES, r"[\s\S]{0,255}")
    ),
    f"{_NAMING}: {_INVALID} {{name}} is invalid. Character sets beyond ASCII are not supported.": (
        partial(_bad_text, _NAMES, r"[\x00-\x7f]*")
    ),
    f"CreateSecurityGroup: {_INVALID} {{name}} is invalid. Valid characters are a-zA-Z0-9 and "
    "._-:/()#,@[]+=&;{{}}!$*": partial(_bad_text, _NAMES, ec2_limits.GROUP_DESCRIPTION.pattern),
    f"CreateSecurityGroup: {_INVALID} {{name}} is invalid. Group names may not be in the format sg-*.": (
        partial(_bad_text, "GroupName", "(?!sg-).*")
    ),
    f"(?!Describe|Get|List).*: {_INVALID} clientToken is invalid. It must be at most "
    f"{ec2_limits.MAX_CLIENT_TOKEN} ASCII characters.": partial(
        _bad_text, "ClientToken", rf"[\x00-\x7f]{{0,{ec2_limits.MAX_CLIENT_TOKEN}}}"
    ),
    f"{_TAGGING}: InvalidTagKey.Malformed: Tag '' is not valid: its key is empty.": (
        lambda call: any("" in tags for tags in _tags(call))
    ),
    f"{_TAGGING}: InvalidParameterValue: Tag '{{key}}' is not valid: {{fault}}.": _bad_tag,
    f"{_TAGGING}: TagLimitExceeded: The maximum number of Tags for a resource has been reached.": (
        _too_many_tags
    ),
    "AuthorizeSecurityGroup.*: RulesPerSecurityGroupLimitExceeded: The maximum number of rules per security "
    "group has been reached.": _too_many_rules,
    "DeleteSubnet: DependencyViolation: The subnet '{SubnetId}' has dependencies and cannot be deleted.": (
        _used_subnet
    ),
    "DeleteVpc: DependencyViolation: The vpc '{VpcId}' has dependencies and cannot be deleted.": _used_vpc,
    "DeleteSecurityGroup: DependencyViolation: resource {GroupId} has a dependent object": _used_group,
    "DeleteNetworkInterface: InvalidNetworkInterface.InUse: Network interface '{NetworkInterfaceId}' is "
    "currently in use.": _used_interface,
    "(Stop|Start|Reboot)Instances: IncorrectInstanceState: The instance '{id}' is not in a state from which "
    "it can be {change}.": _wrong_state,
    "ModifyInstancePlacement: IncorrectInstanceState: The instance '{InstanceId}' is not in the 'stopped' "
    "state.": lambda call: call.backend.get_instance(call.arguments["InstanceId"]).state != "stopped",
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
    **{f"RunInstances: {row}": is_refused for row, is_refused in _LAUNCH.items()},
    "RunInstances|CreateCapacityReservation: Unsupported: Your requested instance type ({call.type}) is not "
    "supported in your requested Availability Zone ({call.zone}). Please retry your request by not "
    "specifying an Availability Zone or choosing {call.zones}.": lambda call: (
        call.zone not in call.offered_zones
    ),
    "CreatePlacementGroup: InvalidPlacementGroup.Duplicate: The Placement Group '{GroupName}' already "
    "exists.": lambda call: call.group in call.groups,
    "RunInstances|DeletePlacementGroup|ModifyInstancePlacement: InvalidPlacementGroup.Unknown: The Placement "
    "Group '{call.group}' is unknown.": lambda call: call.group and call.group not in call.groups,
    "DeletePlacementGroup: InvalidPlacementGroup.InUse: The placement group '{GroupName}' is in use and may "
    "not be deleted.": _used_placement_group,
    "RunInstances|(Describe|Cancel)CapacityReservations?: InvalidCapacityReservationId.NotFound: The "
    "capacity reservation ID '{id}' does not exist": _unknown_reservation,
    "(Run|Start)Instances: ReservationCapacityExceeded: The requested reservation does not have sufficient "
    "compatible and available capacity for this request.": _full_reservation,
    f"{_USING}: MaxSpotInstanceCountExceeded: Max spot instance count exceeded": (
        partial(_over_quota, market="spot")
    ),
    f"{_USING}: VcpuLimitExceeded: You have requested more vCPU capacity than your current vCPU limit of "
    "{limit:.0f} allows for the instance bucket that the specified instance type belongs to. Please visit "
    "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.": _over_quota,
    ".*ServiceQuota.*: NoSuchResourceException: The request failed because the specified quota does not "
    "exist.": lambda call: call.arguments.get("ServiceCode") != "ec2" or call.quota not in offers.QUOTAS,
    "RequestServiceQuotaIncrease: IllegalArgumentException: You must provide a quota value greater than the "
    "current quota value": (
        lambda call: float(call.arguments["DesiredValue"]) <= offers.get_quota_value(call.backend, call.quota)
    ),
    "GetParameter: ParameterNotFound: Parameter {Name} not found.": (
        lambda call: call.arguments.get("Name") not in offers.list_image_parameters(call.request.region)
    ),
}
"""The checks for the refusals, by operation pattern, error code and text."""
