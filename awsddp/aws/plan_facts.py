"""Read the facts for a plan from AWS, including the image; independent reads run in parallel."""

import ipaddress
import re
import socket
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from typing import Any, TypeVar

from awsddp.aws import account_resources, prices
from awsddp.aws.api_errors import AwsRefused, none_if_refused
from awsddp.aws.client import AwsClient, Reply, Shape
from awsddp.aws.clusters import Filters, tags_of
from awsddp.compat import releases
from awsddp.compat.types import GPU_TYPES, GpuType, Market, find_quota
from awsddp.errors import ConfigError
from awsddp.model.records import TargetName
from awsddp.plan.network import ssh_cidrs
from awsddp.plan.records import Facts, Image, OwnGroup
from awsddp.settings.spec import ClusterSpec
from awsddp.util.parallel import run_each, run_in_thread

T = TypeVar("T")
_MARKETS: dict[str | None, Market] = {"spot": "spot", "capacity-block": "capacity-block"}
"""Maps EC2's InstanceLifecycle to the market; an instance with any other value is on-demand."""
# The characters that AWS allows in a tag:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
_NO_TAG = re.compile(r"[^\w .:/=+@-]")
# Each of these services returns the client's public address over HTTPS.
ADDRESS_SOURCES = ("https://checkip.amazonaws.com", "https://api.ipify.org")


def gather_facts(
    aws: AwsClient,
    spec: ClusterSpec,
    *,
    caller_address: str | None,
    target: TargetName = "aws",
    cluster_id: str = "",
) -> Facts:
    """Return the facts that a plan for `spec` needs, for a new cluster or the cluster `cluster_id`.

    `caller_address` is this machine's address as the nodes see it. If it is None, and neither
    `network.ssh_cidr` nor `network.jump` is set, two internet services are queried for the address. Raises
    CloudError if AWS cannot be read, or ConfigError if a resource that `spec` names does not exist.
    """

    def read_if_set(read: Callable[[AwsClient, str], T], name: str | None, default: T) -> Future[T]:
        return run_in_thread(lambda: read(aws, name) if name else default)

    # The longest chain of calls starts first. The identity is requested next, because this call fails quickly
    # if the credentials are invalid, and the error ends the wait.
    image = run_in_thread(find_image, aws, spec.cluster.image)
    caller = run_in_thread(aws.identity)
    subnets = run_in_thread(account_resources.find_subnets, aws, spec.network.subnet)
    callers = run_in_thread(_callers, spec, caller_address)
    key = read_if_set(account_resources.read_own_key, spec.access.key, "")
    role = read_if_set(account_resources.find_role, spec.access.instance_profile, None)
    checks: list[Future[Any]] = [
        run_in_thread(account_resources.check_ssh_groups, aws, spec.network.ssh_cidr),
        role,
        read_if_set(account_resources.check_disk_key, spec.access.kms_key, None),
    ]
    reserved = read_if_set(account_resources.find_reservation, spec.capacity.reservation, None)
    if spec.capacity.reservation:
        caller.result()
    reservation = reserved.result()
    requested_types = spec.cluster.types or ((reservation.instance_type,) if reservation else ())
    type_names = sorted({*GPU_TYPES, *requested_types})
    offers = run_in_thread(_offers, aws, type_names)
    described = {
        name: run_in_thread(_describe_type, aws, name) for name in requested_types if name not in GPU_TYPES
    }
    quotas = {code: run_in_thread(_quota, aws, code) for code in _quota_codes(spec, requested_types)}
    used = run_in_thread(_used_vcpus, aws, cluster_id)
    listed = run_in_thread(
        prices.read_on_demand_prices, aws, type_names, named=next(iter(requested_types), None)
    )
    on_spot = type_names if spec.cluster.spot else []
    market = run_in_thread(prices.read_spot_prices, aws, on_spot)
    budgeted = on_spot if spec.cluster.budget_usd is not None else []
    highest = run_in_thread(
        prices.read_spot_prices, aws, budgeted and (requested_types or type_names), days=7
    )
    group = read_if_set(partial(_own_group, spec, callers), spec.network.security_group, None)
    owner = caller.result().user_id
    reads: list[Future[Any]] = [image, subnets, callers, key, offers, listed, market, highest, group]
    wait([used, *checks, *reads, *described.values(), *quotas.values()])
    for check in checks:
        check.result()
    login_end = aws.credentials_end()
    return Facts(
        region=aws.region,
        target=target,
        owner=owner,
        offers=offers.result(),
        image=image.result().as_requested(rehearse=spec.local.gpus == "on"),
        subnets=subnets.result(),
        quotas={code: future.result() for code, future in quotas.items()},
        used_vcpus=used.result(),
        callers=callers.result(),
        described={name: future.result() for name, future in described.items()},
        prices=listed.result(),
        price_date=datetime.now(UTC).strftime("%Y-%m-%d"),
        spot_prices=market.result(),
        highest_spot_prices=highest.result(),
        group=group.result(),
        public_key=key.result(),
        reservation=reservation,
        host=_NO_TAG.sub("-", socket.gethostname())[:256],
        credentials_s=None if login_end is None else (login_end - datetime.now(UTC)).total_seconds(),
        role=role.result(),
    )


def _own_group(
    spec: ClusterSpec, callers: "Future[tuple[str, ...]]", aws: AwsClient, group_id: str
) -> OwnGroup:
    cidrs = ssh_cidrs(spec, ()) if spec.network.ssh_cidr else callers.result()
    return account_resources.read_own_group(aws, group_id, cidrs=cidrs, efa=spec.capacity.efa)


class _Region(Shape):
    region_name: str


def list_enabled_regions(aws: AwsClient) -> tuple[str, ...]:
    """Return the regions that the account has enabled. Raises CloudError."""
    regions = aws.read(_Region, "DescribeRegions", {"AllRegions": False})
    return tuple(sorted(region.region_name for region in regions))


class _Offering(Shape):
    instance_type: str
    location: str


def _offers(aws: AwsClient, type_names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the zones that offer each of these types."""
    filters = [{"Name": "instance-type", "Values": type_names}]
    request = {"LocationType": "availability-zone", "Filters": filters}
    zones: dict[str, set[str]] = defaultdict(set)
    for offer in aws.read(_Offering, "DescribeInstanceTypeOfferings", request):
        zones[offer.instance_type].add(offer.location)
    return {name: tuple(sorted(zones[name])) for name in sorted(zones)}


def _describe_type(aws: AwsClient, name: str) -> GpuType | str:
    """Return EC2's description of a type that the table lacks, or EC2's error text."""
    try:
        matches = aws.paginate("DescribeInstanceTypes", {"InstanceTypes": [name]})
    except AwsRefused as refusal:
        if refusal.code in ("InvalidInstanceType", "InvalidParameterValue"):
            return refusal.why
        raise
    return _gpu_type(matches[0]) if matches else ""


def _gpu_type(described: Reply) -> GpuType:
    all_gpus = described.get("GpuInfo", {}).get("Gpus", ())
    gpus = [gpu for gpu in all_gpus if gpu.get("Manufacturer") == "NVIDIA"]
    name, network = gpus[0]["Name"] if gpus else "", described.get("NetworkInfo", {})
    return GpuType(
        name=described["InstanceType"],
        gpu=name,
        # For a fraction of a GPU, EC2 returns a Count of 0: https://github.com/aws/aws-cli/issues/9659
        gpus=sum(int(gpu.get("Count") or gpu.get("LogicalGpuCount", 0)) for gpu in gpus),
        memory_gb=gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024 if gpus else 0,
        vcpus=described["VCpuInfo"]["DefaultVCpus"],
        ram_gb=described["MemoryInfo"]["SizeInMiB"] / 1024,
        network=_gbit(network.get("NetworkPerformance", "")),
        efa=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        cards=int(network.get("MaximumNetworkCards", 1)),
        bare_metal=bool(described.get("BareMetal")),
        store_gb=described.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0),
        cpu=described.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])[-1],
        share=float(gpus[0].get("GpuPartitionSize", 1)) if gpus else 1,
    )


def _gbit(performance: str) -> str:
    """Return EC2's network performance in the form that the table has: "Up to 10 Gigabit" is "<=10"."""
    text = performance.removesuffix(" Gigabit").replace("Up to ", "<=")
    return re.sub(r"^(\d+)x ", r"\1 x ", text)


def _quota_codes(spec: ClusterSpec, requested_types: Iterable[str]) -> set[str]:
    """Return the codes of the quotas that the requested types (or else all types) count against."""
    names = tuple(requested_types) or tuple(GPU_TYPES)
    quotas = (find_quota(name, market) for name in names for market in spec.cluster.markets)
    return {quota[0] for quota in quotas if quota is not None}


def _quota(aws: AwsClient, code: str) -> float | None:
    """Return a quota's vCPUs. Returns None if the quota cannot be read, because a launch can continue without
    the quota check.
    """
    request = {"ServiceCode": "ec2", "QuotaCode": code}
    reply = none_if_refused(lambda: aws.call("GetServiceQuota", request, service="service-quotas"))
    return float(reply["Quota"]["Value"]) if reply else None


def _used_vcpus(aws: AwsClient, cluster_id: str) -> dict[str, int]:
    """Return {quota code: vCPUs that run in the region}, excluding the cluster `cluster_id`.

    Returns {} if the user is not allowed to list instances, because a launch can continue without the quota
    check.
    """
    running: Filters = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    read = partial(aws.paginate, "DescribeInstances", {"Filters": running}, "Reservations")
    used: Counter[str] = Counter()
    reservations = none_if_refused(read) or ()
    for instance in (instance for reservation in reservations for instance in reservation["Instances"]):
        kind, cpus = GPU_TYPES.get(instance["InstanceType"]), instance.get("CpuOptions", {})
        lifecycle = instance.get("InstanceLifecycle")
        quota = find_quota(instance["InstanceType"], _MARKETS.get(lifecycle, "on-demand"))
        if quota is not None and tags_of(instance).get("awsddp:id") != cluster_id:
            used[quota[0]] += kind.vcpus if kind else cpus.get("CoreCount", 0) * cpus.get("ThreadsPerCore", 1)
    return dict(used)


def _callers(spec: ClusterSpec, caller_address: str | None) -> tuple[str, ...]:
    """Return this machine's addresses (CIDRs) as the nodes see them, or () if the plan does not need them."""
    if spec.network.ssh_cidr or spec.network.jump:
        return ()
    if caller_address is not None:
        return (str(ipaddress.ip_network(caller_address)),)
    if spec.network.address == "private":
        return ()
    addresses = dict.fromkeys(filter(None, run_each(_ask_address, ADDRESS_SOURCES)))
    return tuple(f"{address}/32" for address in addresses)


def _ask_address(source: str) -> str | None:
    try:
        with urllib.request.urlopen(source, timeout=5) as reply:
            return str(ipaddress.IPv4Address(reply.read(64).decode("ascii").strip()))
    except (OSError, HTTPException, ValueError):
        return None


def find_image(aws: AwsClient, requested: str | None) -> Image:
    """Return the image to launch.

    `requested` is an id ("ami-..."), an SSM parameter ("/aws/service/..."), or a name, in which `*` matches
    any text; None means the newest Deep Learning AMI whose PyTorch is in the table. Raises ConfigError if
    there is no such image.
    """
    setting, tried = "cluster.image", requested or releases.DLAMI_NAMES
    parameter = tried.removeprefix("resolve:ssm:")
    if requested is None:
        setting, image = "the region's newest Deep Learning AMI", _newest_image(aws)
    elif requested.startswith("ami-"):
        image = _image_of_id(aws, requested)
    elif parameter.startswith("/"):
        image = _image_of_parameter(aws, parameter)
    else:
        image = _newest(_images_of_name(aws, requested))
    if image is None:
        raise ConfigError(
            f"{setting}: no image {tried!r} in {aws.region}",
            releases.explain_missing_image(tried)
            or "the image was deregistered, is not shared with this account, or is in another region",
            "name an image with --image: an id, a name with *, or an SSM parameter; "
            "without --image, the newest Deep Learning AMI is used",
        )
    return image


def _newest_image(aws: AwsClient) -> Image | None:
    """Return the newest Deep Learning AMI whose PyTorch is in the table, or else the newest of all.

    The image is looked up by name, because a lookup by SSM parameter would depend on a separate permission.
    """
    images = _images_of_name(aws, releases.DLAMI_NAMES, owners=["amazon"])
    newest = _newest([image for image in images if releases.in_table(image.name)] or images)
    newest_of_all = _newest(images)
    if newest is None or newest_of_all is None or not releases.find_unknown_torch(newest_of_all.name):
        return newest
    return replace(newest, newer=newest_of_all.name)


def _image_of_parameter(aws: AwsClient, name: str) -> Image | None:
    """Return the image that an SSM parameter names, or None if there is no such parameter or image."""
    reply = aws.call("GetParameters", {"Names": [name]}, service="ssm")
    return _image_of_id(aws, reply["Parameters"][0]["Value"]) if reply["Parameters"] else None


def _image_of_id(aws: AwsClient, image_id: str) -> Image | None:
    not_found = ("InvalidAMIID.", "InvalidParameterValue")
    read = partial(_images, aws, {"ImageIds": [image_id]})
    return _newest(none_if_refused(read, lambda refusal: refusal.code.startswith(not_found)) or ())


def _images_of_name(
    aws: AwsClient, pattern: str, *, owners: Sequence[str] = ("amazon", "self")
) -> list[Image]:
    """Return the images with this name; deprecated images only if there are no others."""
    filters = [{"Name": "name", "Values": [pattern]}, {"Name": "state", "Values": ["available"]}]
    request = {"Owners": list(owners), "Filters": filters}
    return _images(aws, request) or _images(aws, {**request, "IncludeDeprecated": True})


def _images(aws: AwsClient, request: Reply) -> list[Image]:
    described = aws.paginate("DescribeImages", request)
    return [_image(image) for image in described if image.get("State") == "available"]


def _newest(images: Iterable[Image]) -> Image | None:
    """Return the newest of the images with the newest torch, or None if there are no images."""
    return max(
        images, key=lambda image: (releases.torch_version(image.name), image.created, image.id), default=None
    )


def _image(described: Reply) -> Image:
    name, root = described.get("Name", ""), described.get("RootDeviceName", "/dev/sda1")
    disks = {disk.get("DeviceName"): disk.get("Ebs", {}) for disk in described.get("BlockDeviceMappings", ())}
    tags = tags_of(described)
    return Image(
        id=described["ImageId"],
        name=name,
        created=described.get("CreationDate", ""),
        architecture=described.get("Architecture", "x86_64"),
        root_device=root,
        root_gb=int(disks.get(root, {}).get("VolumeSize", 0)),
        ssh_user=tags.get("awsddp:ssh-user") or releases.ssh_user(name),
        owner=described.get("ImageOwnerAlias") or described.get("OwnerId", ""),
        deprecated=_if_past(described.get("DeprecationTime", "")),
        platform=described.get("PlatformDetails", "Linux/UNIX"),
        tags=tags,
    )


def _if_past(moment: str) -> str:
    """Return a deprecation time that EC2 reports, or "" if it is in the future, because AWS sets these times
    in advance.
    """
    return moment if moment and datetime.fromisoformat(moment) < datetime.now(UTC) else ""
