"""ModifyInstanceAttribute, in both of its forms, with its checks.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_ModifyInstanceAttribute.html
"""

from __future__ import annotations

import re
from typing import Any

from moto.ec2.utils import parse_user_data

from awsddp.local import refusals
from awsddp.local.requests import Refusal, Reply, Request, dry_run, ec2_reply

WHEN_STOPPED = ("InstanceType", "UserData", "EbsOptimized")
FLAGS = {
    "DisableApiTermination": "disable_api_termination",
    "DisableApiStop": "disable_api_stop",
    "EbsOptimized": "ebs_optimized",
}
DISK = re.compile(r"BlockDeviceMapping\.(\d+)\..*")


def modify(request: Request, backend: Any) -> Reply:
    """Change one attribute of an instance.

    :raises Refusal: with EC2's code; UnsupportedOperation for an attribute that would have no effect.
    """
    instance_id = request.parameters.get("InstanceId", "")
    instance = backend.get_instance_by_id(instance_id)
    if instance is None:
        raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist")
    values = _values(request)
    if len(values) != 1:
        raise Refusal(
            "InvalidParameterCombination",
            "No attributes specified."
            if not values
            else f"Fields for multiple attribute types specified: {', '.join(sorted(values))}",
        )
    ((name, value),) = values.items()
    if name in WHEN_STOPPED and instance.state != "stopped":
        raise Refusal(
            "IncorrectInstanceState", f"The instance '{instance_id}' is not in the 'stopped' state."
        )
    _check(name, value, instance, request, backend)
    if request.dry:
        raise dry_run()
    _set(name, value, instance, request, backend)
    return ec2_reply(request, "<return>true</return>")


def _values(request: Request) -> dict[str, str]:
    """The attributes that the request names: `InstanceType.Value=x`, or `Attribute=instanceType&Value=x`."""
    values = {}
    for name, value in request.parameters.items():
        if name.endswith(".Value") and name.count(".") == 1:
            values[name.partition(".")[0]] = value
        elif name.startswith("GroupId."):
            values["GroupId"] = ""
        elif name.startswith("BlockDeviceMapping."):
            values["BlockDeviceMapping"] = ""
    if attribute := request.parameters.get("Attribute"):
        name = attribute[:1].upper() + attribute[1:]
        values.setdefault({"GroupSet": "GroupId"}.get(name, name), request.parameters.get("Value", ""))
    return values


def _check(name: str, value: str, instance: Any, request: Request, backend: Any) -> None:
    if name == "InstanceInitiatedShutdownBehavior" and value not in ("stop", "terminate"):
        raise _invalid(value, "instanceInitiatedShutdownBehavior")
    if name in FLAGS and value.lower() not in ("true", "false"):
        raise _invalid(value, name[:1].lower() + name[1:])
    if name == "InstanceType":
        image = backend.amis.get(instance.image_id)
        refusals.check_type(value, image, region=request.region, zone=instance.placement.zone)
    elif name == "GroupId":
        _groups(request, instance, backend)
    elif name == "BlockDeviceMapping":
        _disks(request, instance)
    elif name not in (*FLAGS, "InstanceInitiatedShutdownBehavior", "UserData"):
        raise Refusal(
            "UnsupportedOperation", f"The local cloud does not carry out ModifyInstanceAttribute of {name}."
        )


def _set(name: str, value: str, instance: Any, request: Request, backend: Any) -> None:
    if name == "GroupId":
        instance.security_groups = _groups(request, instance, backend)
        instance.nics[0]._group_set = list(instance.security_groups)
    elif name == "BlockDeviceMapping":
        for device, kept in _disks(request, instance).items():
            instance.block_device_mapping[device].delete_on_termination = kept
    elif name in FLAGS:
        setattr(instance, FLAGS[name], value.lower() == "true")
    elif name == "UserData":
        instance.user_data = parse_user_data(value) if value else None
    elif name == "InstanceType":
        instance.instance_type = value
    else:
        instance.instance_initiated_shutdown_behavior = value


def _groups(request: Request, instance: Any, backend: Any) -> list[Any]:
    if len(instance.nics) > 1:
        raise Refusal(
            "InvalidInstanceID",
            f"There are multiple interfaces attached to instance '{instance.id}'. Please specify an "
            "interface ID for the operation instead.",
        )
    known = backend.groups.get(instance.nics[0].subnet.vpc_id, {})
    for group_id in request.listed("GroupId"):
        if group_id not in known:
            raise Refusal("InvalidGroup.NotFound", f"The security group '{group_id}' does not exist")
    return [known[group_id] for group_id in request.listed("GroupId")]


def _disks(request: Request, instance: Any) -> dict[str, bool]:
    """Which of the named disks end with the instance."""
    found = {}
    numbers = {match[1] for match in map(DISK.fullmatch, request.parameters) if match}
    for stem in (f"BlockDeviceMapping.{number}" for number in numbers):
        device = request.parameters.get(f"{stem}.DeviceName", "")
        if device not in instance.block_device_mapping:
            raise Refusal("InvalidInstanceAttributeValue", f"No device is currently mapped at {device}")
        found[device] = request.parameters.get(f"{stem}.Ebs.DeleteOnTermination", "").lower() == "true"
    return found


def _invalid(value: str, name: str) -> Refusal:
    return Refusal("InvalidParameterValue", f"Value ({value}) for parameter {name} is invalid.")
