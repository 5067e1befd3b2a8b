"""Train with DistributedDataParallel (DDP): one process, one machine or many.

    python train/main.py                                                     # 1 rank
    python train/main.py --spawn 4                                           # 4 ranks, by mp.spawn
    torchrun --nproc-per-node 4 train/main.py                                # 4 ranks, by torchrun
    torchrun --nnodes 2 --node-rank I --nproc-per-node 8 --master-addr HOST train/main.py    # I = 0, 1
    python train/main.py 0 0 --world-size 2 --init-method tcp://HOST:23456   # two machines by hand:
    python train/main.py 1 0 --world-size 2 --init-method tcp://HOST:23456   #   RANK LOCAL_RANK
    awsddp train --world-size 16 -- --recipe stl10-resnet18                  # on a cluster

Results: config.json, metrics.jsonl, loss.svg and checkpoints/ in $AWSDDP_RUN_DIR, else in runs/local-<time>.
If this folder has a checkpoint, or with --resume FOLDER, training continues from the newest checkpoint.
Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by SIGTERM after a checkpoint (start again).
"""

from __future__ import annotations

import argparse
import math
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

STOPPED = 75  # EX_TEMPFAIL in sysexits.h: "try again later"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingError(Exception):
    """The training cannot continue. The message says why, and what to change."""


@dataclass
class Position:
    """The training's progress: `step` steps in total, and `images` images in `epoch`, over all ranks."""

    step: int = 0
    epoch: int = 1
    images: int = 0
    best: float = 0.0  # the highest accuracy so far on the held-out images


def main(argv: list[str]) -> int:
    """Join the process group, train and leave the group; return the exit code."""
    args = recipes.parse_arguments(__doc__, argv)
    if args.spawn:
        return group.spawn(run, args.spawn, argv)
    print_line("Collect Inputs")
    world = group.find_world(args.place, args.local_rank, args.world_size, args.init_method)
    device = group.choose_device(args.device, world)  # plain "cuda" would be GPU 0 on every rank
    group.divide_cores(world)
    print_line(f"Initialize Process Group: rank {world.rank} of {world.size} on {device}")
    group.join(world, device=device, backend=args.backend, timeout_s=args.timeout)
    code = Trainer(args, world, device).train()
    group.leave()
    return code


class Trainer:
    """A training run. Every rank has a Trainer, and all ranks call the same methods in the same order."""

    def __init__(self, args: argparse.Namespace, world: group.World, device: torch.device) -> None:
        self.args, self.world, self.device = args, world, device
        self.stop = group.StopSignal()
        torch.manual_seed(args.seed)

        print_line("Initialize Model")
        self.net = models.build(args.model).to(device)
        # DDP sends rank 0's weights to all ranks now, and averages their gradients in each backward pass.
        device_ids = [device.index] if device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.net, device_ids=device_ids, gradient_as_bucket_view=True)
        self.model = torch.compile(self.ddp) if args.compile else self.ddp
        # A larger batch often, but not always, allows a proportionally larger learning rate
        # (https://arxiv.org/abs/1706.02677).
        self.lr = args.lr * (world.size if args.scale_lr else 1)
        options = {"lr": self.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
        self.optimizer = torch.optim.SGD(self.net.parameters(), **options, fused=True)
        self.criterion = nn.CrossEntropyLoss()
        # Small gradients become 0 in fp16, so the scaler multiplies the loss. bf16 has the range of fp32 and
        # needs no scaler.
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        dtype = PRECISIONS[args.precision]
        self.autocast = torch.autocast(device.type, dtype, enabled=args.precision != "fp32")

        print_line("Initialize Dataloaders")
        self.inputs = batches.build_inputs(args, world, device)
        self.meters = meters.Meters(device, accuracy=args.print_every > 0)
        self.folder = meters.results_folder()
        self.metrics = meters.Metrics(self.folder if world.rank == 0 else None)
        if world.rank == 0:  # only rank 0 writes, because the ranks of a node share a folder
            self.write_config()
        self.resume()

    def write_config(self) -> None:
        """Create the results folder and config.json, and print the number of images per step."""
        args, size, inputs = self.args, self.world.size, self.inputs
        sizes = {"world_size": size, "batch_size": inputs.batch_size, "data": inputs.description}
        meters.write_config(self.folder, {**vars(args), **sizes}, device=self.device)
        passes = f" x {args.accumulate} passes" if args.accumulate > 1 else ""
        step = f"{inputs.batch_size} images x {size} ranks{passes} = {inputs.images_per_step} a step"
        print_line(f"{inputs.description}: {step}")
        print_line(f"Learning rate {self.lr}" + (f", {args.lr} x {size}" if args.scale_lr else ""))

    def resume(self) -> None:
        """Continue from the newest checkpoint that any rank finds, if there is one."""
        args, self.position = self.args, Position()
        state = checkpoint.load([self.folder, args.resume] if args.resume else [self.folder])
        if state is not None:
            position = checkpoint.restore(
                state, name=args.model, net=self.net, optimizer=self.optimizer, scaler=self.scaler
            )
            self.position = at = Position(**position)
            # With different random numbers, a resumed run differs from a run that was not interrupted.
            if not checkpoint.restore_rng(state["rng"], world=self.world, device=self.device):
                ranks = len(state["rng"])
                print_line(f"The checkpoint is of {ranks} ranks; random numbers differ from here on")
            print_line(f"Resume after step {at.step}, epoch {at.epoch}, image {at.images}")
        elif args.resume:
            raise checkpoint.CheckpointError(f"no rank finds a checkpoint at {args.resume}.")
        self.metrics.drop_after(self.position.step)

    def train(self) -> int:
        """Train the remaining epochs; return 0, or STOPPED if a rank received SIGTERM."""
        args, position = self.args, self.position
        for epoch in range(position.epoch, args.epochs + 1):
            print_line(f"Begin Training Epoch {epoch}")
            if self.train_epoch(epoch):
                hint = f"go on with --resume {self.folder}"
                print_line(f"Stopped after step {position.step}, with a checkpoint: {hint}")
                return STOPPED
            position.epoch, position.images = epoch + 1, 0
            is_due = epoch == args.epochs or (epoch - 1) % args.evaluate_every == 0
            if is_due and self.inputs.test_set is not None:
                self.validate(epoch)
        title = f"{args.recipe}: {self.inputs.description}"
        meters.draw(self.metrics.rows(), self.folder / "loss.svg", title=title)
        return 0

    def train_epoch(self, epoch: int) -> bool:
        """Train the remaining steps of `epoch`; return True if the ranks agreed to stop."""
        args, train_set = self.args, self.inputs.train
        self.position.epoch = epoch
        drops = (epoch - 1) // args.lr_drop_every if args.lr_drop_every else 0
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.lr / 10**drops
        self.ddp.train()
        self.meters.start_epoch()
        done = self.position.images // self.inputs.images_per_step * args.accumulate
        for number, batch in enumerate(train_set.epoch(epoch, start=done), done + 1):
            self.meters.data_ready()
            is_last_pass = number % args.accumulate == 0 or number == len(train_set)
            self.forward_backward(number, batch, is_last_pass=is_last_pass)
            if is_last_pass:
                self.update_weights()
            self.meters.batch_done()
            if is_last_pass and self.finish_step(number):
                return True
        return False

    def forward_backward(self, number: int, batch: batches.Batch, *, is_last_pass: bool) -> None:
        """Add the gradients from the epoch's batch `number`; each batch is one pass of a step."""
        if (number - 1) % self.args.accumulate == 0:
            self.optimizer.zero_grad()
        images = self.inputs.transform(batch.records, batch.draws)
        # Only the last pass averages the gradients over the ranks. no_sync must enclose the forward pass.
        with nullcontext() if is_last_pass else self.ddp.no_sync():
            with self.autocast:
                logits = self.model(images)
                loss = self.criterion(logits, batch.labels)
            # The last batch of an epoch may be smaller: weight each batch by its share of the step's images.
            share = len(batch.labels) / self.inputs.train.images_of_step(number, self.args.accumulate)
            self.scaler.scale(loss * share if share < 1 else loss).backward()
        self.meters.add(loss, logits, batch.labels)

    def update_weights(self) -> None:
        """Take one step of the optimiser, with clipped gradients if --clip-norm is set."""
        if self.args.clip_norm:
            self.scaler.unscale_(self.optimizer)  # the norm of scaled gradients is meaningless
            nn.utils.clip_grad_norm_(self.net.parameters(), self.args.clip_norm)
        self.scaler.step(self.optimizer)  # the scaler skips a step with an infinite gradient
        self.scaler.update()
        self.position.step += 1
        self.position.images += self.inputs.images_per_step

    def finish_step(self, number: int) -> bool:
        """After batch `number`, log, print and save if due; return True if the ranks agreed to stop."""
        args, position, batch_count = self.args, self.position, len(self.inputs.train)
        if number % (args.log_every * args.accumulate) == 0 or number == batch_count:
            self.log()
        if args.print_every and number % args.print_every == 0:
            print_line(f"Epoch: [{position.epoch}][{number}/{batch_count}]  {self.meters.line()}")
        # All ranks stop after the same step: if only one stopped, the others would wait in all_reduce.
        is_stopping = self.stop.agreed()
        if is_stopping or (args.checkpoint_every and position.step % args.checkpoint_every == 0):
            self.save()
        return is_stopping

    def log(self) -> None:
        """Append a row to metrics.jsonl. Raises TrainingError if the loss is not finite."""
        row, position = self.meters.means(), self.position
        total = math.ceil(len(self.inputs.train) / self.args.accumulate) * self.args.epochs
        rate = self.optimizer.param_groups[0]["lr"]
        self.metrics.write(epoch=position.epoch, step=position.step, total_steps=total, **row, lr=rate)
        if not math.isfinite(row["loss"]):
            raise TrainingError(
                f"the loss is {row['loss']} at step {position.step}. Try a smaller --lr than {self.lr}."
            )

    def validate(self, epoch: int) -> None:
        """Evaluate on the held-out images and save a checkpoint."""
        args, position, data = self.args, self.position, self.inputs.description
        print_line(f"Begin Validation @ Epoch {epoch}")
        scores = evaluate(self.net, self.inputs, self.world, self.device, print_every=args.print_every * 10)
        accuracy, best = scores["accuracy"], position.best
        position.best = max(best, accuracy)
        self.metrics.write(epoch=epoch, step=position.step, **scores, best=position.best, data=data)
        self.save(is_best=accuracy > best)
        if args.export and self.world.local_rank == 0:
            checkpoint.save(self.net.state_dict(), args.export)
        if self.world.rank == 0:
            summary = f"epoch {epoch}, accuracy {accuracy:.4f}, best {position.best:.4f}"
            print_line(f"Epoch Summary: {summary}")

    def save(self, *, is_best: bool = False) -> None:
        """Write a checkpoint, with the random number states of all ranks, on rank 0.

        This is a collective call.
        """
        rng = checkpoint.gather_rng(self.device)
        if self.world.rank != 0:
            return
        # The state is taken from `net`, because the names of `ddp`'s parameters begin with "module.".
        state = checkpoint.state(self.args.model, net=self.net, optimizer=self.optimizer, scaler=self.scaler)
        state |= {"at": asdict(self.position), "rng": rng}
        checkpoint.save_step(state, self.folder / "checkpoints", step=self.position.step, is_best=is_best)


@torch.inference_mode()
def evaluate(
    net: nn.Module, inputs: batches.Inputs, world: group.World, device: torch.device, *, print_every: int
) -> dict[str, float]:
    """Return loss, top-1 and top-5 accuracy on the held-out images. This is a collective call.

    Each of the W ranks takes every W-th image. No images are repeated to make the shares equal, so a rank may
    have one batch fewer than others. `net` is the network without DDP, because DDP's forward pass waits for
    all ranks.
    """
    assert inputs.test_set is not None
    net.eval()
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)  # batch norm's running statistics differ by rank: take those of rank 0
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    parts = torch.arange(world.rank, len(inputs.test_set), world.size).split(256)
    for number, index in enumerate(parts, 1):
        records, labels = inputs.test_set.gather(index).to(device), inputs.test_set.labels[index].to(device)
        logits = net(inputs.transform(records))
        loss = nn.functional.cross_entropy(logits, labels) * len(index)
        sums += torch.stack([loss, *meters.count_hits(logits, labels)])
        if print_every and number % print_every == 0:
            print_line(f"Test: [{number}/{len(parts)}]  Loss {sums[0].item() / (number * 256):.4f}")
    dist.all_reduce(sums)
    loss, top1, top5 = (sums / len(inputs.test_set)).tolist()
    return {"test_loss": loss, "accuracy": top1, "top5": top5}


def print_line(text: str) -> None:
    """Print `text` immediately and in one write, because other ranks may share the terminal."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(argv: list[str]) -> int:
    """Call main; return the exit code. Print an error as one line on stderr."""
    try:
        return main(argv)
    except group.LaunchError as error:
        code, text = 2, str(error)
    except (image_files.DataError, models.MissingPackage, checkpoint.CheckpointError, TrainingError) as error:
        code, text = 1, str(error)
    except OSError as error:
        code, text = 1, f"a file of the run could not be written or read: {error}. Is the disk full?"
    except RuntimeError as error:
        if not group.is_broken(error):
            raise
        code, text = 1, f"the process group failed: another rank ended or cannot be reached. ({error})"
    print(f"main.py: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    group.end(run(sys.argv[1:]))
