"""Train with DistributedDataParallel on one process, one machine or many.

    python train/main.py                                                     # alone
    python train/main.py --spawn 4                                           # 4 ranks here, by mp.spawn
    torchrun --nproc-per-node 4 train/main.py                                # 4 ranks here
    torchrun --nnodes 2 --node-rank I --nproc-per-node 8 --master-addr HOST train/main.py    # on each of two
    python train/main.py 0 0 --world-size 2 --init-method tcp://HOST:23456   # two machines by hand:
    python train/main.py 1 0 --world-size 2 --init-method tcp://HOST:23456   #   RANK LOCAL_RANK
    awsddp train --world-size 16 -- --recipe stl10-resnet18                  # on a cluster

It keeps config.json, metrics.jsonl, loss.svg and checkpoints/ in $AWSDDP_RUN_DIR, else in runs/local-<time>.
Started again with the same folder, or with --resume FOLDER, it goes on from the newest checkpoint there.
Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by SIGTERM after a checkpoint: start it again.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import quiet  # noqa: F401

# isort: split
import batches
import checkpoint
import group
import image_files
import meters
import models
import recipes
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "try again later"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingError(Exception):
    """The training cannot go on. The text says why, and what to change."""


@dataclass
class Position:
    """Where the training stands: `images` of `epoch` are done (by all ranks together) after `step` steps."""

    step: int = 0
    epoch: int = 1
    images: int = 0
    best: float = 0.0


def main(argv: list[str]) -> int:
    """Join the group, train, leave the group; return the exit code."""
    args = recipes.arguments(__doc__, argv)
    if args.spawn:
        return group.spawn(run, args.spawn, argv)
    say("Collect Inputs")
    place = group.find_place(
        args.place,
        env=os.environ,
        local_rank=args.local_rank,
        world_size=args.world_size,
        init_method=args.init_method,
    )
    device = group.choose_device(args.device, place)
    group.share_cores(place)
    say(f"Initialize Process Group: rank {place.rank} of {place.world_size} on {device}")
    group.join(place, device=device, backend=args.backend, timeout_s=args.timeout)
    code = train(args, place, device)
    group.leave()
    return code


def train(args: argparse.Namespace, place: group.Place, device: torch.device) -> int:
    """Train as `args` says; return 0, or STOPPED when a rank was told to end. Every rank calls it."""
    leader = place.rank == 0
    stop = group.Stop()
    torch.manual_seed(args.seed)

    say("Initialize Model")  # DDP gives every rank the weights of rank 0
    net = models.build(args.model).to(device)
    ddp = DistributedDataParallel(
        net, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )
    model = torch.compile(ddp) if args.compile else ddp
    lr = args.lr * (place.world_size if args.scale_lr else 1)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=lr, momentum=args.momentum, weight_decay=args.weight_decay, fused=True
    )
    criterion = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    autocast = torch.autocast(device.type, PRECISIONS[args.precision], enabled=args.precision != "fp32")

    say("Initialize Dataloaders")
    batch_size = args.batch_size or args.global_batch // (place.world_size * args.accumulate)
    if batch_size < 1:
        raise group.LaunchError(f"a global batch of {args.global_batch} leaves some ranks without an image.")
    feed = batches.feed(args, place, device=device, batch_size=batch_size)
    per_step = batch_size * place.world_size * args.accumulate

    folder = meters.run_folder()
    metrics = meters.Metrics(folder if leader else None)
    if leader:
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            **vars(args),
            "world_size": place.world_size,
            "batch_size": batch_size,
            "data": feed.description,
        }
        meters.write_config(folder, settings, device=device)
        passes = f" x {args.accumulate} passes" if args.accumulate > 1 else ""
        scaled = f", {args.lr} x {place.world_size}" if args.scale_lr else ""
        say(f"{feed.description}: {batch_size} images x {place.world_size} ranks{passes} = {per_step} a step")
        say(f"Learning rate {lr}{scaled}")

    at = Position()
    kept = checkpoint.load([folder, args.resume] if args.resume else [folder])
    if kept is not None:
        restored = checkpoint.restore(kept, name=args.model, net=net, optimizer=optimizer, scaler=scaler)
        at = Position(**restored)
        if not checkpoint.restore_rng(kept["rng"], place=place, device=device):
            say(f"The checkpoint is of {len(kept['rng'])} ranks: other random numbers from here on")
        say(f"Resume after step {at.step}, epoch {at.epoch}, image {at.images}")
    elif args.resume:
        raise checkpoint.CheckpointError(f"no rank finds a checkpoint at {args.resume}.")
    metrics.forget_after(at.step)

    def keep(*, best: bool = False) -> None:
        state = checkpoint.state(args.model, net=net, optimizer=optimizer, scaler=scaler)
        state |= {"at": asdict(at), "rng": checkpoint.gather_rng(device)}
        if leader:
            checkpoint.save_step(state, folder / "checkpoints", step=at.step, best=best)

    progress = meters.Progress(device, hits=args.print_every > 0)
    for epoch in range(at.epoch, args.epochs + 1):
        say(f"Begin Training Epoch {epoch}")
        at.epoch = epoch
        drops = (epoch - 1) // args.lr_drop_every if args.lr_drop_every else 0
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr / 10**drops
        ddp.train()
        progress.begin()
        done = at.images // per_step * args.accumulate
        for number, batch in enumerate(feed.train.epoch(epoch, start=done), done + 1):
            progress.data_ready()
            last_pass = number % args.accumulate == 0 or number == len(feed.train)
            if (number - 1) % args.accumulate == 0:
                optimizer.zero_grad()

            inputs = feed.prepare(batch.records, batch.draws)
            with nullcontext() if last_pass else ddp.no_sync():
                with autocast:
                    logits = model(inputs)
                    loss = criterion(logits, batch.labels)
                share = len(batch.labels) / feed.train.images_of_step(number, args.accumulate)
                scaler.scale(loss * share if share < 1 else loss).backward()
            progress.add(loss, logits, batch.labels)
            if not last_pass:
                progress.batch_done()
                continue

            if args.clip_norm:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), args.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            at.step += 1
            at.images += per_step
            progress.batch_done()

            if number % (args.log_every * args.accumulate) == 0 or number == len(feed.train):
                row = progress.row()
                total = -(-len(feed.train) // args.accumulate) * args.epochs
                rate = optimizer.param_groups[0]["lr"]
                metrics.write(epoch=epoch, step=at.step, total_steps=total, **row, lr=rate)
                if not math.isfinite(row["loss"]):
                    raise TrainingError(
                        f"the loss is {row['loss']} at step {at.step}. Try a smaller --lr than {lr}."
                    )
            if args.print_every and number % args.print_every == 0:
                say(f"Epoch: [{epoch}][{number}/{len(feed.train)}]  {progress.line()}")
            stopping = stop.agreed()
            if stopping or (args.checkpoint_every and at.step % args.checkpoint_every == 0):
                keep()
            if stopping:
                say(f"Stopped after step {at.step}, with a checkpoint: go on with --resume {folder}")
                return STOPPED

        last = epoch == args.epochs
        at.epoch, at.images = epoch + 1, 0
        if feed.test_set is None or not (last or (epoch - 1) % args.evaluate_every == 0):
            continue
        say(f"Begin Validation @ Epoch {epoch}")
        seen = evaluate(net, feed, criterion, place=place, device=device, print_every=args.print_every * 10)
        at.best, best = max(at.best, seen["accuracy"]), seen["accuracy"] > at.best
        metrics.write(epoch=epoch, step=at.step, **seen, best=at.best, data=feed.description)
        keep(best=best)
        if args.export and place.local_rank == 0:
            checkpoint.save(net.state_dict(), args.export)
        if leader:
            say(f"Epoch Summary: epoch {epoch}, accuracy {seen['accuracy']:.4f}, best {at.best:.4f}")

    meters.draw(metrics.rows(), folder / "loss.svg", title=f"{args.recipe}: {feed.description}")
    return 0


@torch.inference_mode()
def evaluate(
    net: nn.Module,
    feed: batches.Feed,
    criterion: nn.Module,
    *,
    place: group.Place,
    device: torch.device,
    print_every: int,
) -> dict[str, float]:
    """Return loss, top-1 and top-5 accuracy on the held-out images; a collective call.

    Each rank takes every W-th image, and no image is counted twice, as a padding sampler would.
    """
    assert feed.test_set is not None
    net.eval()
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)  # batch norm's running statistics: everyone's are rank 0's
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    shares = torch.arange(place.rank, len(feed.test_set), place.world_size).split(256)
    for number, index in enumerate(shares, 1):
        records, labels = feed.test_set.gather(index).to(device), feed.test_set.labels[index].to(device)
        logits = net(feed.prepare(records))
        found = logits.topk(5).indices == labels[:, None]
        sums += torch.stack([criterion(logits, labels) * len(index), found[:, 0].sum(), found.sum()])
        if print_every and number % print_every == 0:
            say(f"Test: [{number}/{len(shares)}]  Loss {sums[0].item() / (number * 256):.4f}")
    dist.all_reduce(sums)
    loss, top1, top5 = (sums / len(feed.test_set)).tolist()
    return {"test_loss": loss, "accuracy": top1, "top5": top5}


def say(text: str) -> None:
    """Print a line at once, in one piece: other ranks may share the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(argv: list[str]) -> int:
    """Call main and return the exit code, an error turned into a line on stderr."""
    try:
        return main(argv)
    except group.LaunchError as error:
        code, text = 2, str(error)
    except (image_files.DataError, models.MissingPackage, checkpoint.CheckpointError, TrainingError) as error:
        code, text = 1, str(error)
    except OSError as error:
        code, text = 1, f"the machine refused a file of the run: {error}. Is its disk full?"
    except RuntimeError as error:
        if not group.is_broken(error):
            raise
        code, text = 1, f"the group broke: another rank ended, or cannot be reached any more. ({error})"
    print(f"main.py: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    group.end(run(sys.argv[1:]))
