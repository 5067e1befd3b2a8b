"""A job hangs in one of the usual ways: `why` must name the rank and the line, and must not end the job.

    python -m benchmarks.campaigns.hangs [--seed N] [--runs N] [--ranks N] [--launcher NAME] [--state FILE]

Needs root for its two nodes of the local cloud. The runs take all ways in turn, and choose the rank at
random. The process group's backend is gloo. In `network`, node 1 loses its network, and `why` must name the
ranks of node 1.
"""

import contextlib
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from awsddp.agent_client.launchers import LAUNCHERS
from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, begin, campaign, cluster, instances

BEGIN = """\
import os, sys, threading, time
rank, culprit = int(os.environ["RANK"]), int(os.environ.get("CULPRIT", "2"))
import torch, torch.distributed as dist
"""
GROUP = (
    BEGIN
    + """\
dist.init_process_group("gloo")
for step in range(3):
    dist.all_reduce(torch.ones(4))
print("up", flush=True)
"""
)
# {name: (script, text in the explanation)}; the culprit hangs at the line that is marked "# here".
HANGS = {
    "skip": (
        GROUP
        + """\
def train(step):
    if rank != culprit:
        dist.all_reduce(torch.ones(4))
    else:
        time.sleep(6000)  # here
train(3)
""",
        "in all_reduce (collective 4)",
    ),
    "other": (
        GROUP
        + """\
def train(step):
    if rank == culprit:
        dist.barrier()  # here
    else:
        dist.all_reduce(torch.ones(4))
train(3)
time.sleep(6000)
""",
        "called barrier where the others called all_reduce as collective 4",
    ),
    "loader": (
        GROUP
        + """\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if rank == culprit: time.sleep(6000)  # here
        return torch.ones(4)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
    dist.barrier()
""",
        "its worker processes: ",
    ),
    "lock": (
        GROUP
        + """\
lock = threading.Lock()
def save():
    lock.acquire()
    with lock:  # here
        pass
if rank == culprit: save()
dist.barrier()
""",
        "ait in barrier (collective 4)",
    ),
    "stopped": (
        GROUP
        + """\
if rank == culprit: os.kill(os.getpid(), 19)
dist.barrier()
""",
        "SIGSTOP",
    ),
    "never": (
        BEGIN
        + """\
print("up", flush=True)
if rank == culprit:
    time.sleep(6000)  # here
dist.init_process_group("gloo")
""",
        "did not join the process group",
    ),
}

NETWORK = (
    GROUP
    + """\
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.1)
"""
)


def line_of(script: str, mark: str = "# here") -> int:
    """Return the number of the marked line."""
    return next(number for number, line in enumerate(script.splitlines(), 1) if mark in line)


def is_named(document: dict[str, Any], name: str, culprit: int) -> bool:
    """Return True if `why` names the rank, the rank's line and the reason for the hang."""
    script, words = HANGS[name]
    location = f"{name}.py:{line_of(script)} in" if "# here" in script else ""
    explanation = document["explanation"]
    return document["behind"] == [culprit] and words in explanation and location in explanation


def run(lab: Rehearsal, number: int, dice: random.Random, *, ranks: int, launcher: str) -> Row:
    """Let one job hang, run `why` until the result no longer changes, and return the row."""
    name, culprit = (*HANGS, "network")[number % (len(HANGS) + 1)], dice.randrange(ranks)
    job = f"{name}{number}"
    options = (
        "--world-size",
        str(ranks),
        "--env-var",
        f"CULPRIT={culprit}",
        "-o",
        f"job.launcher={launcher}",
    )
    follower = begin(lab, job, f"{name}.py", *options, ranks=ranks)
    with cut(lab) if name == "network" else contextlib.nullcontext():
        document, took = _run_why(lab, job)
    alive = follower.poll() is None
    lab.run("cancel", job, "-o", "job.grace=1s", "-q")
    follower.communicate(timeout=300)
    if name == "network":
        behind = list(range(ranks // 2, ranks))
        ok = document["behind"] == behind and "does not answer" in document["explanation"]
    else:
        ok = is_named(document, name, culprit)
    parameters = {"hang": name, "launcher": launcher, "rank": culprit, "took": round(took, 1), "alive": alive}
    return {**parameters, "ok": ok and alive, "said": "" if ok else document["explanation"]}


@contextlib.contextmanager
def cut(lab: Rehearsal) -> Iterator[None]:
    """Cut node 1 off the network."""
    instance = instances(lab)[1]
    lab.run("local", "fault", "add", instance, "cut")
    try:
        yield
    finally:
        lab.run("local", "fault", "clear")


def _run_why(lab: Rehearsal, job: str) -> tuple[dict[str, Any], float]:
    """Run `why` until the result no longer changes; return the last document and the last run's seconds."""
    document: dict[str, Any] = {}
    before: dict[str, Any] = {}
    while document.get("moving", True) or document["ranks"] != before.get("ranks"):
        before, start = document, time.monotonic()
        document = json.loads(lab.run("why", job, "--json"))
        took = time.monotonic() - start
    return document, took


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=60)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="ssh")
    args = parser.parse_args()
    scripts = {f"{name}.py": script for name, (script, _) in HANGS.items()}

    def once(number: int, dice: random.Random) -> Row:
        return run(lab, number, dice, ranks=args.ranks, launcher=args.launcher)

    with cluster(2, {**scripts, "network.py": NETWORK}) as lab:
        return campaign(args, once)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
