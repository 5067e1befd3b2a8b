"""Start ranks on a node with the ranks' Python, and end them after a timeout.

Reads JSON from stdin: {"ranks": each rank's variables, "seconds", "program": the source of probe.py}.
Forwards the ranks' output, and adds lines of JSON: {"rank", "at": "started"} for each rank, and
{"rank", "at": "failed", "why": its last line on stderr} for a rank that fails.
"""

import json
import os
import subprocess
import sys
import time


def report(rank, at, **more):
    """Print a line in a single write, because ranks print to the same pipe."""
    os.write(1, (json.dumps({"rank": rank, "at": at, **more}) + "\n").encode())


request = json.loads(sys.stdin.read())
end = time.monotonic() + request["seconds"]
argv = [sys.executable, "-c", request["program"], "--json"]
null, pipe = subprocess.DEVNULL, subprocess.PIPE
started = []
try:
    for variables in request["ranks"]:
        rank = int(variables["RANK"])
        report(rank, "started")
        environ = {**os.environ, **variables}
        started.append((rank, subprocess.Popen(argv, env=environ, stdin=null, stderr=pipe)))
    for rank, process in started:
        try:
            _, stderr = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue
        if process.returncode:
            last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
            report(rank, "failed", why=last[:2000] or f"exit code {process.returncode}")
finally:
    for _, process in started:
        process.kill()
