"""At most one node has a fault that the local cloud simulates: `doctor` must name only this node.

    python -m benchmarks.campaigns.doctor [--nodes N] [--way WAY] [--seed N] [--runs N] [--state FILE]

Needs root for its N nodes of the local cloud. Each node has only one GPU, because `doctor` starts a rank for
each GPU and all nodes share the CPUs of this machine. The runs take all faults in turn, or only the fault
`--way`. The node is chosen at random.
"""

import json
import sys
import time
from typing import Any

from awsddp.local import nspawn
from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, cluster

HEALTHY = "healthy"
# The checks for each fault: at least one of them must fail for the node.
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
    """Return the faults that this machine supports."""
    return [fault for fault in WAYS if fault != "clock" or nspawn.find_faketime() is not None]


def is_named(document: dict[str, Any], fault: str, culprit: int) -> bool:
    """Return True if `doctor` names the node and its fault, and nothing else."""
    failed = [(check["name"], check["node"]) for check in document["checks"] if check["ok"] is False]
    if fault == HEALTHY:
        return not failed and any(check["name"] == "all-reduce" for check in document["checks"])
    return {node for _, node in failed} == {culprit} and bool({name for name, _ in failed} & WAYS[fault])


def run(lab: Rehearsal, fault: str, culprit: int) -> Row:
    """Add the fault to a node, run `doctor`, clear the fault, and return the row."""
    if fault != HEALTHY:
        lab.run("local", "fault", "add", f"node{culprit}", fault)
    start = time.monotonic()
    with lab.started("doctor", "--json") as process:
        text, _ = process.communicate(timeout=900)
    took = time.monotonic() - start
    lab.run("local", "fault", "clear")
    document = json.loads(text)
    ok = "checks" in document and is_named(document, fault, culprit)
    checks = document.get("checks", [document])
    problems = "" if ok else [check for check in checks if check.get("ok") is not True]
    return {"way": fault, "node": culprit, "took": round(took, 1), "ok": ok, "said": problems}


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=len(WAYS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--way", choices=possible())
    args = parser.parse_args()
    ways = [args.way] if args.way else possible()
    with cluster(args.nodes, {}, "--instance-type", "g6.xlarge") as lab:
        return campaign(
            args, lambda number, dice: run(lab, ways[number % len(ways)], dice.randrange(args.nodes))
        )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
