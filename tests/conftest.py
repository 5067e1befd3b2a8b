"""No test touches the user's home, credentials, ssh-agent or the network."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_DANGEROUS = ("AWS_", "AWSDDP_", "SSH_", "MASTER_", "NCCL_", "GLOO_")
_KEPT = ("AWSDDP_CACHE", "AWSDDP_FULL", "AWSDDP_TORCH_INDEX")


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give each test a home of its own and take every way to the user's accounts away."""
    home = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(_DANGEROUS) and name not in _KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWSDDP_HOME", str(home / ".awsddp"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield home


@pytest.fixture
def awsddp(tmp_path: Path) -> "Command":
    """The command line as a user starts it: a process of its own, in an empty folder."""
    return Command(tmp_path)


class Command:
    """Starts `awsddp` in a folder and returns what the user would see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, *words: str, timeout: float = 180, env: dict[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "awsddp", *words],
            cwd=self.folder,
            env={**os.environ, **(env or {})},
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *words: str, **settings: object) -> subprocess.Popen[bytes]:
        """Start it and return at once, for those that are killed half-way."""
        return subprocess.Popen(
            [sys.executable, "-m", "awsddp", *words],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **settings,  # type: ignore[call-overload]
        )
