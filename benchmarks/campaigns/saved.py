"""A saved run loses a node or its whole cluster: new nodes must resume from S3, with the same result.

    python -m benchmarks.campaigns.saved [--seed N] [--runs N] [--state FILE]

Needs root for its two nodes of the local cloud. The bundled program runs with --save-to and a checkpoint
every 61 steps of 0.06 to 0.15 s. At a random step, the client is killed, and node 0, node 1 or both are
terminated. Then `down --discard`, `up` and `train --resume s3://...` run. Columns:

    due       the step of the last checkpoint that was written at least 4 s before the loss
    listed    the step of the newest checkpoint in job.json, which torch.load reads from its parts in S3; this
              step must not be less than `due`
    repeated  steps that the resumed run repeated
    equal     the parameters at the end are bit for bit those of a run that lost nothing
"""

import contextlib
import io
import json
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._rehearsal import Rehearsal, rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, instances

if TYPE_CHECKING:
    import subprocess

EVERY, EPOCHS, PASSES = 61, 75, 46  # 92 batches, so 2 steps per epoch
STEPS = 2 * EPOCHS
SAVED_S = 4.0  # two scans of 1 s and an upload, on a shared machine
LOST = ((0,), (1,), (0, 1))
UP = (
    *("up", "--local", "--nodes", "2", "-y"),
    *("-o", "local.gpus=off", "-o", "job.save_to=s3://results/runs"),
)
TRAIN = (
    *("train", "--json", "--save-to", "s3://results/runs"),
    *("--world-size", "2", "--env-var", "OMP_NUM_THREADS=1"),
)
PROGRAM = (
    *("--batch-size", "8", "--accumulate", f"{PASSES}", "--print-every", f"{PASSES}"),
    *("--epochs", f"{EPOCHS}", "--evaluate-every", f"{EPOCHS}", "--checkpoint-every", f"{EVERY}"),
)


def start(lab: Rehearsal, name: str, *options: str) -> "subprocess.Popen[str]":
    """Start a saved run of the bundled program."""
    return lab.started(*TRAIN, "--name", name, *options, "--", *PROGRAM)


def finish(lab: Rehearsal, name: str, *options: str) -> Any:
    """Complete a saved run; return the parameters at its end."""
    import torch

    follower = start(lab, name, *options)
    shown, _ = follower.communicate()
    if follower.returncode:
        raise RuntimeError(f"{name} failed: {shown}")
    end = lab.project / "runs" / name / f"node0/run/checkpoints/step-{STEPS:08}.pt"
    return torch.load(end, weights_only=True)["model"]


def step_of(log: Path) -> int:
    """Return the number of steps in the log of a rank."""
    epochs = re.findall(r"^Epoch: \[(\d+)\]\[(\d+)/", log.read_text() if log.exists() else "", re.M)
    return 2 * (int(epochs[-1][0]) - 1) + int(epochs[-1][1]) // PASSES if epochs else 0


def watch(lab: Rehearsal, name: str, until: int) -> tuple[int, int]:
    """Follow a run up to the step `until`, then kill its client.

    Returns the step of the last checkpoint that was written at least `SAVED_S` before the kill, and the step
    of the kill.
    """
    follower, log, seen = start(lab, name), lab.project / "runs" / name / "logs/rank0.log", [(0.0, 0)]
    while seen[-1][1] < until:
        if follower.poll() is not None:
            raise RuntimeError(f"{name} ended at step {seen[-1][1]}: {follower.communicate()[0]}")
        time.sleep(0.05)
        seen.append((time.monotonic(), step_of(log)))
    follower.kill()
    follower.communicate()
    before = max(step for at, step in seen if at <= seen[-1][0] - SAVED_S)
    return before // EVERY * EVERY, seen[-1][1]


def listed_step(s3: Any, name: str) -> int:
    """Return the step in the newest checkpoint that job.json lists in S3, or 0 if there is none."""
    import torch

    def content(key: str) -> bytes:
        body: bytes = s3.get_object(Bucket="results", Key=f"runs/{name}/{key}")["Body"].read()
        return body

    checkpoint = json.loads(content("job.json"))["checkpoint"]
    if checkpoint is None:
        return 0
    [page] = [json.loads(content(key)) for key, *_ in checkpoint["pages"]]
    [row] = page["files"].values()
    data = b"".join(content(key)[:size] for key, size, *_ in row["parts"])
    if len(data) != row["size"]:
        raise EOFError(f"{name}: {len(data)} bytes of {row['size']}")
    return int(torch.load(io.BytesIO(data), weights_only=True)["at"]["step"])


def run(lab: Rehearsal, whole: Any, number: int, dice: random.Random) -> Row:
    """Lose the nodes of one run, resume it and return the row; `whole` has a complete run's parameters."""
    lost, name = LOST[number % len(LOST)], f"lost{number}"
    lab.run(*UP)
    nodes, ec2 = instances(lab), lab.client("ec2")
    due, reached = watch(lab, name, dice.randrange(EVERY, STEPS - EVERY // 2))
    ec2.terminate_instances(InstanceIds=[nodes[node] for node in lost])
    lab.run("down", "--discard", "-y")
    listed = listed_step(lab.client("s3"), name)
    lab.run(*UP)
    began = time.monotonic()
    ended = finish(lab, f"{name}b", *(("--resume", f"s3://results/runs/{name}") if listed else ()))
    took = time.monotonic() - began
    lab.run("down", "-y")
    resumed = (lab.project / "runs" / f"{name}b" / "logs/rank0.log").read_text()
    goes_on = f"Resume after step {listed}," in resumed or not listed
    is_equal = all(ended[key].equal(value) for key, value in whole.items())
    return {
        "lost": "+".join(f"node{node}" for node in lost),
        "reached": reached,
        "due": due,
        "listed": listed,
        "repeated": reached - listed,
        "not listed": (reached - listed) // EVERY,
        "took": round(took, 1),
        "equal": is_equal,
        "ok": listed >= due and goes_on and is_equal,
    }


@contextlib.contextmanager
def laboratory() -> Iterator[tuple[Rehearsal, Any]]:
    """Yield a local cloud with a bucket, and the parameters of a run that lost nothing."""
    with rehearsal() as lab:
        lab.run(*UP)
        whole = finish(lab, "whole")
        lab.run("down", "-y")
        yield lab, whole


def main() -> int:
    args = arguments(str(__doc__).splitlines()[0], runs=20).parse_args()
    with laboratory() as (lab, whole):
        return campaign(args, lambda number, dice: run(lab, whole, number, dice))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
