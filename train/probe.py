"""Test if these machines can form a process group, and time its all-reduce. Each rank reports progress.

    torchrun --nproc-per-node 2 train/probe.py                                    # one machine
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 train/probe.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr HOST --master-port 29500 train/probe.py
    awsddp train train/probe.py --world-size 4

The ranks meet at $INIT_METHOD (on Windows file:///PATH) if it is set, else at env://. With --json each line
is a JSON object with "rank" and "at" (started; arrived where the ranks meet; joined; reduced); the last line
also has "gbyte_s".
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=240)
FIRST_BYTES, LAST_BYTES = 512 << 10, 256 << 20
ENOUGH_S, REPEATS = 0.2, 3


def report(at: str, text: str, **figures: float) -> None:
    """Print a line in one write, because ranks share a terminal and torchrun's ranks are unbuffered."""
    line = f"[{os.getpid()}] {text}"
    if "--json" in sys.argv:
        line = json.dumps({"rank": int(os.environ["RANK"]), "at": at, **figures})
    print(f"{line}\n", end="", flush=True)


def connect(init_method: str, rank: int, world_size: int) -> dist.Store:
    """Return the store at which the ranks meet, without waiting for the other ranks."""
    if init_method != "env://":
        return next(dist.rendezvous(init_method, rank, world_size))[0]
    torchrun_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and not torchrun_has_it
    return dist.TCPStore(host, port, world_size, is_server, timeout=TIMEOUT, wait_for_workers=False)


def bus_gbyte_s(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth of an all-reduce of `size` bytes, in GB/s, as nccl-tests defines it.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return size / seconds / 1e9 * 2 * (ranks - 1) / ranks


def measure(device: torch.device) -> float:
    """Time ever larger all-reduces; return the best bus bandwidth (GB/s), using the slowest rank's time."""
    size, best = FIRST_BYTES, 0.0
    while True:
        values, seconds = torch.ones(size // 4, device=device), []
        for _ in range(1 + REPEATS):  # the first all-reduce is a warm-up
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # reading the value waits for the GPU
            elapsed = torch.tensor([time.perf_counter() - started], device=device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX)
            seconds.append(float(elapsed))
            if seconds[-1] > ENOUGH_S and len(seconds) > 1:
                break
        best = max(best, bus_gbyte_s(size, min(seconds[1:]), dist.get_world_size()))
        if min(seconds[1:]) > ENOUGH_S or size == LAST_BYTES:
            return best
        size *= 8


def main() -> None:
    """Form the group, add up the ranks, time the all-reduce, and report each of these steps."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    init_method = os.environ.get("INIT_METHOD", "env://")
    address = init_method
    if init_method == "env://":
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    report("started", f"{socket.gethostname()}: rank {rank} of {world_size} goes to {address}")
    started = time.perf_counter()
    store = connect(init_method, rank, world_size)
    report("arrived", f"rank {rank} waits for the others")
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    total = torch.tensor([rank], device=device)
    dist.all_reduce(total)
    is_right = int(total) == world_size * (world_size - 1) // 2
    seconds = time.perf_counter() - started
    report(
        "joined",
        f"world_size = {dist.get_world_size()}, rank = {dist.get_rank()}, backend = {dist.get_backend()}, "
        f"sum of ranks {'right' if is_right else 'WRONG'} after {seconds:.2f} s",
    )
    if not is_right:
        raise SystemExit("the sum of all ranks is wrong")
    rate = measure(device)
    report("reduced", f"all-reduce: {rate:.2g} GB/s bus bandwidth", gbyte_s=rate)
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
