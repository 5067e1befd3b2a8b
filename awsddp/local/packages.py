"""The `packages` of a cloud-config: a small apt repository that the nodes see, filled by this machine's apt.

Nodes have no way to a mirror. The packages and what they depend on are downloaded here; the node's own
cloud-init and apt install them.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from awsddp.local.scope import cloud_configs

AT = "/srv/packages"
"""Where nodes see the repository."""
SOURCE = f"deb [trusted=yes] file:{AT} ./\n"
PATIENCE_S = 300.0


def wanted(user_data: bytes) -> list[str]:
    """Return the packages that user data names, as apt-get takes them."""
    named = [one for config in cloud_configs(user_data) for one in _listed(config.get("packages"))]
    return ["=".join(map(str, one)) if isinstance(one, list) else str(one) for one in named]


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict):  # by package manager: there is apt alone
        value = value.get("apt")
    return value if isinstance(value, list) else []


def provide(names: Sequence[str], repository: Path) -> None:
    """Put packages into the repository. What apt does not find, the node's apt will say."""
    if not names and (repository / "Packages").exists():
        return
    (repository / "partial").mkdir(parents=True, exist_ok=True)
    for name in names:
        subprocess.run(
            [
                *("apt-get", "install", "--download-only", "--yes", "--quiet"),
                *("-o", f"Dir::Cache::archives={repository}", "-o", "Debug::NoLocking=true"),
                *("-o", "APT::Sandbox::User=root"),  # _apt cannot enter the folder
                *("--", name),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=PATIENCE_S,
        )
    index = repository / "Packages.new"
    index.write_text("\n".join(_stanza(path) for path in sorted(repository.glob("*.deb"))))
    index.rename(repository / "Packages")


def _stanza(package: Path) -> str:
    """A package's entry in the index: https://wiki.debian.org/DebianRepository/Format"""
    control = subprocess.run(["dpkg-deb", "--field", package], capture_output=True, text=True, check=True)
    data = package.read_bytes()
    return (
        f"{control.stdout.strip()}\nFilename: ./{package.name}\nSize: {len(data)}\n"
        f"SHA256: {hashlib.sha256(data).hexdigest()}\n"
    )
