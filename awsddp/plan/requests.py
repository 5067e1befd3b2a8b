"""The calls that a plan makes: as data with placeholders, and resolved to what is sent."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from awsddp.plan.records import LaunchPlan, Request, utc, write_numbers


def resolve(
    plan: LaunchPlan, *, ids: Mapping[str, str], secrets: Mapping[str, str], now: datetime
) -> tuple[Request, ...]:
    """Return the plan's requests as they are sent. Raises KeyError for an id or secret that is not given."""
    return tuple(resolve_request(item, ids=ids, secrets=secrets, now=now) for item in plan.requests)


def resolve_request(
    request: Request, *, ids: Mapping[str, str], secrets: Mapping[str, str], now: datetime
) -> Request:
    """Return one request with ids, secrets and times put in (times in UTC, as "2026-11-21T08:45:00Z")."""

    def put(value: Any) -> Any:
        match value:
            case {"$ref": name}:
                return ids[name]
            case {"$secret": name}:
                return secrets[name]
            case {"$now": later}:
                return utc(now + timedelta(seconds=later))
            case dict():
                return {key: put(item) for key, item in value.items()}
            case list():
                return [put(item) for item in value]
        return value

    return Request(request.operation, put(request.parameters))


def requests(plan: LaunchPlan, *, vpc: str, tags: Mapping[str, str]) -> tuple[Request, ...]:
    group = {"$ref": "security_group"}
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    common = {
        "awsddp:cluster": plan.cluster,
        "awsddp:id": {"$ref": "cluster_id"},
        "awsddp:owner": plan.owner,
        "awsddp:created": {"$now": 0},
        **tags,
    }
    return (
        Request(
            "ImportKeyPair",
            {
                "KeyName": {"$ref": "name"},
                "PublicKeyMaterial": {"$secret": "public_key"},
                "TagSpecifications": [_tagged("key-pair", common)],
            },
        ),
        Request(
            "CreateSecurityGroup",
            {
                "GroupName": {"$ref": "name"},
                "Description": f"awsddp cluster {plan.cluster}",
                "VpcId": vpc,
                "TagSpecifications": [_tagged("security-group", common)],
            },
        ),
        Request(
            "AuthorizeSecurityGroupIngress",
            {"GroupId": group, "IpPermissions": [inside, *map(_ssh_permission, plan.ssh_cidrs)]},
        ),
        Request("AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [inside]}),
        _run_instances(plan, common),
    )


def _ssh_permission(cidr: str) -> dict[str, Any]:
    ranges = {"Ipv6Ranges": [{"CidrIpv6": cidr}]} if ":" in cidr else {"IpRanges": [{"CidrIp": cidr}]}
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, **ranges}


def _tagged(kind: str, tags: Mapping[str, Any]) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _run_instances(plan: LaunchPlan, common: Mapping[str, Any]) -> Request:
    named = {"Name": f"awsddp-{plan.cluster}", **common}
    instance = {
        **named,
        "awsddp:nodes": write_numbers(plan.numbers),
        "awsddp:expires": {"$now": plan.expires_s},
    }
    root = {
        "VolumeSize": plan.disk_gb,
        "VolumeType": "gp3",
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    nic = {
        "DeviceIndex": 0,
        "SubnetId": {"$ref": "subnet"},
        "Groups": [{"$ref": "security_group"}],
        "AssociatePublicIpAddress": True,
        "DeleteOnTermination": True,
    }
    return Request(
        "RunInstances",
        {
            "ClientToken": {"$ref": "client_token"},
            "ImageId": plan.image.id,
            "InstanceType": plan.instance_type,
            "MinCount": len(plan.numbers),
            "MaxCount": len(plan.numbers),
            "KeyName": {"$ref": "name"},
            "UserData": {"$secret": "user_data"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {
                "HttpEndpoint": "enabled",
                "HttpTokens": "required",
                "HttpPutResponseHopLimit": 1,
            },
            "BlockDeviceMappings": [{"DeviceName": plan.image.root_device, "Ebs": root}],
            "NetworkInterfaces": [nic],
            "TagSpecifications": [
                _tagged("instance", instance),
                _tagged("volume", named),
                _tagged("network-interface", named),
            ],
        },
    )
