"""The instance metadata service of each host, on its own 169.254.169.254, as version 2 asks for it.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-categories.html, and for the tokens
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
"""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core.utils import utcnow
from moto.sts.models import sts_backends

LONGEST_S = 21600
SESSION_S = 21600
RENEWED_S = 3600  # before credentials expire, new ones are handed out
TOKEN = "x-aws-ec2-metadata-token"
TTL = "x-aws-ec2-metadata-token-ttl-seconds"

Answer = tuple[int, bytes]


def answer(instance: Any, *, method: str, path: str, headers: Mapping[str, str], secret: str) -> Answer:
    """The reply to a request from inside an instance: HTTP status and body.

    :param headers: by lower-case name.
    :param secret: signs the tokens, so that they outlive the daemon.
    """
    options = instance.metadata_options
    if options.http_endpoint == "disabled":
        return 403, b""
    if path == "/latest/api/token":
        return _token(instance.id, method, headers, secret)
    if method not in ("GET", "HEAD"):
        return 405, b""
    given = headers.get(TOKEN)
    if given is None and options.http_tokens == "required":
        return 401, b""
    if given is not None and not _valid(given, instance.id, secret):
        return 401, b""
    if path.rstrip("/") == "/latest/user-data":
        data = base64.b64decode(str(instance.user_data or ""))
        return (200, data) if data else (404, b"")
    return _read(_tree(instance), path)


def _token(instance_id: str, method: str, headers: Mapping[str, str], secret: str) -> Answer:
    if method != "PUT":
        return 405, b""
    if "x-forwarded-for" in headers:  # a proxy in between: never meant to be asked through one
        return 403, b""
    lifetime = headers.get(TTL, "")
    if not lifetime.isdigit() or not 1 <= int(lifetime) <= LONGEST_S:
        return 400, b""
    until = str(int(time.time()) + int(lifetime))
    return 200, f"{until}.{_sign(until, instance_id, secret)}".encode()


def _valid(token: str, instance_id: str, secret: str) -> bool:
    until, _, signature = token.partition(".")
    known = hmac.compare_digest(signature.encode(), _sign(until, instance_id, secret).encode())
    return known and int(until) > time.time()


def _sign(until: str, instance_id: str, secret: str) -> str:
    return hmac.digest(secret.encode(), f"{instance_id} {until}".encode(), "sha256").hex()


def _read(tree: dict[str, Any], path: str) -> Answer:
    """A leaf's text, or the names in a folder, those of folders with a slash."""
    found: Any = tree
    for name in [part for part in path.split("/") if part]:
        if not isinstance(found, dict) or name not in found:
            return 404, b""
        found = found[name]
    if isinstance(found, dict):
        return 200, "\n".join(f"{k}/" if isinstance(v, dict) else k for k, v in found.items()).encode()
    return 200, str(found).encode()


def _tree(instance: Any) -> dict[str, Any]:
    nics = {nic.mac_address: _interface(nic) for nic in instance.nics.values()}
    pair = instance.ec2_backend.key_pairs.get(instance.key_name)
    facts: dict[str, Any] = {
        "ami-id": instance.image_id,
        "ami-launch-index": instance.ami_launch_index,
        "hostname": instance.private_dns_name,
        "instance-action": "none",
        "instance-id": instance.id,
        "instance-life-cycle": instance.lifecycle or "on-demand",
        "instance-type": instance.instance_type,
        "local-hostname": instance.private_dns_name,
        "local-ipv4": instance.private_ip,
        "mac": instance.nics[0].mac_address,
        "network": {"interfaces": {"macs": nics}},
        "placement": {
            "availability-zone": instance.placement.zone,
            "group-name": instance.placement.group_name,
            "region": instance.region_name,
        },
        "public-ipv4": instance.public_ip,
        "public-keys": {"0": {"openssh-key": pair.material_public.decode().strip()}} if pair else None,
        "security-groups": "\n".join(group.name for group in instance.nics[0].group_set),
        "services": {"domain": "amazonaws.com", "partition": "aws"},
    }
    if instance.metadata_options.instance_metadata_tags == "enabled":
        facts["tags"] = {"instance": {tag["key"]: tag["value"] for tag in instance.get_tags()}}
    document = {
        "accountId": instance.owner_id,
        "architecture": instance.architecture,
        "availabilityZone": instance.placement.zone,
        "imageId": instance.image_id,
        "instanceId": instance.id,
        "instanceType": instance.instance_type,
        "pendingTime": f"{instance.launch_time:%Y-%m-%dT%H:%M:%SZ}",
        "privateIp": instance.private_ip,
        "region": instance.region_name,
        "version": "2017-09-30",
    }
    facts["iam"] = _role(instance)
    facts["spot"] = _notice(instance)
    meta_data = {name: value for name, value in facts.items() if value not in (None, "")}
    dynamic = {"instance-identity": {"document": json.dumps(document, indent=2)}}
    return {"latest": {"dynamic": dynamic, "meta-data": meta_data}}


def _notice(instance: Any) -> dict[str, str] | None:
    """When a spot instance will be taken back; None while nobody has said so.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    at = getattr(instance, "reclaimed_at", None)
    if at is None:
        return None
    moment = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {
        "instance-action": json.dumps({"action": "terminate", "time": moment}),
        "termination-time": moment,
    }


def _role(instance: Any) -> dict[str, Any] | None:
    """The instance profile and its role's credentials; None without one.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html
    """
    profile = _profile(instance)
    if profile is None:
        return None
    info = {
        "Code": "Success",
        "LastUpdated": f"{instance.launch_time:%Y-%m-%dT%H:%M:%SZ}",
        "InstanceProfileArn": profile.arn,
        "InstanceProfileId": profile.id,
    }
    roles = {role.name: json.dumps(_credentials(instance, role), indent=2) for role in profile.roles}
    return {"info": json.dumps(info, indent=2), "security-credentials": roles}


def _profile(instance: Any) -> Any:
    association = instance.ec2_backend.iam_instance_profile_associations.get(instance.id)
    return None if association is None else association.iam_instance_profile


def _credentials(instance: Any, role: Any) -> dict[str, str]:
    session = instance.role_session
    return {
        "Code": "Success",
        "LastUpdated": f"{session.expiration - timedelta(seconds=SESSION_S):%Y-%m-%dT%H:%M:%SZ}",
        "Type": "AWS-HMAC",
        "AccessKeyId": session.access_key_id,
        "SecretAccessKey": session.secret_access_key,
        "Token": session.session_token,
        "Expiration": f"{session.expiration:%Y-%m-%dT%H:%M:%SZ}",
    }


def renew_role(instance: Any) -> bool:
    """Make new credentials for the instance's role where it has none that last; true if it did."""
    profile = _profile(instance)
    session: Any = getattr(instance, "role_session", None)
    if profile is None or not profile.roles:
        return False
    arn = profile.roles[0].arn
    lasts = session is not None and session.expiration > utcnow() + timedelta(seconds=RENEWED_S)
    if lasts and session.role_arn == arn:
        return False
    instance.role_session = sts_backends[instance.owner_id]["aws"].assume_role(
        region_name=instance.region_name,
        role_session_name=instance.id,
        role_arn=arn,
        policy="",
        duration=SESSION_S,
        external_id="",
    )
    return True


def _interface(nic: Any) -> dict[str, Any]:
    return {
        "device-number": nic.device_index,
        "interface-id": nic.id,
        "local-ipv4s": nic.private_ip_address,
        "mac": nic.mac_address,
        "security-group-ids": "\n".join(group.id for group in nic.group_set),
        "subnet-id": nic.subnet.id,
        "vpc-id": nic.subnet.vpc_id,
    }
