"""Runs on a node with the Python of its ranks: they form a process group and time an all-reduce.

Takes JSON on stdin: {"ranks": an environment for each, "backend": "nccl" or "gloo", "seconds", "bytes",
"program": this file}. Each rank prints lines of JSON with its "rank": {"at": "started"}, "arrived" (at the
store), "joined", then {"at": "reduced", "seconds": of one all-reduce}, or {"at": "failed", "why"}. Ends by
itself after `seconds`.
"""

import datetime
import json
import os
import subprocess
import sys
import time

LEAST_S, MOST_TIMES = 0.5, 20


def say(**words):
    """Print a line in one write."""
    os.write(1, (json.dumps({"rank": int(os.environ["RANK"]), **words}) + "\n").encode())


def rank(backend, seconds, size):
    """Be one rank."""
    say(at="started")
    import torch
    import torch.distributed as dist

    number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=seconds)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        number == 0,
        timeout=limit,
        wait_for_workers=False,
    )
    store.set(f"arrived{number}", "")
    say(at="arrived")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)
    values = torch.ones(size // 4, device=device)
    wait = torch.cuda.synchronize if backend == "nccl" else lambda: None
    dist.all_reduce(values[:1])
    wait()
    say(at="joined")
    dist.all_reduce(values)
    dist.barrier()
    wait()
    times = []
    while not times or (sum(times) < LEAST_S and len(times) < MOST_TIMES):
        began = time.monotonic()
        dist.all_reduce(values)
        wait()
        took = torch.tensor([time.monotonic() - began], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    say(at="reduced", seconds=min(times))
    dist.barrier()
    time.sleep(0.2)  # gloo's other ranks may not have left the barrier
    os._exit(0)


def main():
    """Start the ranks of this node and end them when the time is up."""
    asked = json.loads(sys.stdin.read())
    words = [asked["backend"], asked["seconds"], asked["bytes"]]
    argv = [sys.executable, "-c", asked["program"], json.dumps(words)]
    started = [
        subprocess.Popen(argv, env={**os.environ, **one}, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for one in asked["ranks"]
    ]
    end = time.monotonic() + asked["seconds"]
    try:
        for number, one in enumerate(started):
            try:
                _, said = one.communicate(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
            if one.returncode:
                os.environ["RANK"] = asked["ranks"][number]["RANK"]
                why = said.decode(errors="replace").strip().splitlines()[-1:] or [str(one.returncode)]
                say(at="failed", why=why[0][:2000])
    finally:
        for one in started:
            one.kill()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(*json.loads(sys.argv[1]))
    else:
        main()
