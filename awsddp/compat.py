"""Which instance types, GPUs and images fit each other, and what they cost. Tables and pure functions.

A row is a dated fact with its source; what exists now is asked from AWS (DescribeInstanceTypeOfferings), for
a price is no proof of availability: the price list still has the retired p2.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PRICE_DATE = "2026-07-20"
PRICE_REGION = "us-east-1"
# https://aws.amazon.com/ebs/pricing/ (gp3, us-east-1) and https://aws.amazon.com/vpc/pricing/ (public IPv4)
DISK_USD_PER_GB_MONTH = 0.08
ADDRESS_USD_PER_HOUR = 0.005
HOURS_PER_MONTH = 730


@dataclass(frozen=True, kw_only=True)
class GpuType:
    """An instance type. `memory_gb` is of one GPU, in GiB; `efa` the most EFA interfaces it takes.

    `capability` is the GPU's compute capability ("8.9"), "" where it is not known; `price_usd_per_hour` is
    the on-demand list price of Linux in us-east-1 on PRICE_DATE, None where none is known.
    """

    name: str
    gpu: str
    gpus: int
    memory_gb: float
    capability: str
    vcpus: int
    efa: int = 0
    bare_metal: bool = False
    cpu: str = "x86_64"
    price_usd_per_hour: float | None = None

    @property
    def family(self) -> str:
        """The part before the dot: "g6", "p6-b200"."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Retired:
    """An instance type that AWS no longer offers anywhere: since when, and what it was."""

    name: str
    gpu: str
    gpus: int
    since: str


# Family: GPU, GiB of one GPU, compute capability. DescribeInstanceTypes as recorded in getmoto/moto
# moto/ec2/resources/instance_types.json; capabilities: https://developer.nvidia.com/cuda-gpus
_FAMILIES = {
    "p3dn": ("V100", 32, "7.0"),
    "g4dn": ("T4", 16, "7.5"),
    "g5": ("A10G", 22.4, "8.6"),
    "g6": ("L4", 22.4, "8.9"),
    "g6e": ("L40S", 44.7, "8.9"),
    "g7e": ("RTX PRO 6000", 96, "12.0"),
    "p4d": ("A100", 40, "8.0"),
    "p4de": ("A100", 80, "8.0"),
    "p5": ("H100", 80, "9.0"),
    "p5e": ("H200", 141, "9.0"),
    "p5en": ("H200", 141, "9.0"),
    "p6-b200": ("B200", 179, "10.0"),
    "p6-b300": ("B300", 268.6, "10.3"),
}

# Type, GPUs, vCPUs, EFA interfaces: as above. Price: aws/karpenter-provider-aws
# pkg/providers/pricing/zz_generated.pricing_aws.go (p5e is not sold in us-east-1).
_TYPES: tuple[tuple[str, int, int, int, float | None], ...] = (
    ("p3dn.24xlarge", 8, 96, 1, 31.212),
    ("g4dn.xlarge", 1, 4, 0, 0.526),
    ("g4dn.2xlarge", 1, 8, 0, 0.752),
    ("g4dn.4xlarge", 1, 16, 0, 1.204),
    ("g4dn.8xlarge", 1, 32, 1, 2.176),
    ("g4dn.12xlarge", 4, 48, 1, 3.912),
    ("g4dn.16xlarge", 1, 64, 1, 4.352),
    ("g4dn.metal", 8, 96, 1, 7.824),
    ("g5.xlarge", 1, 4, 0, 1.006),
    ("g5.2xlarge", 1, 8, 0, 1.212),
    ("g5.4xlarge", 1, 16, 0, 1.624),
    ("g5.8xlarge", 1, 32, 1, 2.448),
    ("g5.12xlarge", 4, 48, 1, 5.672),
    ("g5.16xlarge", 1, 64, 1, 4.096),
    ("g5.24xlarge", 4, 96, 1, 8.144),
    ("g5.48xlarge", 8, 192, 1, 16.288),
    ("g6.xlarge", 1, 4, 0, 0.8048),
    ("g6.2xlarge", 1, 8, 0, 0.9776),
    ("g6.4xlarge", 1, 16, 0, 1.3232),
    ("g6.8xlarge", 1, 32, 1, 2.0144),
    ("g6.12xlarge", 4, 48, 1, 4.6016),
    ("g6.16xlarge", 1, 64, 1, 3.3968),
    ("g6.24xlarge", 4, 96, 1, 6.6752),
    ("g6.48xlarge", 8, 192, 1, 13.3504),
    ("g6e.xlarge", 1, 4, 0, 1.861),
    ("g6e.2xlarge", 1, 8, 0, 2.24208),
    ("g6e.4xlarge", 1, 16, 0, 3.00424),
    ("g6e.8xlarge", 1, 32, 1, 4.52856),
    ("g6e.12xlarge", 4, 48, 1, 10.49264),
    ("g6e.16xlarge", 1, 64, 1, 7.57719),
    ("g6e.24xlarge", 4, 96, 2, 15.06559),
    ("g6e.48xlarge", 8, 192, 4, 30.13118),
    ("g7e.2xlarge", 1, 8, 0, 3.36312),
    ("g7e.4xlarge", 1, 16, 0, 3.99816),
    ("g7e.8xlarge", 1, 32, 1, 5.26824),
    ("g7e.12xlarge", 2, 48, 1, 8.28608),
    ("g7e.24xlarge", 4, 96, 2, 16.57216),
    ("g7e.48xlarge", 8, 192, 4, 33.14432),
    ("p4d.24xlarge", 8, 96, 4, 21.957642),
    ("p4de.24xlarge", 8, 96, 4, 27.44705),
    ("p5.4xlarge", 1, 16, 1, 6.88),
    ("p5.48xlarge", 8, 192, 32, 55.04),
    ("p5e.48xlarge", 8, 192, 32, None),
    ("p5en.48xlarge", 8, 192, 16, 63.296),
    ("p6-b200.48xlarge", 8, 192, 8, 113.9328),
    ("p6-b300.48xlarge", 8, 192, 16, 142.416),
)


def _gpu_type(name: str, gpus: int, vcpus: int, efa: int, price: float | None) -> GpuType:
    gpu, memory_gb, capability = _FAMILIES[name.partition(".")[0]]
    return GpuType(
        name=name,
        gpu=gpu,
        gpus=gpus,
        memory_gb=memory_gb,
        capability=capability,
        vcpus=vcpus,
        efa=efa,
        bare_metal=name.endswith(".metal"),
        price_usd_per_hour=price,
    )


GPU_TYPES: dict[str, GpuType] = {row[0]: _gpu_type(*row) for row in _TYPES}

# p2, p3: the day from which no region's DescribeInstanceTypeOfferings had them (getmoto/moto, history of
# moto/ec2/resources/instance_type_offerings). g3: AWS's notice (SummitRoute/aws_breaking_changes #114).
RETIRED: dict[str, Retired] = {
    name: Retired(name=name, gpu=gpu, gpus=gpus, since=since)
    for name, gpu, gpus, since in (
        ("p2.xlarge", "K80", 1, "2025-03-30"),
        ("p2.8xlarge", "K80", 8, "2025-03-30"),
        ("p2.16xlarge", "K80", 16, "2025-03-30"),
        ("p3.2xlarge", "V100", 1, "2026-05-01"),
        ("p3.8xlarge", "V100", 4, "2026-05-01"),
        ("p3.16xlarge", "V100", 8, "2026-05-01"),
        ("g3s.xlarge", "M60", 1, "2025-10-31"),
        ("g3.4xlarge", "M60", 1, "2025-10-31"),
        ("g3.8xlarge", "M60", 2, "2025-10-31"),
        ("g3.16xlarge", "M60", 4, "2025-10-31"),
    )
}

# Quotas of running on-demand vCPUs, by the letters a type begins with:
# https://docs.aws.amazon.com/ec2/latest/instancetypes/ec2-instance-quotas.html
QUOTA_P = ("L-417A185B", "Running On-Demand P instances")
QUOTA_G = ("L-DB2E81BA", "Running On-Demand G and VT instances")
QUOTA_STANDARD = ("L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances")

# Deep Learning AMIs with PyTorch, newest first, by the SSM parameter that holds the newest build's id:
# https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
DLAMI_PARAMETERS = tuple(
    "/aws/service/deeplearning/ami/x86_64/"
    f"oss-nvidia-driver-gpu-pytorch-{torch}-ubuntu-{ubuntu}/latest/ami-id"
    for torch, ubuntu in (
        ("2.12", "24.04"),
        ("2.11", "24.04"),
        ("2.10", "24.04"),
        ("2.9", "24.04"),
        ("2.8", "24.04"),
        ("2.7", "22.04"),
    )
)
DLAMI_NAMES = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch *(Ubuntu *"
# The families that its release notes list:
# https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpu-pytorch-2.12-ubuntu-24-04.html
DLAMI_FAMILIES = frozenset({"g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"})


def quota_of(instance_type: str) -> tuple[str, str]:
    """Return code and name of the quota that on-demand instances of this type count against."""
    if instance_type.startswith("p"):
        return QUOTA_P
    return QUOTA_G if instance_type.startswith(("g", "vt")) else QUOTA_STANDARD


def ssh_user(image_name: str) -> str:
    """Return the user that an image of this name lets in: ec2-user on Amazon Linux, else ubuntu."""
    return "ec2-user" if re.search(r"amazon[ -]?linux|^al20", image_name, re.IGNORECASE) else "ubuntu"


def torch_version(image_name: str) -> tuple[int, ...]:
    """Return the PyTorch release in a Deep Learning AMI's name, such as (2, 12); () where it names none."""
    match = re.search(r"PyTorch (\d+)\.(\d+)", image_name)
    return tuple(int(part) for part in match.groups()) if match else ()


def misfit(kind: GpuType, image_name: str) -> str:
    """Return why the image's driver cannot drive this type's GPU, or "".

    Open kernel modules need Turing (7.5) or newer: https://github.com/NVIDIA/open-gpu-kernel-modules
    """
    if "OSS Nvidia Driver" in image_name and kind.capability and float(kind.capability) < 7.5:
        return f"its open-source driver needs a GPU newer than the {kind.gpu}"
    return ""


def unlisted(kind: GpuType, image_name: str) -> bool:
    """Whether this is a Deep Learning AMI whose release notes do not list the type's family."""
    return image_name.startswith("Deep Learning OSS") and kind.family not in DLAMI_FAMILIES


def nearest(kind: GpuType, among: Iterable[GpuType], *, count: int = 3) -> tuple[GpuType, ...]:
    """Return the `count` other priced types nearest to `kind`: by number of GPUs, then by price."""
    price = kind.price_usd_per_hour or 0.0
    others = [other for other in among if other.name != kind.name and other.price_usd_per_hour is not None]
    others.sort(
        key=lambda other: (
            abs(other.gpus - kind.gpus),
            abs((other.price_usd_per_hour or 0) - price),
            other.name,
        )
    )
    return tuple(others[:count])


def replacements(retired: Retired, offered: Collection[str], *, count: int = 3) -> tuple[GpuType, ...]:
    """Return the cheapest virtualised types offered with as many GPUs as the retired one had, 8 at most."""
    gpus = min(retired.gpus, 8)
    found = [
        kind
        for kind in GPU_TYPES.values()
        if kind.gpus == gpus and not kind.bare_metal and kind.price_usd_per_hour and kind.name in offered
    ]
    return tuple(sorted(found, key=lambda kind: kind.price_usd_per_hour or 0)[:count])


def disk_usd_per_hour(disk_gb: int) -> float:
    """Return the list price of a gp3 volume of this size, an hour."""
    return disk_gb * DISK_USD_PER_GB_MONTH / HOURS_PER_MONTH


def node_usd_per_hour(instance_type: str, *, disk_gb: int = 0, address: bool = True) -> float | None:
    """Return what a running node costs an hour with its disk and public address; None: no price is known."""
    kind = GPU_TYPES.get(instance_type)
    if kind is None or kind.price_usd_per_hour is None:
        return None
    return kind.price_usd_per_hour + disk_usd_per_hour(disk_gb) + (ADDRESS_USD_PER_HOUR if address else 0.0)
