"""--save-to without a client at the end: the cluster terminates itself, and no result is lost."""

import json
import os
import signal
import time
from pathlib import Path

import boto3
import pytest

from awsddp.local import control
from tests.support.lab import Lab
from tests.support.seed import draw_cases
from tests.system.test_detached import LATE_S
from tests.system.test_saving import WITH_ROLE, read_results, start_with_bucket, wait_for_job_json

pytestmark = pytest.mark.prove

MADE = """
import json, os, pathlib, socket, time
rank, run = int(os.environ["RANK"]), pathlib.Path(os.environ["AWSDDP_RUN_DIR"])
print("rank", rank, "writes", flush=True)
(run / "state.bin").write_bytes(bytes(range(256)) * (1000 + rank))
pathlib.Path(f"made by {rank}.txt").write_text(f"of {rank}")
with (run / "metrics.jsonl").open("w") as rows:
    for step in range(3):
        rows.write(json.dumps({"rank": rank, "step": step, "loss": 0.53125 / (step + 1)}) + chr(10))
if rank == 0:  # a rank that fails ends the others: rank 1 waits until this one has written
    socket.create_server(("", 29999)).accept()
while rank == 1:
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], 29999), timeout=5).close()
    except OSError:
        time.sleep(0.1)
    else:
        raise SystemExit("no more")
"""


def list_expected(rank: int) -> dict[str, bytes]:
    """Return the files that a rank of MADE writes on its own node."""
    rows = (json.dumps({"rank": rank, "step": step, "loss": 0.53125 / (step + 1)}) for step in range(3))
    log = f"rank {rank} writes\n" + "no more\n" * rank
    return {
        f"logs/rank{rank}.log": log.encode(),
        f"node{rank}/run/state.bin": bytes(range(256)) * (1000 + rank),
        f"node{rank}/made by {rank}.txt": f"of {rank}".encode(),
        f"node{rank}/run/metrics.jsonl": "".join(f"{row}\n" for row in rows).encode(),
    }


def wait_for_states(lab: Lab, state: str) -> None:
    """Wait until all instances have this state, without a command of awsddp, which would change it."""
    info = control.find_cloud(lab.home)
    assert info is not None
    keys = {"aws_access_key_id": info.access_key_id, "aws_secret_access_key": info.secret_access_key}
    ec2 = boto3.client("ec2", endpoint_url=info.endpoint, region_name=info.region, **keys)
    end = time.monotonic() + LATE_S
    while True:
        pages = ec2.describe_instances()["Reservations"]
        states = {node["State"]["Name"] for page in pages for node in page["Instances"]}
        if states == {state}:
            return
        assert time.monotonic() < end, states
        time.sleep(1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ends", draw_cases(["it comes back", "second home", "spot"], 1, label="laptops"))
def test_a_client_that_never_returns_loses_no_result(lab: Lab, tmp_path: Path, ends: str) -> None:
    start_with_bucket(lab)
    lab.script("made.py", MADE)
    args = ("run", "--local", "made.py", *WITH_ROLE, "2", *("--spot",) * (ends == "spot"))
    more = ("--world-size", "2", "--detach", "--idle", "10s", "--save-to", "s3://results/runs")
    client = lab.start(*args, "--name", "left", *more)
    assert client.stderr is not None
    assert any(b"job left runs" in line for line in client.stderr)
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    wait_for_states(lab, "terminated" if ends == "spot" else "stopped")

    second, info = Lab(tmp_path / "second"), control.find_cloud(lab.home)  # it has only credentials
    assert info is not None
    second.environ |= {
        "AWS_ENDPOINT_URL": info.endpoint,
        "AWS_DEFAULT_REGION": info.region,
        "AWS_ACCESS_KEY_ID": info.access_key_id,
        "AWS_SECRET_ACCESS_KEY": info.secret_access_key,
    }
    job = "s3://results/runs/left"
    for verb, text in (("logs", "rank 1 writes"), ("why", "no more"), ("report", "report.html")):
        result = second.run(verb, job)
        assert (result.returncode, text in result.stdout + result.stderr) == (0, True), result
    page = second.project / "runs" / "left" / "report.html"
    assert "0.177" in page.read_text()
    fetched = second.run("fetch", job)
    assert fetched.returncode == 0, fetched.stderr
    assert read_results(second.project / "runs" / "left") == list_expected(0) | list_expected(1)

    if ends != "spot":  # saved results need no started node, and fetched ones no key
        down = lab.run("down", "-y") if ends == "it comes back" else second.run("-c", "default", "down", "-y")
        assert (down.returncode, "2 instances terminated" in down.stdout) == (0, True), down.stderr
    late = lab.run("fetch", "left")
    assert late.returncode == 0, late.stderr
    assert read_results(lab.project / "runs" / "left") == list_expected(0) | list_expected(1)


@pytest.mark.timeout(400)
def test_a_job_that_fails_at_once_is_saved_and_leaves_no_claim(lab: Lab) -> None:
    s3, _ = start_with_bucket(lab)
    lab.script("bad.py", "import missing_module_of_mine\n")
    args = ("run", "--local", "bad.py", *WITH_ROLE, "2", "--world-size", "2")
    result = lab.run(*args, "--save-to", "s3://results/runs")
    assert result.returncode == 1, result.stderr
    assert "the results of bad-1 are in s3://results/runs/bad-1" in result.stderr
    assert "its uploads make no progress" not in result.stderr
    assert wait_for_job_json(s3, "bad-1", "failed")["document"]["state"] == "failed"
