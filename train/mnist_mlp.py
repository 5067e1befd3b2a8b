"""A 784-256-10 perceptron on MNIST, one process and one GPU (or CPU) a machine, ranks given by hand.

    python train/data.py get mnist data                                # once a machine, before anything else

    python train/mnist_mlp.py --rank 0 --world-size 1                  # one machine

Two machines by hand: rank 0 listens on all its addresses, rank 1 connects to the address of rank 0's machine.

    python train/mnist_mlp.py --rank 0 --init-method tcp://0.0.0.0:23456
    python train/mnist_mlp.py --rank 1 --init-method tcp://HOST:23456

With awsddp, the same program on both nodes, or one file for each rank as it was published:

    awsddp train train/mnist_mlp.py --nproc-per-node 1 -- --rank {rank} \\
        --init-method tcp://{master_addr}:{master_port}
    awsddp train train/train_rank{rank}.py --nproc-per-node 1

The published program never wraps its model in DistributedDataParallel: each machine trains alone. This does.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


def network() -> nn.Module:
    """Return the perceptron: log-probabilities [B, 10] of images [B, 784]."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10), nn.LogSoftmax(dim=1))


def read_mnist(folder: Path) -> tuple[Tensor, Tensor, str]:
    """Return MNIST's training pixels [N, 784], normalised, labels [N], and what they are."""
    root = next((f for f in (folder / "MNIST/raw", folder) if (f / "train-images-idx3-ubyte").exists()), None)
    if root is None:
        raise SystemExit(f"no MNIST in {folder}. Type: python train/data.py get mnist {folder}")
    images, labels = root / "train-images-idx3-ubyte", root / "train-labels-idx1-ubyte"
    count = labels.stat().st_size - 8
    if images.stat().st_size != 16 + count * 784:
        raise SystemExit(f"{images} does not hold {count} images, as its labels say: cut short?")
    pixels = torch.from_file(str(images), size=16 + count * 784, dtype=torch.uint8)[16:].view(count, 784)
    answers = torch.from_file(str(labels), size=8 + count, dtype=torch.uint8)[8:].long()
    name = "made data, not MNIST" if (root / "MADE.json").exists() else "MNIST"
    return pixels.float().div_(255).sub_(0.1307).div_(0.3081), answers, name


def main(rank: int | None = None) -> None:
    """Train as rank `rank`, or as --rank says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=rank)
    parser.add_argument("--world-size", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument(
        "--init-method", help="default: MASTER_ADDR and MASTER_PORT, else tcp://127.0.0.1:23456"
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64, help="of one process")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    args = parser.parse_args()
    if args.rank is None:
        parser.error("--rank is needed")
    given = "env://" if "MASTER_ADDR" in os.environ else "tcp://127.0.0.1:23456"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=args.init_method or given,
        rank=args.rank,
        world_size=args.world_size,
    )
    torch.manual_seed(0)
    net = network().to(device)
    model = DistributedDataParallel(net, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    pixels, labels, name = read_mnist(args.data_dir)
    pixels, labels = pixels.to(device), labels.to(device)  # 188 MB: it fits on any GPU
    print(f"rank {args.rank} of {args.world_size} on {device}: {name}", flush=True)
    sampler = DistributedSampler[Tensor](labels, args.world_size, args.rank)  # type: ignore[arg-type]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # the published program forgets it, and repeats the same order
        total, started = torch.zeros((), device=device), time.perf_counter()
        shares = torch.tensor(list(sampler)).split(args.batch_size)
        for index in shares:
            optimizer.zero_grad()
            loss = F.nll_loss(model(pixels[index]), labels[index])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        mean, seconds = total.item() / len(shares), time.perf_counter() - started
        print(
            f"epoch {epoch}  mean training loss of rank {args.rank}: {mean:.4f}  ({seconds:.1f} s)",
            flush=True,
        )

    if args.rank == 0:
        torch.save(net.state_dict(), Path(os.environ.get("AWSDDP_RUN_DIR", ".")) / "mlp.pt")
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
