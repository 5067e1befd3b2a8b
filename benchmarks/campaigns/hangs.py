"""A job hangs in one of the usual ways: `why` must name rank and line, and the job must live on.

    python -m benchmarks.campaigns.hangs [--seed N] [--runs N] [--ranks N] [--launcher NAME] [--state FILE]

Needs root: two nodes of the local cloud. Each way has its turn, the rank is drawn; the group is gloo. In the
way `network` node 1 loses its network: its ranks are to be named.
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
# name: (script, what the explanation must say); a line that is marked "# here" is where the culprit is
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
    """Return the number of the line that is marked."""
    return next(number for number, line in enumerate(script.splitlines(), 1) if mark in line)


def is_named(found: dict[str, Any], name: str, culprit: int) -> bool:
    """Tell whether `why` named the rank, its line and the way in which it hangs."""
    script, words = HANGS[name]
    place = f"{name}.py:{line_of(script)} in" if "# here" in script else ""
    said = found["explanation"]
    return found["behind"] == [culprit] and words in said and place in said


def run(lab: Rehearsal, number: int, dice: random.Random, *, ranks: int, launcher: str) -> Row:
    """Let one job hang, ask until it stands still, and return what is said of it then."""
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
        found, took = _ask(lab, job)
    alive = follower.poll() is None
    lab.run("cancel", job, "-o", "job.grace=1s", "-q")
    follower.communicate(timeout=300)
    if name == "network":
        ok = found["behind"] == list(range(ranks // 2, ranks)) and "does not answer" in found["explanation"]
    else:
        ok = is_named(found, name, culprit)
    told = {"hang": name, "launcher": launcher, "rank": culprit, "took": round(took, 1), "alive": alive}
    return {**told, "ok": ok and alive, "said": "" if ok else found["explanation"]}


@contextlib.contextmanager
def cut(lab: Rehearsal) -> Iterator[None]:
    """Take node 1 off the network for a while."""
    instance = instances(lab)[1]
    lab.run("local", "fault", "add", instance, "cut")
    try:
        yield
    finally:
        lab.run("local", "fault", "clear")


def _ask(lab: Rehearsal, job: str) -> tuple[dict[str, Any], float]:
    """Ask until the job stands still; return what is said then, and how long the answer took (s)."""
    found: dict[str, Any] = {}
    before: dict[str, Any] = {}
    while found.get("moving", True) or found["ranks"] != before.get("ranks"):
        before, start = found, time.monotonic()
        found = json.loads(lab.run("why", job, "--json"))
        took = time.monotonic() - start
    return found, took


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=60)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="ssh")
    asked = parser.parse_args()
    scripts = {f"{name}.py": script for name, (script, _) in HANGS.items()}

    def once(number: int, dice: random.Random) -> Row:
        return run(lab, number, dice, ranks=asked.ranks, launcher=asked.launcher)

    with cluster(2, {**scripts, "network.py": NETWORK}) as lab:
        return campaign(asked, once)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
