"""The claim of the MNIST chapter: more processes, the same loss curve, less time while there are cores.

    python train/data.py make mnist /tmp/made --train 60000 --test 10000      # or: get mnist data
    python benchmarks/train_processes.py --data-dir /tmp/made --to curves.svg

It runs train/mnist_convnet.py undistributed and with 1, 2 and 4 processes, the batch of 128 divided among
them; the cases take turns. It prints the seconds (the median of the rounds), and how far the loss is from
the undistributed run's: at most over the tenths of the epoch, as a part of the curve's height. `exact` is in
float64 without dropout; `as published` is the mean of the rounds in float32, with other rounding and dropout.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = (0, 1, 2, 4)
NAMES = {0: "undistributed", 1: "1 process", 2: "2 processes", 4: "4 processes"}
COLOURS = {0: "#222222", 1: "#c03030", 2: "#3060c0", 4: "#30a050"}


def run(processes: int, seed: int, args: argparse.Namespace, *more: str) -> tuple[float, list[float]]:
    """Return the seconds of training, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        share = args.batch_size // max(1, processes)
        command = [sys.executable, str(ROOT / "train/mnist_convnet.py"), "--data-dir", str(args.data_dir)]
        command += ["--num-processes", str(processes), "--batch-size", str(share), "--seed", str(seed), *more]
        env = {**os.environ, "AWSDDP_RUN_DIR": folder}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        with (Path(folder) / "loss-0.csv").open() as file:
            rows = list(csv.DictReader(file))
    return float(rows[-1]["seconds"]), [float(row["loss"]) for row in rows]


def tenths(losses: list[float]) -> list[float]:
    """Return the mean of each tenth, or of each value where there are less than ten."""
    parts = min(10, len(losses))
    edges = [len(losses) * i // parts for i in range(parts + 1)]
    return [statistics.mean(losses[a:b]) for a, b in pairwise(edges)]


def draw(curves: dict[int, list[float]], path: Path) -> None:
    """Write the curves as an SVG."""
    width, height, top = 640, 360, max(max(curve) for curve in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="background:#fff">'
    ]
    for place, (processes, curve) in enumerate(curves.items()):
        spots = " ".join(
            f"{40 + (width - 60) * i / (len(curve) - 1):.1f},{height - 30 - (height - 60) * loss / top:.1f}"
            for i, loss in enumerate(curve)
        )
        colour, name = COLOURS[processes], NAMES[processes]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.2" points="{spots}"/>')
        parts.append(
            f'<text x="{width - 150}" y="{40 + 18 * place}" font-family="sans-serif" font-size="12" '
            f'fill="{colour}">{name}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", type=Path, help="write the plot there")
    args = parser.parse_args()
    exact: dict[int, list[float]] = {case: run(case, 0, args, "--exact")[1] for case in CASES}
    rounds: dict[int, list[tuple[float, list[float]]]] = {case: [] for case in CASES}
    for seed in range(args.rounds):
        for case in CASES:
            rounds[case].append(run(case, seed, args))
    curves = {case: mean_of([losses for _, losses in runs]) for case, runs in rounds.items()}
    print(f"{'':>14}{'batch each':>12}{'seconds':>9}{'exact':>12}{'as published':>14}")
    for case, runs in rounds.items():
        seconds = statistics.median(seconds for seconds, _ in runs)
        print(f"{NAMES[case]:>14}{args.batch_size // max(1, case):>12}{seconds:>9.1f}", end="")
        print(f"{off(exact[case], exact[0]):>12.0e}{off(curves[case], curves[0]):>14.2%}")
    if args.to:
        draw(curves, args.to)


def mean_of(curves: list[list[float]]) -> list[float]:
    """Return the mean of several curves."""
    return [statistics.mean(column) for column in zip(*curves, strict=True)]


def off(ours: list[float], theirs: list[float]) -> float:
    """Return the largest difference of a tenth, as a part of the height where the curve begins."""
    return max(abs(a - b) for a, b in zip(tenths(ours), tenths(theirs), strict=True)) / theirs[0]


if __name__ == "__main__":
    main()
