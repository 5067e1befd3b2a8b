"""The time that is awsddp's own: between the machines and the user's first line.

    python benchmarks/own_time.py [ROUNDS]

Two nodes of the local cloud. `first job`: from the end of the later node's boot (cloud-init's last stage, as
the node itself wrote it down) to the first line of user code; the promise is at most 3 s. `second train`:
the whole of `awsddp train` with nothing changed, less the import of torch in the rank that took longest; the
promise is at most 1 s. An idle machine is needed: both run on the cores that the nodes use.
"""

import json
import statistics
import sys
import time

from _rehearsal import Rehearsal, rehearsal

SCRIPT = """
import time
began = time.time()
import os, json
booted = os.stat("/run/cloud-init/result.json").st_mtime
imported = time.time()
import torch
print(json.dumps({"began": began, "booted": booted, "import": time.time() - imported}), flush=True)
"""


def said(lines: str) -> list[dict[str, float]]:
    return [json.loads(line.split("] ", 1)[1]) for line in lines.splitlines() if "] {" in line]


def first_job(lab: Rehearsal) -> float:
    ranks = said(lab.run("run", "first.py", "--local", "--nodes", "2", "--world-size", "2", "-y", "-q"))
    return min(rank["began"] for rank in ranks) - max(rank["booted"] for rank in ranks)


def second_train(lab: Rehearsal) -> float:
    start = time.perf_counter()
    ranks = said(lab.run("train", "first.py", "--world-size", "2", "-q"))
    return time.perf_counter() - start - max(rank["import"] for rank in ranks)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with rehearsal() as lab:
        (lab.project / "first.py").write_text(SCRIPT)
        first = [first_job(lab) for _ in range(rounds)]
        lab.run("up", "--local", "--nodes", "2", "-y")
        second = [second_train(lab) for _ in range(rounds + 1)][1:]
        for name, taken, most in (("first job", first, 3.0), ("second train", second, 1.0)):
            median = statistics.median(taken)
            print(f"{name:<14} least {min(taken):6.3f} s  median {median:6.3f} s  (promise: {most:g} s)")


if __name__ == "__main__":
    main()
