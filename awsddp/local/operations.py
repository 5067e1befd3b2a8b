"""What the local cloud carries out: one row for each operation. Everything else is refused by name.

moto records far more than has an effect here: a volume that no node sees, a command that nobody runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moto.core.utils import get_service_model

from awsddp.local import iam, offers
from awsddp.local.ec2_http import Refusal, Request, invalid, lacking

COMMON = ("Action", "Version", "DryRun")
TAGS = ("tag-key", "tag:")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What of an operation is carried out.

    Names of parameters are as they are sent, without their numbers; each stands for all that is below it,
    too; none: those that must be there. `makes`: the kinds of resources that it makes and tags. `answer`
    takes moto's place.
    """

    parameters: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    answer: Callable[[offers.Call], Any] | None = None


def _row(*parameters: str, **more: Any) -> Operation:
    return Operation(parameters=parameters, **more)


_LAUNCH = (
    *("ImageId", "InstanceType", "MinCount", "MaxCount", "ClientToken", "KeyName", "UserData", "SubnetId"),
    *("SecurityGroupId", "SecurityGroup", "IamInstanceProfile.Name", "IamInstanceProfile.Arn"),
    *("InstanceInitiatedShutdownBehavior", "Placement.AvailabilityZone", "Placement.GroupName"),
    *(f"MetadataOptions.Http{name}" for name in ("Endpoint", "Tokens", "PutResponseHopLimit")),
    "BlockDeviceMapping.DeviceName",
    *(f"BlockDeviceMapping.Ebs.{name}" for name in ("VolumeSize", "VolumeType", "Encrypted", "KmsKeyId")),
    "BlockDeviceMapping.Ebs.DeleteOnTermination",
    *(f"NetworkInterface.{name}" for name in ("DeviceIndex", "NetworkCardIndex", "InterfaceType")),
    *(f"NetworkInterface.{name}" for name in ("SubnetId", "SecurityGroupId", "AssociatePublicIpAddress")),
    *("NetworkInterface.DeleteOnTermination", "InstanceMarketOptions.MarketType"),
    *(f"InstanceMarketOptions.SpotOptions.{name}" for name in ("MaxPrice", "SpotInstanceType")),
    "InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior",
    "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId",
)
_RULES = _row(
    "GroupId",
    *(f"IpPermissions.{name}" for name in ("IpProtocol", "FromPort", "ToPort", "IpRanges", "Ipv6Ranges")),
    *(f"IpPermissions.Groups.{name}" for name in ("GroupId", "UserId", "Description")),
)
# Parameters that have an effect with these values alone.
VALUES = {
    "Attribute": ("instanceInitiatedShutdownBehavior",),
    "BlockDeviceMapping.Ebs.DeleteOnTermination": ("true",),
    "BlockDeviceMapping.Ebs.VolumeType": ("gp3",),
    "InstanceInitiatedShutdownBehavior": ("stop", "terminate"),
    "InstanceMarketOptions.MarketType": ("spot",),
    "InstanceMarketOptions.SpotOptions.InstanceInterruptionBehavior": ("terminate",),
    "InstanceMarketOptions.SpotOptions.SpotInstanceType": ("one-time",),
    "MetadataOptions.HttpEndpoint": ("enabled", "disabled"),
    "MetadataOptions.HttpTokens": ("optional", "required"),
    "NetworkInterface.DeleteOnTermination": ("true",),
    "NetworkInterface.InterfaceType": ("interface", "efa", "efa-only"),
    "ProductDescription": (offers.PRODUCT, f"{offers.PRODUCT} (Amazon VPC)"),
    "Strategy": ("cluster",),
    "Value": ("stop", "terminate"),
}
_EC2: dict[str, Operation] = {
    "RunInstances": _row(
        *_LAUNCH,
        makes=("instance", "volume", "network-interface", "spot-instances-request"),
        answer=offers.launch,
    ),
    "DescribeInstances": _row(
        "InstanceId",
        "MaxResults",
        "NextToken",
        filters=(
            *("availability-zone", "image-id", "instance-id", "instance-state-name", "instance-type"),
            *("instance.group-id", "key-name", "private-ip-address", "subnet-id", "vpc-id", *TAGS),
        ),
    ),
    "DescribeInstanceStatus": _row("InstanceId", "IncludeAllInstances"),
    **dict.fromkeys(
        (
            *("StartInstances", "StopInstances", "RebootInstances", "TerminateInstances"),
            *("DescribeInstanceAttribute", "DisassociateIamInstanceProfile", "AssociateIamInstanceProfile"),
            *("CreateTags", "DeleteNetworkInterface", "DeleteVolume", "DeleteSubnet", "DeleteVpc"),
            *("AttachInternetGateway", "DetachInternetGateway", "DeleteInternetGateway"),
            *("DeleteRouteTable", "DisassociateRouteTable"),
        ),
        _row(),
    ),
    "ModifyInstanceAttribute": _row("InstanceId", "Attribute", "Value"),
    "DescribeIamInstanceProfileAssociations": _row("AssociationId"),
    "DeleteTags": _row("ResourceId", "Tag"),
    "DescribeTags": _row(filters=("key", "resource-id", "resource-type", "value")),
    "CreateKeyPair": _row("KeyName", "KeyType", makes=("key-pair",)),
    "ImportKeyPair": _row("KeyName", "PublicKeyMaterial", makes=("key-pair",)),
    "DescribeKeyPairs": _row("KeyName", "IncludePublicKey", filters=("key-name", *TAGS)),
    "DeleteKeyPair": _row("KeyName"),
    "CreatePlacementGroup": _row(
        "GroupName", "Strategy", makes=("placement-group",), answer=offers.create_group
    ),
    "DescribePlacementGroups": _row(
        "GroupName", filters=("group-name", "state", *TAGS), answer=offers.describe_groups
    ),
    "DeletePlacementGroup": _row("GroupName", answer=offers.delete_group),
    "ModifyInstancePlacement": _row("InstanceId", "GroupName", answer=offers.move),
    "CreateSecurityGroup": _row("GroupName", "GroupDescription", "VpcId", makes=("security-group",)),
    "DescribeSecurityGroups": _row(
        "GroupId", "GroupName", filters=("group-id", "group-name", "vpc-id", *TAGS)
    ),
    "DeleteSecurityGroup": _row("GroupId"),
    **{
        f"{verb}SecurityGroup{side}": _RULES
        for verb in ("Authorize", "Revoke")
        for side in ("Ingress", "Egress")
    },
    "DescribeNetworkInterfaces": _row(
        "NetworkInterfaceId", filters=("attachment.instance-id", "group-id", "subnet-id", "vpc-id", *TAGS)
    ),
    "DescribeVolumes": _row("VolumeId", "MaxResults", filters=("attachment.instance-id", *TAGS)),
    "CreateVpc": _row("CidrBlock", makes=("vpc",)),
    "DescribeVpcs": _row("VpcId", filters=("cidr", "is-default", *TAGS)),
    "CreateSubnet": _row("VpcId", "CidrBlock", "AvailabilityZone", makes=("subnet",)),
    "DescribeSubnets": _row(
        "SubnetId", filters=("availability-zone", "default-for-az", "state", "subnet-id", "vpc-id", *TAGS)
    ),
    "CreateInternetGateway": _row(makes=("internet-gateway",)),
    "DescribeInternetGateways": _row("InternetGatewayId", filters=("attachment.vpc-id", *TAGS)),
    "CreateRouteTable": _row("VpcId", "ClientToken", makes=("route-table",)),
    "DescribeRouteTables": _row("RouteTableId", filters=("vpc-id", *TAGS)),
    "CreateRoute": _row("RouteTableId", "DestinationCidrBlock", "GatewayId"),
    "DeleteRoute": _row("RouteTableId", "DestinationCidrBlock"),
    "AssociateRouteTable": _row("RouteTableId", "SubnetId"),
    "CreateVpcEndpoint": _row("VpcId", "ServiceName", "RouteTableId"),
    "DescribeVpcEndpoints": _row("VpcEndpointId", filters=("vpc-id",)),
    "DeleteVpcEndpoints": _row("VpcEndpointId"),
    "CreateCapacityReservation": _row(
        *("InstanceType", "InstancePlatform", "AvailabilityZone", "InstanceCount"),
        *("InstanceMatchCriteria", "EndDate", "EndDateType"),
        makes=("capacity-reservation",),
        answer=offers.create_reservation,
    ),
    "DescribeCapacityReservations": _row(
        "CapacityReservationId", filters=("state", *TAGS), answer=offers.describe_reservations
    ),
    "CancelCapacityReservation": _row("CapacityReservationId", answer=offers.cancel_reservation),
    "DescribeImages": _row(
        "ImageId", "Owner", "IncludeDeprecated", filters=("architecture", "image-id", "name", "state")
    ),
    "DescribeInstanceTypes": _row("InstanceType"),
    "DescribeInstanceTypeOfferings": _row("LocationType", filters=("instance-type", "location")),
    "DescribeRegions": _row("AllRegions", "RegionName"),
    "DescribeAvailabilityZones": _row("ZoneName"),
    "DescribeSpotPriceHistory": _row(
        "InstanceType", "ProductDescription", "StartTime", answer=offers.spot_prices
    ),
}
_QUOTA = ("ServiceCode", "QuotaCode")
OPERATIONS: dict[str, dict[str, Operation]] = {
    "ec2": _EC2,
    "ssm": {
        "GetParameter": _row("Name", answer=offers.image_parameters),
        "GetParameters": _row("Names", answer=offers.image_parameters),
    },
    "sts": {
        "GetCallerIdentity": _row(),
        "AssumeRole": _row("RoleArn", "RoleSessionName", "DurationSeconds"),
    },
    "iam": {
        **dict.fromkeys(
            (
                *("CreateUser", "AddRoleToInstanceProfile", "RemoveRoleFromInstanceProfile"),
                *("PutRolePolicy", "DeleteRolePolicy", "GetRolePolicy", "ListRolePolicies"),
                *("GetRole", "DeleteRole", "GetInstanceProfile", "DeleteInstanceProfile"),
                "ListInstanceProfiles",
            ),
            _row(),
        ),
        "CreateAccessKey": _row("UserName"),
        "CreateRole": _row("RoleName", "AssumeRolePolicyDocument", "Description", "Tags"),
        "CreateInstanceProfile": _row("InstanceProfileName", "Path", "Tags"),
        "SimulatePrincipalPolicy": _row(
            *("PolicySourceArn", "ActionNames", "ResourceArns", "ContextEntries"), answer=iam.simulate
        ),
    },
    "s3": dict.fromkeys(iam.ACTIONS, _row()),  # carried out in s3_api.py
    "kms": dict.fromkeys(
        ("CreateKey", "CreateAlias", "ListAliases", "DescribeKey", "EnableKey", "DisableKey"), _row()
    ),
    "servicequotas": {
        "GetServiceQuota": _row(*_QUOTA, answer=offers.quota),
        "RequestServiceQuotaIncrease": _row(*_QUOTA, "DesiredValue", answer=offers.quota),
    },
}


def find(request: Request) -> Operation:
    """Return the row of a request's operation.

    :raises Refusal: the operation, a parameter, a value or a filter that is not carried out, by its name.
    """
    service, action = request.service, request.action
    if service not in OPERATIONS:
        raise Refusal("UnknownOperationException", f"The local cloud has no service {service}.")
    row = OPERATIONS[service].get(action)
    if row is None:
        if service == "ec2" and action not in get_service_model("ec2").operation_names:
            raise Refusal("InvalidAction", f"The action {action} is not valid for this web service.")
        raise lacking(action, service=service)
    known = (*COMMON, *(row.parameters or _required(service, action)))
    known += ("Filter",) if row.filters else ()
    known += ("TagSpecification", "TagSpecifications") if row.makes else ()
    for name, value in request.parameters.items():
        plain = re.sub(r"\.\d+(?=\.|$)", "", name)
        if not any(f"{plain}.".startswith(f"{one}.") for one in known):
            raise lacking(f"{action} with {plain}", service=service)
        of_tags = re.fullmatch(r"TagSpecifications?\.ResourceType", plain)
        values = row.makes if of_tags else VALUES.get(plain, (value,))
        if value not in values:
            raise invalid(value, plain, f"The local cloud carries out {', '.join(values)}.")
    for one in request.asked.get("Filters", ()) if row.filters else ():
        if re.sub("^tag:.*", "tag:", one["Name"]) not in row.filters:
            raise Refusal("InvalidParameterValue", f"The filter '{one['Name']}' is invalid")
    return row


def _required(service: str, action: str) -> list[str]:
    """Return the parameters that must be there, as they are sent."""
    shape: Any = get_service_model(service).operation_model(action).input_shape
    names = shape.required_members if shape else ()
    sent = [shape.members[name].serialization.get("name", name) for name in names]
    return [f"{name[0].upper()}{name[1:]}" for name in sent]
