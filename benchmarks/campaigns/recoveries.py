"""A run with --recover loses machines: it must go on by itself, with the same result and a correct bill.

    python -m benchmarks.campaigns.recoveries [--seed N] [--runs N] [--state FILE]

Needs root for its nodes of the local cloud (2 or 4 spot nodes, one rank each). A program of 60 steps saves a
checkpoint every 10 steps, and resumes from its option --resume. At a random time, nodes are lost: by a spot
reclaim with a notice of 120 s, of 40 s or without a notice, by the failure of a GPU (Xid 79), or by a reclaim
while AWS has no capacity for 2 minutes. With `--killed`, the client is killed at a random moment of the
recovery, and `awsddp recover` follows.
Columns:

    fault     what was lost, and the number of nodes
    lives     how many jobs the run had
    repeated  the steps that were repeated in each life: at most one checkpoint's (10) or, without a notice,
              those since the last checkpoint that was written at least 4 s before the loss
    lost_s    the seconds from the ends of jobs to the next starts
    equal     the parameters at the end are bit for bit those of a run that lost nothing (4 ranks: within
              1e-6)
    cost      the cost that `jobs` shows less the cost from EC2's own times, in US dollars; at most 0.01
    left      instances, keys and groups after `down`
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._rehearsal import Rehearsal, rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, instances

if TYPE_CHECKING:
    import subprocess

STEPS, EVERY, PAUSE_S, SAVED_S = 60, 10, 0.4, 4.0
TYPE = "g6.12xlarge"
FAULTS = ("notice 120 s", "notice 40 s", "no notice", "GPU", "no capacity")
NO_CAPACITY_S = 120
PROGRAM = f"""
import argparse, hashlib, json, os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
torch.set_num_threads(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(0)
dist.init_process_group("gloo")
rank, run, step = dist.get_rank(), os.environ["AWSDDP_RUN_DIR"], 0
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(device)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
if path := parser.parse_args().resume:
    state = torch.load(path, map_location=device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < {STEPS}:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 16, generator=generator).to(device)
    loss = (ddp(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0:
        with open(f"{{run}}/metrics.jsonl", "a") as file:
            file.write(json.dumps(dict(step=step, loss=loss.item(), time=time.time())) + "\\n")
        if step % {EVERY} == 0:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step)
            torch.save(state, f"{{run}}/part")
            os.replace(f"{{run}}/part", f"{{run}}/state-{{step}}.pt")
        print(f"step {{step}}", flush=True)
    time.sleep({PAUSE_S})
dist.barrier()
dist.destroy_process_group()
"""


def up(lab: Rehearsal, nodes: int, *options: str) -> None:
    """Launch spot nodes of one type."""
    saved = ("--save-to", "s3://results/runs")
    lab.run("up", "--local", "--nodes", f"{nodes}", "--instance-type", TYPE, "--spot", "-y", *saved, *options)


def start(lab: Rehearsal, name: str, nodes: int, *options: str) -> "subprocess.Popen[str]":
    """Start the program, with one rank per node."""
    words = ("train", "steps.py", "--json", "--name", name, "--nproc-per-node", "1")
    saved = ("--save-to", "s3://results/runs", "--world-size", f"{nodes}")
    return lab.started(*words, *saved, *options)


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait for a command, and return its document."""
    shown, _ = process.communicate()
    document: dict[str, Any] = json.loads(shown)
    if process.returncode:
        raise RuntimeError(f"the command failed: {shown}")
    return document


def read_parameters(lab: Rehearsal, job: str) -> dict[str, Any]:
    """Return the parameters of a job's last checkpoint."""
    import torch

    file = lab.project / "runs" / job / f"node0/run/state-{STEPS}.pt"
    parameters: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)["model"]
    return parameters


def wait_for_step(lab: Rehearsal, job: str, step: int, follower: "subprocess.Popen[str]") -> None:
    """Wait until a job's first rank has printed a step. Raises RuntimeError if the command ends before."""
    log = lab.project / "runs" / job / "logs/rank0.log"
    until = time.monotonic() + 180
    while f"step {step}\n" not in (log.read_text() if log.exists() else ""):
        if follower.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{job} did not reach step {step}")
        time.sleep(0.05)


def break_machines(lab: Rehearsal, fault: str, ids: list[str], dice: random.Random) -> None:
    """Inject a fault into one node, or into two nodes at once."""
    victims = dice.sample(ids, 2 if len(ids) > 2 and dice.random() < 0.3 else 1)
    if fault == "no capacity":
        words = ("RunInstances", "InsufficientInstanceCapacity", "--for", f"{NO_CAPACITY_S}s")
        lab.run("local", "fault", "add", *words)
    for victim in victims:
        if fault == "GPU":
            lab.run("local", "fault", "add", victim, "xid")
            break
        notice = {"notice 120 s": "120s", "notice 40 s": "40s"}.get(fault, "0s")
        lab.run("local", "fault", "add", victim, "reclaim", "--notice", notice)


def compute_cost(lab: Rehearsal, ids: set[str]) -> float:
    """Return what the instances cost (USD), from EC2's times and the prices of the local cloud."""
    from awsddp.compat.types import ADDRESS_USD_PER_HOUR, disk_usd_per_hour
    from awsddp.local.offers import price_usd_per_hour

    usd = 0.0
    for reservation in lab.client("ec2").describe_instances()["Reservations"]:
        for instance in reservation["Instances"]:
            if instance["InstanceId"] in ids:
                continue
            ended = instance["StateTransitionReason"].partition("(")[2].removesuffix(" GMT)")
            end = datetime.strptime(ended, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
            zone = instance["Placement"]["AvailabilityZone"]
            rate = price_usd_per_hour(TYPE, zone, instance["LaunchTime"].date())
            rate += disk_usd_per_hour(200) + ADDRESS_USD_PER_HOUR
            usd += max(60.0, (end - instance["LaunchTime"]).total_seconds()) / 3600 * rate
    return usd


def list_instances(lab: Rehearsal) -> dict[str, str]:
    """Return the state of every instance that the local cloud lists."""
    reservations = lab.client("ec2").describe_instances()["Reservations"]
    return {
        instance["InstanceId"]: instance["State"]["Name"]
        for reservation in reservations
        for instance in reservation["Instances"]
    }


def count_left(lab: Rehearsal) -> int:
    """Return how many living instances, keys and security groups there are."""
    ec2 = lab.client("ec2")
    living = sum(state != "terminated" for state in list_instances(lab).values())
    groups = [
        group for group in ec2.describe_security_groups()["SecurityGroups"] if group["GroupName"] != "default"
    ]
    return living + len(ec2.describe_key_pairs()["KeyPairs"]) + len(groups)


def follow(
    lab: Rehearsal, name: str, process: "subprocess.Popen[str]", killed_s: float | None
) -> dict[str, Any]:
    """Wait for a run's end; return its last job. After `killed_s`, kill the client and type `recover`."""
    if killed_s is None:
        return finish(process)
    with contextlib.suppress(Exception):
        process.wait(killed_s)
    if process.poll() is not None:
        return finish(process)
    process.kill()
    process.communicate()
    return finish(lab.started("recover", name, "--json", "-o", "capacity.retry_until_up=true"))


def run(lab: Rehearsal, wholes: dict[int, Any], number: int, dice: random.Random, *, is_killed: bool) -> Row:
    """Run a program that loses machines, and return the row; `wholes` has parameters by number of nodes."""
    fault = FAULTS[number % len(FAULTS)]
    nodes = (2, 4)[number // len(FAULTS) % 2] if not is_killed else 2
    before, costs = set(list_instances(lab)), read_costs(lab)
    gpus = ("-o", "local.gpus=on" if fault == "GPU" else "local.gpus=off")
    up(lab, nodes, *gpus)
    if nodes not in wholes:
        finish(start(lab, f"whole{number}", nodes))
        wholes[nodes] = read_parameters(lab, f"whole{number}")
    name = f"lost{number}"
    options = ("--recover", "3", "-o", "capacity.retry_until_up=true")
    process = start(lab, name, nodes, *options)
    wait_for_step(lab, name, dice.randrange(1, STEPS - EVERY), process)
    break_machines(lab, fault, instances(lab), dice)
    document = follow(lab, name, process, dice.uniform(0, 60) if is_killed else None)
    ended = read_parameters(lab, document["job"])
    lab.run("down", "-y")
    off = compute_cost(lab, before)
    spent = read_costs(lab) - costs
    recoveries = document["recoveries"]
    repeated = [recovery["steps_repeated"] for recovery in recoveries]
    margin = 0.0 if nodes == 2 else 1e-6
    most = EVERY + (0 if fault.startswith("notice") else round(SAVED_S / PAUSE_S))
    is_equal = all((ended[key] - value).abs().max().item() <= margin for key, value in wholes[nodes].items())
    left = count_left(lab)
    return {
        "fault": f"{fault}, {nodes} nodes",
        "lives": 1 + len(recoveries),
        "kinds": "+".join(recovery["kind"] for recovery in recoveries),
        "repeated": "+".join(map(str, repeated)),
        "lost_s": round(sum(recovery["seconds_lost"] or 0.0 for recovery in recoveries)),
        "equal": is_equal,
        "cost": round(spent - off, 4),
        "left": left,
        "ok": is_equal
        and document["state"] == "succeeded"
        and bool(recoveries)
        and all(steps is not None and steps <= most for steps in repeated)
        and abs(spent - off) <= 0.01
        and left == 0,
    }


def read_costs(lab: Rehearsal) -> float:
    """Return the cost of all clusters until now (USD)."""
    shown, _ = lab.started("jobs", "--json").communicate()  # fails if there was no cluster yet
    return float(json.loads(shown)["would_have_cost_usd"])


@contextlib.contextmanager
def laboratory() -> Iterator[Rehearsal]:
    """Yield a local cloud, and the project folder with the program."""
    with rehearsal() as lab:
        Path(lab.project, "steps.py").write_text(PROGRAM)
        yield lab


def main() -> int:
    """Run the campaign."""
    parser = arguments("A run with --recover loses machines.", 20)
    parser.add_argument("--killed", action="store_true", help="kill the client during the recovery")
    args = parser.parse_args()
    with laboratory() as lab:
        wholes: dict[int, Any] = {}
        return campaign(args, lambda number, dice: run(lab, wholes, number, dice, is_killed=args.killed))


if __name__ == "__main__":
    sys.exit(main())
