"""A torchrun job that loses a node continues, and includes it again by the commands that `up` shows."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.system.test_reservations import make_client

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]
LATE_S = 150.0

# Runs until it has had 4, 2 and 4 ranks; each node saves a checkpoint, and every rank loads the newest.
TRAIN = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group('gloo')
latest = pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'latest.pt')
before = latest if latest.exists() else pathlib.Path(os.environ.get('AWSDDP_RESUME', 'none'))
states = [None] * dist.get_world_size()
dist.all_gather_object(states, torch.load(before) if before.exists() else {'step': 0, 'sizes': []})
state = max(states, key=lambda one: one['step'])
state['sizes'].append(dist.get_world_size())
print('begins at step', state['step'], 'with', state['sizes'], len(os.environ['TOKEN']), flush=True)
more = 20
while state['sizes'][-1] != 4 or 2 not in state['sizes'] or more:
    dist.all_reduce(torch.ones(1))
    state['step'] += 1
    more -= state['sizes'][-1] == 4 and 2 in state['sizes'] and more > 0
    if os.environ['LOCAL_RANK'] == '0':
        torch.save(state, f'{latest}.new'); os.replace(f'{latest}.new', latest)
    dist.barrier()
    time.sleep(0.1)
dist.destroy_process_group()
"""


def wait_for_text(read: Callable[[], str], pattern: str) -> str:
    """Return what `read` returns, once it matches the pattern."""
    end = time.monotonic() + LATE_S
    while not re.search(pattern, text := read()):
        assert time.monotonic() < end, text
        time.sleep(1)
    return text


def test_torchrun_job_continues_on_fewer_nodes_and_resumes_on_all_by_the_commands_of_up(lab: Lab) -> None:
    lab.environ["TOKEN"] = "s3cr3t"
    lab.script("again.py", TRAIN)
    nodes = lab.json("up", "--local", "--nodes", "2", "-y")["nodes"]
    args = ("--nproc-per-node", "2", "--nnodes", "1:2", "--max-restarts", "5", "--env-var", "TOKEN")
    heartbeat = ("-o", "job.heartbeat_timeout=10s")
    assert lab.run("train", "again.py", *args, *heartbeat, "--name", "again", "--detach").returncode == 0

    def read_log() -> str:
        return lab.run("logs", "again", "--rank", "0").stdout

    wait_for_text(read_log, r"begins at step 0 with \[4\] 6")
    make_client(lab).terminate_instances(InstanceIds=[nodes[1]["instance_id"]])
    wait_for_text(read_log, r"begins at step [1-9]\d* with \[4, 2\]")
    again = lab.run("up", "--local", "-y")
    assert again.returncode == 0, again.stderr
    match = re.search(r"job again runs without node1, which was replaced; to include it: (.*)", again.stderr)
    assert match is not None, again.stderr
    assert "s3cr3t" not in match[1]
    path = f"{Path(sys.executable).parent}:{lab.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", match[1]],
        cwd=lab.project,
        env=lab.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"rank 0 @ node0\] begins at step [1-9]\d* with \[4, 2, 4\]", result.stdout), result
    before, after = lab.jobs()
    assert (before["state"], after["state"]) == ("cancelled", "succeeded")
    assert [rank["exit_code"] for rank in after["ranks"]] == [0] * 4
    assert after["resumed"] == "again"
    assert lab.run("down", "-y").returncode == 0
