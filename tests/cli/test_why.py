"""`doctor --why` on local nodes: a stopped rank is named, while the job runs and after it was ended."""

import time

import pytest

from tests.cli.conftest import Lab
from tests.cli.schema import check

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

STOPS = """
import os, signal
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()  # here
"""


def test_rank_that_is_stopped_is_named_and_the_job_lives_until_hang_after_ends_it(lab: Lab) -> None:
    lab.script("stops.py", STOPS)
    assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0
    words = ("--world-size", "4", "--name", "stops", "-o", "job.hang_after=20s", "-o", "job.grace=1s")
    assert lab.run("train", "stops.py", *words, "--detach").returncode == 0
    end = time.monotonic() + 20
    while (found := lab.json("doctor", "--why", "stops"))["behind"] != [2]:
        assert time.monotonic() < end, found
    check(found, "doctor", "--why")
    assert found["state"] == "running"
    assert found["ranks"][3]["where"] == "stops.py:5 in <module>"
    shown = lab.run("doctor", "--why", "stops")
    assert "Rank 2 (node1) does not run: a signal (SIGSTOP)" in shown.stdout
    followed = lab.json("logs", "-f", "stops", code=1)
    assert (followed["cause"]["kind"], followed["cause"]["rank"]) == ("hang", 2)
    assert lab.json("doctor", "--why", "stops")["behind"] == [2]
