"""Killed clients (-9), and two clients at once: run again, a command finishes, or `down` leaves nothing."""

import json
import random
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.support.lab import Lab
from tests.support.seed import FULL, SEED
from tests.support.traces import find_traces

MOMENTS = 30 if FULL else 3
RACES = 50 if FULL else 3
UP = ("up", "--local", "--nodes", "2", "-y")
DOWN = ("down", "--local", "-y")

LINES = """
import os, time
for number in range(150):
    print("rank", os.environ["RANK"], "line", number, flush=True)
    time.sleep(0.02)
"""


def count_launches(lab: Lab) -> Counter[str]:
    """Return the number of instances of each cluster id that the endpoint lists, with terminated ones."""
    cloud = json.loads(lab.run("local", "status", "--json").stdout)
    program = (
        "import boto3, collections, json\n"
        "pages = boto3.client('ec2').get_paginator('describe_instances').paginate()\n"
        "tags = [t['Value'] for p in pages for r in p['Reservations'] for i in r['Instances']"
        " for t in i['Tags'] if t['Key'] == 'awsddp:id']\n"
        "print(json.dumps(collections.Counter(tags)))"
    )
    environ = lab.environ | {
        "AWS_ENDPOINT_URL": cloud["endpoint"],
        "AWS_DEFAULT_REGION": cloud["region"],
        "AWS_ACCESS_KEY_ID": cloud["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": cloud["secret_access_key"],
        "NO_PROXY": "127.0.0.1",
    }
    result = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True)
    return Counter(json.loads(result.stdout))


def start_and_kill(lab: Lab, *args: str, after_s: float) -> None:
    """Start a client and kill it with -9."""
    client = lab.start(*args)
    time.sleep(after_s)
    client.kill()
    client.communicate()


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", ["up", "train", "down"])
def test_a_client_killed_at_a_random_moment_can_be_run_again_or_cleaned_up(lab: Lab, verb: str) -> None:
    moments = random.Random(f"{SEED} {verb}")
    longest = {"up": 9.0, "train": 7.0, "down": 4.0}[verb]
    lab.script("lines.py", LINES)
    assert lab.run("local", "start").returncode == 0
    before = find_traces(lab.home)
    for number in range(MOMENTS):
        delay = moments.uniform(0.1, longest)
        if verb != "up":
            assert lab.json(*UP)["state"] == "ready"
        args = {"up": UP, "train": ("train", "lines.py", "--world-size", "2"), "down": DOWN}[verb]
        start_and_kill(lab, *args, after_s=delay)
        if verb == "up" and number % 2:
            again = lab.json(*UP)
            assert (again["state"], len(again["nodes"])) == ("ready", 2), delay
        if verb == "train":
            _check_job(lab, number, delay)
        ended = lab.run(*DOWN)
        assert ended.returncode == 0, (delay, ended.stderr)
        assert lab.json("status", "--local")["state"] == "absent", delay
        assert find_traces(lab.home) == before, delay
        assert max(count_launches(lab).values(), default=0) <= 2, delay


def _check_job(lab: Lab, number: int, delay: float) -> None:
    """Check that the job of a killed `train` has all its output, and that another job can start."""
    jobs = lab.jobs()
    if jobs:
        result = lab.run("logs", "-f")
        expected = sorted(
            f"[rank {rank} @ node{rank}] rank {rank} line {n}" for rank in (0, 1) for n in range(150)
        )
        assert sorted(result.stdout.splitlines()) == expected, delay
        assert result.returncode == 0, delay
    if number % 2:
        assert lab.run("train", "lines.py", "--world-size", "2", "-q").returncode == 0, delay


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_two_clients_at_once_have_one_outcome_and_clear_errors(lab: Lab) -> None:
    """`up` and `up`, `up` and `down`, `down` and `down` at once: one outcome, and each error is clear."""
    moments = random.Random(SEED)
    assert lab.run("local", "start", "--no-hosts").returncode == 0
    pairs = [(UP, UP), (UP, DOWN), (DOWN, DOWN)]
    for number in range(RACES):
        first, second = pairs[number % 3]
        if first is DOWN:
            assert lab.run(*UP).returncode == 0
        clients = [lab.start(*first)]
        time.sleep(moments.choice([0.0, moments.uniform(0.0, 2.0)]))
        clients.append(lab.start(*second))
        codes = []
        for client in clients:
            _, err = client.communicate(timeout=120)
            codes.append(client.returncode)
            assert b"Traceback" not in err, err
            assert client.returncode == 0 or b"held by `awsddp" in err, err
        assert set(codes) <= {0, 3}, (number, codes)
        assert 0 in codes, number
        status = lab.json("status", "--local")
        allowed = {(UP, UP): {"ready"}, (UP, DOWN): {"ready", "absent"}, (DOWN, DOWN): {"absent"}}
        assert status["state"] in allowed[first, second], (number, status)
        assert len(status["nodes"]) == (2 if status["state"] == "ready" else 0), number
        assert max(count_launches(lab).values(), default=0) <= 2, number
        assert lab.run(*DOWN).returncode == 0
