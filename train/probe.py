"""Can these machines form a process group at all? Each rank says who it is and adds its rank to a sum of all.

    torchrun --nproc-per-node 2 train/probe.py                                    # one machine
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 train/probe.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr HOST --master-port 29500 train/probe.py
    awsddp train train/probe.py --world-size 4

INIT_METHOD in the environment is taken where it is set (file:///PATH on Windows), else env://.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    """Form the group, reduce once, say what was seen."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    where = os.environ.get("INIT_METHOD", "env://")
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if where == "env://" else where
    who = f"[{os.getpid()}] {socket.gethostname()}: rank {rank} of {world_size}"
    print(f"{who} goes to {place}\n", end="", flush=True)
    started = time.perf_counter()
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        init_method=where,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    total = torch.tensor([rank], device=device)
    dist.all_reduce(total)
    right = int(total) == world_size * (world_size - 1) // 2
    seconds = time.perf_counter() - started
    print(
        f"[{os.getpid()}] world_size = {dist.get_world_size()}, rank = {dist.get_rank()}, "
        f"backend = {dist.get_backend()}, "
        f"sum of ranks {'right' if right else 'WRONG'} after {seconds:.2f} s\n",
        end="",  # in one piece: ranks share a terminal, and torchrun's write unbuffered
        flush=True,
    )
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
