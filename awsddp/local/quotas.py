"""Service quotas of EC2, which moto lacks: answered, changed on request, and held by launches.

Codes and names: https://docs.aws.amazon.com/general/latest/gr/ec2-service.html
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from awsddp.local import reservations
from awsddp.local.requests import Refusal, Reply, Request

ACTIONS = frozenset(
    {"GetServiceQuota", "ListServiceQuotas", "GetAWSDefaultServiceQuota", "RequestServiceQuotaIncrease"}
)
VCPUS = 12288.0  # 64 of the largest machines: what the local cloud is asked to carry
RUNNING = ("pending", "running")


@dataclass(frozen=True)
class Bucket:
    """The instance types that share a quota of vCPUs: the letters that their names begin with."""

    code: str
    name: str
    families: tuple[str, ...]
    spot: bool = False


STANDARD = ("a", "c", "d", "h", "i", "m", "r", "t", "z")
BUCKETS = (
    Bucket("L-417A185B", "Running On-Demand P instances", ("p",)),
    Bucket("L-DB2E81BA", "Running On-Demand G and VT instances", ("g", "vt", "gr")),
    Bucket("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances", STANDARD),
    Bucket("L-2C3B7624", "Running On-Demand Trn instances", ("trn",)),
    Bucket(
        "L-C4BD4855", "All P5 Spot Instance Requests", ("p5", "p5e", "p5en", "p6-b200", "p6-b300"), spot=True
    ),
    Bucket("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests", ("p",), spot=True),
    Bucket("L-3819A6DF", "All G and VT Spot Instance Requests", ("g", "vt", "gr"), spot=True),
    Bucket(
        "L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests", STANDARD, spot=True
    ),
    Bucket("L-6B0D517C", "All Trn Spot Instance Requests", ("trn",), spot=True),
)


@dataclass
class Quotas:
    """The values of one region that are not the default."""

    values: dict[str, float] = field(default_factory=dict)

    def of(self, code: str) -> float:
        return self.values.get(code, VCPUS)


def bucket_of(instance_type: str, *, spot: bool) -> Bucket | None:
    """The quota that a type counts against, None if none holds it."""
    family = instance_type.partition(".")[0]
    letters = re.match(r"[a-z]*", family)
    known = {family, letters.group() if letters else ""}
    return next((one for one in BUCKETS if one.spot == spot and known & set(one.families)), None)


def check(backend: Any, instance_type: str, count: int, *, spot: bool = False) -> None:
    """Refuses machines over the quota.

    :raises Refusal: VcpuLimitExceeded, or MaxSpotInstanceCountExceeded.
    """
    bucket = bucket_of(instance_type, spot=spot)
    if bucket is None:
        return
    limit = of(backend).of(bucket.code)
    used = sum(
        vcpus(one.instance_type)
        for reservation in backend.reservations.values()
        for one in reservation.instances
        if one.state in RUNNING and bucket == bucket_of(one.instance_type, spot=one.lifecycle == "spot")
    )
    if not spot:
        used += sum(
            one.free(backend) * vcpus(one.instance_type)
            for one in reservations.held(backend).values()
            if bucket == bucket_of(one.instance_type, spot=False)
        )
    if used + count * vcpus(instance_type) <= limit:
        return
    if spot:
        raise Refusal("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    raise Refusal(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def vcpus(instance_type: str) -> int:
    """The vCPUs of a type; 0 of one that nobody knows."""
    return int(INSTANCE_TYPES.get(instance_type, {}).get("VCpuInfo", {}).get("DefaultVCpus", 0))


def of(backend: Any) -> Quotas:
    """The quotas of a region, kept in its back end."""
    found: Quotas = backend.__dict__.setdefault("service_quotas", Quotas())
    return found


def answer(request: Request, backend: Any) -> Reply | None:
    """The reply to one of ACTIONS about EC2; None leaves it to moto. An increase is granted at once.

    :raises Refusal: no such quota, or less was asked for than there is.
    """
    asked = json.loads(request.body or b"{}")
    if asked.get("ServiceCode") != "ec2":
        return None
    quotas = of(backend)
    if request.action == "ListServiceQuotas":
        return _reply({"Quotas": [_quota(request, bucket, quotas.of(bucket.code)) for bucket in BUCKETS]})
    bucket = next((one for one in BUCKETS if one.code == asked.get("QuotaCode")), None)
    if bucket is None:
        raise Refusal(
            "NoSuchResourceException", "The request failed because the specified quota does not exist."
        )
    if request.action == "GetAWSDefaultServiceQuota":
        return _reply({"Quota": _quota(request, bucket, VCPUS)})
    if request.action == "GetServiceQuota":
        return _reply({"Quota": _quota(request, bucket, quotas.of(bucket.code))})
    wanted = float(asked.get("DesiredValue", 0))
    if wanted <= quotas.of(bucket.code):
        raise Refusal(
            "IllegalArgumentException", "You must provide a quota value greater than the current quota value"
        )
    quotas.values[bucket.code] = wanted
    granted = {"Id": uuid.uuid4().hex, "Status": "APPROVED", "DesiredValue": wanted}
    return _reply({"RequestedQuota": {**_quota(request, bucket, wanted), **granted}})


def _quota(request: Request, bucket: Bucket, value: float) -> dict[str, Any]:
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": f"arn:aws:servicequotas:{request.region}:123456789012:ec2/{bucket.code}",
        "QuotaCode": bucket.code,
        "QuotaName": bucket.name,
        "Value": value,
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }


def _reply(document: dict[str, Any]) -> Reply:
    return "200 OK", [("Content-Type", "application/x-amz-json-1.1")], json.dumps(document).encode()
