"""A node's network breaks during a job: the job must end as without the break and show every line once.

    python -m benchmarks.campaigns.network_breaks [--seed N] [--runs N] [--longest S] [--state FILE]

Needs root for its two nodes of the local cloud. At a random moment of the job, nftables rules in a node's
network namespace cut the node off for 1 s to 4 min, in one direction or both. The ranks of lines.py only
print lines; those of group.py print each line after an all_reduce of a gloo group.
"""

import contextlib
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, begin, campaign, cluster, instances

STEPS = 60
SECONDS = 0.2  # of a step
SCRIPTS = {
    "lines.py": f"""\
import os, time
for step in range({STEPS}):
    print("step", step, flush=True)
    time.sleep({SECONDS})
""",
    "group.py": f"""\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range({STEPS}):
    total = torch.ones(1000)
    dist.all_reduce(total)
    assert total.sum().item() == 1000 * dist.get_world_size()
    print("step", step, flush=True)
    time.sleep({SECONDS})
dist.barrier()
time.sleep(0.5)
dist.destroy_process_group()
""",
}
EXPECTED = [f"step {step}" for step in range(STEPS)]
_CHAINS = {"in": ("input", "iifname"), "out": ("output", "oifname")}


@contextlib.contextmanager
def broken(instance_id: str, directions: tuple[str, ...]) -> Iterator[None]:
    """Drop what a node of the local cloud receives ("in"), sends ("out"), or both."""
    (namespace,) = Path("/run/netns").glob(f"*-{instance_id}")
    nft = ["ip", "netns", "exec", namespace.name, "nft"]
    chains = "".join(
        f"chain {name} {{ type filter hook {hook} priority -300; {interface} ens5 drop; }}\n"
        for name, (hook, interface) in _CHAINS.items()
        if name in directions
    )
    rules = f"table inet campaign {{\n{chains}}}\n"
    subprocess.run([*nft, "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*nft, "delete", "table", "inet", "campaign"], check=True)


def run(lab: Rehearsal, number: int, dice: random.Random, *, longest: float = 240) -> Row:
    """Break the network once, in a way drawn from `dice`, for at most `longest` seconds; return the row."""
    script = dice.choice(["lines.py", "lines.py", "group.py"])
    directions = dice.choice([("in", "out"), ("in",), ("out",)])
    node = dice.randrange(2)
    seconds = math.exp(dice.uniform(0, math.log(longest)))
    after = dice.uniform(0, STEPS * SECONDS)
    start = time.monotonic()
    name = f"{script[:-3]}{number}"
    follower = begin(lab, name, script, "--world-size", "4")
    time.sleep(after)
    with broken(instances(lab)[node], directions):
        time.sleep(seconds)
    document = json.loads(follower.communicate(timeout=900)[0])
    logs = lab.project / "runs" / name / "logs"
    whole = [(logs / f"rank{rank}.log").read_text().splitlines() == EXPECTED for rank in range(4)]
    return {
        "script": script,
        "node": node,
        "cut": "+".join(directions),
        "seconds": round(seconds, 1),
        "after": round(after, 1),
        "state": document["state"],
        "whole": sum(whole),
        "took": round(time.monotonic() - start, 1),
        "ok": follower.returncode == 0 and document["state"] == "succeeded" and all(whole),
    }


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=50)
    parser.add_argument("--longest", type=float, default=240.0, help="the longest break in seconds")
    args = parser.parse_args()
    with cluster(2, SCRIPTS) as lab:
        return campaign(args, lambda number, dice: run(lab, number, dice, longest=args.longest))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
