"""A task that DDP does not fit: a parameter server and its trainers, with torch.distributed.rpc.

Rank 0 is the server, which holds the weights and the optimiser. Each other rank trains at its own speed: it
fetches the weights, computes gradients on its share of the digits, and sends the gradients. No rank waits for
another.

    torchrun --nproc-per-node 3 train/parameter_server.py               # one machine: a server, two trainers
    torchrun --nnodes 2 --node-rank I --nproc-per-node 2 --master-addr HOST train/parameter_server.py
    awsddp train train/parameter_server.py --world-size 4

TP_SOCKET_IFNAME names the network interface; awsddp sets it. Every rank listens on a random port, so all
ports between the machines must be open. torch.distributed.rpc needs NumPy (seen with torch 2.13).
"""

from __future__ import annotations

import gzip
import os
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn


def network() -> nn.Module:
    """Return the network, the same on all ranks."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(*, train: bool) -> tuple[Tensor, Tensor]:
    """Return the pixels [N, 64], from 0 to 1, and the labels of UCI digits.

    Every seventh digit is held out from training; these digits are returned if `train` is False.
    """
    text = gzip.decompress((Path(__file__).resolve().parent / "digits.csv.gz").read_bytes()).decode()
    rows = torch.tensor([[int(value) for value in line.split(",")] for line in text.split()])
    rows = rows[(torch.arange(len(rows)) % 7 < 6) == train]
    return rows[:, :64] / 16, rows[:, 64]


class Server:
    """Holds the weights and their optimiser, on rank 0.

    The trainers call this object's methods through an RRef.
    """

    def __init__(self, lr: float) -> None:
        torch.manual_seed(0)
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.lock = threading.Lock()  # calls from several trainers run in several threads
        self.updates = 0

    def weights(self) -> list[Tensor]:
        """Return a copy of the current weights."""
        with self.lock:
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def update(self, gradients: list[Tensor]) -> list[Tensor]:
        """Take a step with `gradients`; return the new weights, so that each batch needs only one call."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.updates += 1
        return self.weights()

    def accuracy(self, pixels: Tensor, labels: Tensor) -> tuple[float, int]:
        """Return the accuracy on these images, and the number of updates so far."""
        with self.lock, torch.inference_mode():
            return float((self.model(pixels).argmax(1) == labels).float().mean()), self.updates


def train(server: rpc.RRef[Server], trainer: int, trainers: int, epochs: int) -> float:
    """Train as trainer `trainer` of `trainers`; return the last loss."""
    pixels, labels = (part[trainer::trainers] for part in digits(train=True))
    model, loss = network(), torch.zeros(())
    weights = server.rpc_sync().weights()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for index in order.split(32):
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights, strict=True):
                    parameter.copy_(weight)
            loss = nn.functional.cross_entropy(model(pixels[index]), labels[index])
            weights = server.rpc_sync().update(list(torch.autograd.grad(loss, list(model.parameters()))))
    return loss.item()


def main() -> None:
    """Start the server and the trainers on rank 0; the other ranks wait for calls."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if find_spec("numpy") is None:
        parser.error("torch.distributed.rpc needs NumPy. Type: pip install numpy")
    if world_size < 2:
        parser.error("there must be a server and at least one trainer: start 2 ranks or more")
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", num_worker_threads=2 + 2 * world_size)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        server = rpc.RRef(Server(args.lr))
        trainers = world_size - 1
        results = [
            rpc.rpc_async(f"rank{n}", train, args=(server, n - 1, trainers, args.epochs), timeout=0)
            for n in range(1, world_size)
        ]
        for number, loss in enumerate([result.wait() for result in results], 1):
            print(f"trainer {number}: last loss {loss:.4f}", flush=True)
        accuracy, updates = server.local_value().accuracy(*digits(train=False))
        print(f"{trainers} trainers, {updates} updates, accuracy {accuracy:.4f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
