"""Train with DistributedDataParallel on one process, one machine or many.

    python train/main.py                                                     # alone
    torchrun --nproc-per-node 4 train/main.py                                # 4 ranks on this machine
    python train/main.py 0 0 --world-size 2 --init-method tcp://HOST:23456   # two machines by hand:
    python train/main.py 1 0 --world-size 2 --init-method tcp://HOST:23456   #   RANK LOCAL_RANK
    awsddp train --world-size 4                                              # on a cluster

What it keeps goes to $AWSDDP_RUN_DIR (else runs/local-<time>): config.json, metrics.jsonl, checkpoints/.
Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by SIGTERM after a checkpoint: go on with --resume.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import quiet  # noqa: F401

# isort: split
import checkpoint
import data
import group
import meters
import models
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "place", nargs="*", type=int, metavar="RANK LOCAL_RANK", help="default: from the environment"
    )
    parser.add_argument("--local-rank", "--local_rank", type=int, help="as legacy launchers pass it")
    parser.add_argument("--world-size", type=int, help="default: $WORLD_SIZE, else 1")
    parser.add_argument("--init-method", help="tcp://HOST:PORT, file:///PATH or env:// (default)")
    parser.add_argument("--backend", help="default: nccl on GPUs, gloo on CPUs")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="for the group to form, and for a collective"
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=64, help="samples of one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--resume", type=Path, default=os.environ.get("AWSDDP_RESUME"), help="a checkpoint, or a run's folder"
    )
    return parser.parse_args(argv)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def main() -> int:
    args = arguments()
    place = group.find_place(
        args.place,
        env=os.environ,
        local_rank=args.local_rank,
        world_size=args.world_size,
        init_method=args.init_method,
    )
    leader = place.rank == 0

    # The process group
    device = group.choose_device(args.device, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group.share_cores(place)
    say(f"Initialize Process Group: rank {place.rank} of {place.world_size} on {device}")
    group.join(place, device=device, backend=args.backend, timeout_s=args.timeout)
    stop = group.Stop()
    torch.manual_seed(args.seed)

    # The model: DDP gives every rank rank 0's weights
    say("Initialize Model")
    net = models.digits_net().to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        net.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )

    # The data
    say("Initialize Dataloaders")
    train_set, test_set = data.digits(train=True), data.digits(train=False)
    sampler = DistributedSampler[object](train_set, place.world_size, place.rank, seed=args.seed)
    batch_size = max(1, args.global_batch // place.world_size)

    def prepare(pixels: torch.Tensor) -> torch.Tensor:
        return pixels.to(device, non_blocking=True).float().div_(train_set.scale).sub_(0.3).div_(0.38)

    folder = meters.run_folder()
    metrics = meters.Metrics(folder if leader else None)
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**vars(args), "world_size": place.world_size, "batch_size": batch_size}
        meters.write_config(folder, settings, device=device)
        say(f"{batch_size} images a rank x {place.world_size} ranks a step, learning rate {args.lr}")

    step, first_epoch, done = 0, 1, 0  # `done`: batches of first_epoch that are trained already
    best = 0.0
    if args.resume:
        state = checkpoint.load(args.resume, rank=place.rank)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch, best = state["step"], state["epoch"], state["best"]
        done = state["samples"] // (batch_size * place.world_size)
        checkpoint.restore_rng(state["rng"], rank=place.rank, device=device)
        metrics.forget_after(step)
        say(f"Resume at step {step}, epoch {first_epoch}")

    def keep(epoch: int, batches: int) -> None:
        rng = checkpoint.gather_rng(device)
        if leader:
            state = {
                "model": net.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "epoch": epoch,
                "samples": batches * batch_size * place.world_size,
                "best": best,
                "rng": rng,
            }
            checkpoint.save_step(state, folder / "checkpoints", step=step)

    started = time.perf_counter()
    for epoch in range(first_epoch, args.epochs + 1):
        say(f"Begin Training Epoch {epoch}")
        sampler.set_epoch(epoch)
        model.train()
        loss_sum, losses = torch.zeros(1, device=device), 0
        batches = torch.tensor(list(sampler)).split(batch_size)
        for number, index in enumerate(batches[done:], done + 1):
            stop.ask()
            pixels, labels = train_set.gather(index)
            loss = criterion(model(prepare(pixels)), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            loss_sum += loss.detach()
            losses += 1
            if step % args.print_every == 0 or number == len(batches):
                dist.all_reduce(loss_sum)
                mean = loss_sum.item() / (losses * place.world_size)
                loss_sum, losses = torch.zeros(1, device=device), 0
                seconds = round(time.perf_counter() - started, 3)
                metrics.write(epoch=epoch, step=step, loss=mean, seconds=seconds)
                if not mean < float("inf"):
                    say(f"the loss is {mean} at step {step}: lower --lr. The last checkpoint is from before.")
                    return 1
            if stop.agreed():
                keep(epoch, number)
                say(f"Stopped at step {step} with a checkpoint: start again with --resume {folder}")
                group.leave()
                return STOPPED
        done = 0

        # Each rank counts its own share of the held-out images once
        say(f"Begin Validation @ Epoch {epoch}")
        model.eval()
        right = torch.zeros(1, device=device)
        with torch.inference_mode():
            for index in torch.arange(place.rank, len(test_set), place.world_size).split(256):
                pixels, labels = test_set.gather(index)
                right += (net(prepare(pixels)).argmax(1) == labels.to(device)).sum()
        dist.all_reduce(right)
        accuracy = right.item() / len(test_set)
        best = max(best, accuracy)
        seconds = round(time.perf_counter() - started, 3)
        metrics.write(epoch=epoch, step=step, accuracy=accuracy, best=best, seconds=seconds)
        if leader:
            say(f"Epoch Summary: epoch {epoch}, accuracy {accuracy:.4f}, best {best:.4f}, {seconds:.1f} s")
        keep(epoch + 1, 0)

    group.leave()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (group.LaunchError, argparse.ArgumentError) as error:
        print(f"main.py: {error}", file=sys.stderr)
        sys.exit(2)
    except (data.DataError, checkpoint.CheckpointError) as error:
        print(f"main.py: {error}", file=sys.stderr)
        sys.exit(1)
