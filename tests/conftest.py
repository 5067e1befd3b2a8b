"""No test touches the user's home, credentials, ssh-agent or the network."""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from awsddp.cli.command_line import COMMAND, CommandState
from awsddp.errors import AwsddpError
from tests.support.fleet import fleet, make_fleet
from tests.support.folder_nodes import world
from tests.support.lab import cluster, lab, says, story
from tests.support.local_cloud import records
from tests.support.seed import SEED

if TYPE_CHECKING:
    from tests.support.moto_cloud import Server

_DANGEROUS = ("AWS_", "AWSDDP_", "SSH_", "MASTER_", "NCCL_", "GLOO_")
_TYPED: set[str] = set()
_NUMBERS = itertools.count()
_ALLOWED = ("AWSDDP_CACHE", "AWSDDP_FULL", "AWSDDP_SEED", "AWSDDP_TORCH_INDEX")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the seconds of each file, the counts of cases, and the lines that tests reported."""
    seconds = _seconds(terminalreporter)
    for file in sorted(seconds, key=lambda file: -seconds[file]) if len(seconds) > 1 else ():
        terminalreporter.write_line(f"{seconds[file]:7.1f} s  {file}")
    count = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
    ran = sum(count.get(outcome, 0) for outcome in ("passed", "failed"))
    for report in terminalreporter.stats.get("passed", ()):
        for line in dict(report.user_properties).get("says", "").splitlines():
            terminalreporter.write_line(line)
    drawn = f", drawn with AWSDDP_SEED={SEED}" if config.option.markexpr == "prove" else ""
    terminalreporter.write_line(f"{ran} cases ran, {count.get('skipped', 0)} skipped{drawn}")


def _seconds(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """Return the seconds of each test file, its fixtures included; with workers, those of all of them."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    return seconds


@pytest.fixture(scope="session")
def server() -> Iterator["Server"]:
    """The moto server of tests/aws and tests/cluster: patches moto once, and only if a test needs it."""
    from tests.support.moto_fixtures import serve_moto

    yield from serve_moto()


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give each test its own home and command line, and no access to the user's accounts."""
    # Numbered by a counter: pytest would search all existing homes for the next number.
    home = tmp_path_factory.mktemp(f"home{next(_NUMBERS)}", numbered=False)
    for name in list(os.environ):
        if name.startswith(_DANGEROUS) and name not in _ALLOWED:
            monkeypatch.delenv(name)
    for name, value in vars(CommandState()).items():
        monkeypatch.setattr(COMMAND, name, value)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWSDDP_HOME", str(home / ".awsddp"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(home / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield home


@pytest.fixture(autouse=True)
def advice_is_typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Type the commands of every `next` that an error of the test has into the parser."""
    from tests.support.advice_lines import parse_commands

    advice: set[str] = set()
    make = AwsddpError.__init__

    def record_advice(self: AwsddpError, *args: str, **options: str) -> None:
        make(self, *args, **options)
        advice.add(self.next)

    monkeypatch.setattr(AwsddpError, "__init__", record_advice)
    yield
    for text in advice - _TYPED:
        parse_commands(text)
    _TYPED.update(advice)
