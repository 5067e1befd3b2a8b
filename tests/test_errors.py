"""The exit codes and kinds of errors of docs/design.md, which scripts rely on."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from awsddp import errors
from awsddp.cli import failures
from awsddp.errors import AwsddpError

DESIGN = (Path(__file__).resolve().parents[1] / "docs/design.md").read_text()
CODES = {
    "JobError": 1,
    "UsageError": 2,
    "ConfigError": 3,
    "NoRegion": 3,
    "InUse": 3,
    "LocalCloudError": 3,
    "CloudError": 4,
    "CapacityError": 5,
    "NodeError": 6,
    "NotFoundError": 7,
    "LeftoverError": 8,
    "Interrupted": 130,
}
CLASSES = {name: getattr(errors, name) for name in CODES}


def rows(pattern: str) -> dict[str, re.Match[str]]:
    return {match[1]: match for match in re.finditer(pattern, DESIGN, re.MULTILINE)}


@pytest.mark.parametrize("name", CODES)
def test_command_that_raises_an_error_ends_with_its_number(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise CLASSES[name]("it failed", "because", "try again")

    monkeypatch.setattr(sys, "argv", ["awsddp"])
    assert failures.run(click.Command("awsddp", callback=fail)) == CODES[name]
    assert capsys.readouterr().err == "error: it failed\n  why: because\n next: try again\n"


def test_every_error_is_in_the_table_with_its_number_and_whether_it_is_retryable() -> None:
    known = {value for value in vars(errors).values() if isinstance(value, type)}
    raised = {one for one in known if issubclass(one, AwsddpError)} - {AwsddpError}
    assert {one.__name__ for one in raised} == set(CODES)
    kinds = rows(r"^\| `(\w+)` \| (\d+) \| (yes|no) \| ")
    for one in raised | {AwsddpError}:
        documented = kinds[one.kind]
        assert (int(documented[2]), documented[3] == "yes") == (one.exit_code, one.retryable), one
    assert set(rows(r"^\| (\d+) \| ")) == {str(code) for code in (0, *CODES.values())}


def test_reader_that_goes_away_is_128_and_the_signal_of_a_broken_pipe() -> None:
    line = f"{sys.executable} -m awsddp --help | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("141\n", "")
