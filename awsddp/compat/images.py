"""Machine images by their name: what is in a Deep Learning AMI, and which instance types it drives."""

import re
from dataclasses import dataclass

from awsddp.compat.releases import KernelModule, architecture_of, release, undriven, unfit
from awsddp.compat.types import GpuType

# Deep Learning AMIs with PyTorch, newest first, by the SSM parameter that holds the newest build's id:
# https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
_PARAMETER = "/aws/service/deeplearning/ami/{}/oss-nvidia-driver-gpu-pytorch-{}-ubuntu-{}/latest/ami-id"
_TORCHES = (
    ("2.12", "24.04"),
    ("2.11", "24.04"),
    ("2.10", "24.04"),
    ("2.9", "24.04"),
    ("2.8", "24.04"),
    ("2.7", "22.04"),
)
DLAMI_PARAMETERS = tuple(_PARAMETER.format("x86_64", *pair) for pair in _TORCHES)
DLAMI_NAMES = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch *(Ubuntu *"


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """What an image's name tells of it. "", None and () mean that the name does not tell.

    `families` are the instance families that its release notes list.
    """

    torch: str = ""
    cuda: str = ""
    driver: int | None = None
    module: KernelModule | None = None
    families: frozenset[str] = frozenset()


_G4_TO_P5 = frozenset({"g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en"})
_K80_TO_A100 = frozenset({"p2", "p3", "p3dn", "g3", "g4dn", "p4d"})
_TO_B200 = _G4_TO_P5 | {"p6-b200"}
# torch: CUDA, driver branch, families. Release notes, as of 2026-10:
# https://docs.aws.amazon.com/dlami/latest/devguide/appendix-ami-release-notes.html
# An older build of the same release may have an older driver; CUDA is "" where the notes were not seen.
_PYTORCH_DLAMIS: dict[str, tuple[str, int, frozenset[str]]] = {
    "2.12": ("13.0", 595, _TO_B200),
    "2.11": ("13.0", 595, _TO_B200),
    "2.10": ("13.0", 580, _TO_B200),
    "2.9": ("", 580, _TO_B200),
    "2.8": ("", 570, _TO_B200),
    "2.7": ("12.8", 570, _TO_B200),
    "2.6": ("12.6", 570, _G4_TO_P5),
}
# Patterns of other images: the driver branch that AWS's notes gave last, and the families they list.
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
    """Return what the name of an image tells; all empty where it is none of the known families."""
    match = re.search(r"OSS Nvidia Driver (?:AMI )?GPU PyTorch (\d+\.\d+)", name)
    if match:
        cuda, driver, families = _PYTORCH_DLAMIS.get(match[1], ("", None, frozenset()))
        return ImageFacts(torch=match[1], cuda=cuda, driver=driver, module="open", families=families)
    return next((facts for pattern, facts in _OTHERS if re.search(pattern, name)), ImageFacts())


def ssh_user(image_name: str) -> str:
    """Return the user that an image of this name lets in: ec2-user on Amazon Linux, else ubuntu."""
    return "ec2-user" if re.search(r"amazon[ -]?linux|^al20", image_name, re.IGNORECASE) else "ubuntu"


def torch_version(image_name: str) -> tuple[int, ...]:
    """Return the PyTorch release in a Deep Learning AMI's name, such as (2, 12); () where it names none."""
    match = re.search(r"PyTorch (\d+)\.(\d+)", image_name)
    return tuple(int(part) for part in match.groups()) if match else ()


def misfit(kind: GpuType, image_name: str) -> str:
    """Return why the image's driver or torch cannot use this type's GPU, or ""."""
    facts, gpu = image_facts(image_name), architecture_of(kind.gpu)
    if gpu is None:
        return ""
    row = release(facts.torch) if facts.torch and facts.cuda else None
    return undriven(gpu, driver=facts.driver, module=facts.module) or (
        unfit(row, facts.cuda, gpu, driver=facts.driver) if row else ""
    )


def unlisted(kind: GpuType, image_name: str) -> bool:
    """Whether this is a Deep Learning AMI whose release notes do not list the type's family."""
    families = image_facts(image_name).families
    return bool(families) and kind.family not in families


def explained(image_name: str) -> str:
    """Return why an image of the early Deep Learning AMIs can no longer be had, or "".

    Public images are deprecated two years after they were made, and these have since been deregistered:
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ami-deprecate.html
    """
    first = r"Deep Learning (Base )?AMI \((Ubuntu|Amazon Linux)"
    old = re.match(rf"{first}|Deep Learning AMI GPU PyTorch (1\.|2\.[0-4]\b)", image_name)
    return "Deep Learning AMIs of that age were deprecated and then deregistered by AWS" if old else ""
