"""The steps of `make prove-aws`, in the local cloud."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import Lab

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "prove_aws.py"
STEPS = [
    "bucket and role",
    "up",
    "train",
    "train, its client killed",
    "reboot of node1",
    "train after the reboot",
    "train, saved in S3",
    "stop",
    "start",
    "down",
    "up, a second cluster",
    "train, resumed from S3",
    "down of the second cluster",
    "search by tag",
]


def run_program(lab: Lab, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**lab.environ, **environ},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_nothing_is_launched_on_an_account_without_awsddp_real(lab: Lab) -> None:
    refused = run_program(lab)
    assert refused.returncode == 2
    assert "AWSDDP_REAL=cpu make prove-aws" in refused.stdout


@pytest.mark.prove
@pytest.mark.timeout(500)
def test_every_step_runs_in_the_local_cloud(lab: Lab, tmp_path: Path) -> None:
    page = tmp_path / "proven.md"
    process = run_program(lab, "--local", "--to", str(page))
    assert process.returncode == 0, process.stdout + process.stderr
    text = page.read_text()
    assert re.search(r"^## \d{4}-\d\d-\d\d: 2 x \S+ in us-east-1 \(local\)$", text, re.MULTILINE)
    assert re.findall(r"^\| (.*) \| \d+ \|$", text, re.MULTILINE) == STEPS
    assert re.search(r"Commit [0-9a-f]{12}.*Cost by list price: \$\d", text)
