"""Foreign clients of EC2, each in an environment of its own, installed once into the cache."""

import fcntl
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from awsddp.local.torchenv import cache_folder

INSTALL_S = 240.0
COLLECTIONS = "ansible==12.3.0"
"""Ansible's collections as PyPI has them, of which amazon.aws alone is unpacked: 500 MB less."""
CLIENTS = {
    "ansible": ("ansible-core==2.19.14", "boto3==1.44.5"),
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
    try:
        _pip(folder, "install", "--no-compile", *wanted)
        if folder.name.startswith("ansible-"):
            _pip(folder, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), COLLECTIONS)
            _unpack_collection(folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{wanted[0]} cannot be installed: {str(error.stderr)[-300:]}")
    (folder / "installed").write_text(str(wanted))


def _pip(folder: Path, *argv: str) -> None:
    words = [folder / "bin/pip", "--quiet", "--disable-pip-version-check", *argv]
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALL_S)


def _unpack_collection(folder: Path) -> None:
    (wheel,) = folder.glob("ansible-*.whl")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith("ansible_collections/amazon/aws/")]
        archive.extractall(packages, wanted)
    wheel.unlink()
