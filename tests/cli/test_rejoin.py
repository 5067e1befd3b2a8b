"""A node of a torchrun job is lost and replaced: the new machine joins, and training goes on."""

import re
import time
from collections.abc import Callable

import pytest

from tests.cli.conftest import Lab
from tests.cli.test_clients import client

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]
LATE_S = 150.0

# Trains until it has run with 4, 2 and 4 ranks; each node keeps its checkpoint, the newest is everybody's.
TRAIN = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group('gloo')
latest = pathlib.Path(os.environ['AWSDDP_RUN_DIR'], 'latest.pt')
states = [None] * dist.get_world_size()
dist.all_gather_object(states, torch.load(latest) if latest.exists() else {'step': 0, 'sizes': []})
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


def becomes(said: Callable[[], str], pattern: str) -> str:
    """Return what `said` says, once it holds the pattern."""
    end = time.monotonic() + LATE_S
    while not re.search(pattern, text := said()):
        assert time.monotonic() < end, text
        time.sleep(1)
    return text


def test_node_that_is_replaced_joins_and_training_goes_on_from_its_checkpoint(lab: Lab) -> None:
    lab.environ["TOKEN"] = "secret"
    lab.script("again.py", TRAIN)
    nodes = lab.json("up", "--local", "--nodes", "2", "-y")["nodes"]
    words = ("--nproc-per-node", "2", "--nnodes", "1:2", "--max-restarts", "5", "--env-var", "TOKEN")
    brief = ("-o", "job.heartbeat_timeout=10s")
    assert lab.run("train", "again.py", *words, *brief, "--name", "again", "--detach").returncode == 0

    def said() -> str:
        return lab.run("logs", "again", "--rank", "0").stdout

    becomes(said, r"begins at step 0 with \[4\] 6")
    client(lab).terminate_instances(InstanceIds=[nodes[1]["instance_id"]])
    becomes(said, r"begins at step [1-9]\d* with \[4, 2\]")
    del lab.environ["TOKEN"]
    refused = lab.run("up", "--local", "-y")
    assert (refused.returncode, "TOKEN not set in this environment" in refused.stderr) == (3, True)
    lab.environ["TOKEN"] = "secret"
    again = lab.run("up", "--local", "-y")
    assert again.returncode == 0, again.stderr
    assert "node1 joins job again" in again.stderr
    followed = lab.run("logs", "-f", "again")
    assert followed.returncode == 0, followed.stderr
    text = becomes(said, r"begins at step [1-9]\d* with \[4, 2(, \d)*, 4\]")
    begun = [int(step) for step in re.findall(r"begins at step (\d+)", text)]
    assert begun == sorted(begun)
    (job,) = lab.json("jobs")
    assert (job["state"], [rank["exit_code"] for rank in job["ranks"]]) == ("succeeded", [0] * 4)  # type: ignore[index]
    assert lab.run("fetch", "--job", "again").returncode == 0
    assert lab.run("down", "-y").returncode == 0
