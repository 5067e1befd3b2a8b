"""--save-to: the results of a job are in S3 when it ends, so that its nodes can be terminated."""

import json
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from awsddp.local import control, machine
from awsddp.plan.policy import role_policy
from awsddp.settings.spec import ClusterSpec, JobSection, JobSpec
from tests.support.lab import Lab

WITH_ROLE = ("-y", "-o", "local.gpus=off", "-o", "access.instance_profile=training", "--nodes")


@pytest.fixture
def client(lab: Lab) -> Any:
    """An S3 client of a lab with a bucket and two nodes that have a role."""
    return launch_with_role(lab, 2)[0]


def launch_with_role(lab: Lab, nodes: int) -> tuple[Any, Any]:
    """Launch nodes with a role, and return clients of S3 and IAM."""
    clients = start_with_bucket(lab)
    shown = lab.run("up", "--local", *WITH_ROLE, str(nodes))
    assert shown.returncode == 0, shown.stderr
    return clients


def start_with_bucket(lab: Lab) -> tuple[Any, Any]:
    """Start a cloud with a bucket and a role that may write to it; return clients of S3 and IAM."""
    assert lab.run("local", "start").returncode == 0
    info = control.find_cloud(lab.home)
    assert info is not None
    keys = {"aws_access_key_id": info.access_key_id, "aws_secret_access_key": info.secret_access_key}
    options: Any = {"endpoint_url": info.endpoint, "region_name": info.region, **keys}
    s3, iam = boto3.client("s3", **options), boto3.client("iam", **options)
    s3.create_bucket(Bucket="results")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument="{}")
    job = JobSpec(job=JobSection(save_to="s3://results/runs"))
    document = json.dumps(role_policy(ClusterSpec(name="lab"), job))
    iam.put_role_policy(RoleName="training", PolicyName="s3", PolicyDocument=document)
    iam.create_instance_profile(InstanceProfileName="training")
    iam.add_role_to_instance_profile(InstanceProfileName="training", RoleName="training")
    return s3, iam


def wait_for_job_json(s3: Any, job: str, state: str) -> Any:
    end = time.monotonic() + 60
    while True:
        document = json.loads(s3.get_object(Bucket="results", Key=f"runs/{job}/job.json")["Body"].read())
        if document["state"] == state:
            return document
        assert time.monotonic() < end, document
        time.sleep(0.5)


def read_object(s3: Any, job: str, key: str) -> bytes:
    return bytes(s3.get_object(Bucket="results", Key=f"runs/{job}/{key}")["Body"].read())


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_job_saves_its_checkpoints_and_down_waits_for_the_last(lab: Lab, client: Any) -> None:
    train = ("train", "--save-to", "s3://results/runs")
    assert lab.run("train", "--save-to", "s3://nowhere/runs").returncode == 3
    shown = lab.run(*train, "--", "--epochs", "2")
    assert shown.returncode == 0, shown.stderr
    [job] = [row["job"] for row in lab.json("jobs")["jobs"]]
    assert f"the results of {job} are in s3://results/runs/{job}" in shown.stderr
    document = wait_for_job_json(client, job, "succeeded")
    assert document["facts"]["save_to"] == "s3://results/runs"
    [page] = [json.loads(read_object(client, job, key)) for key, *_ in document["checkpoint"]["pages"]]
    assert page["files"]
    for name, row in page["files"].items():
        saved = b"".join(read_object(client, job, key)[:size] for key, size, *_ in row["parts"])
        assert saved == (lab.project / "runs" / job / name).read_bytes()
        assert len(saved) == row["size"]
    (lab.project / "runs").rename(lab.project / "older")
    refused = lab.run(*train, "--name", job)
    assert (refused.returncode, "already exists" in refused.stderr) == (2, True), refused.stderr
    assert lab.run(*train, "--name", "second", "--detach", "--", "--epochs", "2").returncode == 0
    while lab.json("jobs")["jobs"][-1]["state"] == "running":
        time.sleep(1)
    down = lab.run("down", "-y")
    assert (down.returncode, "the results of second are in s3://results/runs/second" in down.stderr) == (
        0,
        True,
    ), down.stderr
    wait_for_job_json(client, "second", "succeeded")


ALL = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
}
RIGHT, NEEDS = (
    "the role of node0 has no permission {} in {}",
    "awsddp doctor -o job.save_to={} --iam-policy nodes",
)


def remove_action(policy: Any, right: str) -> Any:
    """Return a policy without one of its actions."""
    statements = [
        {**row, "Action": [action for action in row["Action"] if action != right]}
        for row in policy["Statement"]
    ]
    return {**policy, "Statement": [row for row in statements if row["Action"]]}


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_missing_rights_on_s3_are_refused_before_a_rank_starts(lab: Lab) -> None:
    s3, iam = launch_with_role(lab, 1)
    runs = "s3://results/runs"
    policy = json.loads(lab.run("doctor", "--iam-policy", "nodes", "-o", f"job.save_to={runs}").stdout)
    s3.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    s3.create_bucket(Bucket="theirs")
    file = machine.CloudPaths(lab.home).buckets / "theirs" / "bucket.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "owner": "999999999999"}))

    def expect(target: str, rights: Any, message: str, advice: str) -> None:
        iam.put_role_policy(RoleName="training", PolicyName="s3", PolicyDocument=json.dumps(rights))
        shown = lab.run("train", "--name", "job", "--save-to", target)
        lines = shown.stderr[shown.stderr.index("error: ") :].rstrip("\n").split("\n")
        assert (shown.returncode, len(lines)) == (3, 3), shown.stderr
        assert message in lines[0] and advice in lines[2], shown.stderr

    for right in ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
        expect(runs, remove_action(policy, right), RIGHT.format(right, runs), NEEDS.format(runs))
    for target in ("s3://results/other", "s3://theirs/runs"):
        expect(target, policy, RIGHT.format("s3:ListBucket", target), NEEDS.format(target))
    expect("s3://theirs/runs", ALL, RIGHT.format("s3:ListBucket", "s3://theirs/runs"), "--iam-policy nodes")
    expect("s3://far/runs", policy, "bucket far is in eu-west-1, the nodes are in us-east-1", "us-east-1")
    named = {"InstanceProfileName": "training", "RoleName": "training"}
    iam.remove_role_from_instance_profile(**named)
    expect(runs, policy, "node0 has no role, so it cannot save to", f"--save-to {runs}")
    assert lab.json("jobs")["jobs"] == []
    [item] = s3.list_objects_v2(Bucket="results")["Contents"]
    assert (item["Key"], item["Size"]) == ("runs/.awsddp", 2)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket="results")
    iam.add_role_to_instance_profile(**named)
    shown = lab.run("train", "--name", "job", "--save-to", runs, "--", "--epochs", "1")
    assert shown.returncode == 0, shown.stderr  # the printed policy suffices
    wait_for_job_json(s3, "job", "succeeded")


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


def read_results(top: Path) -> dict[str, bytes]:
    """Return the files of a results folder that nodes wrote, by their names."""
    return {
        str(path.relative_to(top)): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file() and path.parts[len(top.parts)].startswith(("node", "logs"))
    }


@pytest.mark.timeout(400)
def test_another_client_reads_a_saved_job_after_its_cluster_was_terminated(
    lab: Lab,
    client: Any,
    tmp_path: Path,
) -> None:
    (lab.project / "saved.py").write_text(SCRIPT)
    args = ("--name", "first", "--save-to", "s3://results/runs", "--nproc-per-node", "2")
    assert lab.run("train", "saved.py", *args).returncode == 1
    expected = read_results(lab.project / "runs" / "first")
    upload = {"Bucket": "results", "Key": "runs/first/node0/large"}
    client.create_multipart_upload(**upload)
    lab.run("down", "-y")
    assert "Uploads" not in client.list_multipart_uploads(Bucket="results")
    (lab.project / "runs").rename(tmp_path / "elsewhere")
    job = "s3://results/runs/first"
    for verb, text in (("logs", "rank 3 begins at 0"), ("why", "no more"), ("report", "report.html")):
        result = lab.run("--local", verb, job)
        assert (result.returncode, text in result.stdout + result.stderr) == (0, True), result
    [row] = lab.json("--local", "jobs", job)["jobs"]
    assert (row["job"], row["state"], row["cause"]["rank"]) == ("first", "failed", 3)
    client.create_multipart_upload(**upload)
    fetched = lab.run("--local", "fetch", job)
    assert fetched.returncode == 0, fetched.stderr
    assert "Uploads" not in client.list_multipart_uploads(Bucket="results")
    assert read_results(lab.project / "runs" / "first") == expected
    again = lab.json("--local", "fetch", job)
    assert sum(node["bytes"] for node in again["nodes"]) == 0
    missing = lab.run("--local", "fetch", "s3://results/runs/none")
    assert (missing.returncode, "no job at s3://results/runs/none" in missing.stderr) == (7, True)


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_new_nodes_resume_from_s3(lab: Lab, client: Any) -> None:
    (lab.project / "saved.py").write_text(SCRIPT)
    args = ("--save-to", "s3://results/runs", "--nproc-per-node", "2")
    assert lab.run("train", "saved.py", "--name", "first", *args).returncode == 1
    lab.run("exec", "rm -rf ~/awsddp/work ~/.awsddp/jobs/first")
    (lab.project / "runs").rename(lab.project / "elsewhere")
    resumed = lab.run("train", "saved.py", "--name", "second", "--resume", "s3://results/runs/first", *args)
    assert "rank 2 begins at 7" in resumed.stdout, resumed.stderr + resumed.stdout
    records = (lab.project / name / "job.json" for name in ("elsewhere/first", "runs/second"))
    first, second = (json.loads(record.read_text())["run_id"] for record in records)
    assert first == second is not None


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_a_folder_of_data_is_uploaded_once_and_copied_from_s3_to_the_nodes(lab: Lab, client: Any) -> None:
    look = (
        "import os, pathlib\nfor path in sorted(pathlib.Path(os.environ['AWSDDP_DATA'], 'set').rglob('*')):\n"
    )
    lab.script("look.py", f"{look}    path.is_file() and print('has', path.name, path.read_text())\n")
    for name, text in (("a/one", "1"), ("a/two", "2"), ("b", "3")):
        lab.script(f"set/{name}", text)
    args = ("train", "--json", "look.py", "--nproc-per-node", "1", "--save-to", "s3://results/runs")

    def train() -> tuple[list[str], str, dict[str, Any]]:
        """Return the files of rank 1, the messages about copies, and the objects of the folder."""
        shown = lab.run(*args, "--data", "./set")
        assert shown.returncode == 0, shown.stderr
        rows = client.list_objects_v2(Bucket="results", Prefix="runs/.data/")["Contents"]
        objects = {row["Key"].partition("/set/")[2]: row["LastModified"] for row in rows}
        files = [line.partition("] has ")[2] for line in lab.run("logs", "--rank", "1").stdout.splitlines()]
        return files, shown.stderr, {name: at for name, at in objects.items() if name}

    files, stderr, first = train()
    assert (files, first.keys()) == (["one 1", "two 2", "b 3"], {"a/one", "a/two", "b"}), stderr
    assert stderr.count("data: 3 files, 3 bytes copied") == 2
    files, stderr, second = train()
    assert (second, stderr.count("data: 0 files, 0 bytes copied")) == (first, 2)
    lab.script("set/b", "4")
    (lab.project / "set/a/two").unlink()
    files, stderr, third = train()
    assert (files, stderr.count("data: 1 file, 1 bytes copied")) == (["one 1", "b 4"], 2)
    assert third.keys() == {"a/one", "b"}
    assert third["a/one"] == first["a/one"]
    lab.run("exec", "--node", "1", "--", "rm -rf ~/awsddp/data")  # as on a new node
    files, stderr, _ = train()
    assert (files, stderr.count("data: 2 files, 2 bytes copied")) == (["one 1", "b 4"], 1)
