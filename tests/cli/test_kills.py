"""The client killed with -9 at random moments of `up`: run again it finishes, or `down` leaves nothing."""

import os
import random
import time

import pytest

from tests.cli.conftest import Lab
from tests.cli.traces import traces

SEED = 20261121
MOMENTS = 30 if os.environ.get("AWSDDP_FULL") else 10
LONGEST_S = 9.0


@pytest.mark.prove
@pytest.mark.timeout(1200)
def test_up_killed_at_random_moments(lab: Lab) -> None:
    moments = random.Random(SEED)
    before = traces(lab.home)
    for number in range(MOMENTS):
        delay = moments.uniform(0.2, LONGEST_S)
        client = lab.start("up", "--local", "--nodes", "2", "-y")
        time.sleep(delay)
        client.kill()
        client.communicate()
        if number % 2:
            again = lab.json("up", "--local", "--nodes", "2", "-y")
            assert (again["state"], len(again["nodes"])) == ("ready", 2), delay
        ended = lab.run("down", "--local", "-y")
        assert ended.returncode == 0, (delay, ended.stderr)
        assert lab.json("status", "--local")["state"] == "absent", delay
        assert traces(lab.home) == before, delay
