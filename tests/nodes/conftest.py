"""Hosts with a real sshd (tests/support/ssh_hosts.py), and what nodes have."""

import os
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from awsddp.nodes import hostkeys
from awsddp.nodes.catalog import Catalog
from awsddp.nodes.hostkeys import make_key
from tests.support.ssh_hosts import Host, Lab, make_host


@pytest.fixture
def make_lab(tmp_path: Path, isolated: Path) -> Iterator[Callable[[int], Lab]]:
    """A function that starts N hosts with known host keys, in a folder whose name needs quoting."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd requires it; usually systemd creates it
    hosts: list[Host] = []

    def make(count: int) -> Lab:
        folder = tmp_path / "a lab's"
        folder.mkdir()
        login = make_key("login")
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_text(login.private)
        hosts.extend(make_host(tmp_path, node, login) for node in range(count))
        known_hosts = folder / "known hosts"
        hostkeys.add_keys(known_hosts, {host.endpoint.instance_id: host.seed.public for host in hosts})
        for host in hosts:
            host.start()
        return Lab(folder, list(hosts), key, known_hosts)

    yield make
    for host in hosts:
        host.stop()


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment with a stand-in for torch."""
    folder = tmp_path_factory.mktemp("pytorch")
    venv.create(folder, with_pip=False, symlinks=True)
    torch = folder / f"lib/python3.{sys.version_info.minor}/site-packages/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('asked only on nodes with GPUs')\n")
    (torch / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda = '13.0'\n")
    return folder


@pytest.fixture
def catalog(monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """A catalog that grants all downloads of nodes, on a machine without a proxy."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return Catalog(everything=True, key=b"key")
