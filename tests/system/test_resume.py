"""--resume: a job that was interrupted ends with the weights of one that was not."""

import json
import os
import re
import signal
from typing import Any

import pytest
import torch

from tests.support.lab import Lab
from tests.support.seed import draw_cases

TRAIN = """
import os, pathlib, sys, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp

kind, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group('gloo')
torch.manual_seed(0)
model = torch.nn.Linear(4, 4, dtype=torch.float64)
momentum = torch.zeros(20, dtype=torch.float64)
state = {'model': model.state_dict(), 'momentum': momentum, 'step': torch.tensor(0)}
found = os.environ.get('AWSDDP_RESUME')
assert found == (sys.argv[3] if sys.argv[3:] else None)
if found and kind == 'save':
    state = torch.load(found)
elif found:
    dcp.load(state, checkpoint_id=found)
model.load_state_dict(state['model'])
parameters, momentum = list(model.parameters()), state['momentum']
run = pathlib.Path(os.environ['AWSDDP_RUN_DIR'])
for step in range(int(state['step']) + 1, steps + 1):
    seeded = torch.Generator().manual_seed(step * 10 + dist.get_rank())
    x = torch.randn(8, 4, dtype=torch.float64, generator=seeded)
    model.zero_grad()
    ((model(x) - x.roll(1, 1)) ** 2).mean().backward()
    grad = torch.cat([one.grad.flatten() for one in parameters])
    dist.all_reduce(grad)
    momentum = 0.9 * momentum + grad
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(parameters) - 0.01 * momentum, parameters
        )
    state = {'model': model.state_dict(), 'momentum': momentum, 'step': torch.tensor(step)}
    if kind == 'dcp':
        dcp.save(state, checkpoint_id=run / f'step-{step}')
    elif dist.get_rank() == 0:
        torch.save(state, run / f'step-{step}.pt')
print('run', os.environ['AWSDDP_RUN_ID'], os.environ.get('WANDB_RUN_ID'))
if dist.get_rank() == 3:
    print('weights', torch.nn.utils.parameters_to_vector(parameters).tolist())
dist.barrier(); time.sleep(0.2); dist.destroy_process_group()
"""


def train_weights(cluster: Lab, *args: str) -> str:
    result = cluster.run("train", "resumed.py", "--nproc-per-node", "2", *args)
    assert result.returncode == 0, result.stderr + result.stdout
    match = re.search(r"^\[rank 3 @ node1\] weights (.*)$", result.stdout, re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.prove
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", draw_cases(["save", "dcp"], 1, label="checkpoints"))
def test_resumed_job_ends_with_the_weights_of_one_that_was_not_interrupted(cluster: Lab, kind: str) -> None:
    cluster.script("resumed.py", TRAIN)
    whole = train_weights(cluster, "--", kind, "5")
    half = train_weights(cluster, "--name", f"half-{kind}", "--", kind, "3")
    assert half != whole
    assert train_weights(cluster, "--resume", "last", "--name", "end", "--", kind, "5", "{resume}") == whole
    first, second = read_run_lines(cluster, f"half-{kind}"), read_run_lines(cluster, "end")
    run = first[0].split()[1]
    assert (first, second) == ([f"run {run} None"] * 4, [f"run {run} {run}", *[f"run {run} None"] * 3])


def read_run_lines(cluster: Lab, job: str) -> list[str]:
    """Return the line "run ID WANDB_ID" of each rank of a job."""
    logs = [cluster.project / "runs" / job / "logs" / f"rank{rank}.log" for rank in range(4)]
    return [re.findall("^run .*$", log.read_text(), re.MULTILINE)[0] for log in logs]


def load_last_checkpoint(cluster: Lab, job: str) -> dict[str, Any]:
    """Return the last checkpoint of main.py in the results of a job."""
    steps = (cluster.project / "runs" / job / "node0" / "run" / "checkpoints").glob("step-*.pt")
    state: dict[str, Any] = torch.load(max(steps), map_location="cpu", weights_only=True)
    return state


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_bundled_program_that_is_interrupted_resumes_to_the_weights_of_one_that_is_not(cluster: Lab) -> None:
    args = ("train", "--world-size", "2", "--name")
    client = cluster.start(*args, "cut", "--", "--epochs", "100000")
    assert client.stdout is not None
    for line in client.stdout:
        if b"Epoch Summary: epoch 2" in line:
            os.killpg(client.pid, signal.SIGINT)
            break
    _, stderr = client.communicate(timeout=300)
    assert client.returncode == 130, stderr
    cut = load_last_checkpoint(cluster, "cut")
    epochs = ("--", "--epochs", str(cut["at"]["epoch"] + 1))
    resumed = cluster.run(*args, "resumed", "--resume", "cut", *epochs, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resume after step {cut['at']['step']}," in resumed.stdout
    assert cluster.run(*args, "whole", *epochs, timeout=300).returncode == 0
    ended, whole = load_last_checkpoint(cluster, "resumed"), load_last_checkpoint(cluster, "whole")
    assert ended["at"]["step"] > cut["at"]["step"]
    assert json.dumps(ended, default=torch.Tensor.tolist) == json.dumps(whole, default=torch.Tensor.tolist)


def test_resume_without_a_checkpoint_is_refused(records: Lab) -> None:
    records.script("none.py", "")
    for name, reason in (
        ("last", "no job of none.py has results here"),
        ("x", "job x has no checkpoint here"),
    ):
        result = records.run("train", "none.py", "--resume", name)
        assert (result.returncode, reason in result.stderr) == (3, True), result.stderr
