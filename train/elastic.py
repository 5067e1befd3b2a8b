"""Elastic training: workers may fail and nodes may come and go; training continues from the last snapshot.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 4 --max-restarts 3 train/elastic.py                        # one machine
    torchrun --nnodes 1:2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d \\
        --rdzv-id job1 --rdzv-endpoint HOST:29400 train/elastic.py                       # on each of two
    awsddp exec -- env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 4 \\
        --max-restarts 3 --rdzv-backend c10d --rdzv-id job1 --rdzv-endpoint HOST:29400 train/elastic.py

HOST is an address of node 0 that the other nodes can reach (see `awsddp status`).
TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives each generation of workers its own store. Without this variable, all
generations share one store, in which new workers find the addresses of dead workers (torch 2.13;
https://github.com/pytorch/pytorch/issues/135712).

After a failure, torchrun starts the workers again. There may be fewer workers, and their ranks may differ.
Therefore nothing depends on earlier rank numbers: every node keeps the snapshot, and the newest snapshot that
any worker finds is sent to all workers.
"""

from __future__ import annotations

import io
import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network() -> nn.Module:
    """Return the network, which learns to add 20 numbers."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))


def newest(path: Path) -> dict[str, Any] | None:
    """Return on all workers the newest snapshot that any worker finds at `path`, or None if there is none."""
    content = bytearray(path.read_bytes() if path.exists() else b"")
    epoch = load(content)["epoch"] if content else 0
    snapshots = [torch.zeros(2, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(snapshots, torch.tensor([epoch, len(content)]))
    source = max(range(len(snapshots)), key=lambda rank: int(snapshots[rank][0]))
    size = int(snapshots[source][1])
    if size == 0:
        return None
    if dist.get_rank() != source:
        content = bytearray(size)
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=source)
    return load(content)


def load(content: bytearray) -> dict[str, Any]:
    """Return the snapshot in `content`, on the CPU because it may come from another worker's GPU."""
    return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def save(snapshot: dict[str, Any], path: Path) -> None:
    """Write the snapshot, then rename it: if a worker fails in between, the previous snapshot remains."""
    aside = path.with_suffix(".aside")
    torch.save(snapshot, aside)
    aside.replace(path)


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, seed: int, steps: int
) -> float:
    """Train for `steps` steps; return the last loss."""
    random = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(32, 20, generator=random).to(device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Train until --epochs epochs are done, including the epochs of earlier starts."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    parser.add_argument("--fail-at", type=int, default=0, metavar="EPOCH", help="rank 1 fails after it")
    parser.add_argument("--snapshot", type=Path, help="default: snapshot.pt in $AWSDDP_RUN_DIR or here")
    args = parser.parse_args()
    path = args.snapshot or Path(os.environ.get("AWSDDP_RUN_DIR", ".")) / "snapshot.pt"
    local_rank, gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")  # gloo sends the snapshot from the CPU
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = network().to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    snapshot, done = newest(path), 0
    if snapshot:
        net.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        done = snapshot["epoch"]
    # Print in one write, because ranks share a terminal and torchrun's ranks are unbuffered.
    print(f"rank {rank} of {world_size}: {done} epochs are done\n", end="", flush=True)

    for epoch in range(done + 1, args.epochs + 1):
        loss = train_epoch(model, optimizer, device, seed=epoch * 1000 + rank, steps=args.steps)
        if local_rank == 0:  # one worker on each node saves, because any node may be lost
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
        if rank == 0:
            print(f"epoch {epoch}  loss {loss:.6f}  on {world_size} workers", flush=True)
        dist.barrier()  # no worker continues before the snapshot is written
        if epoch == args.fail_at and rank == 1:
            os._exit(17)
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
