"""What EC2 refuses and moto lets pass, as rows: the first one that finds something in a request counts."""

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
from awsddp.local.ec2_http import Refusal, kept
from awsddp.local.offers import Call
from awsddp.settings import ec2_limits

# What of a cloud-config hosts carry out: https://docs.cloud-init.io/en/latest/reference/modules.html
USER_DATA_KEYS = frozenset({"ssh_keys", "ssh_deletekeys", "ssh_pwauth", "write_files", "bootcmd", "runcmd"})


Found = dict[str, Callable[[Call], Any]]
"""A refusal, and what returns whether a call is refused so.

Instead of True it may return the words that the text names beside the call and its parameters.
"""


def check(call: Call) -> None:
    """Refuse what a row refuses; a launch that is sent again is not looked at again.

    :raises ServiceException: with EC2's code; moto's own for names of things that are not there.
    """
    request, asked, backend = call.request, call.asked, call.backend
    if request.action == "RunInstances":
        if asked.get("ClientToken") in kept(backend, "launches"):
            return
        _ = call.image
        backend.describe_key_pairs([asked.get("KeyName")])
    if request.action in ("CreateTags", "DeleteTags"):
        backend.get_multi_instances_by_id([one for one in asked.get("Resources", ()) if one.startswith("i-")])
    for row, found in ROWS.items():
        operations, code, text = row.split(": ", 2)
        if re.fullmatch(operations, request.action) and (words := found(call)):
            more = words if isinstance(words, dict) else {}
            raise Refusal(code, text.format(call=call, **asked, **more))


def _bad_text(names: str, right: str, call: Call) -> dict[str, str] | None:
    """Look at the parameters of these names (a pattern), which are to match another one."""
    for name, value in call.request.parameters.items():
        if re.fullmatch(names, name) and not re.fullmatch(right, value):
            return {"name": name, "value": value[:300]}
    return None


def _tags(call: Call) -> list[dict[str, str]]:
    """The tags that a call puts on things, by what it tags."""
    given = [one.get("Tags", ()) for one in (call.asked, *call.asked.get("TagSpecifications", ()))]
    return [{tag.get("Key", ""): tag.get("Value", "") for tag in tags} for tags in given]


def _long_filter(call: Call) -> bool:
    return any(len(one.get("Values", ())) > ec2_limits.FILTER_VALUES for one in call.asked.get("Filters", ()))


def _bad_tag(call: Call) -> dict[str, str] | None:
    for key, value in (pair for tags in _tags(call) for pair in tags.items()):
        if fault := ec2_limits.tag_fault(key, value):
            return {"key": key[:200], "fault": fault}
    return None


def _too_many_tags(call: Call) -> bool:
    things = [call.backend.tags.get(one, {}).keys() for one in call.asked.get("Resources", [""])]
    return any(len(has | tags.keys()) > ec2_limits.TAGS for has in things for tags in _tags(call))


def _too_many_rules(call: Call) -> bool:
    """Count the rules that a group has and gets: one that names a group counts as IPv4 and as IPv6."""
    group = call.backend.get_security_group_from_id(call.asked.get("GroupId", ""))
    if group is None:
        return False
    rules = group.ingress_rules if call.request.action.endswith("Ingress") else group.egress_rules
    asked = call.asked.get("IpPermissions", ())
    counts = [
        sum(bool(rule.source_group or rule.ip_range.get(key)) for rule in rules)
        + sum(len(one.get(kind, ())) + len(one.get("UserIdGroupPairs", ())) for one in asked)
        for kind, key in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6"))
    ]
    return max(counts) > ec2_limits.RULES


def _used_subnet(call: Call) -> bool:
    return any(one.subnet.id == call.asked.get("SubnetId") for one in call.backend.enis.values())


def _used_vpc(call: Call) -> bool:
    vpc_id = call.asked.get("VpcId", "")
    gateways = call.backend.describe_internet_gateways(filters={"attachment.vpc-id": [vpc_id]})
    groups = call.backend.groups.get(vpc_id, {}).values()
    return bool(gateways) or any(one.name != "default" for one in groups)


def _used_interface(call: Call) -> Any:
    return getattr(call.backend.enis.get(call.asked.get("NetworkInterfaceId")), "instance", None)


def _used_group(call: Call) -> bool:
    """Whether an interface, or a rule of another group, still needs a group."""
    wanted = call.asked.get("GroupId", "")
    users = {group.id for eni in call.backend.enis.values() for group in eni.group_set}
    users |= {
        rule.source_group.get("GroupId")
        for group in call.backend.describe_security_groups()
        for rule in (*group.ingress_rules, *group.egress_rules)
        if group.id != wanted
    }
    return wanted in users


def _unknown_profile(call: Call) -> dict[str, str] | None:
    known = iam_backends[DEFAULT_ACCOUNT_ID]["aws"].instance_profiles.values()
    for key, text in call.asked.get("IamInstanceProfile", {}).items():
        if text not in {one.name if key == "Name" else one.arn for one in known}:
            return {"value": text[:300], "key": key.lower(), "what": "ARN" if key == "Arn" else "name"}
    return None


def _other_interfaces(call: Call) -> bool:
    """A node has one interface: what is EFA alone is no device of the network."""
    kinds = [(nic.get("InterfaceType"), nic.get("NetworkCardIndex")) for nic in call.nics]
    return any(kind != ("efa-only", place) for place, kind in enumerate(kinds) if place)


def _unknown_group(call: Call) -> dict[str, str] | None:
    """moto makes one of an unknown id."""
    named = [
        *call.asked.get("SecurityGroupIds", ()),
        *(one for nic in call.nics for one in nic.get("Groups", ())),
    ]
    unknown = [one for one in named if call.backend.get_security_group_from_id(one) is None]
    return {"group": unknown[0]} if unknown else None


def _small_disk(call: Call) -> dict[str, int] | None:
    """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_EbsBlockDevice.html"""
    least = call.image.ebs_snapshot.volume.size
    sizes = [one.get("Ebs", {}).get("VolumeSize", least) for one in call.disks]
    return {"size": min(sizes), "least": least} if sizes and min(sizes) < least else None


def _known_types() -> list[str]:
    shape: Any = get_service_model("ec2").shape_for("InstanceType")
    return list(shape.enum)


def _other_architecture(call: Call) -> dict[str, str] | None:
    supported = INSTANCE_TYPES[call.type]["ProcessorInfo"]["SupportedArchitectures"]
    return None if call.image.architecture in supported else {"supported": ",".join(supported)}


def _not_of_a_host(call: Call) -> dict[str, str] | None:
    """What no host would have, where hosts boot. They are reached at addresses of the block alone."""
    if call.backend.tags[call.image.id].get("awsddp:hosts") == "none":
        return None
    data, subnet = call.user_data or b"", call.subnet
    block = IPv4Network(call.backend.default_vpc.cidr_block)
    missing = [f"{key} of the user data" for key in _cloud_config(data) if key not in USER_DATA_KEYS]
    if data and not data.startswith((b"#!", b"#cloud-config")):
        missing = ["user data that is neither a script nor a cloud-config"]
    if not IPv4Network(subnet.cidr_block).subnet_of(block):
        missing = [f"a launch into {subnet.cidr_block} ({subnet.id}): {block} alone is routed"]
    return {"what": ", ".join(missing)} if missing else None


def _cloud_config(data: bytes) -> dict[str, Any]:
    """The keys of user data. What cannot be parsed is left to cloud-init, which complains in its place."""
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    found = None
    with suppress(yaml.YAMLError, ValueError):
        found = yaml.safe_load(data) if data.startswith(b"#cloud-config") else None
    return found if isinstance(found, dict) else {}


def _used_placement_group(call: Call) -> bool:
    alive = [one for one in call.backend.all_instances() if one.state != "terminated"]
    return any(one.placement.group_name == call.group for one in alive)


def _unknown_reservation(call: Call) -> dict[str, str] | None:
    named = [call.named_reservation, call.asked.get("CapacityReservationId")]
    named += call.asked.get("CapacityReservationIds", ())
    unknown = [one for one in named if one and one not in offers.held(call.backend)]
    return {"id": unknown[0]} if unknown else None


def _wrong_state(call: Call) -> dict[str, str] | None:
    wish, wrong = _WRONG_STATES[call.request.action]
    named = call.backend.get_multi_instances_by_id(call.asked.get("InstanceIds", ()))
    return next(({"id": one.id, "wish": wish} for one in named if one.state in wrong), None)


def _outside(call: Call) -> list[Any]:
    """The stopped instances to be started that have no reservation, or no room in theirs."""
    named = call.backend.get_multi_instances_by_id(call.asked.get("InstanceIds", ()))
    stopped = [one for one in named if one.state == "stopped"]
    counts = Counter(one.capacity_reservation_id for one in stopped)
    free = {key: one.available_instance_count for key, one in offers.held(call.backend).items()}
    full = {key for key, count in counts.items() if count > free.get(key, 0)}
    return [one for one in stopped if one.capacity_reservation_id in full]


def _full_reservation(call: Call) -> bool:
    """No code tells one without room from one that does not fit.

    https://github.com/hashicorp/terraform-provider-aws/issues/32458
    """
    if call.request.action == "RunInstances":
        return bool(call.named_reservation) and call.reservation is None
    return any(hasattr(one, "capacity_reservation_specification") for one in _outside(call))


def _over_quota(call: Call, *, market: Market = "on-demand") -> dict[str, float] | None:
    """Held against a quota: launches and starts outside of a reservation, and reserved machines."""
    if (market == "spot") != ("InstanceMarketOptions" in call.asked):
        return None
    if call.request.action == "RunInstances" and call.reservation is not None:
        return None
    counts = Counter({call.type: call.asked.get("InstanceCount", call.asked["MaxCount"])})
    if call.request.action == "StartInstances":
        counts = Counter(one.instance_type for one in _outside(call))
    over = [offers.exceeded_limit(call.backend, name, count, market=market) for name, count in counts.items()]
    return next(({"limit": one} for one in over if one is not None), None)


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
_LAUNCH: Found = {
    "InvalidParameterValue: Value ({MinCount}) for parameter minCount is invalid. It must be at least 1 and "
    "at most maxCount ({MaxCount}).": lambda call: not 1 <= call.asked["MinCount"] <= call.asked["MaxCount"],
    "InvalidParameterValue: Invalid BASE64 encoding of user data.": lambda call: call.user_data is None,
    f"InvalidParameterValue: User data is limited to {ec2_limits.USER_DATA_BYTES} bytes": (
        lambda call: len(call.user_data or b"") > ec2_limits.USER_DATA_BYTES
    ),
    f"{_INVALID} iamInstanceProfile.{{key}} is invalid. Invalid IAM Instance Profile {{what}}": (
        _unknown_profile
    ),
    "InvalidParameterCombination: Network interfaces and an instance-level security groups may not be "
    "specified on the same request": lambda call: (
        call.nics and {"SecurityGroupIds", "SecurityGroups"} & call.asked.keys()
    ),
    "InvalidParameterCombination: The associatePublicIPAddress parameter cannot be specified when launching "
    "with multiple network interfaces.": lambda call: (
        len(call.nics) > 1 and any(one.get("AssociatePublicIpAddress") for one in call.nics)
    ),
    f"{_LACKING} network interfaces beside the first, but an efa-only one of each further card.": (
        _other_interfaces
    ),
    "InvalidGroup.NotFound: The security group '{group}' does not exist": _unknown_group,
    f"{_LACKING} more than one EBS volume (BlockDeviceMapping).": (
        lambda call: any(one.get("DeviceName") != call.image.root_device_name for one in call.disks)
    ),
    "InvalidBlockDeviceMapping: Volume of size {size}GB is smaller than snapshot "
    "'{call.image.ebs_snapshot.id}', expect size>= {least}GB": _small_disk,
    "InvalidParameterValue: Invalid value '{call.type}' for InstanceType.": (
        lambda call: call.type not in _known_types()
    ),
    "Unsupported: The requested configuration is currently not supported. Please check the documentation for "
    "supported configurations.": lambda call: not call.offered,
    "InvalidParameterValue: The architecture '{supported}' of the specified instance type does not match the "
    "architecture '{call.image.architecture}' of the specified AMI. Specify an instance type and an AMI that "
    "have matching architectures, and try again.": _other_architecture,
    # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-request-status.html
    "InvalidParameterValue: Value ({call.price}) for parameter price is invalid. It is no number.": (
        lambda call: call.price is not None and not re.fullmatch(r"\d*\.?\d+", call.price)
    ),
    "SpotMaxPriceTooLow: Your Spot request price of {call.price} is lower than the minimum required Spot "
    "request fulfillment price of {call.least_price:.6f}.": lambda call: (
        call.price is not None and float(call.price) < call.least_price
    ),
    f"{_LACKING} {{what}}.": _not_of_a_host,
}
ROWS: Found = {
    ".*: FilterLimitExceeded: The maximum number of filter values specified on a single call is "
    f"{ec2_limits.FILTER_VALUES}": _long_filter,
    f"{_NAMING}: {_INVALID} {{name}} is invalid. Length exceeds maximum of 255.": (
        partial(_bad_text, _NAMES, r"[\s\S]{0,255}")
    ),
    f"{_NAMING}: {_INVALID} {{name}} is invalid. Character sets beyond ASCII are not supported.": (
        partial(_bad_text, _NAMES, r"[\x00-\x7f]*")
    ),
    f"CreateSecurityGroup: {_INVALID} {{name}} is invalid. Valid characters are a-zA-Z0-9 and "
    "._-:/()#,@[]+=&;{{}}!$*": partial(_bad_text, _NAMES, ec2_limits.GROUP_TEXT.pattern),
    f"CreateSecurityGroup: {_INVALID} {{name}} is invalid. Group names may not be in the format sg-*.": (
        partial(_bad_text, "GroupName", "(?!sg-).*")
    ),
    f"(?!Describe|Get|List).*: {_INVALID} clientToken is invalid. It must be at most "
    f"{ec2_limits.CLIENT_TOKEN} ASCII characters.": partial(
        _bad_text, "ClientToken", rf"[\x00-\x7f]{{0,{ec2_limits.CLIENT_TOKEN}}}"
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
    "it can be {wish}.": _wrong_state,
    "ModifyInstancePlacement: IncorrectInstanceState: The instance '{InstanceId}' is not in the 'stopped' "
    "state.": lambda call: call.backend.get_instance(call.asked["InstanceId"]).state != "stopped",
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RunInstances.html
    **{f"RunInstances: {row}": found for row, found in _LAUNCH.items()},
    "RunInstances|CreateCapacityReservation: Unsupported: Your requested instance type ({call.type}) is not "
    "supported in your requested Availability Zone ({call.zone}). Please retry your request by not "
    "specifying an Availability Zone or choosing {call.zones}.": lambda call: call.zone not in call.offered,
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
    "exist.": lambda call: call.asked.get("ServiceCode") != "ec2" or call.quota not in offers.QUOTAS,
    "RequestServiceQuotaIncrease: IllegalArgumentException: You must provide a quota value greater than the "
    "current quota value": (
        lambda call: float(call.asked["DesiredValue"]) <= offers.quota_value(call.backend, call.quota)
    ),
    "GetParameter: ParameterNotFound: Parameter {Name} not found.": (
        lambda call: call.asked.get("Name") not in offers.parameters(call.request.region)
    ),
}
"""The operations (a pattern), the code and the text."""
