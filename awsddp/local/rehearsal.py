"""What makes the torch of a node pretend the GPUs of its instance type (templates/rehearse_gpu)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from awsddp.compat.types import GPU_TYPES
from awsddp.resources import template_folder

PACKAGES = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
"""Where an environment keeps its packages."""


def install(packages: Path, instance_type: str) -> None:
    """Puts the shim for a type into a folder of packages; a type without known GPUs has none to pretend."""
    kind = GPU_TYPES.get(instance_type)
    shutil.copytree(
        template_folder("rehearse_gpu"),
        packages / "rehearse_gpu",
        ignore=shutil.ignore_patterns("__pycache__"),
        dirs_exist_ok=True,
    )
    facts = {
        "count": kind.gpus if kind else 0,
        "name": f"NVIDIA {kind.gpu}" if kind else "",
        "memory_bytes": int(kind.memory_gb * 2**30) if kind else 0,
        "capability": tuple(map(int, (kind.capability if kind and kind.capability else "8.0").split("."))),
    }
    # Not a sitecustomize: Debian's python has one of its own, which comes first.
    (packages / "rehearse_gpu.pth").write_text(f"import rehearse_gpu; rehearse_gpu.pretend(**{facts!r})\n")
