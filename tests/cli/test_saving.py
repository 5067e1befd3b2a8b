"""--save-to: the results of a job are in S3 when it ends, and the nodes may go."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from awsddp.local import control
from tests.cli.conftest import Lab

RIGHTS = ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject"]


@pytest.fixture
def client(lab: Lab) -> Iterator[Any]:
    """The S3 of a lab whose two nodes have a role, and its bucket."""
    assert lab.run("local", "start").returncode == 0
    info = control.find(lab.home)
    assert info is not None
    keys = {"aws_access_key_id": info.access_key_id, "aws_secret_access_key": info.secret_access_key}
    where: Any = {"endpoint_url": info.endpoint, "region_name": info.region, **keys}
    s3, iam = boto3.client("s3", **where), boto3.client("iam", **where)
    s3.create_bucket(Bucket="results")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument="{}")
    at = "arn:aws:s3:::results"
    allowed = {"Effect": "Allow", "Action": RIGHTS, "Resource": [at, f"{at}/*"]}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_role_policy(RoleName="training", PolicyName="s3", PolicyDocument=document)
    iam.create_instance_profile(InstanceProfileName="training")
    iam.add_role_to_instance_profile(InstanceProfileName="training", RoleName="training")
    words = ("--nodes", "2", "-y", "-o", "local.gpus=off", "-o", "access.instance_profile=training")
    shown = lab.run("up", "--local", *words)
    assert shown.returncode == 0, shown.stderr
    yield s3


def job_json(s3: Any, job: str, state: str) -> Any:
    end = time.monotonic() + 60
    while True:
        found = json.loads(s3.get_object(Bucket="results", Key=f"runs/{job}/job.json")["Body"].read())
        if found["state"] == state:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.5)


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_job_saves_its_checkpoints_and_down_waits_for_the_last(lab: Lab, client: Any) -> None:
    train = ("train", "--save-to", "s3://results/runs")
    assert lab.run("train", "--save-to", "s3://nowhere/runs").returncode == 3
    shown = lab.run(*train, "--", "--epochs", "2")
    assert shown.returncode == 0, shown.stderr
    [job] = [one["job"] for one in lab.json("jobs")["jobs"]]
    assert f"the results of {job} are in s3://results/runs/{job}" in shown.stderr
    found = job_json(client, job, "succeeded")
    assert found["facts"]["save_to"] == "s3://results/runs"
    for _, home, size, parts in found["checkpoint"]["files"]:
        saved = [
            client.get_object(Bucket="results", Key=f"runs/{job}/{key}")["Body"].read() for key, _ in parts
        ]
        assert b"".join(saved) == (lab.project / "runs" / job / home).read_bytes()
        assert sum(map(len, saved)) == size
    (lab.project / "runs").rename(lab.project / "older")
    again = lab.run(*train, "--name", job)
    assert (again.returncode, "already exists" in again.stderr) == (2, True), again.stderr
    assert lab.run(*train, "--name", "second", "--detach", "--", "--epochs", "2").returncode == 0
    while lab.json("jobs")["jobs"][-1]["state"] == "running":
        time.sleep(1)
    ended = lab.run("down", "-y")
    assert (ended.returncode, "the results of second are in s3://results/runs/second" in ended.stderr) == (
        0,
        True,
    ), ended.stderr
    job_json(client, "second", "succeeded")


SCRIPT = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, run = dist.get_rank(), pathlib.Path(os.environ["AWSDDP_RUN_DIR"])
found = os.environ.get("AWSDDP_RESUME")
print("rank", rank, "begins at", torch.load(found)["step"] if found else 0)
pathlib.Path(f"made by {rank}.txt").write_text(f"of {rank}")
if rank == 0:
    torch.save({"step": 7}, run / "step-7.pt")
dist.barrier()
dist.destroy_process_group()
if rank == 3:
    raise SystemExit("no more")
"""


def files(top: Path) -> dict[str, bytes]:
    """Return what a folder of results holds of what the nodes made."""
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and path.parts[len(top.parts)].startswith(("node", "logs"))
    }


@pytest.mark.timeout(400)
def test_a_second_home_reads_all_of_a_job_whose_cluster_has_ended(
    lab: Lab,
    client: Any,
    tmp_path: Path,
) -> None:
    (lab.project / "saved.py").write_text(SCRIPT)
    words = ("--name", "first", "--save-to", "s3://results/runs", "--nproc-per-node", "2")
    assert lab.run("train", "saved.py", *words).returncode == 1
    whole = files(lab.project / "runs" / "first")
    cut = {"Bucket": "results", "Key": "runs/first/node0/large"}
    client.create_multipart_upload(**cut)
    lab.run("down", "-y")
    assert "Uploads" not in client.list_multipart_uploads(Bucket="results")
    (lab.project / "runs").rename(tmp_path / "elsewhere")
    job = "s3://results/runs/first"
    for verb, shown in (("logs", "rank 3 begins at 0"), ("why", "no more"), ("report", "report.html")):
        said = lab.run("--local", verb, job)
        assert (said.returncode, shown in said.stdout + said.stderr) == (0, True), said.stderr + said.stdout
    [row] = lab.json("--local", "jobs", job)["jobs"]
    assert (row["job"], row["state"], row["cause"]["rank"]) == ("first", "failed", 3)
    client.create_multipart_upload(**cut)
    fetched = lab.run("--local", "fetch", job)
    assert fetched.returncode == 0, fetched.stderr
    assert "Uploads" not in client.list_multipart_uploads(Bucket="results")
    assert files(lab.project / "runs" / "first") == whole
    again = lab.json("--local", "fetch", job)
    assert sum(one["bytes"] for one in again["nodes"]) == 0
    missing = lab.run("--local", "fetch", "s3://results/runs/none")
    assert (missing.returncode, "no job at s3://results/runs/none" in missing.stderr) == (7, True)


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_new_nodes_resume_from_s3(lab: Lab, client: Any) -> None:
    (lab.project / "saved.py").write_text(SCRIPT)
    words = ("--save-to", "s3://results/runs", "--nproc-per-node", "2")
    assert lab.run("train", "saved.py", "--name", "first", *words).returncode == 1
    lab.run("exec", "rm -rf ~/awsddp/work ~/.awsddp/jobs/first")
    (lab.project / "runs").rename(lab.project / "elsewhere")
    resumed = lab.run("train", "saved.py", "--name", "second", "--resume", "s3://results/runs/first", *words)
    assert "rank 2 begins at 7" in resumed.stdout, resumed.stderr + resumed.stdout
