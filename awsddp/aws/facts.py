"""Reads from AWS what a plan needs: independent reads side by side, nothing changed."""

import ipaddress
import urllib.request
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from awsddp import compat
from awsddp.aws.images import find_image
from awsddp.aws.refusals import Refused
from awsddp.aws.session import Aws
from awsddp.cluster import TargetName
from awsddp.compat import GpuType
from awsddp.plan import Facts, Subnet
from awsddp.spec import ClusterSpec

# Each answers with the address that it sees, over HTTPS.
ADDRESS_SOURCES = ("https://checkip.amazonaws.com", "https://api.ipify.org")


def gather(aws: Aws, spec: ClusterSpec, *, caller_address: str | None, target: TargetName = "aws") -> Facts:
    """Return what a plan for `spec` needs to know.

    `caller_address` is this machine as the nodes see it; where it is None, and there is no
    `network.ssh_cidr`, two sources on the internet are asked. Raises CloudError where AWS cannot be read,
    ConfigError where there is no image.
    """
    owner = aws.identity().user_id
    asked = spec.cluster.instance_type
    with ThreadPoolExecutor(max_workers=8) as pool:
        offers = pool.submit(_offers, aws, asked)
        image = pool.submit(find_image, aws, spec.cluster.image)
        subnets = pool.submit(_subnets, aws)
        described = pool.submit(_describe_type, aws, asked)
        quotas = {code: pool.submit(_quota, aws, code) for code in _quota_codes(asked)}
        callers = pool.submit(_callers, spec, caller_address)
    kind, refusal = described.result()
    return Facts(
        region=aws.region,
        target=target,
        owner=owner,
        offers=offers.result(),
        image=image.result(),
        subnets=subnets.result(),
        quotas=_results(quotas),
        callers=callers.result(),
        described=kind,
        refusal=refusal,
    )


def enabled_regions(aws: Aws) -> tuple[str, ...]:
    """Return the regions that this account may use. Raises CloudError."""
    found = aws.call("DescribeRegions", {"AllRegions": False})["Regions"]
    return tuple(sorted(region["RegionName"] for region in found))


def _results(futures: dict[str, Future[float | None]]) -> dict[str, float | None]:
    return {key: future.result() for key, future in futures.items()}


def _offers(aws: Aws, asked: str | None) -> dict[str, tuple[str, ...]]:
    """Return the zones that offer each known type, and the asked one."""
    known = sorted({*compat.GPU_TYPES, *([asked] if asked else [])})
    found = aws.pages(
        "DescribeInstanceTypeOfferings",
        {"LocationType": "availability-zone", "Filters": [{"Name": "instance-type", "Values": known}]},
        "InstanceTypeOfferings",
    )
    zones: dict[str, set[str]] = defaultdict(set)
    for offer in found:
        zones[offer["InstanceType"]].add(offer["Location"])
    return {name: tuple(sorted(zones[name])) for name in sorted(zones)}


def _describe_type(aws: Aws, asked: str | None) -> tuple[GpuType | None, str]:
    """Return what EC2 says of a type that the table lacks, or how it refuses it."""
    if asked is None or asked in compat.GPU_TYPES:
        return None, ""
    try:
        found = aws.call("DescribeInstanceTypes", {"InstanceTypes": [asked]})["InstanceTypes"]
    except Refused as refusal:
        if refusal.code in ("InvalidInstanceType", "InvalidParameterValue"):
            return None, refusal.why
        raise
    return (_gpu_type(found[0]) if found else None), ""


def _gpu_type(described: dict[str, Any]) -> GpuType:
    gpus = [
        gpu for gpu in described.get("GpuInfo", {}).get("Gpus", []) if gpu.get("Manufacturer") == "NVIDIA"
    ]
    network = described.get("NetworkInfo", {})
    return GpuType(
        name=described["InstanceType"],
        gpu=gpus[0]["Name"] if gpus else "",
        gpus=sum(int(gpu.get("Count", 0)) for gpu in gpus),
        memory_gb=gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024 if gpus else 0,
        capability="",
        vcpus=described["VCpuInfo"]["DefaultVCpus"],
        efa=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        bare_metal=bool(described.get("BareMetal")),
        cpu=described.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"])[-1],
    )


def _subnets(aws: Aws) -> tuple[Subnet, ...]:
    """Return the subnets of the default VPC."""
    filters = [{"Name": "default-for-az", "Values": ["true"]}, {"Name": "state", "Values": ["available"]}]
    found = aws.pages("DescribeSubnets", {"Filters": filters}, "Subnets")
    return tuple(
        Subnet(
            id=subnet["SubnetId"],
            zone=subnet["AvailabilityZone"],
            vpc=subnet["VpcId"],
            free_addresses=int(subnet.get("AvailableIpAddressCount", 0)),
        )
        for subnet in sorted(found, key=lambda subnet: str(subnet["SubnetId"]))
    )


def _quota_codes(asked: str | None) -> set[str]:
    codes = {compat.QUOTA_P[0], compat.QUOTA_G[0]}
    return codes | {compat.quota_of(asked)[0]} if asked else codes


def _quota(aws: Aws, code: str) -> float | None:
    """Return a quota's vCPUs; None where it cannot be read, which no launch depends on."""
    try:
        reply = aws.call(
            "GetServiceQuota", {"ServiceCode": "ec2", "QuotaCode": code}, service="service-quotas"
        )
    except Refused:
        return None
    return float(reply["Quota"]["Value"])


def _callers(spec: ClusterSpec, caller_address: str | None) -> tuple[str, ...]:
    """Return this machine's addresses as the nodes see them, as CIDRs; none are asked for needlessly."""
    if spec.network.ssh_cidr:
        return ()
    if caller_address is not None:
        return (str(ipaddress.ip_network(caller_address)),)
    with ThreadPoolExecutor(max_workers=len(ADDRESS_SOURCES)) as pool:
        told = [address for address in pool.map(_ask_address, ADDRESS_SOURCES) if address]
    return tuple(f"{address}/32" for address in dict.fromkeys(told))


def _ask_address(source: str) -> str | None:
    try:
        with urllib.request.urlopen(source, timeout=5) as reply:
            return str(ipaddress.IPv4Address(reply.read(64).decode("ascii").strip()))
    except (OSError, ValueError):
        return None
