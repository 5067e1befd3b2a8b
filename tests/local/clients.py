"""Foreign clients of EC2, each in an environment of its own, installed once into the cache."""

import fcntl
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from awsddp.local.torchenv import cache_folder

INSTALL_S = 240.0
CLIENTS = {
    "ansible": ("ansible==12.3.0", "boto3==1.44.5"),
    "fabric": ("fabric==3.2.3",),
    "flintrock": ("flintrock==2.1.0",),
    "libcloud": ("apache-libcloud==3.9.1",),
    "ray": ("ray[default]==2.60.0", "boto3==1.44.5"),
}


def client(name: str) -> Path:
    """Return the folder with the programs of a client; skip the test where it cannot be installed."""
    wanted = CLIENTS[name]
    folder = cache_folder() / "clients" / f"{name}-python-{sys.version_info.major}.{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "installed").exists() or (folder / "installed").read_text() != str(wanted):
            _install(folder, wanted)
    return folder / "bin"


def _install(folder: Path, wanted: tuple[str, ...]) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pip = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    try:
        subprocess.run(pip, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{wanted[0]} cannot be installed: {str(error.stderr)[-300:]}")
    (folder / "installed").write_text(str(wanted))
