"""A small ConvNet on MNIST: undistributed, or distributed on CPUs or GPUs. It is started once a machine.

    python train/data.py get mnist data                       # once a machine, before anything else

    python train/mnist_convnet.py                             # undistributed
    python train/mnist_convnet.py --num-processes 2 --batch-size 64
    python train/mnist_convnet.py --num-gpu-processes 8 --batch-size 16

Two machines by hand (HOST is the first, its port 8892 open to the other), I = 0 there and 1 on the other:

    MASTER_ADDR=HOST python train/mnist_convnet.py --num-machines 2 --machine-id I --num-processes 2 \\
        --batch-size 32

With awsddp, which starts it once a node and sets MASTER_ADDR and MASTER_PORT:

    awsddp train train/mnist_convnet.py --nproc-per-node 1 -- \\
        --num-machines {world_size} --machine-id {rank} --num-processes 2 --batch-size 32

Divide --batch-size as you multiply processes, and the loss falls as before: a step sees as many images.
Process 0 of each machine prints each 10 batches: the mean loss of all processes since the line before. They
are in loss-MACHINE.csv, in $AWSDDP_RUN_DIR, too.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


class ConvNet(nn.Module):
    """Two convolutions, two linear layers, dropout, log-probabilities of ten digits."""

    def __init__(self, *, dropout: bool = True) -> None:
        super().__init__()
        self.cn1 = nn.Conv2d(1, 16, 3)
        self.cn2 = nn.Conv2d(16, 32, 3)
        self.dp1, self.dp2 = nn.Dropout2d(0.10 * dropout), nn.Dropout(0.25 * dropout)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities [B, 10] of images [B, 1, 28, 28]."""
        x = F.relu(self.cn2(F.relu(self.cn1(x))))
        x = self.dp1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dp2(F.relu(self.fc1(x)))), dim=1)


def read_mnist(folder: Path, half: str) -> tuple[Tensor, Tensor, str]:
    """Return pixels [N, 28, 28] uint8, mapped so that processes share them, labels [N], and what they are."""
    root = next(
        (f for f in (folder / "MNIST/raw", folder) if (f / f"{half}-images-idx3-ubyte").exists()), None
    )
    if root is None:
        raise SystemExit(f"no MNIST in {folder}. Type: python train/data.py get mnist {folder}")
    images, labels = root / f"{half}-images-idx3-ubyte", root / f"{half}-labels-idx1-ubyte"
    count = labels.stat().st_size - 8
    if images.stat().st_size != 16 + count * 784:
        raise SystemExit(f"{images} does not hold {count} images, as its labels say: cut short?")
    pixels = torch.from_file(str(images), size=16 + count * 784, dtype=torch.uint8)[16:].view(count, 28, 28)
    answers = torch.from_file(str(labels), size=8 + count, dtype=torch.uint8)[8:].long()
    return pixels, answers, "made data, not MNIST" if (root / "MADE.json").exists() else "MNIST"


def train(local_rank: int, args: argparse.Namespace) -> None:
    """Be process `local_rank` of this machine."""
    per_machine = args.num_gpu_processes or args.num_processes
    world_size = max(1, per_machine * args.num_machines)
    rank = args.machine_id * per_machine + local_rank
    device = torch.device("cuda", local_rank) if args.num_gpu_processes else torch.device("cpu")
    if per_machine and "OMP_NUM_THREADS" not in os.environ:  # who shares cores must not take them all
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // per_machine))
    if per_machine:
        dist.init_process_group(
            "nccl" if args.num_gpu_processes else "gloo",
            init_method="env://",
            world_size=world_size,
            rank=rank,
        )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    model: nn.Module = ConvNet(dropout=not args.no_dropout).to(device)
    if per_machine:
        model = DistributedDataParallel(model, device_ids=[device] if args.num_gpu_processes else None)
    torch.manual_seed(args.seed * world_size + rank)  # from here on for dropout: no two processes drop alike
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)

    pixels, labels, name = read_mnist(args.data_dir, "train")
    sampler = DistributedSampler[Tensor](labels, world_size, rank, shuffle=args.shuffle, seed=0)  # type: ignore[arg-type]
    folder = Path(os.environ.get("AWSDDP_RUN_DIR", "."))
    rows = []
    model.train()
    started = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # else a shuffled epoch is the same every time
        shares = torch.tensor(list(sampler)).split(args.batch_size)
        total, since = torch.zeros((), device=device), 0
        for number, index in enumerate(shares):
            batch, target = pixels[index], labels[index]
            if args.num_gpu_processes:  # pinned, so that the copy overlaps what the GPU is at
                batch, target = batch.pin_memory(), target.pin_memory()
            batch, target = batch.to(device, non_blocking=True), target.to(device, non_blocking=True)
            prediction = model((batch[:, None].to(total.dtype) / 255 - 0.1302) / 0.3069)
            loss = F.nll_loss(prediction, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, since = total + loss.detach(), since + 1
            if number % 10 == 0:
                if per_machine:
                    dist.all_reduce(total)
                mean = total.item() / (since * world_size)
                total, since = torch.zeros((), device=device), 0
                if local_rank == 0:
                    seen, seconds = (number + 1) * args.batch_size * world_size, time.perf_counter() - started
                    rows.append((epoch, number, seen, round(seconds, 3), mean, name))
                    print(f"epoch {epoch} [{number}/{len(shares)}]  training loss {mean:.6f}", flush=True)
    if local_rank == 0:
        print(f"Finished training on {name} in {time.perf_counter() - started:.2f} secs", flush=True)
        with (folder / f"loss-{args.machine_id}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("epoch", "batch", "images", "seconds", "loss", "data"), *rows])
        test(model.module if per_machine else model, args.data_dir, device)  # type: ignore[arg-type]
    if per_machine:
        dist.barrier()
        time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
        dist.destroy_process_group()


@torch.inference_mode()
def test(model: nn.Module, folder: Path, device: torch.device) -> None:
    """Print the accuracy on the test images."""
    model.eval()
    pixels, labels, name = read_mnist(folder, "t10k")
    right = 0
    for index in torch.arange(len(labels)).split(500):
        batch = pixels[index].to(device)[:, None].to(torch.get_default_dtype())
        logits = model((batch / 255 - 0.1302) / 0.3069)
        right += int((logits.argmax(1).cpu() == labels[index]).sum())
    print(f"Test accuracy {right / len(labels):.4f} on {name}", flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-machines", default=1, type=int)
    parser.add_argument("--machine-id", default=0, type=int)
    parser.add_argument("--num-processes", default=0, type=int, help="of this machine; 0: undistributed")
    parser.add_argument(
        "--num-gpu-processes", default=0, type=int, help="instead, one for each GPU of this machine"
    )
    parser.add_argument("--epochs", default=1, type=int)
    parser.add_argument("--batch-size", default=128, type=int, help="of one process")
    parser.add_argument(
        "--seed", default=0, type=int, help="of the dropout; the first weights are always the same"
    )
    parser.add_argument("--no-dropout", action="store_true", help="leave nothing to chance...")
    parser.add_argument("--float64", action="store_true", help="...nor to rounding")
    parser.add_argument("--shuffle", action="store_true", help="the published program does not")
    parser.add_argument("--data-dir", default="data", type=Path)
    args = parser.parse_args(argv)
    if args.num_gpu_processes > torch.cuda.device_count():
        parser.error(
            f"{args.num_gpu_processes} GPU processes: there are {torch.cuda.device_count()} GPUs here"
        )
    return args


def main() -> None:
    """Start this machine's processes."""
    args = arguments()
    read_mnist(args.data_dir, "train")  # what is missing is said here, once, and not by each process
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "8892")
    processes = args.num_gpu_processes or args.num_processes
    if processes:
        mp.spawn(train, nprocs=processes, args=(args,))  # type: ignore[attr-defined]
    else:
        train(0, args)


if __name__ == "__main__":
    main()
