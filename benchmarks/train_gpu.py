"""Images a second of train/main.py on the GPUs of this machine, with a data set and with synthetic images.

    python train/data.py make stl10 /tmp/made --train 5000
    python benchmarks/train_gpu.py --data-dir /tmp/made

The network is resnet18 at 224 pixels, for each precision, eager and compiled. Training on synthetic images
and whole training (on the data set) alternate. A figure is the median of the rows that main.py logs in the
second half of a run. The ratio of whole to synthetic training is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

RECIPES = ("synthetic", "stl10-resnet18")
ROOT = Path(__file__).resolve().parents[1]


def rate(args: argparse.Namespace, recipe: str, *more: str) -> float:
    """Return the images a second of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "train/main.py"),
            "--spawn",
            str(args.ranks),
            "--recipe",
            recipe,
        ]
        command += [
            "--data-dir",
            str(args.data_dir),
            "--batch-size",
            str(args.batch_size),
            "--print-every",
            "0",
        ]
        command += ["--epochs", str(args.epochs), "--steps", str(args.steps), "--lr", "0.001", *more]
        env = {**os.environ, "AWSDDP_RUN_DIR": folder}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rates = [row["images_per_second"] for row in rows if "images_per_second" in row]
    return statistics.median(rates[len(rates) // 2 :])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40, help="steps in an epoch of the synthetic recipe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("left out: there is no GPU here")
        return
    print(f"{'':>16}{'synthetic':>12}{'whole':>12}{'ratio':>8}")
    for precision in ("fp32", "bf16", "fp16"):
        for compiled in ([], ["--compile"])[: 1 if args.no_compile else 2]:
            pairs = [
                [rate(args, recipe, "--precision", precision, *compiled) for recipe in RECIPES]
                for _ in range(args.rounds)
            ]
            synthetic, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            name = precision + (" compiled" if compiled else "")
            print(f"{name:>16}{synthetic:>12.0f}{whole:>12.0f}{ratio:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
