"""Seconds of `awsddp up` to running nodes, compared with the shortest program that could launch them.

    python benchmarks/start.py [ROUNDS] [--nodes N ...]

Both programs are timed from the start of the process to the describe call that shows all nodes running. The
programs are interleaved. The local cloud has no hosts, and adds 100 ms to each call. The bare program uses
only boto3, whose import is part of the time. It makes only the longest sequence of dependent calls: the
image's parameter, the image, the group, the group's rules, the launch, the describe. It sends the requests of
the plan, and gets the results of the other calls of `up` (identity, existing resources, types, prices,
quotas, subnets, the key, the placement group) as input. The promise is at most 1.20 times the bare program's
time, with ratios for 2, 8 and 64 nodes that differ by at most 10 %. Ratios are compared, not times, because
the local cloud itself takes longer to launch and to describe 64 nodes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _rehearsal import Rehearsal, rehearsal

from awsddp.nodes.hostkeys import make_key
from awsddp.nodes.provision import render_user_data
from awsddp.plan.records import Request, resource_names
from awsddp.plan.requests import RequestValues

BARE = """
import json, sys, time
import boto3
requests, parameter = json.load(sys.stdin)
made = []
def call(client, operation, **parameters):
    made.append(operation)
    return getattr(client, operation)(**parameters)
ssm, ec2 = boto3.client("ssm"), boto3.client("ec2")
[found] = call(ssm, "get_parameters", Names=[parameter])["Parameters"]
[image] = call(ec2, "describe_images", ImageIds=[found["Value"]])["Images"]
group = call(ec2, "create_security_group", **requests["CreateSecurityGroup"])["GroupId"]
rules = requests["AuthorizeSecurityGroupIngress"] | {"GroupId": group}
rules["IpPermissions"][0]["UserIdGroupPairs"][0]["GroupId"] = group
call(ec2, "authorize_security_group_ingress", **rules)
launch = requests["RunInstances"] | {"ImageId": image["ImageId"]}
launch["NetworkInterfaces"][0]["Groups"] = [group]
count = len(call(ec2, "run_instances", **launch)["Instances"])
tag = [{"Name": "tag:awsddp:id", "Values": ["01234567"]}]
states = []
while states != ["running"] * count:
    pages = call(ec2, "describe_instances", Filters=tag)["Reservations"]
    states = [one["State"]["Name"] for page in pages for one in page["Instances"]]
print(json.dumps([time.time(), made]))
"""
PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.12-ubuntu-24.04/latest/ami-id"
)
OPTIONS = ("-o", "network.ssh_cidr=10.0.0.0/8", "--instance-type", "g6.48xlarge")
DELAY_S = 0.1


def run_timed(lab: Rehearsal, words: list[str], keys: dict[str, str], **more: Any) -> tuple[float, str]:
    """Run a program with DELAY_S added to each of its calls; return the start time and the stdout."""
    lab.run("local", "fault", "add", "*", "delay", "--seconds", str(DELAY_S))
    began = time.time()
    done = subprocess.run(
        words, cwd=lab.project, env=lab.environ | keys, check=True, stdout=subprocess.PIPE, text=True, **more
    )
    return began, done.stdout


def prepare_requests(lab: Rehearsal, keys: dict[str, str], nodes: int) -> dict[str, Any]:
    """Return the parameters of the plan's requests by operation; create the key and the placement group."""
    import boto3

    plan = json.loads(lab.run("plan", "--json", *OPTIONS, "--nodes", str(nodes), **keys))
    ec2 = boto3.Session(
        keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"], region_name=keys["AWS_DEFAULT_REGION"]
    ).client("ec2", endpoint_url=keys["AWS_ENDPOINT_URL"])
    zone = [{"Name": "availability-zone", "Values": plan["zones"][:1]}]
    ids = resource_names("bare", "01234567") | {
        "subnet": ec2.describe_subnets(Filters=zone)["Subnets"][0]["SubnetId"],
        "security_group": "",
        "client_token": uuid.uuid4().hex,
    }
    secrets = {
        "user_data": render_user_data(host_key=make_key("bare"), expires_at=datetime.now(UTC)),
        "public_key": make_key("bare").public,
    }
    values = RequestValues(ids=ids, secrets=secrets, now=datetime.now(UTC))
    made = {row["operation"]: values.resolve(Request(**row)).parameters for row in plan["requests"]}
    ec2.import_key_pair(**made["ImportKeyPair"])
    ec2.create_placement_group(**made["CreatePlacementGroup"])
    return made


def run_bare(nodes: int) -> tuple[float, list[str]]:
    """Return the seconds of the bare program in a new cloud, and the program's calls."""
    with rehearsal("--no-hosts") as lab:
        keys = lab.keys()
        program_input = json.dumps([prepare_requests(lab, keys, nodes), PARAMETER])
        began, output = run_timed(lab, [sys.executable, "-c", BARE], keys, input=program_input)
        ended, chain = json.loads(output)
        return ended - began, chain


def run_awsddp(nodes: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the seconds from the start of `awsddp up` to the end of its last describe call by id, and the
    calls."""
    with rehearsal("--no-hosts") as lab:
        words = [sys.executable, "-m", "awsddp", "up", *OPTIONS, "--nodes", str(nodes), "-y", "-q"]
        began, _ = run_timed(lab, words, lab.keys())
        trail = Path(lab.environ["AWSDDP_HOME"]) / "clusters/default/calls.jsonl"
        calls = sorted(map(json.loads, trail.read_text().splitlines()), key=lambda call: str(call["at"]))
        for call in calls:
            call["began"] = datetime.fromisoformat(call["at"]).timestamp() - began
            call["ended"] = call["began"] + call["seconds"]
        describe_ends = [
            call["ended"]
            for call in calls
            if call["operation"] == "DescribeInstances"
            and call["parameters"]["Filters"][0]["Name"] == "instance-id"
        ]
        return describe_ends[-1], calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 64])
    args = parser.parse_args()
    rounds, ratios = args.rounds, []
    for nodes in args.nodes:
        times_of: dict[str, list[float]] = {"bare boto3": [], "awsddp up": []}
        for _ in range(rounds):
            taken, chain = run_bare(nodes)
            times_of["bare boto3"].append(taken)
            times_of["awsddp up"].append(run_awsddp(nodes)[0])
        if not ratios:
            print("the chain:", " -> ".join(chain))
        reference = statistics.median(times_of["bare boto3"])
        for name, times in times_of.items():
            median = statistics.median(times)
            print(
                f"{nodes:>3} nodes  {name:<10} least {min(times):6.3f} s  median {median:6.3f} s"
                f"  {median / reference:5.2f} x bare"
            )
        ratios.append(statistics.median(times_of["awsddp up"]) / reference)
    print(f"times the bare program, the worst count of nodes over the best: {max(ratios) / min(ratios):.2f}")


if __name__ == "__main__":
    main()
