"""Runs on a node with the Python of its ranks: starts them, and ends them when the time is up.

Takes JSON on stdin: {"ranks": an environment for each, "seconds", "program": the source of train/probe.py}.
What the ranks print is passed on, as lines of the same kind: {"rank", "at": "started"}, and of one that fails
{"rank", "at": "failed", "why": its last line on stderr}.
"""

import json
import os
import subprocess
import sys
import time


def say(rank, at, **more):
    """Print a line in one write, as ranks print to the same place."""
    os.write(1, (json.dumps({"rank": rank, "at": at, **more}) + "\n").encode())


asked = json.loads(sys.stdin.read())
end = time.monotonic() + asked["seconds"]
argv = [sys.executable, "-c", asked["program"], "--json"]
null, pipe = subprocess.DEVNULL, subprocess.PIPE
started = []
try:
    for one in asked["ranks"]:
        rank = int(one["RANK"])
        say(rank, "started")
        started.append((rank, subprocess.Popen(argv, env={**os.environ, **one}, stdin=null, stderr=pipe)))
    for rank, process in started:
        try:
            _, said = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
        if process.returncode:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            say(rank, "failed", why=last[:2000] or f"exit code {process.returncode}")
finally:
    for _, process in started:
        process.kill()
