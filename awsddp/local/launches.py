"""Every operation that launches instances: RunInstances, RequestSpotInstances, CreateFleet.

Each becomes one or more RunInstances calls with plain parameters (no template, every interface in a subnet),
which pass the same checks whatever the operation was.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from xml.sax.saxutils import escape

from awsddp.local import placement, refusals, reservations, scope
from awsddp.local.emulator import Emulator
from awsddp.local.requests import Refusal, Reply, Request, ec2_reply, under
from awsddp.local.store import Launch, Store

ACTIONS = frozenset({"RunInstances", "RequestSpotInstances", "CreateFleet"})
TEMPLATE_ACTIONS = frozenset({"CreateLaunchTemplate", "CreateLaunchTemplateVersion"})
NOT_COMPARED = ("ClientToken", "DryRun")  # what may differ when a launch is sent again
CAPACITY = "TargetCapacitySpecification."
# Parameters of a fleet's override that RunInstances does not have.
FLEET_ONLY = ("MaxPrice", "Priority", "WeightedCapacity", "AvailabilityZone")
# Refusals that a fleet of type instant reports beside what it could launch.
CAPACITY_REFUSALS = frozenset(
    {
        "MaxSpotInstanceCountExceeded",
        "ReservationCapacityExceeded",
        "Unsupported",
        "VcpuLimitExceeded",
    }
)

Parameters = dict[str, str]


class Launcher:
    """Launches instances. The caller holds the emulator's lock."""

    def __init__(
        self,
        emulator: Emulator,
        store: Store,
        *,
        routed: bool,
        user_data_keys: frozenset[str] | None,
        forward: Callable[[Request], Reply],
    ) -> None:
        """
        :param routed: instances have hosts, which only subnets in the block can reach.
        :param user_data_keys: what of a cloud-config the hosts carry out; None accepts everything.
        :param forward: sends a request to moto.
        """
        self._emulator = emulator
        self._store = store
        self._routed = routed
        self._user_data_keys = user_data_keys
        self._forward = forward

    def answer(self, request: Request, backend: Any) -> Reply:
        """Return the reply to one of ACTIONS. A client token sent again gets the same launch again.

        :raises Refusal: with EC2's code.
        """
        digest = _digest(request)
        key = (request.region, request.parameters.get("ClientToken", ""))
        if key[1] and (earlier := self._store.launches.get(key)):
            return _replay(earlier, digest, backend)
        before = self._ids()
        if request.action == "RunInstances":
            reply, _ = self._run(request, backend)
        elif request.action == "RequestSpotInstances":
            reply = self._request_spot(request, backend)
        else:
            reply = self._create_fleet(request, backend)
        if key[1] and (launched := self._ids() - before):
            self._store.launches[key] = Launch(digest, reply, tuple(launched))
        return reply

    def _ids(self) -> set[str]:
        return {instance.id for instance in self._emulator.instances()}

    def _run(self, request: Request, backend: Any) -> tuple[Reply, list[Any]]:
        """Carry out RunInstances: the reply and the new instances."""
        parameters = {**_with_template(request.parameters, backend), "Action": "RunInstances"}
        request = replace(request, action="RunInstances", parameters=parameters)
        refusals.check_launch(request, backend)
        scope.check_launch(request, self._user_data_keys)
        placement.check_known(request.parameters.get("Placement.GroupName", ""), backend)
        request = _with_subnets(request, backend)
        if self._routed:
            refusals.check_subnet(request, backend, self._emulator.block)
        refusals.check_addresses(request, backend)
        reserved = refusals.check_capacity(request, backend)
        before = self._ids()
        reply = self._forward(request)
        launched = [instance for instance in self._emulator.instances() if instance.id not in before]
        if launched:
            _tag_interfaces(request, launched)
            _give_role(request, backend, launched)
            placement.remember(request, launched)
            reservations.remember(request, launched, reserved)
        return reply, launched

    def _request_spot(self, request: Request, backend: Any) -> Reply:
        """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RequestSpotInstances.html"""
        count = request.parameters.get("InstanceCount", "1")
        wanted = {
            **under(request.parameters, "LaunchSpecification."),
            **_kept(request.parameters),
            **_spot(request.parameters.get("SpotPrice")),
            "MinCount": count,
            "MaxCount": count,
        }
        reply, launched = self._run(replace(request, parameters=wanted), backend)
        if not launched:
            return reply
        backend.launched_for_spot = list(launched)  # moto's records of the requests take them from here
        try:
            return self._forward(request)
        finally:
            del backend.launched_for_spot

    def _create_fleet(self, request: Request, backend: Any) -> Reply:
        """https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateFleet.html"""
        kind = request.parameters.get("Type", "maintain")
        if kind == "maintain":
            raise Refusal(
                "UnsupportedOperation",
                "The local cloud does not carry out fleets of type maintain: use instant or request.",
            )
        options = list(_fleet_options(request.parameters))
        launched: list[Any] = []
        errors, items = "", ""
        for market, capacity in _capacities(request.parameters):
            for option in options:
                try:
                    reply, made = self._run(_fleet_launch(request, option, market, capacity), backend)
                except Refusal as refusal:
                    if not launched and refusal.code not in CAPACITY_REFUSALS:
                        raise
                    errors += _fleet_error(refusal, market)
                    continue
                if not made:
                    return reply
                launched += made
                items += _fleet_item(made, market)
                break
        inside = f"<fleetId>{self._record_fleet(request, backend, launched)}</fleetId>"
        if kind == "instant":
            inside += f"<errorSet>{errors}</errorSet><fleetInstanceSet>{items}</fleetInstanceSet>"
        return ec2_reply(request, inside)

    def _record_fleet(self, request: Request, backend: Any, launched: list[Any]) -> str:
        """Have moto record a fleet without capacity, give it the instances, return its id."""
        empty = {
            name: value for name, value in request.parameters.items() if not name.startswith(CAPACITY)
        } | {f"{CAPACITY}TotalTargetCapacity": "0"}
        reply = self._forward(replace(request, parameters=empty))
        found = re.search(rb"<fleetId>([^<]+)", reply[2])
        if found is None:
            raise Refusal("InvalidFleetConfig", "The fleet's configuration is not valid.")
        fleet = backend.get_fleet(found[1].decode())
        fleet.on_demand_instances = [{"id": None, "instance": one} for one in launched]
        fleet.fulfilled_capacity = fleet.target_capacity = len(launched)
        return str(fleet.id)


def remember_template(request: Request, backend: Any) -> None:
    """Keep a new template's parameters as they came: moto's launches use a few of them alone."""
    template = _template(request.parameters, backend)
    version = template.versions[-1]
    data = under(request.parameters, "LaunchTemplateData.")
    if source := request.parameters.get("SourceVersion"):
        earlier = _version(template, source)
        data = _merged(earlier.parameters, data)
        version.data = {**earlier.data, **version.data}
    version.parameters = data


def _template(parameters: Parameters, backend: Any) -> Any:
    """The launch template that parameters name.

    :raises Refusal: it does not exist.
    """
    template_id, name = (parameters.get(f"LaunchTemplate{key}") for key in ("Id", "Name"))
    for template in backend.launch_templates.values():
        if template.id == template_id or template.name == name:
            return template
    kind = "Id" if template_id else "Name"
    raise Refusal(
        f"InvalidLaunchTemplate{kind}.NotFoundException",
        f"The specified launch template, with template {kind.lower()} {template_id or name}, does not exist.",
    )


def _version(template: Any, number: str) -> Any:
    named = {"$latest": len(template.versions), "$default": template.default_version_number}
    for version in template.versions:
        if str(version.number) == str(named.get(number.lower(), number)):
            return version
    raise Refusal(
        "InvalidLaunchTemplateId.VersionNotFound",
        f"Could not find launch template version {number} of {template.id}.",
    )


def _with_template(parameters: Parameters, backend: Any) -> Parameters:
    """The parameters of a launch, completed by those of its launch template."""
    chosen = under(parameters, "LaunchTemplate.")
    if not chosen:
        return parameters
    version = _version(_template(chosen, backend), chosen.get("Version", "$Default"))
    given = {name: value for name, value in parameters.items() if not name.startswith("LaunchTemplate.")}
    merged = _merged(version.parameters, given)
    if "SubnetId" in given and "NetworkInterface.1.DeviceIndex" in merged:
        merged["NetworkInterface.1.SubnetId"] = merged.pop("SubnetId")
    return merged


def _merged(base: Parameters, changes: Parameters) -> Parameters:
    """`base` with each parameter replaced, as a whole, that `changes` has."""
    changed = {name.partition(".")[0] for name in changes}
    return {name: value for name, value in base.items() if name.partition(".")[0] not in changed} | changes


def _with_subnets(request: Request, backend: Any) -> Request:
    """The launch with a subnet for the instance or for each of its new interfaces.

    :raises Refusal: MissingInput: no default subnet fits.
    """
    parameters = dict(request.parameters)
    interfaces = {name.split(".")[1] for name in parameters if name.startswith("NetworkInterface.")}
    stems = [f"NetworkInterface.{number}." for number in sorted(interfaces)] or [""]
    for stem in stems:
        if {f"{stem}SubnetId", f"{stem}NetworkInterfaceId"} & set(parameters):
            continue
        subnet = parameters.get("NetworkInterface.1.SubnetId") or refusals.default_subnet(request, backend)
        if subnet is None:
            raise Refusal("MissingInput", "No default subnet can take this instance type. Specify a subnet.")
        parameters[f"{stem}SubnetId"] = subnet
    parameters["MinCount"] = parameters.get("MaxCount", "1")  # moto launches MinCount
    image = backend.amis.get(parameters.get("ImageId"))
    return replace(request, parameters=_with_disks(parameters, image))


def _with_disks(parameters: Parameters, image: Any) -> Parameters:
    """The launch with a size for the root volume, and without instance store, which EC2 ignores for NVMe.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/block-device-mapping-concepts.html
    """
    mappings = under(parameters, "BlockDeviceMapping.")
    kept = {name: value for name, value in parameters.items() if not name.startswith("BlockDeviceMapping.")}
    numbers = {name.split(".")[0] for name in mappings if ".Ebs." in name}
    for place, number in enumerate(sorted(numbers, key=int), 1):
        for name, value in under(mappings, f"{number}.").items():
            kept[f"BlockDeviceMapping.{place}.{name}"] = value
        size = str(image.ebs_snapshot.volume.size)
        if f"{number}.Ebs.SnapshotId" not in mappings:
            kept.setdefault(f"BlockDeviceMapping.{place}.Ebs.VolumeSize", size)
    return kept


def _kept(parameters: Parameters) -> Parameters:
    """What every launch takes over from the request that it is part of."""
    return {
        name: value
        for name, value in parameters.items()
        if name in ("Version", "DryRun") or name.startswith("TagSpecification.")
    }


def _spot(max_price: str | None) -> Parameters:
    price = {"InstanceMarketOptions.SpotOptions.MaxPrice": max_price} if max_price else {}
    return {"InstanceMarketOptions.MarketType": "spot", **price}


def _fleet_options(parameters: Parameters) -> Iterator[Parameters]:
    """The launches that a fleet may make, in the order in which they are tried: template and override."""
    configs = under(parameters, "LaunchTemplateConfigs.")
    for number in sorted({int(name.split(".")[0]) for name in configs}):
        config = under(configs, f"{number}.")
        template = {
            f"LaunchTemplate.{name}": value
            for name, value in under(config, "LaunchTemplateSpecification.").items()
        }
        overrides = under(config, "Overrides.")
        numbers = sorted({int(name.split(".")[0]) for name in overrides})
        chosen = [under(overrides, f"{one}.") for one in numbers] or [{}]
        for override in sorted(chosen, key=lambda one: float(one.get("Priority", "inf"))):
            yield {**template, **override}


def _capacities(parameters: Parameters) -> Iterator[tuple[str, int]]:
    """How much a fleet wants of each market."""
    wanted = under(parameters, CAPACITY)
    default = wanted.get("DefaultTargetCapacityType", "on-demand")
    counts = {
        "on-demand": int(wanted.get("OnDemandTargetCapacity", "0")),
        "spot": int(wanted.get("SpotTargetCapacity", "0")),
    }
    counts[default] += int(wanted.get("TotalTargetCapacity", "0")) - sum(counts.values())
    yield from ((market, count) for market, count in counts.items() if count > 0)


def _fleet_launch(request: Request, option: Parameters, market: str, capacity: int) -> Request:
    """The RunInstances of a fleet for one of its options.

    :raises Refusal: the option is described by requirements instead of a type.
    """
    if any(name.startswith("InstanceRequirements.") for name in option):
        raise Refusal("UnsupportedOperation", "The local cloud does not carry out InstanceRequirements.")
    count = str(math.ceil(capacity / float(option.get("WeightedCapacity", "1"))))
    parameters = {name: value for name, value in option.items() if name not in FLEET_ONLY}
    if zone := option.get("AvailabilityZone"):
        parameters["Placement.AvailabilityZone"] = zone
    tags = _kept(request.parameters)
    if request.parameters.get("TagSpecification.1.ResourceType") == "fleet":
        tags = {name: value for name, value in tags.items() if not name.startswith("TagSpecification.")}
    spot = _spot(option.get("MaxPrice")) if market == "spot" else {}
    return replace(request, parameters={**tags, **parameters, **spot, "MinCount": count, "MaxCount": count})


def _fleet_item(instances: list[Any], market: str) -> str:
    ids = "".join(f"<item>{instance.id}</item>" for instance in instances)
    return (
        f"<item><lifecycle>{market}</lifecycle><instanceIds>{ids}</instanceIds>"
        f"<instanceType>{escape(instances[0].instance_type)}</instanceType></item>"
    )


def _fleet_error(refusal: Refusal, market: str) -> str:
    return (
        f"<item><lifecycle>{market}</lifecycle><errorCode>{escape(refusal.code)}</errorCode>"
        f"<errorMessage>{escape(refusal.message)}</errorMessage></item>"
    )


def _digest(request: Request) -> str:
    compared = sorted((k, v) for k, v in request.parameters.items() if k not in NOT_COMPARED)
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _replay(earlier: Launch, digest: str, backend: Any) -> Reply:
    if earlier.digest != digest:
        raise Refusal(
            "IdempotentParameterMismatch",
            "Arguments on this idempotent request are inconsistent with arguments used in previous "
            "request(s).",
        )
    alive = {
        instance.id
        for reservation in backend.reservations.values()
        for instance in reservation.instances
        if instance.state not in ("shutting-down", "terminated")
    }
    if not alive & set(earlier.instance_ids):
        raise Refusal(
            "IdempotentInstanceTerminated",
            "The instances launched with this client token have been terminated. Please use a new token.",
        )
    return earlier.reply


def _tag_interfaces(request: Request, instances: list[Any]) -> None:
    """Add the tags for network interfaces of the launch, which moto drops."""
    tags: dict[str, str] = {}
    number = 1
    while kind := request.parameters.get(f"TagSpecification.{number}.ResourceType"):
        stem = f"TagSpecification.{number}.Tag"
        count = 1
        while kind == "network-interface" and (name := request.parameters.get(f"{stem}.{count}.Key")):
            tags[name] = request.parameters.get(f"{stem}.{count}.Value", "")
            count += 1
        number += 1
    for instance in instances:
        for nic in instance.nics.values():
            nic.add_tags(tags)


def _give_role(request: Request, backend: Any, instances: list[Any]) -> None:
    """Associate the instance profile of the launch, which moto gives to the first instance only."""
    name, arn = (request.parameters.get(f"IamInstanceProfile.{key}") for key in ("Name", "Arn"))
    for instance in instances if name or arn else ():
        if instance.id not in backend.iam_instance_profile_associations:
            backend.associate_iam_instance_profile(
                instance.id, iam_instance_profile_name=name, iam_instance_profile_arn=arn
            )
