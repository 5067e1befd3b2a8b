"""The time that awsddp takes from the end of the boot to the user's first line, and in a second `train`.

    python benchmarks/own_time.py [ROUNDS]

Needs root for two nodes of the local cloud, each a real host. The client uses the local cloud in place of
AWS. Rows:

    first job       the time from the end of the later node's boot (cloud-init's last stage, as recorded on
                    the node) to the first line of user code; the promise is at most 3 s
    second train    the time of a whole `awsddp train` without a change
    beyond torch    the same, less the time of `python -c 'import torch'`, which is timed on both nodes at
                    once, because the ranks also import torch at once; the promise is at most 1 s
    beyond ranks    the same, less the time of the longest rank, which only imports torch; this figure is more
                    precise on a busy machine

The measurements are then repeated with a delay of 100 ms each way to AWS and to the nodes. The round trips
are counted from the response to RunInstances to the first visible line, and in the whole second `train`. For
AWS, calls are counted: connections stay open, as they do with AWS, and a call on a new connection takes two
round trips. For the node with the most round trips, the count includes the round trips that open connections.

No promise applies at this distance, where a round trip takes 0.2 s. The second `train` waits for 14 round
trips in sequence: five to log in, three for the first response (claim and jobs), two for AWS (in parallel
with the checks of the nodes and of the files), one to start the job, one for the job's results, and two for
AWS to release the nodes.

The machine must be idle, because the nodes run on the cores that awsddp runs on.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator

from _delay import Distance
from _rehearsal import Rehearsal, rehearsal

SCRIPT = """
import time
began = time.time()
import os, json
booted = os.stat("/run/cloud-init/result.json").st_mtime
import torch
print(json.dumps({"began": began, "booted": booted}), flush=True)
"""
REFERENCE = """
import subprocess, sys, time
began = time.time()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
print(time.time() - began)
"""
DELAYS_S = (0.0, 0.1)
UP = (
    *("--region", "us-east-1", "-o", "network.ssh_cidr=10.0.0.0/8", "-o", "cluster.max_price_usd=100"),
    *("--nodes", "2", "-y", "-q"),
)
JOB = ("first.py", "--world-size", "2", "-q")


class Far:
    """Runs `awsddp` with delayed connections to the cloud. `trips` has the round trips of each `train`, by
    kind."""

    def __init__(self, lab: Rehearsal, keys: dict[str, str], distance: Distance) -> None:
        self._lab = lab
        self._keys = keys | {"AWS_ENDPOINT_URL": distance.url}
        self._distance = distance
        self.trips: dict[str, list[dict[str, int]]] = defaultdict(list)

    def run(self, *words: str) -> str:
        """Run `awsddp` and return its stdout."""
        return self._lab.run(*words, **self._keys)

    def first_job(self) -> float:
        """Return the seconds from the boot of two nodes to the first line of user code."""
        with self._lab.started("run", *JOB, *UP, **self._keys) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            self._note("first job", since=self._distance.at_launch)
            lines += process.stdout
        ranks = [json.loads(line.split("] ", 1)[1]) for line in lines if "] {" in line]
        return float(min(rank["began"] for rank in ranks) - max(rank["booted"] for rank in ranks))

    def second_train(self) -> tuple[float, float]:
        """Return the seconds of a `train` without a change, and the seconds of the longest rank."""
        before, began = self._distance.count(), time.perf_counter()
        document = json.loads(self.run("train", "--json", *JOB))
        taken = time.perf_counter() - began
        self._note("second train", since=before)
        return taken, max(float(rank["seconds"]) for rank in document["ranks"])

    def reference(self) -> float:
        """Return the seconds that Python needs to import torch on the slower node."""
        document = json.loads(self.run("exec", "--json", "python", "-c", REFERENCE))
        return max(float(node["stdout"]) for node in document["nodes"])

    def _note(self, name: str, *, since: dict[str, int]) -> None:
        count = self._distance.count()
        self.trips[name].append({peer: count[peer] - since.get(peer, 0) for peer in count})


@contextlib.contextmanager
def far(lab: Rehearsal, *, delay_s: float) -> Iterator[Far]:
    """Yield a Far whose connections to the local cloud are delayed by `delay_s` each way."""
    keys = lab.keys()
    distance = Distance(keys["AWS_ENDPOINT_URL"], delay_s=delay_s)
    try:
        yield Far(lab, keys, distance)
    finally:
        distance.close()


def show(name: str, taken: list[float], tail: str = "") -> None:
    print(f"  {name:<14} least {min(taken):6.3f} s  median {statistics.median(taken):6.3f} s{tail}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    rounds = parser.parse_args().rounds
    for delay_s in DELAYS_S:
        with rehearsal() as lab, far(lab, delay_s=delay_s) as client:
            (lab.project / "first.py").write_text(SCRIPT)
            first = [client.first_job() for _ in range(rounds)]
            client.run("up", *UP)
            client.second_train()
            trains = [(client.reference(), *client.second_train()) for _ in range(rounds)]
        print(f"{delay_s * 1000:.0f} ms each way, {rounds} rounds")
        show("import torch", [reference for reference, _, _ in trains])
        show("first job", first, "  (promise: 3 s)")
        show("second train", [taken for _, taken, _ in trains])
        show("  beyond torch", [taken - reference for reference, taken, _ in trains], "  (promise: 1 s)")
        show("  beyond ranks", [taken - ranks for _, taken, ranks in trains])
        for name in ("first job", "second train"):
            trips = {peer: min(row[peer] for row in client.trips[name]) for peer in ("AWS", "a node")}
            counts = ", ".join(f"{count} to {peer}" for peer, count in trips.items())
            print(f"  {name:<14} round trips: {counts}")


if __name__ == "__main__":
    main()
