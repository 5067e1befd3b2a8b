"""/opt/pytorch of the nodes: a Python with torch and torchvision, made once in a cache and bound read-only.

Deep Learning AMIs have theirs at /opt/pytorch. The Python below it may lie in a home that a node does not
show (pyenv, uv), so it is bound at /opt/python, and the environment points there.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from awsddp.compat.types import GPU_TYPES
from awsddp.errors import LocalCloudError
from awsddp.local.network import run
from awsddp.resources import template_folder, train_folder

TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = "0.28.0"
OTHERS = ("numpy", "pillow")  # of what the Deep Learning AMIs have beside them
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NAME = f"torch-{TORCH_VERSION}-torchvision-{TORCHVISION_VERSION}"
AT = Path("/opt/pytorch")
BASE = Path(sys.base_prefix)
BASE_AT = BASE if Path("/usr") == BASE else Path("/opt/python")
"""Where a node has the Python of this process."""
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
BASE_PYTHON = BASE / "bin" / PYTHON
PACKAGES = Path("lib", PYTHON, "site-packages")
"""Where an environment keeps its packages."""


def cache_folder() -> Path:
    """$AWSDDP_CACHE; else /var/cache/awsddp for root, the user's cache folder for others."""
    if given := os.environ.get("AWSDDP_CACHE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/awsddp")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "awsddp"


def ensure(mode: str, *, on_event: Callable[[str], None] = lambda _: None) -> Path:
    """Return the environment's folder in the cache; makes it if it is not there (once, some minutes).

    :param mode: of the local cloud: in loopback mode its packages alone are used, not its interpreter.
    :raises LocalCloudError: torch could not be installed.
    """
    cache = cache_folder()
    folder = cache / f"{_NAME}-python-{platform.python_version()}-{platform.machine()}"
    if folder.exists():
        return folder
    alike = sorted(cache.glob(f"{_NAME}-{PYTHON.replace('python', 'python-')}.*-{platform.machine()}"))
    if alike and mode == "loopback":
        return alike[-1]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                on_event(f"installing torch {TORCH_VERSION} for the local cloud, once, into {folder}")
                _install(folder)
    except OSError as error:
        raise LocalCloudError(
            "torch for the local cloud cannot be kept in its cache",
            why=str(error),
            next="awsddp local stop   # then set AWSDDP_CACHE to a folder with 3 GB free, and again",
        ) from error
    return folder


def library() -> Path | None:
    """Return the shared library that Python in a node needs from outside /usr."""
    # sysconfig, which would tell, answers None to the second of two hosts that boot at once (Python 3.11).
    shared = BASE / "lib" / f"lib{PYTHON}{sys.abiflags}.so.1.0"
    return shared if BASE_AT != BASE and shared.exists() else None


def _install(folder: Path) -> None:
    building = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    index = os.environ.get("AWSDDP_TORCH_INDEX") or TORCH_INDEX
    install = partial(
        run,
        failed="torch could not be installed for the local cloud",
        next="awsddp local stop   # then set AWSDDP_TORCH_INDEX to an index that answers, and again",
    )
    install(str(BASE_PYTHON), "-m", "venv", "--prompt", "pytorch", str(building))
    pip = [str(building / "bin/python"), "-I", "-m", "pip", "install", "--quiet"]
    patience = ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    indexes = ["--index-url", index, "--extra-index-url", "https://pypi.org/simple"]
    install(*pip, *patience, *indexes, f"torch=={TORCH_VERSION}", *OTHERS)
    # Its own requirement would have an index without CPU builds answer with torch for CUDA.
    install(*pip, *patience, *indexes, "--no-deps", f"torchvision=={TORCHVISION_VERSION}")
    _declare_operators(next(building.glob("lib/python*/site-packages")))
    # From here on it is right for /opt/pytorch in a node; on this machine it runs no more.
    point_at(BASE_AT / "bin" / PYTHON, building)
    for script in (building / "bin").iterdir():
        if not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(str(building).encode(), str(AT).encode()))
    building.rename(folder)


def _declare_operators(packages: Path) -> None:
    """Has torchvision import train/torchvision_operators.py where its compiled half does not fit torch.

    In torchvision's own file: a .pth or sitecustomize would cost every start of Python.
    """
    name = "torchvision_operators"
    shutil.copy(train_folder() / f"{name}.py", packages)
    with (packages / "torchvision/extension.py").open("a") as file:
        file.write(f"\n\nif not _has_ops():  # written by awsddp\n    import {name}\n")


def point_at(python: Path, environment: Path) -> None:
    """Make an environment, whose packages may be there already, one of this interpreter."""
    (environment / "bin").mkdir(parents=True, exist_ok=True)
    for name in ("python", "python3", PYTHON):
        (environment / "bin" / name).unlink(missing_ok=True)
        (environment / "bin" / name).symlink_to(python)
    (environment / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\n"
        f"version = {platform.python_version()}\n"
    )


def rehearse(packages: Path, instance_type: str) -> None:
    """Has the torch of these packages pretend the GPUs of a type, if known (templates/rehearse_gpu)."""
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
