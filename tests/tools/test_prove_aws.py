"""The steps of `make prove-aws`, in the local cloud."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

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
    "up, a second cluster, of spot nodes",
    "train, resumed from S3",
    "train --recover 1, a spot node interrupted",
    "down of the second cluster",
    "search by tag",
]


def run_program(lab: Lab, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        env={**lab.environ, **environ},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_nothing_is_launched_on_an_account_without_awsddp_real(lab: Lab) -> None:
    refused = run_program(lab)
    assert refused.returncode == 2
    assert "AWSDDP_REAL=cpu make prove-aws" in refused.stdout


def load_program() -> Any:
    spec = importlib.util.spec_from_file_location("prove_aws", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_proof(program: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Stubber, Any]:
    """Return a proof whose client for FIS answers as the stubber says, and the experiment's request."""
    proof = program.Proof(folder, local=False, region=None)
    proof.fis_role = "arn:aws:iam::123456789012:role/proof-fis"
    fis = boto3.client("fis", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="y")
    monkeypatch.setattr(proof, "client", lambda *_: fis)
    monkeypatch.setattr(program.secrets, "token_hex", lambda _: "token")
    monkeypatch.setattr(program.time, "sleep", lambda _: None)
    return proof, Stubber(fis), program.make_experiment("i-1", "eu-west-1", role=proof.fis_role)


@pytest.mark.parametrize(("last", "fails"), [("running", False), ("completed", False), ("failed", True)])
def test_the_interruptions_requests_fit_the_service_and_the_template_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, fails: bool
) -> None:
    """botocore checks the requests and answers against its description of AWS FIS, which was never called."""
    program = load_program()
    proof, stubber, request = make_proof(program, tmp_path, monkeypatch)
    (target,) = request["targets"].values()
    assert target["resourceArns"] == ["arn:aws:ec2:eu-west-1:123456789012:instance/i-1"]
    started = {"experiment": {"id": "EXP1", "state": {"status": "pending"}}}
    seen = {"experiment": {"id": "EXP1", "state": {"status": last, "reason": "no such instance"}}}
    stubber.add_response("create_experiment_template", {"experimentTemplate": {"id": "EXT1"}}, request)
    stubber.add_response(
        "start_experiment", started, {"clientToken": "token", "experimentTemplateId": "EXT1"}
    )
    stubber.add_response("get_experiment", seen, {"id": "EXP1"})
    stubber.add_response("delete_experiment_template", {}, {"id": "EXT1"})
    with stubber:
        if fails:
            with pytest.raises(program.Failed, match="no such instance"):
                proof.interrupt("i-1", "eu-west-1")
        else:
            proof.interrupt("i-1", "eu-west-1")
        proof.undo.close()
    stubber.assert_no_pending_responses()


def test_the_role_of_fis_may_only_interrupt_spot_instances() -> None:
    program = load_program()
    statements = json.loads(program.FIS_POLICY)["Statement"]
    assert [row["Action"] for row in statements] == [
        "ec2:DescribeInstances",
        "ec2:SendSpotInstanceInterruptions",
    ]
    assert json.loads(program.FIS_TRUST)["Statement"][0]["Principal"] == {"Service": "fis.amazonaws.com"}
    prices = (program.BUDGET_USD, program.SECOND_USD, program.FIS_USD, "0.01")
    assert sum(map(float, prices)) == pytest.approx(2)


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_every_step_runs_in_the_local_cloud(lab: Lab, tmp_path: Path) -> None:
    page = tmp_path / "proven.md"
    process = run_program(lab, "--local", "--to", str(page))
    assert process.returncode == 0, process.stdout + process.stderr
    text = page.read_text()
    assert re.search(r"^## \d{4}-\d\d-\d\d: 2 x \S+ in us-east-1 \(local\)$", text, re.MULTILINE)
    assert re.findall(r"^\| (.*) \| \d+ \|$", text, re.MULTILINE) == STEPS
    assert re.search(r"Commit [0-9a-f]{12}.*Cost by list price: \$\d", text)
