"""Tables of the GPUs, drivers, torch releases, CUDA versions and machine images that are compatible.

The tables are static and dated, each with its source. A check on each node shows what the node really has.
"""

import re
from dataclasses import dataclass
from typing import Literal

from awsddp.compat.types import GpuType

KernelModule = Literal["proprietary", "open"]
_RTX_PRO = ("RTX PRO 6000", "RTX PRO Server 6000", "RTX PRO 4500")


@dataclass(frozen=True)
class Architecture:
    """GPUs with one compute capability: their first and last driver branch and their kernel module.

    If `module` is None, both kinds of module work. If `last_driver` is None, the newest driver works.
    `last_torch` ("": unknown) is the last release whose libraries (cuDNN) support these GPUs, although later
    wheels still have code for them.
    """

    capability: str
    name: str
    gpus: tuple[str, ...]
    first_driver: int
    module: KernelModule | None = None
    last_driver: int | None = None
    last_torch: str = ""


# The open kernel modules support only Turing and later GPUs, and Blackwell supports only open modules:
# https://github.com/NVIDIA/open-gpu-kernel-modules (issue 19). The last branches are R470 for Kepler and R580
# for Maxwell to Volta: https://www.nvidia.com/en-us/drivers/unix/ Capabilities:
# https://developer.nvidia.com/cuda-gpus. A GPU's first branch is the driver branch of the first CUDA release
# that supports the GPU: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ The first branch of the B300
# is from NVIDIA's DGX notes, and was not tried. torch 2.4 and later do not support Kepler, because they use
# cuDNN 9, which has no code for Kepler. The last torch for Kepler in the table is 2.0, because torch 2.1 to
# 2.3 with cu118 were never tried.
ARCHITECTURES = (
    Architecture(
        "3.7", "Kepler", ("K80",), first_driver=367, module="proprietary", last_driver=470, last_torch="2.0"
    ),
    Architecture("5.2", "Maxwell", ("M60",), first_driver=367, module="proprietary", last_driver=580),
    Architecture("7.0", "Volta", ("V100",), first_driver=384, module="proprietary", last_driver=580),
    Architecture("7.5", "Turing", ("T4", "T4g"), first_driver=418),
    Architecture("8.0", "Ampere", ("A100",), first_driver=450),
    Architecture("8.6", "Ampere", ("A10G",), first_driver=470),
    Architecture("8.9", "Ada", ("L4", "L40S"), first_driver=525),
    Architecture("9.0", "Hopper", ("H100", "H200"), first_driver=525),
    Architecture("10.0", "Blackwell", ("B200",), first_driver=570, module="open"),
    Architecture("10.3", "Blackwell", ("B300",), first_driver=580, module="open"),
    Architecture("12.0", "Blackwell", _RTX_PRO, first_driver=570, module="open"),
)

# The oldest driver branch that supports a CUDA toolkit. Since CUDA 11, minor-version compatibility determines
# this branch: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html For older
# toolkits, see table 3 of https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
_LEAST_DRIVER = {"13": 580, "12": 525, "11": 450, "10.2": 440, "10.1": 418}
# The newest capability that a CUDA toolkit compiles for, from the same release notes. Code for one capability
# also runs on later minor versions of it: code for 8.6 runs on 8.9, and code for 10.0 runs on 10.3.
_NEWEST_CAPABILITY = (
    ((10, 0), "7.5"),
    ((11, 0), "8.0"),
    ((11, 1), "8.6"),
    ((11, 8), "9.0"),
    ((12, 8), "12.0"),
)


@dataclass(frozen=True, kw_only=True)
class Release:
    """A torch release: its torchvision, its Python versions and its wheels.

    `wheels` maps a CUDA version to the oldest compute capability that the wheel has code for.
    """

    torch: str
    torchvision: str
    pythons: tuple[str, ...]
    wheels: dict[str, str]


def _release(torch: str, torchvision: str, first: int, last: int, **wheels: str) -> Release:
    pythons = tuple(f"3.{minor}" for minor in range(first, last + 1))
    versions = {f"{key[2:-1]}.{key[-1]}": oldest for key, oldest in wheels.items()}
    return Release(torch=torch, torchvision=torchvision, pythons=pythons, wheels=versions)


# Sources of the versions of torch, torchvision and Python: https://github.com/pytorch/vision#installation and
# https://github.com/pytorch/pytorch/blob/main/RELEASE.md#release-compatibility-matrix (2026-08-21).
# Sources of the oldest capabilities: pytorch/builder manywheel/build_cuda.sh, pytorch
# .ci/manywheel/build_cuda.sh, and
# https://github.com/pytorch/pytorch/issues/172352 (2.11), /172663 (2.11), /190385 (2.15). The torchvision
# of 2.14 is not confirmed. The table begins with 1.7, released in October 2020.
RELEASES = (
    _release("2.14", "0.29", 10, 14, cu126="5.0", cu130="7.5", cu132="7.5"),
    _release("2.13", "0.28", 10, 14, cu126="5.0", cu130="7.5", cu132="7.5"),
    _release("2.12", "0.27", 10, 14, cu126="5.0", cu130="7.5", cu132="7.5"),
    _release("2.11", "0.26", 10, 14, cu126="5.0", cu128="7.5", cu130="7.5"),
    _release("2.10", "0.25", 10, 14, cu126="5.0", cu128="7.0", cu130="7.5"),
    _release("2.9", "0.24", 10, 14, cu126="5.0", cu128="7.0", cu130="7.5"),
    _release("2.8", "0.23", 9, 13, cu126="5.0", cu128="7.0", cu129="7.0"),
    _release("2.7", "0.22", 9, 13, cu118="3.7", cu126="5.0", cu128="7.5"),
    _release("2.6", "0.21", 9, 13, cu118="3.7", cu124="5.0", cu126="5.0"),
    _release("2.5", "0.20", 9, 12, cu118="3.7", cu121="5.0", cu124="5.0"),
    _release("2.4", "0.19", 8, 12, cu118="3.7", cu121="5.0", cu124="5.0"),
    _release("2.3", "0.18", 8, 12, cu118="3.7", cu121="5.0"),
    _release("2.2", "0.17", 8, 12, cu118="3.7", cu121="5.0"),
    _release("2.1", "0.16", 8, 11, cu118="3.7", cu121="5.0"),
    _release("2.0", "0.15", 8, 11, cu117="3.7", cu118="3.7"),
    _release("1.13", "0.14", 7, 10, cu116="3.7", cu117="3.7"),
    _release("1.12", "0.13", 7, 10, cu102="3.7", cu113="3.7", cu116="3.7"),
    _release("1.11", "0.12", 7, 10, cu102="3.7", cu113="3.7"),
    _release("1.10", "0.11", 6, 9, cu102="3.7", cu113="3.7"),
    _release("1.9", "0.10", 6, 9, cu102="3.7", cu111="3.7"),
    _release("1.8", "0.9", 6, 9, cu102="3.7", cu111="5.0"),
    _release("1.7", "0.8", 6, 9, cu101="3.7", cu102="3.7", cu110="3.7"),
)


def find_architecture(gpu: str) -> Architecture | None:
    """Return the architecture of the GPU with this name ("L4"), or None if it is not in the table."""
    return next((row for row in ARCHITECTURES if gpu in row.gpus), None)


def find_release(torch: str) -> Release | None:
    """Return the row for a torch version ("2.12" or "2.12.1+cu130"), or None if it is not in the table."""
    match = re.match(r"(\d+\.\d+)(?!\d)", torch)
    return next((row for row in RELEASES if match and row.torch == match[1]), None)


def least_driver(cuda: str) -> int:
    """Return the oldest driver branch for a CUDA version. Raises KeyError for versions before CUDA 10.1."""
    return _LEAST_DRIVER.get(cuda.partition(".")[0]) or _LEAST_DRIVER[cuda]


def find_wheel_problem(row: Release, cuda: str, gpu: Architecture, *, driver: int | None = None) -> str:
    """Return the reason a wheel cannot run on this GPU with this driver branch (None: the newest), or ""."""
    if cuda not in row.wheels:
        return f"torch {row.torch} has no wheel for CUDA {cuda}, only for {', '.join(row.wheels)}"
    oldest, has = _pair(row.wheels[cuda]), _pair(gpu.capability)
    newest = next(_pair(top) for version, top in reversed(_NEWEST_CAPABILITY) if version <= _pair(cuda))
    if not oldest <= has or (has > newest and has[0] != newest[0]):
        return f"torch {row.torch} for CUDA {cuda} has no code for the {gpu.gpus[0]} ({gpu.capability})"
    if gpu.last_torch and _pair(row.torch) > _pair(gpu.last_torch):
        return f"torch {gpu.last_torch} is the last release that supports the {gpu.gpus[0]}"
    least = least_driver(cuda)
    most = driver if driver is not None else gpu.last_driver
    if most is not None and most < least:
        return f"CUDA {cuda} needs driver {least} or newer, but only driver {most} is available"
    return ""


def find_driver_problem(gpu: Architecture, *, driver: int | None, module: KernelModule | None) -> str:
    """Return the reason a driver with this branch and kind of kernel module does not support a GPU, or ""."""
    name = f"the {gpu.gpus[0]} ({gpu.name}, {gpu.capability})"
    if module is not None and gpu.module not in (None, module):
        kind = "open-source" if module == "open" else module
        return f"its {kind} driver does not support {name}, which needs the {gpu.module} driver"
    if driver is None:
        return ""
    if driver < gpu.first_driver:
        return f"its driver {driver} is too old for {name}, which needs {gpu.first_driver} or newer"
    if gpu.last_driver is not None and driver > gpu.last_driver:
        return f"its driver {driver} is too new for {name}, whose last branch is {gpu.last_driver}"
    return ""


def _pair(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor or 0)


# The names of Deep Learning AMIs with PyTorch for x86_64 on Ubuntu:
# https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
DLAMI_NAMES = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch *(Ubuntu *"


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """The versions that an image's name implies; "", None and () mean unknown.

    `families` are the instance families that the image's release notes list.
    """

    torch: str = ""
    cuda: str = ""
    driver: int | None = None
    module: KernelModule | None = None
    families: frozenset[str] = frozenset()


_G4_TO_P5 = frozenset({"g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en"})
_K80_TO_A100 = frozenset({"p2", "p3", "p3dn", "g3", "g4dn", "p4d"})
_TO_B200 = _G4_TO_P5 | {"p6-b200"}
_ARM64 = frozenset({"g5g", "p6e-gb200"})
# The Ubuntu, CUDA, driver branch and instance families of the image with each torch version. The facts are
# from the release notes as of 2026-10:
# https://docs.aws.amazon.com/dlami/latest/devguide/appendix-ami-release-notes.html An older build of the same
# release may have an older driver. CUDA is "", or the families are empty, if no release notes with this fact
# were seen. The row of 2.13 is from the output of `nvidia-smi` and torch on a g6 (2026-08-29).
_PYTORCH_DLAMIS: dict[str, tuple[str, str, int, frozenset[str]]] = {
    "2.13": ("26.04", "13.0", 595, frozenset()),
    "2.12": ("24.04", "13.0", 595, _TO_B200),
    "2.11": ("24.04", "13.0", 595, _TO_B200),
    "2.10": ("24.04", "13.0", 580, _TO_B200),
    "2.9": ("24.04", "", 580, _TO_B200),
    "2.8": ("24.04", "", 570, _TO_B200),
    "2.7": ("22.04", "12.8", 570, _TO_B200),
    "2.6": ("22.04", "12.6", 570, _G4_TO_P5),
}
# Types with a part of a GPU need NVIDIA's vGPU driver. The release notes of PyTorch 2.10 on Amazon Linux 2023
# list such types for the build of 20260808. The notes for the build of 20260418, and the notes for images on
# Ubuntu, do not list such types.
_PARTS = frozenset({"g6f", "gr6f"})
_PARTS_SINCE = "20260808"
PARTS_IMAGE = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Amazon Linux 2023) *"
"""The name pattern for images whose release notes list fractions of a GPU."""
# Name patterns of other images, with the latest driver branch and the families in AWS's notes.
_OTHERS: tuple[tuple[str, ImageFacts], ...] = (
    # https://github.com/skypilot-org/skypilot sky/catalog/data_fetchers/fetch_aws.py: driver 470.57.02
    (
        r"^Deep Learning AMI GPU PyTorch 1\.10\.0 \(Ubuntu (18|20)\.04\) 20211208$",
        ImageFacts(torch="1.10", cuda="11.3", driver=470, module="proprietary", families=_K80_TO_A100),
    ),
    (
        r"^Deep Learning Base (OSS Nvidia Driver GPU AMI|AMI with Single CUDA)",
        ImageFacts(driver=580, module="open", families=_TO_B200 | {"p6-b300"}),
    ),
    (
        r"^Deep Learning Base Proprietary Nvidia Driver",
        ImageFacts(driver=570, module="proprietary", families=frozenset({"g3", "p3", "p3dn"})),
    ),
    ("OSS Nvidia Driver", ImageFacts(module="open")),
)


def image_facts(name: str) -> ImageFacts:
    """Return the facts that an image's name implies; all are empty for an unknown name."""
    match = re.search(r"OSS Nvidia Driver (?:AMI )?GPU PyTorch (\d+\.\d+)", name)
    if match:
        _, cuda, driver, families = _PYTORCH_DLAMIS.get(match[1], ("", "", None, frozenset()))
        if "ARM64" in name:
            cuda, families = "", _ARM64
        elif families and re.search(r"\(Amazon Linux 2023\) \d+$", name) and name[-8:] >= _PARTS_SINCE:
            families |= _PARTS
        return ImageFacts(torch=match[1], cuda=cuda, driver=driver, module="open", families=families)
    return next((facts for pattern, facts in _OTHERS if re.search(pattern, name)), ImageFacts())


def in_table(image_name: str) -> bool:
    """Return True if an image is a Deep Learning AMI whose PyTorch and Ubuntu are in the table."""
    match = re.search(r"PyTorch (\d+\.\d+)[.\d]* \(Ubuntu (\d+\.\d+)\)", image_name)
    return match is not None and _PYTORCH_DLAMIS.get(match[1], ("",))[0] == match[2]


def find_unknown_torch(image_name: str) -> str:
    """Return a Deep Learning AMI's PyTorch ("2.14") if it is not in the table; "" for any other image."""
    torch = image_facts(image_name).torch
    return torch if image_name.startswith("Deep Learning") and torch not in ("", *_PYTORCH_DLAMIS) else ""


# Patterns for the names of public images, each with the login user. The first pattern that matches is used:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/managing-users.html
_USERS = (
    (r"amazon[ -]?linux|^al20|^amzn|^RHEL|^suse|^AlmaLinux|^OL\d|^CentOS[ -]Stream", "ec2-user"),
    (r"ubuntu", "ubuntu"),
    (r"^debian", "admin"),
    (r"^Rocky", "rocky"),
    (r"^Fedora", "fedora"),
    (r"^CentOS", "centos"),
)


def ssh_user(image_name: str) -> str:
    """Return the login user for an image with this name, or "" if it is unknown."""
    return next((user for pattern, user in _USERS if re.search(pattern, image_name, re.IGNORECASE)), "")


def torch_version(image_name: str) -> tuple[int, ...]:
    """Return the PyTorch release in an image's name, such as (2, 12), or () if the name contains none."""
    match = re.search(r"PyTorch (\d+)\.(\d+)", image_name)
    return tuple(int(part) for part in match.groups()) if match else ()


def find_image_problem(kind: GpuType, image_name: str) -> str:
    """Return the reason why the image's driver or torch does not support this type's GPU, or ""."""
    facts, gpu = image_facts(image_name), find_architecture(kind.gpu)
    if gpu is None:
        return ""
    if kind.share < 1 and facts.module and kind.family not in facts.families:
        return (
            f"its release notes do not list {kind.family}: a part of an {kind.gpu} needs "
            "NVIDIA's vGPU driver, which is in the PyTorch images on Amazon Linux 2023"
        )
    row = find_release(facts.torch) if facts.torch and facts.cuda else None
    return find_driver_problem(gpu, driver=facts.driver, module=facts.module) or (
        find_wheel_problem(row, facts.cuda, gpu, driver=facts.driver) if row else ""
    )


def is_family_unlisted(kind: GpuType, image_name: str) -> bool:
    """Return True for a Deep Learning AMI whose release notes do not list the type's family."""
    families = image_facts(image_name).families
    return bool(families) and kind.family not in families


def explain_missing_image(image_name: str) -> str:
    """Return the reason why an early Deep Learning AMI is no longer available, or "".

    AWS deprecates public images two years after their creation, and has deregistered the early images:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ami-deprecate.html
    """
    first = r"Deep Learning (Base )?AMI \((Ubuntu|Amazon Linux)"
    old = re.match(rf"{first}|Deep Learning AMI GPU PyTorch (1\.|2\.[0-4]\b)", image_name)
    return "AWS deprecated and then deregistered Deep Learning AMIs of that age" if old else ""
