"""A node shuts down during a job that needs 5 s to save: the saved files must be fetched completely.

    python -m benchmarks.campaigns.saves [--seed N] [--runs N] [--state FILE]

Needs root for its two nodes of the local cloud. The shutdown is at a random moment of the job. The runs take
these kinds of shutdown in turn: both nodes expire, one node is powered off or rebooted from inside, or
`awsddp stop` stops the cluster.
"""

import json
import random
import subprocess
import sys
import time

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, begin, campaign, cluster

SAVE_S = 5
SCRIPT = f"""\
import os, signal, sys, time
def save(*_):
    with open("saved" + os.environ["RANK"], "w") as file:
        for part in range({SAVE_S * 10}):
            print(part, file=file, flush=True)
            time.sleep(0.1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while True:
    print("step", flush=True)
    time.sleep(0.5)
"""
SAVED = "".join(f"{part}\n" for part in range(SAVE_S * 10))
KINDS = ("expiry", "poweroff", "reboot", "stop")
_WORDS = {
    "poweroff": "sudo systemctl poweroff --no-block",
    "reboot": "sudo systemctl reboot --no-block",
}


def up(lab: Rehearsal, expires: str) -> None:
    """Launch the cluster; retry, because a node of the previous run may shut down during the launch."""
    for retries_left in (2, 1, 0):
        try:
            lab.run("up", "--nodes", "2", "-y", "--expires", expires)
            return
        except subprocess.CalledProcessError:
            if not retries_left:
                raise
            time.sleep(5)


def boots(lab: Rehearsal) -> dict[str, str]:
    """Return the boot id of each running instance, or {} while an instance is starting or stopping."""
    try:
        nodes = json.loads(lab.run("status", "--json"))["nodes"]
        ids = {node["node"]: node["instance_id"] for node in nodes if node["state"] == "running"}
        document = json.loads(lab.run("exec", "--json", "cat /proc/sys/kernel/random/boot_id")) if ids else {}
        return {ids[node["node"]]: node["stdout"] for node in document.get("nodes", [])}
    except subprocess.CalledProcessError:
        return {}


def saved(lab: Rehearsal, name: str) -> list[str]:
    """Return the content of the fetched files that the ranks of a job saved."""
    return [path.read_text() for path in (lab.project / "runs" / name).glob("node*/saved*")]


def run(lab: Rehearsal, number: int, dice: random.Random) -> Row:
    """Run one shutdown, and return its row."""
    kind, node, name = KINDS[number % len(KINDS)], dice.randrange(2), f"save{number}"
    up(lab, "100s" if kind == "expiry" else "1h")
    before = boots(lab)
    follower = begin(lab, name, "save.py", "--world-size", "4")
    time.sleep(dice.uniform(0, 5))
    if kind == "stop":
        lab.run("stop", "-y")
    elif kind in _WORDS:
        lab.run("exec", "--node", str(node), "--", _WORDS[kind])
    document = json.loads(follower.communicate(timeout=300)[0])
    deadline = time.monotonic() + 60
    while before.items() <= boots(lab).items() and time.monotonic() < deadline:
        time.sleep(1)
    fetched = "at once"
    if len(saved(lab, name)) < 4:  # a node was off before `fetch`; its disk still exists
        fetched = "after up"
        up(lab, "1h")
        lab.run("fetch", name)
        document = json.loads((lab.project / "runs" / name / "job.json").read_text())
    whole = [text == SAVED for text in saved(lab, name)]
    cause = document["cause"]
    return {
        "kind": kind,
        "state": document["state"],
        "whole": sum(whole),
        "home": fetched,
        "cause": cause and cause["explanation"],
        "ok": whole == [True] * 4 and document["state"] == ("cancelled" if kind == "stop" else "interrupted"),
    }


def main() -> int:
    args = arguments(str(__doc__).splitlines()[0], runs=20).parse_args()
    with cluster(2, {"save.py": SCRIPT}) as lab:
        return campaign(args, lambda number, dice: run(lab, number, dice))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
