"""What the local cloud carries out. Everything else that would change something is refused by name.

moto records far more than has an effect here: a volume that no node sees, a command that nobody runs.
"""

from __future__ import annotations

import base64
import email
import gzip
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from awsddp.local.requests import Refusal, Request

READS = ("Describe", "Get", "List", "Search")
EC2_CHANGES = frozenset(
    {
        *("RunInstances", "StartInstances", "StopInstances", "RebootInstances", "TerminateInstances"),
        *("ModifyInstanceAttribute", "ModifyInstanceMetadataOptions"),
        *("RequestSpotInstances", "CancelSpotInstanceRequests", "CreateFleet", "DeleteFleets"),
        *("CreateLaunchTemplate", "CreateLaunchTemplateVersion", "ModifyLaunchTemplate"),
        *("DeleteLaunchTemplate", "CreateTags", "DeleteTags"),
        *("AllocateAddress", "AssociateAddress", "DisassociateAddress", "ReleaseAddress"),
        *("AssociateIamInstanceProfile", "DisassociateIamInstanceProfile"),
        "ReplaceIamInstanceProfileAssociation",
        *("CreateKeyPair", "ImportKeyPair", "DeleteKeyPair"),
        *("CreatePlacementGroup", "DeletePlacementGroup"),
        *("CreateCapacityReservation", "CancelCapacityReservation"),
        *("CreateSecurityGroup", "DeleteSecurityGroup", "ModifySecurityGroupRules"),
        *("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"),
        *("RevokeSecurityGroupIngress", "RevokeSecurityGroupEgress"),
        "UpdateSecurityGroupRuleDescriptionsIngress",
        "UpdateSecurityGroupRuleDescriptionsEgress",
        *("CreateVpc", "DeleteVpc", "ModifyVpcAttribute", "CreateDefaultVpc"),
        *("CreateSubnet", "DeleteSubnet", "ModifySubnetAttribute"),
        *("CreateInternetGateway", "AttachInternetGateway", "DetachInternetGateway"),
        *("DeleteInternetGateway", "CreateRouteTable", "DeleteRouteTable", "CreateRoute", "DeleteRoute"),
        *("ReplaceRoute", "AssociateRouteTable", "DisassociateRouteTable", "ReplaceRouteTableAssociation"),
        *("CreateNetworkInterface", "DeleteNetworkInterface", "ModifyNetworkInterfaceAttribute"),
        *("CreateVolume", "DeleteVolume"),
    }
)
SSM_CHANGES = frozenset(
    {
        *("PutParameter", "DeleteParameter", "DeleteParameters", "LabelParameterVersion"),
        *("UnlabelParameterVersion", "AddTagsToResource", "RemoveTagsFromResource"),
    }
)
CHANGES = {"ec2": EC2_CHANGES, "ssm": SSM_CHANGES}
# Parameters of a launch that would need hardware that a node does not have.
LAUNCH_LACKS = re.compile(
    r"HibernationOptions\.Configured|EnclaveOptions\.Enabled|CpuOptions\..*|Ipv6Address.*|Placement\.Host.*"
    r"|(NetworkInterface\.\d+\.)?(SecondaryPrivateIpAddressCount|Ipv6.*)|ElasticGpuSpecification.*"
    r"|NetworkInterface\.\d+\.PrivateIpAddresses\.([2-9]|1\d)\..*"
)
# https://docs.cloud-init.io/en/latest/reference/modules.html: what nodes carry out, by mode.
_LOOPBACK_KEYS = frozenset(
    {"ssh_keys", "ssh_deletekeys", "ssh_pwauth", "write_files", "bootcmd", "runcmd", "packages"}
)
_NSPAWN_KEYS = _LOOPBACK_KEYS | {
    *("users", "groups", "user", "password", "chpasswd", "disable_root", "disable_root_opts"),
    *("ssh_authorized_keys", "ssh_import_id", "allow_public_ssh_keys", "no_ssh_fingerprints"),
    *("ssh", "ssh_genkeytypes", "ssh_quiet_keygen", "ssh_fp_console_blacklist", "ssh_key_console_blacklist"),
    *("hostname", "fqdn", "preserve_hostname", "prefer_fqdn_over_hostname", "create_hostname_file"),
    *("package_update", "final_message", "power_state", "output", "merge_how", "merge_type"),
}
USER_DATA_KEYS = {"nspawn": _NSPAWN_KEYS, "loopback": _LOOPBACK_KEYS}
ADDRESS_ACTIONS = frozenset({"AllocateAddress", "AssociateAddress"})


def check_action(request: Request, *, mode: str) -> None:
    """Refuse what would have no effect.

    :raises Refusal: UnsupportedOperation, or UnknownOperationException for other services than EC2.
    """
    carried = CHANGES.get(request.service)
    if carried is not None and request.action not in carried and not request.action.startswith(READS):
        raise not_carried_out(request.action, service=request.service)
    if mode == "loopback" and request.action in ADDRESS_ACTIONS:
        raise Refusal(
            "UnsupportedOperation",
            f"The local cloud does not carry out {request.action} in loopback mode.",
        )


def not_carried_out(action: str, *, service: str) -> Refusal:
    """The refusal of an operation of a service that is here."""
    if service == "ec2":
        return Refusal("UnsupportedOperation", f"The local cloud does not carry out {action}.")
    return Refusal("UnknownOperationException", f"The local cloud does not carry out {service}:{action}.")


def check_launch(request: Request, user_data_keys: frozenset[str] | None) -> None:
    """Refuse what of a launch no node would have.

    :param user_data_keys: the keys of a cloud-config that are carried out; None: all are accepted.
    :raises Refusal: UnsupportedOperation, which names it.
    """
    lacking = [name for name, value in request.parameters.items() if _lacks(name, value)]
    devices = [name for name in request.parameters if re.fullmatch(r"BlockDeviceMapping\.\d+\.Ebs\..*", name)]
    numbers = {name.split(".")[1] for name in devices}
    if len(numbers) > 1:
        lacking.append("more than one EBS volume (BlockDeviceMapping)")
    if user_data_keys is not None:
        user_data = base64.b64decode("".join(request.parameters.get("UserData", "").split()))
        for config in cloud_configs(user_data):
            lacking += [f"{key} of the user data" for key in config if key not in user_data_keys]
    if lacking:
        raise Refusal("UnsupportedOperation", f"The local cloud does not carry out {', '.join(lacking)}.")


def _lacks(name: str, value: str) -> bool:
    return LAUNCH_LACKS.fullmatch(name) is not None and value.lower() not in ("false", "0")


def cloud_configs(data: bytes) -> Iterator[dict[str, Any]]:
    """The cloud-configs in user data, each part of a multipart message by itself.

    What cannot be parsed is left to cloud-init, which complains in its own place.
    """
    if data.startswith(b"\x1f\x8b"):
        with suppress(OSError, EOFError):
            data = gzip.decompress(data)
    parts = [data]
    if data.lstrip()[:13].lower() in (b"content-type:", b"mime-version:"):
        message = email.message_from_bytes(data.lstrip())
        parts = [bytes(part.get_payload(decode=True) or b"") for part in message.walk()]
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    for part in parts:
        if part.lstrip().startswith(b"#cloud-config"):
            with suppress(yaml.YAMLError, ValueError):
                if isinstance(config := yaml.safe_load(part), dict):
                    yield config
