"""All settings of main.py: the recipes, and the options that override them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    """The settings of a named training run.

    The fields up to `workers` are the defaults of the options with the same names.
    """

    data: str  # a name in image_files.FORMATS, or "synthetic"
    model: str  # a name in models.MODELS
    epochs: int
    lr: float
    weight_decay: float
    batch_size: int | None = None  # images of one process in one pass, or None if global_batch is set
    global_batch: int | None = None  # images of all processes in one step
    momentum: float = 0.9
    lr_drop_every: int = 0  # epochs after which the learning rate is divided by 10, or 0 for never
    image_size: int | None = None  # the side length to which images are resized
    log_every: int = 10  # steps between rows in metrics.jsonl
    print_every: int = 10  # batches between printed lines, or 0 for no lines
    evaluate_every: int = 1  # epochs
    export: Path | None = None  # a file for a copy of the weights, written on EACH node by local rank 0
    workers: int = 0
    crop: int = 0  # pixels of padding before random crops and mirroring, or 0 for neither
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
        log_every=25,  # once per epoch (23 steps): a row's all_reduce takes as long as a step
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


def parse_arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings: the recipe that --recipe names, overridden by the options in `argv`."""
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument("--recipe", choices=RECIPES, default="digits")
    recipe = RECIPES[chooser.parse_known_args(argv)[0].recipe]
    parser = argparse.ArgumentParser(
        parents=[chooser], description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_launch_options(parser.add_argument_group("launch").add_argument)
    _add_training_options(parser.add_argument_group("training (defaults: the recipe's)").add_argument)
    _add_running_options(parser.add_argument_group("running").add_argument)
    parser.set_defaults(**{**asdict(recipe), "batch_size": None, "global_batch": None})
    args = parser.parse_args(argv)
    if args.batch_size is None and args.global_batch is None:  # either option overrides the recipe's value
        args.batch_size, args.global_batch = recipe.batch_size, recipe.global_batch
    return args


def _add_launch_options(add: Callable[..., object]) -> None:
    add("place", nargs="*", type=int, metavar="RANK LOCAL_RANK", help="default: the environment's")
    add("--local-rank", "--local_rank", type=int, help="passed by legacy launchers")
    add("--world-size", type=int, help="default: $WORLD_SIZE, else 1")
    add("--init-method", help="tcp://HOST:PORT, file:///PATH or env:// (default)")
    add("--spawn", type=int, metavar="N", help="start N ranks on this machine by mp.spawn")
    add("--backend", help="default: nccl on GPUs, gloo on CPUs")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add(
        "--timeout",
        type=float,
        default=600,
        metavar="S",
        help="timeout of the rendezvous and of a collective",
    )


def _add_training_options(add: Callable[..., object]) -> None:
    add("--model")
    add("--epochs", type=int)
    add("--batch-size", type=int, metavar="N", help="images of one process in one pass")
    add("--global-batch", type=int, metavar="N", help="images of one step over all ranks")
    add("--accumulate", type=int, default=1, metavar="N", help="passes per step")
    add("--lr", type=float)
    add("--scale-lr", action="store_true", help="multiply --lr by the world size")
    add("--lr-drop-every", type=int, metavar="EPOCHS", help="divide --lr by 10 each time; 0: never")
    add("--momentum", type=float)
    add("--weight-decay", type=float)
    add("--clip-norm", type=float, metavar="NORM", help="clip the gradient to this norm")
    add("--image-size", type=int, metavar="PIXELS", help="resize images to this side length")
    add("--seed", type=int, default=0)
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--steps", type=int, default=100, help="steps in an epoch of the synthetic recipe")


def _add_running_options(add: Callable[..., object]) -> None:
    add("--data-dir", type=Path, default=Path("data"), help="the folder in which data.py put the data set")
    add("--workers", type=int, metavar="N", help="DataLoader processes; 0: gather in this one")
    add("--log-every", type=int, metavar="STEPS", help="steps between rows of metrics.jsonl")
    add("--print-every", type=int, metavar="BATCHES", help="batches between printed lines; 0: no lines")
    add("--evaluate-every", type=int, metavar="EPOCHS")
    add(
        "--checkpoint-every",
        type=int,
        default=0,
        metavar="STEPS",
        help="save this often, and after each evaluation",
    )
    add("--export", type=Path, metavar="PATH", help="local rank 0 of each node writes the weights to it")
    resume = os.environ.get("AWSDDP_RESUME")
    default = Path(resume) if resume else None
    add("--resume", type=Path, default=default, help="checkpoint or results folder; default: $AWSDDP_RESUME")
