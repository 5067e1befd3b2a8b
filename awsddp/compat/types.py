"""Tables of instance types with GPUs: hardware, list prices, quotas, retired types.

Availability is read from AWS (DescribeInstanceTypeOfferings), because the price list does not prove that a
type is available: the list still has the retired p2.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Market = Literal["on-demand", "spot", "capacity-block"]

PRICE_DATE = "2026-07-20"
PRICE_REGION = "us-east-1"
# https://aws.amazon.com/ebs/pricing/ (gp3, us-east-1) and https://aws.amazon.com/vpc/pricing/ (public IPv4)
DISK_USD_PER_GB_MONTH = 0.08
ADDRESS_USD_PER_HOUR = 0.005
# https://aws.amazon.com/ec2/pricing/on-demand/ (data transfer out to the internet, after 100 GB a month)
EGRESS_USD_PER_GB = 0.09
# The price from us-east-1 to most regions, from the same page. Between other regions, the price can be
# higher.
REGION_USD_PER_GB = 0.02
HOURS_PER_MONTH = 730


@dataclass(frozen=True, kw_only=True)
class GpuType:
    """An instance type.

    `memory_gb` is one GPU's memory and `ram_gb` is the instance's memory, both in GiB. `network` is in
    Gbit/s. `efa` is the maximum number of EFA interfaces, on `cards` network cards. `capability` is the GPU's
    compute capability ("8.9"), or "" for a type that is not in this table. `price_usd_per_hour` is the
    on-demand list price for Linux in us-east-1 on `price_date` (None: unknown). `store_gb` is the size of the
    instance store. `share` is the fraction of a physical GPU that each of the type's GPUs has (0.125: an
    eighth).
    """

    name: str
    gpu: str
    gpus: int
    memory_gb: float
    vcpus: int
    capability: str = ""
    ram_gb: float = 0
    network: str = ""
    efa: int = 0
    cards: int = 1
    bare_metal: bool = False
    cpu: str = "x86_64"
    price_usd_per_hour: float | None = None
    store_gb: float = 0
    share: float = 1
    price_date: str = PRICE_DATE

    @property
    def gpu_shown(self) -> str:
        """The name of the type's GPU, preceded by the fraction if it is not a whole GPU: "L4", "1/8 L4"."""
        return self.gpu if self.share >= 1 else f"1/{1 / self.share:.0f} {self.gpu}"

    @property
    def family(self) -> str:
        """The part of the name before the dot: "g6", "p6-b200"."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Retired:
    """An instance type that AWS stopped offering in all regions on the date `since`."""

    name: str
    gpu: str
    gpus: int
    since: str


# For each family: the GPU, its memory in GiB and its compute capability. Source: DescribeInstanceTypes as
# recorded in getmoto/moto moto/ec2/resources/instance_types.json; capabilities:
# https://developer.nvidia.com/cuda-gpus
_FAMILIES = {
    "p3dn": ("V100", 32, "7.0"),
    "g4dn": ("T4", 16, "7.5"),
    "g5": ("A10G", 22.4, "8.6"),
    "g5g": ("T4g", 16, "7.5"),
    "g6": ("L4", 22.4, "8.9"),
    "gr6": ("L4", 22.4, "8.9"),
    "g6f": ("L4", 22.4, "8.9"),
    "gr6f": ("L4", 22.4, "8.9"),
    "g6e": ("L40S", 44.7, "8.9"),
    "g7": ("RTX PRO 4500", 32, "12.0"),
    "g7e": ("RTX PRO 6000", 96, "12.0"),
    "p4d": ("A100", 40, "8.0"),
    "p4de": ("A100", 80, "8.0"),
    "p5": ("H100", 80, "9.0"),
    "p5e": ("H200", 141, "9.0"),
    "p5en": ("H200", 141, "9.0"),
    "p6-b200": ("B200", 179, "10.0"),
    "p6-b300": ("B300", 268.6, "10.3"),
}

# Type, GPUs, vCPUs, RAM in GiB, network in Gbit/s and EFA interfaces are from the same source as _FAMILIES.
# Source of the prices: karpenter-provider-aws pkg/providers/pricing/zz_generated.pricing_aws.go (p5e is not
# sold in us-east-1, and g7 is not in the list).
_TYPES: tuple[tuple[str, int, int, int, str, int, float | None], ...] = (
    ("p3dn.24xlarge", 8, 96, 768, "100", 1, 31.212),
    ("g4dn.xlarge", 1, 4, 16, "<=25", 0, 0.526),
    ("g4dn.2xlarge", 1, 8, 32, "<=25", 0, 0.752),
    ("g4dn.4xlarge", 1, 16, 64, "<=25", 0, 1.204),
    ("g4dn.8xlarge", 1, 32, 128, "50", 1, 2.176),
    ("g4dn.12xlarge", 4, 48, 192, "50", 1, 3.912),
    ("g4dn.16xlarge", 1, 64, 256, "50", 1, 4.352),
    ("g4dn.metal", 8, 96, 384, "100", 1, 7.824),
    ("g5.xlarge", 1, 4, 16, "<=10", 0, 1.006),
    ("g5.2xlarge", 1, 8, 32, "<=10", 0, 1.212),
    ("g5.4xlarge", 1, 16, 64, "<=25", 0, 1.624),
    ("g5.8xlarge", 1, 32, 128, "25", 1, 2.448),
    ("g5.12xlarge", 4, 48, 192, "40", 1, 5.672),
    ("g5.16xlarge", 1, 64, 256, "25", 1, 4.096),
    ("g5.24xlarge", 4, 96, 384, "50", 1, 8.144),
    ("g5.48xlarge", 8, 192, 768, "100", 1, 16.288),
    ("g5g.xlarge", 1, 4, 8, "<=10", 0, 0.42),
    ("g5g.2xlarge", 1, 8, 16, "<=10", 0, 0.556),
    ("g5g.4xlarge", 1, 16, 32, "<=10", 0, 0.828),
    ("g5g.8xlarge", 1, 32, 64, "12", 0, 1.372),
    ("g5g.16xlarge", 2, 64, 128, "25", 0, 2.744),
    ("g5g.metal", 2, 64, 128, "25", 0, 2.744),
    ("g6.xlarge", 1, 4, 16, "<=10", 0, 0.8048),
    ("g6.2xlarge", 1, 8, 32, "<=10", 0, 0.9776),
    ("g6.4xlarge", 1, 16, 64, "<=25", 0, 1.3232),
    ("g6.8xlarge", 1, 32, 128, "25", 1, 2.0144),
    ("g6.12xlarge", 4, 48, 192, "40", 1, 4.6016),
    ("g6.16xlarge", 1, 64, 256, "25", 1, 3.3968),
    ("g6.24xlarge", 4, 96, 384, "50", 1, 6.6752),
    ("g6.48xlarge", 8, 192, 768, "100", 1, 13.3504),
    ("gr6.4xlarge", 1, 16, 128, "<=25", 0, 1.5392),
    ("gr6.8xlarge", 1, 32, 256, "25", 1, 2.4464),
    ("g6f.large", 1, 2, 8, "<=10", 0, 0.202),
    ("g6f.xlarge", 1, 4, 16, "<=10", 0, 0.2375),
    ("g6f.2xlarge", 1, 8, 32, "<=10", 0, 0.475),
    ("g6f.4xlarge", 1, 16, 64, "<=25", 0, 0.95),
    ("gr6f.4xlarge", 1, 16, 128, "<=25", 0, 1.066),
    ("g6e.xlarge", 1, 4, 32, "<=20", 0, 1.861),
    ("g6e.2xlarge", 1, 8, 64, "<=20", 0, 2.24208),
    ("g6e.4xlarge", 1, 16, 128, "20", 0, 3.00424),
    ("g6e.8xlarge", 1, 32, 256, "25", 1, 4.52856),
    ("g6e.12xlarge", 4, 48, 384, "100", 1, 10.49264),
    ("g6e.16xlarge", 1, 64, 512, "35", 1, 7.57719),
    ("g6e.24xlarge", 4, 96, 768, "200", 2, 15.06559),
    ("g6e.48xlarge", 8, 192, 1536, "400", 4, 30.13118),
    ("g7.2xlarge", 1, 8, 32, "<=60", 0, None),
    ("g7.4xlarge", 1, 16, 64, "<=100", 0, None),
    ("g7.8xlarge", 1, 32, 128, "100", 1, None),
    ("g7.12xlarge", 2, 48, 192, "175", 1, None),
    ("g7.24xlarge", 4, 96, 384, "350", 1, None),
    ("g7.48xlarge", 8, 192, 768, "700", 2, None),
    ("g7e.2xlarge", 1, 8, 64, "50", 0, 3.36312),
    ("g7e.4xlarge", 1, 16, 128, "50", 0, 3.99816),
    ("g7e.8xlarge", 1, 32, 256, "100", 1, 5.26824),
    ("g7e.12xlarge", 2, 48, 512, "400", 1, 8.28608),
    ("g7e.24xlarge", 4, 96, 1024, "800", 2, 16.57216),
    ("g7e.48xlarge", 8, 192, 2048, "1600", 4, 33.14432),
    ("p4d.24xlarge", 8, 96, 1152, "4 x 100", 4, 21.957642),
    ("p4de.24xlarge", 8, 96, 1152, "4 x 100", 4, 27.44705),
    ("p5.4xlarge", 1, 16, 256, "100", 1, 6.88),
    ("p5.48xlarge", 8, 192, 2048, "3200", 32, 55.04),
    ("p5e.48xlarge", 8, 192, 2048, "3200", 32, None),
    ("p5en.48xlarge", 8, 192, 2048, "3200", 16, 63.296),
    ("p6-b200.48xlarge", 8, 192, 2048, "3200", 8, 113.9328),
    ("p6-b300.48xlarge", 8, 192, 4096, "6400", 16, 142.416),
)

# Types by the size of their instance store in GB; the source is the same as for _FAMILIES.
_STORES = {
    100: "g6f.large g6f.xlarge",
    125: "g4dn.xlarge",
    200: "g6f.2xlarge",
    225: "g4dn.2xlarge g4dn.4xlarge",
    250: "g5.xlarge g6.xlarge g6e.xlarge",
    440: "g7.2xlarge",
    450: "g5.2xlarge g6.2xlarge g6e.2xlarge g6f.4xlarge gr6f.4xlarge",
    600: "g5.4xlarge g6.4xlarge g6e.4xlarge gr6.4xlarge",
    875: "g7.4xlarge",
    900: "g4dn.8xlarge g4dn.12xlarge g4dn.16xlarge g5.8xlarge g6.8xlarge g6e.8xlarge gr6.8xlarge",
    930: "g7.8xlarge",
    1800: "p3dn.24xlarge g4dn.metal",
    1880: "g6.16xlarge",
    1900: "g5.16xlarge g6e.16xlarge g7.12xlarge g7e.2xlarge g7e.4xlarge g7e.8xlarge",
    3760: "g6.12xlarge g6.24xlarge",
    3800: "g5.12xlarge g5.24xlarge g6e.12xlarge g6e.24xlarge g7.24xlarge g7e.12xlarge p5.4xlarge",
    7520: "g6.48xlarge",
    7600: "g5.48xlarge g6e.48xlarge g7.48xlarge g7e.24xlarge",
    8000: "p4d.24xlarge p4de.24xlarge",
    15200: "g7e.48xlarge",
    30400: "p5.48xlarge p5e.48xlarge p5en.48xlarge p6-b200.48xlarge p6-b300.48xlarge",
}
_STORE_GB = {name: size for size, names in _STORES.items() for name in names.split()}

# A type with 17 network cards, of which card 0 does not support EFA:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html
_NO_EFA_ON_CARD_0 = frozenset({"p6-b300.48xlarge"})


# Types whose GPUs are fractions of a physical GPU, with the fraction (GpuPartitionSize). The source is the
# same as for _FAMILIES.
_SHARES = {"g6f.large": 1 / 8, "g6f.xlarge": 1 / 8, "g6f.2xlarge": 1 / 4}
_SHARES |= {"g6f.4xlarge": 1 / 2, "gr6f.4xlarge": 1 / 2}
# Families whose prices are from an earlier version of the price list, with that version's date.
_PRICE_DATES = dict.fromkeys(("g5g", "gr6", "g6f", "gr6f"), "2026-02-09")
_ARM64 = frozenset({"g5g"})

GPU_TYPES: dict[str, GpuType] = {
    name: GpuType(
        name=name,
        gpu=gpu,
        gpus=gpus,
        memory_gb=memory_gb * _SHARES.get(name, 1),
        capability=capability,
        vcpus=vcpus,
        ram_gb=ram_gb,
        network=network,
        efa=efa,
        cards=efa + 1 if name in _NO_EFA_ON_CARD_0 else max(efa, 1),
        bare_metal=name.endswith(".metal"),
        cpu="arm64" if family in _ARM64 else "x86_64",
        price_usd_per_hour=price,
        store_gb=_STORE_GB.get(name, 0),
        share=_SHARES.get(name, 1),
        price_date=_PRICE_DATES.get(family, PRICE_DATE),
    )
    for name, gpus, vcpus, ram_gb, network, efa, price in _TYPES
    for family in [name.partition(".")[0]]
    for gpu, memory_gb, capability in [_FAMILIES[family]]
}

# The dates for p2 and p3 are the first days on which DescribeInstanceTypeOfferings did not list them in any
# region (getmoto/moto, history of moto/ec2/resources/instance_type_offerings). The date for g3 is from AWS's
# notice (SummitRoute/aws_breaking_changes #114).
_RETIRED = {
    "p2": ("K80", "2025-03-30", {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}),
    "p3": ("V100", "2026-05-01", {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "g3s": ("M60", "2025-10-31", {"xlarge": 1}),
    "g3": ("M60", "2025-10-31", {"4xlarge": 1, "8xlarge": 2, "16xlarge": 4}),
}
RETIRED = {
    f"{family}.{size}": Retired(f"{family}.{size}", gpu, gpus, since)
    for family, (gpu, since, sizes) in _RETIRED.items()
    for size, gpus in sizes.items()
}

# vCPU quotas by the prefix of a type: https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
# Sources disagree on the quota for spot requests for p6, so the table has no such quota.
QUOTA_P = ("L-417A185B", "Running On-Demand P instances")
QUOTA_G = ("L-DB2E81BA", "Running On-Demand G and VT instances")
QUOTA_STANDARD = ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances")
SPOT_P5 = ("L-C4BD4855", "All P5 Spot Instance Requests")
SPOT_P = ("L-7212CCBC", "All P4, P3 and P2 Spot Instance Requests")
SPOT_G = ("L-3819A6DF", "All G and VT Spot Instance Requests")
SPOT_STANDARD = ("L-34B43A08", "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests")
_OTHER = ("dl", "f", "hpc", "inf", "mac", "trn", "u-", "u7", "x")  # these count against other quotas
_QUOTAS: dict[Market, tuple[tuple[str | tuple[str, ...], tuple[str, str] | None], ...]] = {
    "on-demand": (("p", QUOTA_P), (("g", "vt"), QUOTA_G), (_OTHER, None), ("", QUOTA_STANDARD)),
    "spot": (
        ("p5", SPOT_P5),
        ("p6", None),
        ("p", SPOT_P),
        (("g", "vt"), SPOT_G),
        (_OTHER, None),
        ("", SPOT_STANDARD),
    ),
    "capacity-block": (("", None),),
}
"""The first row whose prefix matches a type is used. None means that the quota is unknown."""


def find_quota(instance_type: str, market: Market = "on-demand") -> tuple[str, str] | None:
    """Return the code and name of the quota that this type's instances count against, or None if unknown."""
    return next(quota for prefix, quota in _QUOTAS[market] if instance_type.startswith(prefix))


def find_nearest_types(
    gpus: int, among: Iterable[GpuType], *, price: float = 0.0, excluded: str = ""
) -> tuple[GpuType, ...]:
    """Return the three types in `among` whose number of GPUs is nearest to `gpus`.

    If several types are equally near, those with a price nearer to `price` come first. The type `excluded`,
    bare-metal types and types without a price are left out.
    """

    def distance(kind: GpuType) -> tuple[float, float, str]:
        return abs(kind.gpus - gpus), abs((kind.price_usd_per_hour or 0.0) - price), kind.name

    priced = (kind for kind in among if kind.price_usd_per_hour is not None and not kind.bare_metal)
    return tuple(sorted((kind for kind in priced if kind.name != excluded), key=distance)[:3])


def network_gbyte_s(instance_type: str) -> float | None:
    """Return a type's guaranteed network bandwidth in GB/s, or None if at most a peak bandwidth is known."""
    kind = GPU_TYPES.get(instance_type)
    match = re.fullmatch(r"(?:(\d+) x )?(\d+)", kind.network) if kind else None
    return int(match[1] or 1) * int(match[2]) / 8 if match else None


def disk_usd_per_hour(disk_gb: int) -> float:
    """Return the list price per hour for a gp3 volume with this size."""
    return disk_gb * DISK_USD_PER_GB_MONTH / HOURS_PER_MONTH
