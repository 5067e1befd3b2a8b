"""Test all verbs on a real AWS account, for at most $2: `AWSDDP_REAL=cpu python tools/prove_aws.py` (or gpu).

The program tests up, train, a killed client, a reboot, results in S3, stop, start and down on two nodes. A
second cluster of two spot nodes then resumes from S3, and AWS FIS interrupts one of the nodes during a job
with --recover (never run on AWS so far): at most $0.50 for the nodes and $0.30 for FIS, of the $2. At the
end, the program searches for remaining resources. The bucket (at most $0.01 of requests), the roles and the
experiment template are created for the test and deleted afterwards. A run that succeeds on AWS is added to
docs/proven.md. With `--local`, the same steps run in a separate local cloud, whose own fault reclaims the
node.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import ClientError

from awsddp.local import control

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = "proof"
BUDGET_USD, SECOND_USD, EXPIRES = "1.19", "0.50", "30m"
FIS_USD = "0.30"
"""For three minutes of one action, at $0.10 per minute: https://aws.amazon.com/fis/pricing/"""
CPU_TYPE = "t3.medium"
BOOT_S = 600
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
saved = os.environ.get("AWSDDP_RESUME")
assert (saved is not None) == ("resumed" in sys.argv)
assert saved is None or int(torch.load(saved)) == 2
total = torch.ones(1, device="cuda" if cuda else "cpu")
for step in range(int(sys.argv[1])):
    total.fill_(1)
    dist.all_reduce(total)
    assert int(total) == world
    print("step", step, "of", dist.get_backend(), flush=True)
    time.sleep(0.5)
torch.save(total.cpu(), f"total{rank}.pt")
dist.destroy_process_group()
"""
GOES_ON = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if cuda else "gloo")
rank, saved = dist.get_rank(), os.environ.get("AWSDDP_RESUME")
begin = int(torch.load(saved)) if saved else 0
latest = Path(os.environ["AWSDDP_RUN_DIR"], "latest.pt")
for step in range(begin, begin + 5 if saved else 1200):
    total = torch.ones(1, device="cuda" if cuda else "cpu")
    dist.all_reduce(total)
    if rank == 0:
        torch.save(torch.tensor(step + 1), f"{latest}.new")
        os.replace(f"{latest}.new", latest)
    print("step", step, flush=True)
    time.sleep(0.5)
torch.save(total.cpu(), f"total{rank}.pt")
dist.destroy_process_group()
"""
FIS_TRUST = """{"Version": "2012-10-17", "Statement": [{
    "Effect": "Allow", "Principal": {"Service": "fis.amazonaws.com"}, "Action": "sts:AssumeRole"}]}"""
FIS_POLICY = """{"Version": "2012-10-17", "Statement": [
    {"Effect": "Allow", "Action": "ec2:DescribeInstances", "Resource": "*"},
    {"Effect": "Allow", "Action": "ec2:SendSpotInstanceInterruptions",
     "Resource": "arn:aws:ec2:*:*:instance/*"}]}"""
FIS_ENDED = ("completed", "stopping", "stopped", "failed", "cancelled")
TRUST = """{"Version": "2012-10-17", "Statement": [{
    "Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]}"""
START = "cat /proc/sys/kernel/random/boot_id; awk '{print $22}' /proc/1/stat"


class Failed(Exception):
    """A step failed."""


class Proof:
    """A cluster and the steps on it.

    `seconds` has the duration of each step, `undo` deletes the bucket and the role.
    """

    def __init__(self, project: Path, *, local: bool, region: str | None) -> None:
        self.project = project
        self.options = [
            "-c",
            CLUSTER,
            *(["--local"] if local else []),
            *(["--region", region] if region else []),
        ]
        self.environ = {**os.environ, **({"AWSDDP_HOME": str(project / "home")} if local else {})}
        self.local = local
        self.seconds: dict[str, float] = {}
        self.costs: list[float | None] = []
        self.undo = ExitStack()
        self.fis_role = ""

    def awsddp(self, *words: str) -> Any:
        """Run a verb and return its document. Raises Failed."""
        argv = [sys.executable, "-m", "awsddp", *self.options, "--json", "-y", *words]
        shown = subprocess.run(
            argv,
            cwd=self.project,
            env=self.environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if shown.returncode != 0:
            raise Failed(
                f"awsddp {' '.join(words)}: exit {shown.returncode}\n{shown.stderr[-4000:]}{shown.stdout}"
            )
        return json.loads(shown.stdout)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Print and time a step."""
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began
        print(f"{name}: {self.seconds[name]:.0f} s", flush=True)

    def run(self, instance_type: str) -> dict[str, Any]:
        """Run every step and return the `up` document. Raises Failed."""
        (self.project / "steps.py").write_text(SCRIPT)
        options = ["--nodes", "2", "--instance-type", instance_type, "--expires", EXPIRES]
        plan = self.awsddp("plan", *options)
        price = plan["price_usd_per_hour"]
        first, second = ([] if price is None else ["--budget", usd] for usd in (BUDGET_USD, SECOND_USD))
        print(f"2 x {instance_type} for {EXPIRES} at most, {price or 'an unknown number of'} USD per hour")
        with self.step("bucket and role"):
            uri, profile = self.place_in_s3(plan["region"])
        options += ["-o", f"access.instance_profile={profile}"]
        with self.step("up"):
            cluster: dict[str, Any] = self.awsddp("up", *options, *first)
        self.train("train")
        self.killed_client()
        self.reboot()
        self.train("train after the reboot")
        self.train("train, saved in S3", "3", save=("--save-to", uri, "--name", "saved"))
        with self.step("stop"):
            self.expect(self.awsddp("stop")["state"], "stopped")
        with self.step("start"):
            self.expect(self.awsddp("up")["state"], "ready")
        with self.step("down"):
            self.costs.append(self.awsddp("down")["cost_usd"])
        with self.step("up, a second cluster, of spot nodes"):
            spot = self.awsddp("up", *options, *second, "--spot")
        self.train("train, resumed from S3", "3", "resumed", save=("--resume", f"{uri}/saved"))
        self.recover(uri, plan["region"], spot["nodes"][1]["instance_id"])
        with self.step("down of the second cluster"):
            self.costs.append(self.awsddp("down")["cost_usd"])
        with self.step("search by tag"):
            clusters = self.awsddp("status", "--all")
            self.expect([row for row in clusters if row["cluster"] == CLUSTER and row["mine"]], [])
        return cluster

    def client(self, service: str, region: str) -> Any:
        """Return a boto3 client for AWS, or for the local cloud."""
        arguments: dict[str, Any] = {"region_name": region}
        if self.local and (info := control.find_cloud(self.project / "home")):
            keys = {"aws_access_key_id": info.access_key_id, "aws_secret_access_key": info.secret_access_key}
            arguments |= {"endpoint_url": info.endpoint, **keys}
        return boto3.client(service, **arguments)  # type: ignore[call-overload]

    def place_in_s3(self, region: str) -> tuple[str, str]:
        """Create a bucket, and an instance profile whose role may write to it; `undo` deletes both.

        Returns an S3 URI and the name of the profile.
        """
        name = f"awsddp-proof-{secrets.token_hex(6)}"
        print(f"bucket, role and instance profile {name}", flush=True)
        uri, role, profile = f"s3://{name}/runs", {"RoleName": name}, {"InstanceProfileName": name}
        iam, s3, undo = self.client("iam", region), self.client("s3", region), self.undo.callback
        policy = json.dumps(self.awsddp("doctor", "--iam-policy", "nodes", "-o", f"job.save_to={uri}"))
        location = {"CreateBucketConfiguration": {"LocationConstraint": region}}
        s3.create_bucket(Bucket=name, **(location if region != "us-east-1" else {}))
        undo(s3.delete_bucket, Bucket=name)
        undo(empty, s3, name)
        self.create_role(iam, name, trust=TRUST, policy=policy)
        if not self.local:  # long before its use, because a new role is not usable at once
            self.fis_role = self.create_role(iam, f"{name}-fis", trust=FIS_TRUST, policy=FIS_POLICY)
        iam.create_instance_profile(**profile)
        undo(iam.delete_instance_profile, **profile)
        iam.add_role_to_instance_profile(**profile, **role)
        undo(iam.remove_role_from_instance_profile, **profile, **role)
        return uri, name

    def create_role(self, iam: Any, name: str, *, trust: str, policy: str) -> str:
        """Create a role with an inline policy and return the role's ARN; `undo` deletes both."""
        arn: str = iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)["Role"]["Arn"]
        self.undo.callback(iam.delete_role, RoleName=name)
        iam.put_role_policy(RoleName=name, PolicyName="proof", PolicyDocument=policy)
        self.undo.callback(iam.delete_role_policy, RoleName=name, PolicyName="proof")
        return arn

    def train(self, name: str, *args: str, save: tuple[str, ...] = ()) -> None:
        """Train on all nodes, with the script's arguments `args` and the options `save`; check the
        results."""
        with self.step(name):
            job = self.awsddp("train", "steps.py", "--nproc-per-node", "1", *save, "--", *(args or "3"))
            self.results(job)

    def recover(self, uri: str, region: str, instance_id: str) -> None:
        """Interrupt a spot node during a job; the job must go on by itself, on a new node."""
        (self.project / "goes_on.py").write_text(GOES_ON)
        with self.step("train --recover 1, a spot node interrupted"):
            words = (
                "goes_on.py",
                "--nproc-per-node",
                "1",
                "--name",
                "spot",
                "--recover",
                "1",
                "--save-to",
                uri,
            )
            client, is_interrupted = self.start("train", *words), False
            assert client.stdout is not None
            for line in client.stdout:
                if b"step 9" in line and not is_interrupted:
                    self.interrupt(instance_id, region)
                    is_interrupted = True
            self.expect((client.wait(), is_interrupted), (0, True))
            (last,) = [job for job in self.awsddp("jobs")["jobs"] if job["job"] == "spot.2"]
            self.expect([recovery["kind"] for recovery in last["recoveries"]], ["spot_interruption"])
            self.expect(last["recoveries"][0]["checkpoint"] is not None, True)
            self.results(last)

    def interrupt(self, instance_id: str, region: str) -> None:
        """Give a spot instance its notice and reclaim it two minutes later, by AWS FIS. Raises Failed.

        Never run on AWS. Your login needs fis:CreateExperimentTemplate, StartExperiment, GetExperiment and
        DeleteExperimentTemplate, iam:PassRole, and at the account's first experiment
        iam:CreateServiceLinkedRole
        (https://docs.aws.amazon.com/fis/latest/userguide/using-service-linked-roles.html).
        """
        if self.local:
            self.awsddp("local", "fault", "add", instance_id, "reclaim", "--notice", "10s")
            return
        fis = self.client("fis", region)
        template = fis.create_experiment_template(**make_experiment(instance_id, region, role=self.fis_role))
        template_id = template["experimentTemplate"]["id"]
        self.undo.callback(fis.delete_experiment_template, id=template_id)
        token = secrets.token_hex(16)
        run = fis.start_experiment(clientToken=token, experimentTemplateId=template_id)["experiment"]
        while run["state"]["status"] not in ("running", *FIS_ENDED):
            time.sleep(2)
            run = fis.get_experiment(id=run["id"])["experiment"]
        if run["state"]["status"] not in ("running", "completed"):
            raise Failed(f"the interruption {run['id']}: {run['state']}")

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Start a verb that shows its lines on stdout."""
        return subprocess.Popen(
            [sys.executable, "-m", "awsddp", *self.options, "-y", *words],
            cwd=self.project,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def killed_client(self) -> None:
        """Kill the client that follows a job; the job must go on, and another client must fetch the
        results."""
        with self.step("train, its client killed"):
            name = "orphaned"
            client = self.start("train", "steps.py", "--nproc-per-node", "1", "--name", name, "--", "12")
            assert client.stdout is not None
            has_started = any(b"step 2 " in line for line in client.stdout)
            client.send_signal(signal.SIGKILL)
            client.wait()
            self.expect(has_started, True)
            self.results(self.awsddp("logs", "-f", name))

    def reboot(self) -> None:
        """Reboot node 1 and wait until it answers again."""
        with self.step("reboot of node1"):
            read_boot_id = ("exec", "--node", "1", START)
            before = self.awsddp(*read_boot_id)["nodes"][0]["stdout"]
            self.awsddp("exec", "--node", "1", "sudo systemd-run --on-active=1 systemctl reboot")
            deadline, after = time.monotonic() + BOOT_S, before
            while after == before:
                if time.monotonic() > deadline:
                    raise Failed(f"node1 did not reboot within {BOOT_S} s")
                time.sleep(2)
                try:
                    after = self.awsddp(*read_boot_id)["nodes"][0]["stdout"]
                except Failed:
                    continue  # the node is down or booting

    def results(self, job: dict[str, Any]) -> None:
        """Check that a job succeeded and that the file of every rank was fetched."""
        self.expect(job["state"], "succeeded")
        for rank in job["ranks"]:
            name = f"total{rank['rank']}.pt"
            self.expect([path.name for path in (self.project / job["home"]).rglob(name)], [name])

    def expect(self, actual: object, expected: object) -> None:
        """Raise Failed unless `actual` equals `expected`."""
        if actual != expected:
            raise Failed(f"expected {expected!r}, found {actual!r}")


def make_experiment(instance_id: str, region: str, *, role: str) -> dict[str, Any]:
    """Return the request for an experiment template that interrupts one spot instance; `role` is an ARN.

    https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html
    """
    arn = f"arn:aws:ec2:{region}:{role.split(':')[4]}:instance/{instance_id}"
    spot = {"resourceType": "aws:ec2:spot-instance", "resourceArns": [arn], "selectionMode": "ALL"}
    action = {
        "actionId": "aws:ec2:send-spot-instance-interruptions",
        "parameters": {"durationBeforeInterruption": "PT2M"},
        "targets": {"SpotInstances": "node"},
    }
    return {
        "clientToken": secrets.token_hex(16),
        "description": "awsddp prove-aws: interrupt a spot node",
        "roleArn": role,
        "stopConditions": [{"source": "none"}],
        "targets": {"node": spot},
        "actions": {"interrupt": action},
    }


def empty(s3: Any, bucket: str) -> None:
    """Delete every object of a bucket."""
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        for item in page.get("Contents", ()):
            s3.delete_object(Bucket=bucket, Key=item["Key"])


def one_gpu(proof: Proof) -> str:
    """Return the cheapest type with one GPU that is offered, fits the quota and runs the default image."""
    offers = proof.awsddp("plan", "--offers")["offers"]
    usable = [
        offer
        for offer in offers
        if offer["gpus_per_node"] == 1
        and "/" not in offer["gpu"]  # a part of a GPU
        and offer["fits_quota"] is not False
        and not offer["instance_type"].startswith("g5g.")  # ARM
    ]
    return str(min(usable, key=lambda offer: offer["price_usd_per_hour"] or float("inf"))["instance_type"])


def section(proof: Proof, cluster: dict[str, Any]) -> str:
    """Return the section of docs/proven.md."""
    now = datetime.now(UTC)
    rows = "\n".join(f"| {name} | {seconds:.0f} |" for name, seconds in proof.seconds.items())
    cost = "unknown" if None in proof.costs else f"${sum(filter(None, proof.costs)):.2f}"
    fis = "" if proof.local else f", and at most ${FIS_USD} for AWS FIS"
    title = f"2 x {cluster['instance_type']} in {cluster['region']} ({cluster['target']})"
    return (
        f"\n## {now:%Y-%m-%d}: {title}\n\n"
        f"Commit {commit()}, {now:%H:%M} UTC. Cost by list price: {cost}{fis}. Nothing was left.\n\n"
        f"| step | seconds |\n|---|---|\n{rows}\n"
    )


def commit() -> str:
    """Return the commit of this checkout, with a note if it has changes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    return f"{git('rev-parse', '--short=12', 'HEAD')}{' with changes' * bool(git('status', '--porcelain'))}"


def main() -> int:
    """Run the steps and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", action="store_true", help="use a local cloud, at no cost")
    parser.add_argument("--region", help="the AWS region  [default: the configured one]")
    parser.add_argument("--instance-type", help=f"[default: {CPU_TYPE}, or the cheapest with one GPU]")
    parser.add_argument("--to", type=Path, help="the page to add to  [default: docs/proven.md, on AWS]")
    options = parser.parse_args()
    kind = os.environ.get("AWSDDP_REAL", "")
    if kind not in ("cpu", "gpu") and not options.local:
        print("This launches two EC2 instances on your AWS account, for at most $2.")
        print("Type: AWSDDP_REAL=cpu make prove-aws   # then AWSDDP_REAL=gpu")
        return 2
    with (
        tempfile.TemporaryDirectory() as folder,
        (proof := Proof(Path(folder), local=options.local, region=options.region)).undo,
    ):
        if options.local:
            proof.undo.callback(control.stop, Path(folder) / "home")
            control.start(Path(folder) / "home")
        try:
            cluster = proof.run(options.instance_type or (CPU_TYPE if kind == "cpu" else one_gpu(proof)))
        except (Failed, ClientError, KeyboardInterrupt) as failure:
            print("failed, ending the cluster", file=sys.stderr)
            try:
                print(json.dumps(proof.awsddp("down", "--discard"), indent=2), file=sys.stderr)
            finally:  # print this last, even if `down` fails
                print(f"failed: {failure}", file=sys.stderr)
            return 1
    page = options.to or (None if options.local else ROOT / "docs" / "proven.md")
    text = section(proof, cluster)
    print(text)
    if page is not None:
        head = "# Proven on a real account\n\nWritten by `make prove-aws`.\n"
        page.write_text((page.read_text() if page.exists() else head) + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
