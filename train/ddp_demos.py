"""Three demos of DistributedDataParallel on a toy model: basic use, a checkpoint, a split model.

    python train/ddp_demos.py basic                       # a rank per GPU, or 2 ranks on the CPU
    python train/ddp_demos.py checkpoint --ranks 4
    python train/ddp_demos.py split                       # two GPUs per rank: rank r owns GPUs 2r and 2r + 1
    torchrun --nproc-per-node 2 train/ddp_demos.py basic  # with a launcher each process is one rank
    torchrun --nnodes 2 --node-rank I --nproc-per-node 2 --master-addr HOST train/ddp_demos.py basic
    awsddp train train/ddp_demos.py --world-size 4 -- basic
    awsddp train train/ddp_demos.py --nproc-per-node 4 -- split                              # 8 GPUs per node

Legacy launchers pass --local_rank=N, and --local_world_size=N if one process owns several GPUs.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Toy(nn.Module):
    """A model 10 -> 10 -> 5; its first layer is on the device `first`, its second layer is on `second`."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(10, 10).to(first)
        self.net2 = nn.Linear(10, 5).to(second)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs [B, 5] on the second device."""
        hidden = torch.relu(self.net1(x.to(self.first)))
        output: Tensor = self.net2(hidden.to(self.second))
        return output


def devices(local_rank: int, demo: str) -> tuple[torch.device, torch.device]:
    """Return the devices for the two layers of this machine's rank `local_rank`."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), torch.device("cpu")
    if demo == "split":
        return torch.device("cuda", 2 * local_rank), torch.device("cuda", 2 * local_rank + 1)
    return torch.device("cuda", local_rank), torch.device("cuda", local_rank)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Train for one step on random numbers; return the loss."""
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 10))
    loss = nn.functional.mse_loss(outputs, torch.randn(20, 5).to(device))
    loss.backward()
    optimizer.step()
    return loss.item()


def checkpoint(model: nn.Module, path: Path, rank: int, device: torch.device) -> None:
    """Save on rank 0, load on all ranks of rank 0's machine, then remove on rank 0.

    Barriers enforce this order.
    """
    if rank == 0:
        torch.save(model.state_dict(), path.with_suffix(".aside"))
        path.with_suffix(".aside").replace(path)
    dist.barrier()  # no rank reads the file before it is written
    if path.exists():  # the file exists only on rank 0's machine: the others do not share its disk
        model.load_state_dict(torch.load(path, map_location=device, weights_only=True))
        print(f"rank {rank} loaded {path.name}\n", end="", flush=True)
    dist.barrier()  # after this, no rank is still reading
    if rank == 0:
        path.unlink()


def run(rank: int, world_size: int, local_rank: int, demo: str) -> None:
    """Run the demo as rank `rank`."""
    first, second = devices(local_rank, demo)
    if first.type == "cuda":
        torch.cuda.set_device(first)
    dist.init_process_group("nccl" if first.type == "cuda" else "gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # the ranks' weights differ until DDP sends rank 0's weights to all ranks
    # device_ids is only for a model on one GPU.
    device_ids = [first] if first == second and first.type == "cuda" else None
    model = DistributedDataParallel(Toy(first, second), device_ids=device_ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if demo == "checkpoint":
        folder = Path(os.environ.get("AWSDDP_RUN_DIR", tempfile.gettempdir()))
        checkpoint(model, folder / "ddp_demos.pt", rank, first)
    loss = step(model, optimizer, second)
    weights = torch.cat([p.detach().flatten().to(first) for p in model.parameters()])
    lowest, highest = weights.clone(), weights.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    alike = "alike" if torch.equal(lowest, highest) else "NOT alike"
    print(
        f"{demo}: rank {rank} of {world_size} on {first}, {second}: loss {loss:.4f}, weights {alike}\n",
        end="",  # in one write, because ranks share a terminal and torchrun's ranks are unbuffered
        flush=True,
    )
    dist.barrier()
    time.sleep(0.2)  # torch 2.13's gloo may abort a peer that is still in its last collective
    dist.destroy_process_group()


def run_spawned(local_rank: int, ranks: int, demo: str) -> None:
    """Run the demo in a process that mp.spawn started."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    run(local_rank, ranks, local_rank, demo)


def main() -> None:
    """Run the demo as a rank if a launcher started this process; otherwise start ranks on this machine."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("demo", choices=["basic", "checkpoint", "split"])
    add("--ranks", type=int, help="ranks to start; default: as many as the GPUs allow, or 2 on a CPU")
    add("--local_rank", "--local-rank", type=int, help="passed by legacy launchers")
    add("--local_world_size", type=int, help="passed by legacy launchers, and ignored")
    args = parser.parse_args()
    if "RANK" in os.environ:
        local_rank = int(os.environ["LOCAL_RANK"]) if args.local_rank is None else args.local_rank
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local_rank, args.demo)
        return
    gpus = torch.cuda.device_count()
    most = gpus // 2 if args.demo == "split" else gpus
    ranks = args.ranks or (most if gpus else 2)
    if gpus and not 0 < ranks <= most:
        parser.error(f"{args.demo} with {ranks or 1} ranks needs more than this machine's {gpus} GPUs")
    mp.spawn(run_spawned, nprocs=ranks, args=(ranks, args.demo))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
