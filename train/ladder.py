"""From one GPU to many: one GPU, then DataParallel (one line) on all of a machine's GPUs, then DDP.

    python train/ladder.py single                                 # one GPU, or the CPU
    python train/ladder.py dataparallel                           # one process, all GPUs of this machine
    torchrun --nproc-per-node 2 train/ladder.py ddp               # one process per GPU
    torchrun --nnodes 2 --node-rank I --nproc-per-node 2 --master-addr HOST train/ladder.py ddp    # I = 0, 1
    awsddp train train/ladder.py --world-size 4 -- ddp

All three ways train on the same batches and print the same losses, because each rank of DDP takes a part of
each batch. The next steps are elastic.py, for workers that fail, and parameter_server.py, for tasks that DDP
does not fit.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def network() -> nn.Module:
    """Return the network, which maps inputs [B, 20] to outputs [B, 1]."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def model_and_device(rung: str) -> tuple[nn.Module, torch.device]:
    """Return the model in the wrapper that `rung` names, and the device for the model's inputs."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if rung == "ddp" else 0  # each rank has its own GPU
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    net = network().to(device)
    if rung == "dataparallel":
        return DataParallel(net), device  # without a GPU, DataParallel only calls the model
    if rung == "ddp":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        device_ids = [local_rank] if device.type == "cuda" else None
        return DistributedDataParallel(net, device_ids=device_ids), device
    return net, device


def main() -> None:
    """Learn a linear function; print the whole batch's loss."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("rung", choices=["single", "dataparallel", "ddp"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    args = parser.parse_args()
    model, device = model_and_device(args.rung)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if args.rung == "ddp" else (0, 1)
    if args.batch_size % world_size:
        parser.error(f"--batch-size {args.batch_size} is not divisible by {world_size} ranks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    random = torch.Generator().manual_seed(1)
    slope = torch.randn(20, 1, generator=random)
    for step in range(1, args.steps + 1):
        batch = torch.randn(args.batch_size, 20, generator=random)
        inputs = batch.chunk(world_size)[rank].to(device)
        targets = (batch @ slope).chunk(world_size)[rank].to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = loss.detach() / world_size
            if args.rung == "ddp":
                dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}  loss {mean.item():.6f}", flush=True)
    if args.rung == "ddp":
        dist.barrier()
        time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
