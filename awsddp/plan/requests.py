"""Build a plan's requests, as data with placeholders, and resolve the placeholders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from awsddp.model.records import format_node_numbers
from awsddp.plan.records import Facts, LaunchPlan, Parameters, Request
from awsddp.settings.spec import ClusterSpec
from awsddp.util.formatting import utc


@dataclass(frozen=True, kw_only=True)
class RequestValues:
    """The values for the placeholders in a plan's requests: ids and secrets by name, and the start time."""

    ids: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    now: datetime

    def resolve(self, request: Request, **ids: str) -> Request:
        """Return the request without placeholders (times in UTC, as "2026-11-21T08:45:00Z").

        `ids` are used in addition to this object's ids. Raises KeyError for an id or secret without a value.
        """
        all_ids = {**self.ids, **ids}

        def put(value: Any) -> Any:
            match value:
                case {"$ref": name}:
                    return all_ids[name]
                case {"$secret": name}:
                    return self.secrets[name]
                case {"$now": later}:
                    return utc(self.now + timedelta(seconds=later))
                case dict():
                    return {key: put(item) for key, item in value.items()}
                case list():
                    return [put(item) for item in value]
            return value

        return Request(request.operation, put(request.parameters))


def build_requests(plan: LaunchPlan, spec: ClusterSpec, facts: Facts) -> tuple[Request, ...]:
    """Return the requests that carry out the plan, in order; the user's own resources are not created.

    Returns () for a plan that launches no nodes.
    """
    if not plan.numbers:
        return ()
    common = {
        "awsddp:cluster": plan.cluster,
        "awsddp:id": {"$ref": "cluster_id"},
        "awsddp:owner": plan.owner,
        "awsddp:created": {"$now": 0},
        **({"awsddp:host": facts.host} if facts.host else {}),
        **dict(sorted(spec.tags.items())),
    }
    calls = []
    if spec.access.key is None:
        key = {"KeyName": {"$ref": "name"}, "PublicKeyMaterial": {"$secret": "public_key"}}
        calls.append(
            Request("ImportKeyPair", {**key, "TagSpecifications": [_tag_specification("key-pair", common)]})
        )
    if facts.group is None:
        calls += _group_requests(plan, facts.subnets[0].vpc, common)
    if plan.placement:
        placement = {"GroupName": plan.placement, "Strategy": "cluster"}
        tagged = {"TagSpecifications": [_tag_specification("placement-group", common)]}
        calls.append(Request("CreatePlacementGroup", placement | tagged))
    return (*calls, _run_instances(plan, spec, facts, common))


def _group_requests(plan: LaunchPlan, vpc: str, common: Parameters) -> list[Request]:
    group = {"$ref": "security_group"}
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    return [
        Request(
            "CreateSecurityGroup",
            {
                "GroupName": {"$ref": "name"},
                "Description": f"awsddp cluster {plan.cluster}",
                "VpcId": vpc,
                "TagSpecifications": [_tag_specification("security-group", common)],
            },
        ),
        Request(
            "AuthorizeSecurityGroupIngress",
            {"GroupId": group, "IpPermissions": [inside, *map(ssh_permission, plan.ssh_cidrs)]},
        ),
        Request("AuthorizeSecurityGroupEgress", {"GroupId": group, "IpPermissions": [inside]}),
    ]


def ssh_permission(cidr: str) -> Parameters:
    """Return the rule that allows SSH from an address block, or from a security group's members."""
    source: Parameters = {"IpRanges": [{"CidrIp": cidr}]}
    if cidr.startswith("sg-"):
        source = {"UserIdGroupPairs": [{"GroupId": cidr}]}
    elif ":" in cidr:
        source = {"Ipv6Ranges": [{"CidrIpv6": cidr}]}
    return {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, **source}


def _tag_specification(kind: str, tags: Parameters) -> Parameters:
    return {"ResourceType": kind, "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}


def _run_instances(plan: LaunchPlan, spec: ClusterSpec, facts: Facts, common: Parameters) -> Request:
    named = {"Name": f"awsddp-{plan.cluster}", **common}
    instance = {
        **named,
        "awsddp:nodes": format_node_numbers(plan.numbers),
        "awsddp:expires": {"$now": plan.expires_s},
        **({"awsddp:gpus": "pretended"} if plan.pretended and not plan.image.rehearses else {}),
    }
    options = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    disk = {"VolumeSize": plan.disk_gb, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    if spec.access.kms_key:
        disk["KmsKeyId"] = spec.access.kms_key
    profile = spec.access.instance_profile or ""
    by = "Arn" if profile.startswith("arn:") else "Name"
    kinds = ["volume", "network-interface", *(["spot-instances-request"] if plan.market == "spot" else [])]
    return Request(
        "RunInstances",
        {
            "ClientToken": {"$ref": "client_token"},
            "ImageId": plan.image.id,
            "InstanceType": plan.instance_type,
            "MinCount": len(plan.numbers),
            "MaxCount": len(plan.numbers),
            "KeyName": spec.access.key or {"$ref": "name"},
            "UserData": {"$secret": "user_data"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": options,
            "BlockDeviceMappings": [{"DeviceName": plan.image.root_device, "Ebs": disk}],
            "NetworkInterfaces": _interfaces(plan, spec, facts.group.id if facts.group else None),
            **_market(plan, facts),
            **({"Placement": {"GroupName": plan.placement}} if plan.placement else {}),
            **({"IamInstanceProfile": {by: profile}} if profile else {}),
            "TagSpecifications": [
                _tag_specification("instance", instance),
                *(_tag_specification(kind, named) for kind in kinds),
            ],
        },
    )


def _interfaces(plan: LaunchPlan, spec: ClusterSpec, group: str | None) -> list[Parameters]:
    """Return a node's interfaces: one for each network card if EFA uses several cards, otherwise only one.

    The first interface has the address; each other card has an EFA-only interface as its device 1:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
    """
    common = {
        "SubnetId": {"$ref": "subnet"},
        "Groups": [group or {"$ref": "security_group"}],
        "DeleteOnTermination": True,
    }
    first: Parameters = {"DeviceIndex": 0}
    cards = range(1, plan.kind.cards) if plan.efa.count > 1 else range(0)
    if plan.efa.count:
        plain = plan.kind.cards > plan.kind.efa
        first |= {"NetworkCardIndex": 0, "InterfaceType": "interface" if plain else "efa"}
    if not cards:
        first["AssociatePublicIpAddress"] = spec.network.address == "public"
    further = [{"DeviceIndex": 1, "NetworkCardIndex": card, "InterfaceType": "efa-only"} for card in cards]
    return [{**interface, **common} for interface in (first, *further)]


def _market(plan: LaunchPlan, facts: Facts) -> Parameters:
    """Return the parameters that request the market.

    A spot request is one-time, so that it never starts instances later.
    """
    requested: Parameters = {}
    if plan.market == "spot":
        options = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
        requested["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": options}
    elif plan.market == "capacity-block":
        requested["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
    if facts.reservation is not None:
        target = {"CapacityReservationId": facts.reservation.id}
        requested["CapacityReservationSpecification"] = {"CapacityReservationTarget": target}
    return requested
