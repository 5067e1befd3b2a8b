"""Service quotas of EC2, which moto lacks: answered, changed on request, and held by launches.

Codes and names: https://docs.aws.amazon.com/general/latest/gr/ec2-service.html
"""

from __future__ import annotations

import uuid
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from awsddp.compat import types
from awsddp.local import reservations
from awsddp.local.requests import Refusal, Request, kept

VCPUS = 12288.0  # 64 of the largest machines: what the local cloud is asked to carry
RUNNING = ("pending", "running")
NAMES = dict(
    (
        *(types.QUOTA_P, types.QUOTA_G, types.QUOTA_STANDARD),
        *(types.SPOT_P5, types.SPOT_P, types.SPOT_G, types.SPOT_STANDARD),
    )
)


def check(backend: Any, instance_type: str, count: int, *, spot: bool = False) -> None:
    """Refuses machines over the quota.

    :raises Refusal: VcpuLimitExceeded, or MaxSpotInstanceCountExceeded.
    """
    quota = _quota(instance_type, spot=spot)
    if quota is None:
        return
    limit = kept(backend, "service_quotas").get(quota, VCPUS)
    used = sum(
        _vcpus(one.instance_type)
        for one in backend.all_instances()
        if one.state in RUNNING and quota == _quota(one.instance_type, spot=one.lifecycle == "spot")
    )
    used += sum(
        one.available_instance_count * _vcpus(one.instance_type)
        for one in reservations.held(backend).values()
        if quota == _quota(one.instance_type, spot=False)
    )
    if used + count * _vcpus(instance_type) <= limit:
        return
    if spot:
        raise Refusal("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    raise Refusal(
        "VcpuLimitExceeded",
        f"You have requested more vCPU capacity than your current vCPU limit of {limit:.0f} allows for the "
        "instance bucket that the specified instance type belongs to. Please visit "
        "http://aws.amazon.com/contact-us/ec2-request to request an adjustment to this limit.",
    )


def _quota(instance_type: str, *, spot: bool) -> str | None:
    """The code of the quota that a type counts against, None if none is known."""
    found = types.quota_of(instance_type, "spot" if spot else "on-demand")
    return found[0] if found else None


def _vcpus(instance_type: str) -> int:
    """The vCPUs of a type; 0 of one that nobody knows."""
    return int(INSTANCE_TYPES.get(instance_type, {}).get("VCpuInfo", {}).get("DefaultVCpus", 0))


def answer(request: Request, backend: Any) -> dict[str, Any]:
    """Answer GetServiceQuota and RequestServiceQuotaIncrease. An increase is granted at once.

    :raises Refusal: no such quota, or less was asked for than there is.
    """
    code, values = request.asked.get("QuotaCode", ""), kept(backend, "service_quotas")
    if request.asked.get("ServiceCode") != "ec2" or code not in NAMES:
        raise Refusal(
            "NoSuchResourceException", "The request failed because the specified quota does not exist."
        )
    quota: dict[str, Any] = {"ServiceCode": "ec2", "QuotaCode": code, "QuotaName": NAMES[code]}
    if request.action == "GetServiceQuota":
        return {"Quota": {**quota, "Value": values.get(code, VCPUS), "Adjustable": True}}
    wanted = float(request.asked.get("DesiredValue", 0))
    if wanted <= values.get(code, VCPUS):
        raise Refusal(
            "IllegalArgumentException", "You must provide a quota value greater than the current quota value"
        )
    values[code] = wanted
    granted = {"Id": uuid.uuid4().hex, "Status": "APPROVED", "DesiredValue": wanted}
    return {"RequestedQuota": {**quota, **granted}}
