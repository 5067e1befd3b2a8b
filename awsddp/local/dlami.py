"""The images that the local cloud offers: Deep Learning AMIs, by their public names and SSM parameters.

Names and parameters as https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html has them. All
are tagged `awsddp:gpus=rehearsed`, which is how a client knows that the CPU answers in the place of CUDA
devices (torchenv.py; not on an instance tagged `awsddp:gpus=pretended`), and `awsddp:internet=none`; where
nothing boots also `awsddp:hosts=none`, without root `awsddp:ssh-user` (daemon.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from awsddp.local.requests import Refusal, Request

OWNER = "898082745236"
ROOT_DEVICE = "/dev/sda1"
ROOT_GIB = 75


@dataclass(frozen=True)
class Image:
    """One image; `parameter` is the part of its SSM name after the architecture, "" if it has none."""

    name: str
    created: str
    parameter: str = ""
    architecture: str = "x86_64"

    def id(self, region: str) -> str:
        """Stable, and another one in each region, as on AWS."""
        return "ami-" + hashlib.sha256(f"{region}/{self.name}".encode()).hexdigest()[:17]

    def parameter_name(self) -> str:
        return f"/aws/service/deeplearning/ami/{self.architecture}/{self.parameter}/latest/ami-id"


def _pytorch(version: str, ubuntu: str, day: str, *, newest: bool = True, arm: bool = False) -> Image:
    stem = "Deep Learning ARM64 AMI OSS" if arm else "Deep Learning OSS"
    driver = "Nvidia Driver GPU" if arm else "Nvidia Driver AMI GPU"
    parameter = f"oss-nvidia-driver-gpu-pytorch-{version}-ubuntu-{ubuntu}" if newest else ""
    return Image(
        name=f"{stem} {driver} PyTorch {version} (Ubuntu {ubuntu}) {day}",
        created=f"{day[:4]}-{day[4:6]}-{day[6:]}T05:12:42.000Z",
        parameter=parameter,
        architecture="arm64" if arm else "x86_64",
    )


IMAGES = (
    _pytorch("2.12", "24.04", "20260822"),
    _pytorch("2.12", "24.04", "20260705", newest=False),
    _pytorch("2.11", "24.04", "20260517"),
    _pytorch("2.10", "24.04", "20260301"),
    _pytorch("2.9", "24.04", "20260317"),
    _pytorch("2.7", "22.04", "20250602"),
    _pytorch("2.12", "24.04", "20260822", arm=True),
    Image(
        name="Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) 20260815",
        created="2026-08-15T04:02:11.000Z",
        parameter="base-oss-nvidia-driver-gpu-ubuntu-24.04",
    ),
)


def parameters(request: Request, backend: Any) -> dict[str, Any]:
    """Answer GetParameter and GetParameters of Systems Manager, which name the images.

    :raises Refusal: ParameterNotFound.
    """
    ids = {image.parameter_name(): image.id(request.region) for image in IMAGES if image.parameter}
    names = request.asked.get("Names") or [request.asked.get("Name", "")]
    found = [{"Name": name, "Type": "String", "Value": ids[name]} for name in names if name in ids]
    if request.action == "GetParameters":
        return {"Parameters": found, "InvalidParameters": [name for name in names if name not in ids]}
    if not found:
        raise Refusal("ParameterNotFound", f"Parameter {names[0]} not found.")
    return {"Parameter": found[0]}
