"""The settings of the published programs by name, and the flags that override them."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """What a name stands for. Fields up to `workers` are the defaults of the flags of the same names."""

    data: str  # of image_files.FORMATS, or "synthetic"
    model: str  # of models.MODELS
    epochs: int
    lr: float
    weight_decay: float
    batch_size: int | None = None  # images of one process in one pass...
    global_batch: int | None = None  # ...or of all of them in one step
    momentum: float = 0.9
    lr_drop_every: int = 0  # epochs after which the learning rate is divided by 10; 0: never
    image_size: int | None = None  # the side that images are resized to
    log_every: int = 10  # steps between rows of metrics.jsonl
    print_every: int = 10  # batches between printed lines; 0: none
    evaluate_every: int = 1  # epochs
    export: Path | None = None  # where local rank 0 of EACH node also leaves the bare weights
    workers: int = 0
    crop: int = 0  # random crops after padding by this much, and mirroring
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


RECIPES = {
    "digits": Recipe(
        data="digits",
        model="digits-net",
        epochs=8,
        lr=0.05,
        weight_decay=1e-4,
        global_batch=64,
        log_every=25,  # once an epoch, which has 23 steps as short as the all_reduce of a row
        print_every=0,
        mean=(0.3,),
        std=(0.38,),
    ),
    "stl10-resnet18": Recipe(
        data="stl10",
        model="resnet18",
        epochs=2,
        lr=0.1,
        weight_decay=1e-4,
        batch_size=32,
        lr_drop_every=30,
        image_size=224,
    ),
    "cifar10-resnet18": Recipe(
        data="cifar10",
        model="resnet18",
        epochs=10_000,
        lr=0.1,
        weight_decay=1e-5,
        batch_size=256,
        evaluate_every=10,
        export=Path("saved_models/resnet_distributed.pth"),
        crop=4,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    ),
    "synthetic": Recipe(
        data="synthetic",
        model="resnet18",
        epochs=1,
        lr=0.1,
        weight_decay=1e-4,
        batch_size=32,
        image_size=224,
    ),
}


def arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings: flags over the recipe that --recipe names."""
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--recipe", choices=RECIPES, default="digits")
    name = chooser.parse_known_args(argv)[0].recipe
    parser = argparse.ArgumentParser(
        parents=[chooser], description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _launch_flags(parser.add_argument_group("launch"))
    _training_flags(parser.add_argument_group("training (defaults: the recipe's)"))
    _running_flags(parser.add_argument_group("running"))
    parser.set_defaults(**asdict(RECIPES[name]))
    args = parser.parse_args(argv)
    if args.batch_size and args.global_batch and not RECIPES[name].batch_size:
        args.global_batch = None  # --batch-size was given over a recipe that fixes the global batch
    return args


def _launch_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "place", nargs="*", type=int, metavar="RANK LOCAL_RANK", help="default: the environment's"
    )
    group.add_argument("--local-rank", "--local_rank", type=int, help="as legacy launchers pass it")
    group.add_argument("--world-size", type=int, help="default: $WORLD_SIZE, else 1")
    group.add_argument("--init-method", help="tcp://HOST:PORT, file:///PATH or env:// (default)")
    group.add_argument("--spawn", type=int, metavar="N", help="start N ranks on this machine by mp.spawn")
    group.add_argument("--backend", help="default: nccl on GPUs, gloo on CPUs")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="to form the group; of a collective"
    )


def _training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model")
    group.add_argument("--epochs", type=int)
    group.add_argument("--batch-size", type=int, metavar="N", help="images of one process in one pass")
    group.add_argument("--global-batch", type=int, metavar="N", help="images of one step over all ranks")
    group.add_argument("--accumulate", type=int, default=1, metavar="N", help="passes to a step")
    group.add_argument("--lr", type=float)
    group.add_argument("--scale-lr", action="store_true", help="multiply --lr by the world size")
    group.add_argument("--lr-drop-every", type=int, metavar="EPOCHS", help="divide it by 10 then; 0: never")
    group.add_argument("--momentum", type=float)
    group.add_argument("--weight-decay", type=float)
    group.add_argument("--clip-norm", type=float, metavar="NORM", help="of the gradient")
    group.add_argument("--image-size", type=int, metavar="PIXELS", help="resize to this side")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument("--steps", type=int, default=100, help="of an epoch of the synthetic recipe")


def _running_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-dir", type=Path, default=Path("data"), help="where data.py put the data set")
    group.add_argument("--workers", type=int, metavar="N", help="DataLoader processes; 0: gather in this one")
    group.add_argument("--log-every", type=int, metavar="STEPS", help="between rows of metrics.jsonl")
    group.add_argument("--print-every", type=int, metavar="BATCHES", help="between printed lines; 0: none")
    group.add_argument("--evaluate-every", type=int, metavar="EPOCHS")
    group.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="STEPS", help="besides each evaluation"
    )
    group.add_argument(
        "--export", type=Path, metavar="PATH", help="local rank 0 of each node leaves weights there"
    )
    resume = os.environ.get("AWSDDP_RESUME")
    group.add_argument(
        "--resume", type=Path, default=Path(resume) if resume else None, help="checkpoint or run folder"
    )
