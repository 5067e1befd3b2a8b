"""Seconds of `awsddp status`, compared with a bare boto3 program that makes the same call, interleaved.

    python benchmarks/status.py [ROUNDS]

The promise for a cluster with a local record is one API call, no SSH, and at most 1.25 times the time of the
bare program. A proxy between `awsddp` and the endpoint counts the calls; a request and its response count as
one call. The figures are then measured again while the proxy adds 100 ms each way.
"""

import argparse
import statistics
import subprocess
import sys
import time
from urllib.parse import urlsplit

from _delay import DelayProxy
from _rehearsal import Rehearsal, rehearsal

BARE = """
import boto3
filters = [{"Name": "tag:awsddp:cluster", "Values": ["default"]}]
reply = boto3.client("ec2").describe_instances(Filters=filters)
print([i["State"]["Name"] for r in reply["Reservations"] for i in r["Instances"]])
"""
REMOTE = ("-o", "network.ssh_cidr=10.0.0.0/8", "-o", "cluster.max_price_usd=100", "--region", "us-east-1")


def seconds(lab: Rehearsal, words: list[str], environ: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, cwd=lab.project, env=lab.environ | environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    rounds = parser.parse_args().rounds
    with rehearsal("--no-hosts") as lab:
        keys = lab.keys()
        lab.run("up", *REMOTE, "--nodes", "2", "-y", **keys)
        endpoint = urlsplit(keys["AWS_ENDPOINT_URL"])
        for delay_s in (0.0, 0.1):
            proxy = DelayProxy((str(endpoint.hostname), int(endpoint.port or 80)), delay_s=delay_s)
            far = keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
            cases = {
                "bare boto3": [sys.executable, "-c", BARE],
                "awsddp status": [sys.executable, "-m", "awsddp", "status"],
            }
            times: dict[str, list[float]] = {name: [] for name in cases}
            turns = dict.fromkeys(cases, 0)
            for _ in range(rounds):
                for name, words in cases.items():
                    before = proxy.turns
                    times[name].append(seconds(lab, words, far))
                    turns[name] = proxy.turns - before
            bare = statistics.median(times["bare boto3"])
            print(f"delay {delay_s * 1000:.0f} ms each way, {rounds} rounds")
            for name, taken in times.items():
                median = statistics.median(taken)
                print(
                    f"  {name:<14} least {min(taken):6.3f} s  median {median:6.3f} s"
                    f"  {median / bare:5.2f} x bare  {turns[name]} call{'s' * (turns[name] != 1)}"
                )


if __name__ == "__main__":
    main()
