"""A small ConvNet on MNIST: undistributed, or distributed on CPUs or GPUs. Start it once per machine.

    python train/data.py get mnist data                       # first, on each machine

    python train/mnist_convnet.py                             # undistributed
    python train/mnist_convnet.py --num-processes 2 --batch-size 64
    python train/mnist_convnet.py --num-gpu-processes 8 --batch-size 16

Two machines by hand: HOST is the first machine, whose port 8892 must be open to the second. I is 0 on the
first machine and 1 on the second:

    MASTER_ADDR=HOST python train/mnist_convnet.py --num-machines 2 --machine-id I --num-processes 2 \\
        --batch-size 32

With awsddp, which starts the program once per node and sets MASTER_ADDR and MASTER_PORT:

    awsddp train train/mnist_convnet.py --nproc-per-node 1 -- \\
        --num-machines {world_size} --machine-id {rank} --num-processes 2 --batch-size 32

With twice as many processes, halve --batch-size: a step then has as many images as before, and the loss falls
in the same way. Every 10 batches, process 0 of each machine prints the mean loss of all processes since the
last line. The losses are also in loss-MACHINE.csv in $AWSDDP_RUN_DIR.
"""

from __future__ import annotations

import csv
import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from mnist import read_mnist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


class ConvNet(nn.Module):
    """A network with two convolutions, two linear layers and dropout; returns digits' log-probabilities."""

    def __init__(self, *, dropout: bool = True) -> None:
        super().__init__()
        self.cn1 = nn.Conv2d(1, 16, 3)
        self.cn2 = nn.Conv2d(16, 32, 3)
        self.dp1, self.dp2 = nn.Dropout2d(0.10 * dropout), nn.Dropout(0.25 * dropout)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities [B, 10] for images [B, 1, 28, 28]."""
        x = F.relu(self.cn2(F.relu(self.cn1(x))))
        x = self.dp1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dp2(F.relu(self.fc1(x)))), dim=1)


def train(local_rank: int, args: Namespace) -> None:
    """Train as this machine's process `local_rank`."""
    rank, world_size = join_group(local_rank, args)
    device = torch.device("cuda", local_rank) if args.num_gpu_processes else torch.device("cpu")
    model = build_model(args, device)
    torch.manual_seed(args.seed * world_size + rank)  # for dropout: each process drops different units
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    pixels, labels, name = read_mnist(args.data_dir, "train")
    sampler = DistributedSampler[Tensor](labels, world_size, rank, shuffle=args.shuffle, seed=0)  # type: ignore[arg-type]
    rows: list[tuple[object, ...]] = [("epoch", "batch", "images", "seconds", "loss", "data")]
    model.train()
    started = time.perf_counter()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # otherwise every shuffled epoch has the same order
        batches = torch.tensor(list(sampler)).split(args.batch_size)
        losses: list[Tensor] = []
        for number, index in enumerate(batches):
            losses.append(train_batch(model, optimizer, pixels[index], labels[index], device))
            if number % 10 == 0:
                mean, losses = mean_over_processes(losses), []
                images, seconds = (number + 1) * args.batch_size * world_size, time.perf_counter() - started
                rows.append((epoch, number, images, round(seconds, 3), mean, name))
                if local_rank == 0:
                    print(f"epoch {epoch} [{number}/{len(batches)}]  training loss {mean:.6f}", flush=True)
    if local_rank == 0:
        print(f"Finished training on {name} in {time.perf_counter() - started:.2f} secs", flush=True)
        folder = Path(os.environ.get("AWSDDP_RUN_DIR", "."))
        with (folder / f"loss-{args.machine_id}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        test(model.module if dist.is_initialized() else model, args.data_dir, device)  # type: ignore[arg-type]
    leave_group()


def join_group(local_rank: int, args: Namespace) -> tuple[int, int]:
    """Form the process group if there are several processes; return the rank and the world size."""
    per_machine = args.num_gpu_processes or args.num_processes
    if not per_machine:
        return 0, 1
    if "OMP_NUM_THREADS" not in os.environ:  # otherwise each process would use all cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // per_machine))
    backend = "nccl" if args.num_gpu_processes else "gloo"  # nccl does not support CPU tensors
    rank, world_size = args.machine_id * per_machine + local_rank, per_machine * args.num_machines
    dist.init_process_group(backend, init_method="env://", world_size=world_size, rank=rank)
    return rank, world_size


def leave_group() -> None:
    """Leave the process group, if there is one, when all processes have reached this point."""
    if dist.is_initialized():
        dist.barrier()
        time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
        dist.destroy_process_group()


def build_model(args: Namespace, device: torch.device) -> nn.Module:
    """Return the network with fixed initial weights, in DDP if there is a process group."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if args.float64 else torch.float32)
    net = ConvNet(dropout=not args.no_dropout).to(device)
    if not dist.is_initialized():
        return net
    return DistributedDataParallel(net, device_ids=[device] if device.type == "cuda" else None)


def normalise(pixels: Tensor) -> Tensor:
    """Return pixels [B, 28, 28] uint8 as images [B, 1, 28, 28]."""
    return (pixels[:, None].to(torch.get_default_dtype()) / 255 - 0.1302) / 0.3069


def train_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, pixels: Tensor, labels: Tensor, device: torch.device
) -> Tensor:
    """Train on one batch; return the loss, which stays on the device."""
    if device.type == "cuda":  # only a copy from pinned memory overlaps with the GPU's work
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    pixels, labels = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    loss = F.nll_loss(model(normalise(pixels)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean_over_processes(losses: list[Tensor]) -> float:
    """Return the mean loss over all processes. This is a collective call."""
    total = sum(losses, torch.zeros_like(losses[0]))
    if not dist.is_initialized():
        return total.item() / len(losses)
    dist.all_reduce(total)
    return total.item() / (len(losses) * dist.get_world_size())


@torch.inference_mode()
def test(net: nn.Module, folder: Path, device: torch.device) -> None:
    """Print the accuracy on the test images."""
    net.eval()
    pixels, labels, name = read_mnist(folder, "t10k")
    hits = 0
    for index in torch.arange(len(labels)).split(500):
        outputs = net(normalise(pixels[index].to(device)))
        hits += int((outputs.argmax(1).cpu() == labels[index]).sum())
    print(f"Test accuracy {hits / len(labels):.4f} on {name}", flush=True)


def arguments(argv: list[str] | None = None) -> Namespace:
    """Return the settings."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--num-machines", default=1, type=int)
    add("--machine-id", default=0, type=int)
    add("--num-processes", default=0, type=int, help="CPU processes on this machine; 0: undistributed")
    add("--num-gpu-processes", default=0, type=int, help="processes on this machine, with one GPU each")
    add("--epochs", default=1, type=int)
    add("--batch-size", default=128, type=int, help="images in one process's batch")
    add("--seed", default=0, type=int, help="seed of the dropout; the initial weights never change")
    add("--no-dropout", action="store_true", help="for exact comparisons, with --float64")
    add("--float64", action="store_true")
    add("--shuffle", action="store_true", help="the published program does not")
    add("--data-dir", default="data", type=Path)
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if args.num_gpu_processes > gpus:
        parser.error(f"{args.num_gpu_processes} GPU processes need as many GPUs; this machine has {gpus}")
    return args


def main() -> None:
    """Start this machine's processes."""
    args = arguments()
    read_mnist(args.data_dir, "train")  # so that missing data causes one error, not one per process
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "8892")
    processes = args.num_gpu_processes or args.num_processes
    if processes:
        mp.spawn(train, nprocs=processes, args=(args,))  # type: ignore[attr-defined]
    else:
        train(0, args)


if __name__ == "__main__":
    main()
