"""A node has one of the faults of the local cloud, or none: `doctor` must name it, and no other.

    python -m benchmarks.campaigns.doctor [--nodes N] [--way WAY] [--seed N] [--runs N] [--state FILE]

Needs root: N nodes of the local cloud, one rank each: they share the CPUs of this machine, and doctor starts
a rank for each GPU. Each way has its turn, or only `--way`; the node is drawn.
"""

import json
import sys
import time
from typing import Any

from awsddp.local import nspawn
from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, cluster

HEALTHY = "healthy"
# Way: the checks of which at least one must fail for the node.
WAYS: dict[str, frozenset[str]] = {
    HEALTHY: frozenset(),
    "cut": frozenset({"login"}),
    "one-way": frozenset({"login"}),
    "frozen": frozenset({"login"}),
    "hostkey": frozenset({"login"}),
    "slow-network": frozenset({"network", "pairs"}),
    "slow-cpu": frozenset({"alike: CPUs"}),
    "full-disk": frozenset({"disk"}),
    "oom": frozenset({"memory"}),
    "clock": frozenset({"clock"}),
}


def possible() -> list[str]:
    """Return the ways that this machine can bring about."""
    return [way for way in WAYS if way != "clock" or nspawn.find_faketime() is not None]


def is_named(found: dict[str, Any], way: str, culprit: int) -> bool:
    """Tell whether `doctor` named the node for what it has, and nothing else."""
    failed = [(check["name"], check["node"]) for check in found["checks"] if check["ok"] is False]
    if way == HEALTHY:
        return not failed and any(check["name"] == "all-reduce" for check in found["checks"])
    return {node for _, node in failed} == {culprit} and bool({name for name, _ in failed} & WAYS[way])


def run(lab: Rehearsal, way: str, culprit: int) -> Row:
    """Break a node, ask, heal it, and return what was said."""
    if way != HEALTHY:
        lab.run("local", "fault", "add", f"node{culprit}", way)
    start = time.monotonic()
    with lab.started("doctor", "--json") as process:
        text, _ = process.communicate(timeout=900)
    took = time.monotonic() - start
    lab.run("local", "fault", "clear")
    found = json.loads(text)
    ok = "checks" in found and is_named(found, way, culprit)
    said = "" if ok else [check for check in found.get("checks", [found]) if check.get("ok") is not True]
    return {"way": way, "node": culprit, "took": round(took, 1), "ok": ok, "said": said}


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=len(WAYS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--way", choices=possible())
    asked = parser.parse_args()
    ways = [asked.way] if asked.way else possible()
    with cluster(asked.nodes, {}, "--instance-type", "g6.xlarge") as lab:
        return campaign(
            asked, lambda number, dice: run(lab, ways[number % len(ways)], dice.randrange(asked.nodes))
        )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
