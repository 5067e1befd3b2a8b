"""`why` on local nodes: the rank that is behind, with its line, while the job runs and after it ended."""

import re
import time

import pytest

from tests.support.lab import Lab
from tests.support.schema import check
from tests.support.terminal import CTRL_C, Terminal

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

STOPS = """
import os, signal
if os.environ["RANK"] == "2":
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()  # here
"""
HANGS = """\
import time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(3600)
    dist.all_reduce(torch.ones(4))
    print("step", step, flush=True)
"""
SCREEN = """\
Job hangs: no output for N s. Rank 1 (node1) is behind.
  rank 1 (node1)  hangs.py:6  time.sleep(3600)
  rank 0 (node0)  hangs.py:7  dist.all_reduce(torch.ones(4))
                  waits for rank 1 in all_reduce 4
  stacks: awsddp why hangs -v
  end it: awsddp cancel hangs"""


def test_why_shows_the_whole_screen_of_a_job_that_hangs(cluster: Lab) -> None:
    cluster.script("hangs.py", HANGS)
    args = ("--world-size", "2", "--name", "hangs", "--detach")
    assert cluster.run("train", "hangs.py", *args).returncode == 0
    end = time.monotonic() + 60
    sources = ["dist.all_reduce(torch.ones(4))", "time.sleep(3600)"]
    why = cluster.json("why", "hangs")
    while [rank["source"] for rank in why["ranks"]] != sources or why["moving"]:  # may still import torch
        assert time.monotonic() < end, why
        why = cluster.json("why", "hangs")
    assert why["behind"] == [1]
    terminal = Terminal(cluster.project, cluster.environ)
    shown = terminal.type("awsddp why").text
    assert re.sub(r"for [0-9.]+ s\.", "for N s.", shown) == SCREEN
    stacks = cluster.run("why", "hangs", "-v").stdout
    assert "rank 1\n  | hangs.py:6 in <module>\n" in stacks

    tail = cluster.run("logs", "hangs", "--rank", "0", "-n", "2").stdout
    assert tail == "[rank 0 @ node0] step 1\n[rank 0 @ node0] step 2\n"
    assert not (cluster.project / "runs" / "hangs" / "logs").exists()
    followed = terminal.type("awsddp logs -f -n 1 --rank 1", [("step", CTRL_C)])
    assert (followed.lines[0], followed.code) == ("[rank 1 @ node1] step 2", 130)
    assert followed.lines[-1] == "hangs keeps running. Follow it again: awsddp logs -f"

    assert cluster.run("cancel").returncode == 0
    ended = cluster.run("why", "hangs")
    assert (ended.returncode, ended.stdout.startswith("Job hangs: cancelled in ")) == (0, True), ended
    assert "results: on the nodes; fetch them: awsddp fetch hangs" in ended.stdout
    assert cluster.json("why")["result"]["state"] == "cancelled"


def test_why_names_a_stopped_rank_and_hang_after_ends_the_job(cluster: Lab) -> None:
    cluster.script("stops.py", STOPS)
    args = ("--world-size", "4", "--name", "stops", "-o", "job.hang_after=20s", "-o", "job.grace=1s")
    assert cluster.run("train", "stops.py", *args, "--detach").returncode == 0
    end = time.monotonic() + 20
    while (why := cluster.json("why", "stops"))["behind"] != [2]:
        assert time.monotonic() < end, why
    check(why, "why")
    assert why["state"] == "running"
    assert why["ranks"][3]["where"] == "stops.py:5 in <module>"
    assert why["ranks"][3]["source"] == "signal.pause()  # here"
    shown = cluster.run("why", "stops")
    assert "Rank 2 (node1) was stopped by a signal (SIGSTOP) or a debugger.\n" in shown.stdout
    assert "  rank 2 (node1): stopped\n" in shown.stdout
    followed = cluster.json("logs", "-f", "stops", code=1)
    assert (followed["cause"]["kind"], followed["cause"]["rank"]) == ("hang", 2)
    ended = cluster.json("why", "stops")
    assert (ended["behind"], ended["result"]["cause"]["kind"]) == ([2], "hang")
    assert "  rank 2 (node1): stopped\n" in cluster.run("why", "stops").stdout
