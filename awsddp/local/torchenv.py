"""/opt/pytorch of the nodes: a Python with torch and torchvision, made once in a cache and bound read-only.

Deep Learning AMIs have theirs at /opt/pytorch. The Python below it may lie in a home that a node does not
show (pyenv, uv), so it is bound at /opt/python, and the environment points there.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from awsddp.errors import LocalCloudError
from awsddp.resources import train_folder

TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = "0.28.0"
OTHERS = ("numpy", "pillow")  # of what the Deep Learning AMIs have beside them
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_NAME = f"torch-{TORCH_VERSION}-torchvision-{TORCHVISION_VERSION}"
AT = Path("/opt/pytorch")
BASE_AT = Path("/opt/python")


@dataclass(frozen=True)
class TorchEnvironment:
    """What a node is shown so that /opt/pytorch/bin/python has torch."""

    binds: tuple[tuple[Path, Path], ...]
    libraries: tuple[Path, ...]


def cache_folder() -> Path:
    """$AWSDDP_CACHE; else /var/cache/awsddp for root, the user's cache folder for others."""
    if given := os.environ.get("AWSDDP_CACHE"):
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/cache/awsddp")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "awsddp"


def ensure(cache: Path, *, interpreter: bool = True, on_event: Callable[[str], None]) -> Path:
    """Returns the environment's folder in the cache; makes it if it is not there (once, some minutes).

    :param interpreter: it must run by itself in a node; else its packages alone are used.
    :raises LocalCloudError: torch could not be installed.
    """
    folder = cache / f"{_NAME}-python-{platform.python_version()}-{platform.machine()}"
    if folder.exists():
        return folder
    if not interpreter:
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        alike = sorted(cache.glob(f"{_NAME}-python-{minor}.*-{platform.machine()}"))
        if alike:
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
            next="set AWSDDP_CACHE to a folder with 3 GB free, then: awsddp local start",
        ) from error
    return folder


def describe(folder: Path) -> TorchEnvironment:
    """What a node is shown of an environment made by `ensure`."""
    base = Path(sys.base_prefix)
    if base == Path("/usr"):
        return TorchEnvironment(binds=((folder, AT),), libraries=())
    libraries: tuple[Path, ...] = ()
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        libraries = (BASE_AT / "lib" / str(sysconfig.get_config_var("INSTSONAME")),)
    return TorchEnvironment(binds=((folder, AT), (base, BASE_AT)), libraries=libraries)


def _install(folder: Path) -> None:
    building = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(building, ignore_errors=True)
    index = os.environ.get("AWSDDP_TORCH_INDEX") or TORCH_INDEX
    _run([str(_base_python()), "-m", "venv", "--prompt", "pytorch", str(building)])
    pip = [str(building / "bin/python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    patience = ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    indexes = ["--index-url", index, "--extra-index-url", "https://pypi.org/simple"]
    _run([*pip, *patience, *indexes, f"torch=={TORCH_VERSION}", *OTHERS])
    # Its own requirement would have an index without CPU builds answer with torch for CUDA.
    _run([*pip, *patience, *indexes, "--no-deps", f"torchvision=={TORCHVISION_VERSION}"])
    _declare_operators(next(building.glob("lib/python*/site-packages")))
    _point_at_node(building)
    building.rename(folder)


def _declare_operators(packages: Path) -> None:
    """Has torchvision import train/torchvision_operators.py where its compiled half does not fit torch.

    In torchvision's own file: a .pth or sitecustomize would cost every start of Python.
    """
    name = "torchvision_operators"
    shutil.copy(train_folder() / f"{name}.py", packages)
    with (packages / "torchvision/extension.py").open("a") as file:
        file.write(f"\n\nif not _has_ops():  # written by awsddp\n    import {name}\n")


def _point_at_node(building: Path) -> None:
    """Makes the environment right for /opt/pytorch in a node; on this machine it then runs no more."""
    base = Path(sys.base_prefix)
    base_at = base if base == Path("/usr") else BASE_AT
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = building / "bin/python"
    python.unlink()
    python.symlink_to(base_at / "bin" / f"python{version}")
    for name in ("python3", f"python{version}"):
        (building / "bin" / name).unlink(missing_ok=True)
        (building / "bin" / name).symlink_to("python")
    (building / "pyvenv.cfg").write_text(
        f"home = {base_at / 'bin'}\ninclude-system-site-packages = false\n"
        f"version = {platform.python_version()}\n"
    )
    for script in (building / "bin").iterdir():
        if not script.is_symlink():
            script.write_bytes(script.read_bytes().replace(str(building).encode(), str(AT).encode()))
    _compile(building)


def _compile(building: Path) -> None:
    """Byte code beforehand: the nodes see the environment read-only, and each would compile it again."""
    where = ["-s", str(building), "-p", str(AT), "--invalidation-mode", "unchecked-hash"]
    subprocess.run(
        [str(_base_python()), "-m", "compileall", "-q", "-j", "0", *where, str(building / "lib")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _base_python() -> Path:
    return Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise LocalCloudError(
            "torch could not be installed for the local cloud",
            why="\n".join((done.stderr or done.stdout).strip().splitlines()[-5:]),
            next="set AWSDDP_TORCH_INDEX to an index that answers, then: awsddp local start",
        )
