"""A 784-256-10 perceptron on MNIST: one process with one GPU (or the CPU) per machine.

    python train/data.py get mnist data                                # first, on each machine

    python train/mnist_mlp.py --rank 0 --world-size 1                  # one machine

Two machines by hand: rank 0 listens on all its addresses, rank 1 connects to the address of rank 0's machine.

    python train/mnist_mlp.py --rank 0 --init-method tcp://0.0.0.0:23456
    python train/mnist_mlp.py --rank 1 --init-method tcp://HOST:23456

With awsddp, run the same program on both nodes, or, as published, one file for each rank:

    awsddp train train/mnist_mlp.py --nproc-per-node 1 -- --rank {rank} \\
        --init-method tcp://{master_addr}:{master_port}
    awsddp train train/train_rank{rank}.py --nproc-per-node 1

The published program never wraps its model in DistributedDataParallel, so that each machine trains a separate
model. This program wraps its model.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mnist import read_mnist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def network() -> nn.Module:
    """Return the perceptron, which maps images [B, 784] to log-probabilities [B, 10]."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10), nn.LogSoftmax(dim=1))


def main(rank: int | None = None) -> None:
    """Train as rank `rank`, or as the rank that --rank gives."""
    args = arguments(rank)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",  # nccl does not support CPU tensors
        init_method=args.init_method,
        rank=args.rank,
        world_size=args.world_size,
    )
    torch.manual_seed(0)
    net = network().to(device)
    model = DistributedDataParallel(net, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    pixels, labels, name = read_mnist(args.data_dir, "train")
    pixels = pixels.flatten(1).float().div_(255).sub_(0.1307).div_(0.3081)
    pixels, labels = pixels.to(device), labels.to(device)  # the images are 188 MB, which fit on any GPU
    print(f"rank {args.rank} of {args.world_size} on {device}: {name}", flush=True)
    sampler = DistributedSampler[Tensor](labels, args.world_size, args.rank)  # type: ignore[arg-type]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without this, as in the published program, every epoch has the same order
        total, started = torch.zeros((), device=device), time.perf_counter()
        batches = torch.tensor(list(sampler)).split(args.batch_size)
        for index in batches:
            optimizer.zero_grad()
            loss = F.nll_loss(model(pixels[index]), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.detach()  # stays on the device: .item() here would wait for each batch
        mean, seconds = total.item() / len(batches), time.perf_counter() - started
        loss_line = f"mean training loss of rank {args.rank}: {mean:.4f}  ({seconds:.1f} s)"
        print(f"epoch {epoch}  {loss_line}", flush=True)

    if args.rank == 0:  # the ranks' weights are equal
        torch.save(net.state_dict(), Path(os.environ.get("AWSDDP_RUN_DIR", ".")) / "mlp.pt")
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()


def arguments(rank: int | None) -> Namespace:
    """Return the settings; `rank` is the default of --rank."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    meeting = "env://" if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:23456"
    add = parser.add_argument
    add("--rank", type=int, default=rank)
    add("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    add(
        "--init-method",
        default=meeting,
        help="default: MASTER_ADDR and MASTER_PORT, else tcp://127.0.0.1:23456",
    )
    add("--epochs", type=int, default=100)
    add("--batch-size", type=int, default=64, help="of one process")
    add("--data-dir", type=Path, default=Path("data"))
    args = parser.parse_args()
    if args.rank is None:
        parser.error("--rank is needed")
    return args


if __name__ == "__main__":
    main()
