"""What makes the torch of a node pretend the GPUs of its instance type (templates/rehearse_gpu)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from awsddp.compat.types import GPU_TYPES
from awsddp.resources import template_folder

PACKAGES = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
"""Where an environment keeps its packages."""


def install(packages: Path, instance_type: str) -> None:
    """Puts the shim for a type into a folder of packages; a type without known GPUs has none to pretend."""
    shutil.copytree(template_folder("rehearse_gpu"), packages / "rehearse_gpu", dirs_exist_ok=True)
    facts: dict[str, Any] = {}
    if kind := GPU_TYPES.get(instance_type):
        facts = {
            "count": kind.gpus,
            "name": f"NVIDIA {kind.gpu}",
            "memory_bytes": int(kind.memory_gb * 2**30),
            "capability": tuple(map(int, (kind.capability or "8.0").split("."))),
        }
    # Not a sitecustomize: Debian's python has one of its own, which comes first.
    (packages / "rehearse_gpu.pth").write_text(f"import rehearse_gpu; rehearse_gpu.pretend(**{facts!r})\n")
