"""A table with one row for each operation that the local cloud supports. The error for any other operation
contains its name.

moto also accepts operations that have no effect in the local cloud, such as creating a volume that no node
can use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moto.core.utils import get_service_model

from awsddp.local import iam, offers
from awsddp.local.ec2_http import Refusal, Request, invalid_value_error, unsupported_error

COMMON = ("Action", "Version", "DryRun")
TAGS = ("tag-key", "tag:")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Describes the supported part of an operation.

    `parameters` has the parameters' names as clients send them, but without list indexes. A name also covers
    nested names, such as NAME.FIELD. If `parameters` is empty, only the required parameters are supported.
    `creates` has the resource kinds that the operation creates and tags. `handler` replaces moto's handler.
    """

    parameters: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    creates: tuple[str, ...] = ()
    handler: Callable[[offers.Call], Any] | None = None


def _row(
    *parameters: str,
    filters: tuple[str, ...] = (),
    creates: tuple[str, ...] = (),
    handler: Callable[[offers.Call], Any] | None = None,
) -> Operation:
    return Operation(parameters=parameters, filters=filters, creates=creates, handler=handler)


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
# Parameters for which only these values are supported.
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
        creates=("instance", "volume", "network-interface", "spot-instances-request"),
        handler=offers.launch,
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
    "CreateKeyPair": _row("KeyName", "KeyType", creates=("key-pair",)),
    "ImportKeyPair": _row("KeyName", "PublicKeyMaterial", creates=("key-pair",)),
    "DescribeKeyPairs": _row("KeyName", "IncludePublicKey", filters=("key-name", *TAGS)),
    "DeleteKeyPair": _row("KeyName"),
    "CreatePlacementGroup": _row(
        "GroupName", "Strategy", creates=("placement-group",), handler=offers.create_placement_group
    ),
    "DescribePlacementGroups": _row(
        "GroupName", filters=("group-name", "state", *TAGS), handler=offers.describe_placement_groups
    ),
    "DeletePlacementGroup": _row("GroupName", handler=offers.delete_placement_group),
    "ModifyInstancePlacement": _row("InstanceId", "GroupName", handler=offers.modify_placement),
    "CreateSecurityGroup": _row("GroupName", "GroupDescription", "VpcId", creates=("security-group",)),
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
    "CreateVpc": _row("CidrBlock", creates=("vpc",)),
    "DescribeVpcs": _row("VpcId", filters=("cidr", "is-default", *TAGS)),
    "CreateSubnet": _row("VpcId", "CidrBlock", "AvailabilityZone", creates=("subnet",)),
    "DescribeSubnets": _row(
        "SubnetId", filters=("availability-zone", "default-for-az", "state", "subnet-id", "vpc-id", *TAGS)
    ),
    "CreateInternetGateway": _row(creates=("internet-gateway",)),
    "DescribeInternetGateways": _row("InternetGatewayId", filters=("attachment.vpc-id", *TAGS)),
    "CreateRouteTable": _row("VpcId", "ClientToken", creates=("route-table",)),
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
        creates=("capacity-reservation",),
        handler=offers.create_reservation,
    ),
    "DescribeCapacityReservations": _row(
        "CapacityReservationId", filters=("state", *TAGS), handler=offers.describe_reservations
    ),
    "CancelCapacityReservation": _row("CapacityReservationId", handler=offers.cancel_reservation),
    "DescribeImages": _row(
        "ImageId", "Owner", "IncludeDeprecated", filters=("architecture", "image-id", "name", "state")
    ),
    "DescribeInstanceTypes": _row("InstanceType"),
    "DescribeInstanceTypeOfferings": _row("LocationType", filters=("instance-type", "location")),
    "DescribeRegions": _row("AllRegions", "RegionName"),
    "DescribeAvailabilityZones": _row("ZoneName"),
    "DescribeSpotPriceHistory": _row(
        "InstanceType", "ProductDescription", "StartTime", handler=offers.spot_prices
    ),
}
_QUOTA = ("ServiceCode", "QuotaCode")
OPERATIONS: dict[str, dict[str, Operation]] = {
    "ec2": _EC2,
    "ssm": {
        "GetParameter": _row("Name", handler=offers.get_image_parameters),
        "GetParameters": _row("Names", handler=offers.get_image_parameters),
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
            *("PolicySourceArn", "ActionNames", "ResourceArns", "ContextEntries"), handler=iam.simulate
        ),
    },
    "s3": dict.fromkeys(iam.ACTIONS, _row()),  # handled in s3_api.py
    "kms": dict.fromkeys(
        ("CreateKey", "CreateAlias", "ListAliases", "DescribeKey", "EnableKey", "DisableKey"), _row()
    ),
    "servicequotas": {
        "GetServiceQuota": _row(*_QUOTA, handler=offers.handle_quota),
        "RequestServiceQuotaIncrease": _row(*_QUOTA, "DesiredValue", handler=offers.handle_quota),
    },
}


def find_operation(request: Request) -> Operation:
    """Return the row for a request's operation.

    :raises Refusal: the operation, a parameter, a value or a filter is not supported; the text says which.
    """
    service, action = request.service, request.action
    if service not in OPERATIONS:
        raise Refusal("UnknownOperationException", f"The local cloud has no service {service}.")
    row = OPERATIONS[service].get(action)
    if row is None:
        if service == "ec2" and action not in get_service_model("ec2").operation_names:
            raise Refusal("InvalidAction", f"The action {action} is not valid for this web service.")
        raise unsupported_error(action, service=service)
    supported = (*COMMON, *(row.parameters or _list_required(service, action)))
    supported += ("Filter",) if row.filters else ()
    supported += ("TagSpecification", "TagSpecifications") if row.creates else ()
    for numbered_name, value in request.parameters.items():
        name = re.sub(r"\.\d+(?=\.|$)", "", numbered_name)
        if not any(f"{name}.".startswith(f"{prefix}.") for prefix in supported):
            raise unsupported_error(f"{action} with {name}", service=service)
        is_tagged_kind = re.fullmatch(r"TagSpecifications?\.ResourceType", name)
        values = row.creates if is_tagged_kind else VALUES.get(name, (value,))
        if value not in values:
            raise invalid_value_error(value, name, f"The local cloud carries out {', '.join(values)}.")
    filters = request.arguments.get("Filters", ()) if row.filters else ()
    for filter_name in (entry["Name"] for entry in filters):
        if re.sub("^tag:.*", "tag:", filter_name) not in row.filters:
            raise Refusal("InvalidParameterValue", f"The filter '{filter_name}' is invalid")
    return row


def _list_required(service: str, action: str) -> list[str]:
    """Return the names of the required parameters, as they are sent."""
    shape: Any = get_service_model(service).operation_model(action).input_shape
    members = shape.required_members if shape else ()
    names = [shape.members[name].serialization.get("name", name) for name in members]
    return [f"{name[0].upper()}{name[1:]}" for name in names]
