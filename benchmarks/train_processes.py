"""Check the MNIST chapter's claim: more processes give the same loss curve in less time, if cores are free.

    python benchmarks/train_processes.py --to curves.svg                    # made data, about 3 minutes
    python benchmarks/train_processes.py --to curves.svg --data-dir data    # where data.py put MNIST

The benchmark runs train/mnist_convnet.py undistributed and with 1, 2 and 4 processes, interleaved. All cases
train on the same images in the same order, and the batch of 128 is divided among the processes. The benchmark
prints the seconds of training (the median of the rounds) and the distance of each loss curve from the
undistributed curve. This distance is the largest difference between the mean losses of 40 batches, as a
fraction of the loss at the start. The plot shows the mean curve of the rounds, with one point for every 10
batches.

    float64      without dropout: no randomness
    float32      without dropout: the effect of rounding
    published    float32 with dropout, where each process drops other units: the mean curve of the rounds
    by chance    the median distance between two rounds of one case: the effect of another seed of the dropout
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))
import mnist_convnet
import obtain
import torch.multiprocessing as mp

CASES = {0: "undistributed", 1: "1 process", 2: "2 processes", 4: "4 processes"}
COLOURS = ("#222222", "#c03030", "#3060c0", "#30a050")
BATCH = 128  # of all processes together
Curve = list[float]


def train_silently(local_rank: int, args: argparse.Namespace, environ: dict[str, str]) -> None:
    """Run as a process of the program, without its output."""
    os.environ.update(environ)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123
    mnist_convnet.train(local_rank, args)


def run(processes: int, data: Path, *flags: str, seed: int = 0) -> tuple[float, Curve]:
    """Return the seconds of training, and the losses: of the first batch, then of every 10 batches."""
    words = f"--num-processes {processes} --batch-size {BATCH // max(1, processes)} --seed {seed}"
    args = mnist_convnet.arguments([*words.split(), "--data-dir", str(data), *flags])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        environ = {"AWSDDP_RUN_DIR": folder, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        mp.start_processes(
            train_silently, (args, environ), nprocs=max(1, processes), start_method="forkserver"
        )
        with (Path(folder) / "loss-0.csv").open() as file:
            rows = list(csv.DictReader(file))
    return float(rows[-1]["seconds"]), [float(row["loss"]) for row in rows]


def gap(ours: Curve, theirs: Curve) -> float:
    """Return the largest difference between means of 40 batches, as a fraction of the loss at the start."""
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    return max(abs(statistics.mean(apart[i : i + 4])) for i in range(1, len(apart), 4)) / theirs[0]


def mean(curves: list[Curve]) -> Curve:
    """Return the mean of several curves."""
    return [statistics.mean(column) for column in zip(*curves, strict=True)]


def draw(curves: dict[int, Curve], path: Path) -> None:
    """Write the curves as an SVG."""
    width, height, top = 640, 360, max(max(curve) for curve in curves.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" style="background:#fff">'
    ]
    for index, (colour, (processes, curve)) in enumerate(zip(COLOURS, curves.items(), strict=True)):
        spots = " ".join(
            f"{40 + (width - 60) * i / (len(curve) - 1):.1f},{height - 30 - (height - 60) * loss / top:.1f}"
            for i, loss in enumerate(curve)
        )
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.2" points="{spots}"/>')
        parts.append(
            f'<text x="{width - 150}" y="{40 + 18 * index}" font-family="sans-serif" font-size="12" '
            f'fill="{colour}">{CASES[processes]}</text>'
        )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="default: synthetic images")
    parser.add_argument("--images", type=int, default=25_600, help="number of synthetic images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--to", type=Path, help="write the plot there")
    args = parser.parse_args()
    mp.set_forkserver_preload(["torch._dynamo"])  # else each process spends seconds on the import
    with tempfile.TemporaryDirectory() as made:
        data = args.data_dir or Path(made)
        if args.data_dir is None:
            obtain.make("mnist", data, train=args.images, test=500)
        plain = {case: run(case, data, "--no-dropout")[1] for case in CASES}
        exact = {case: run(case, data, "--no-dropout", "--float64")[1] for case in CASES}
        rounds = [{case: run(case, data, seed=seed) for case in CASES} for seed in range(args.rounds)]
    curves = {case: mean([results[case][1] for results in rounds]) for case in CASES}
    titles = ("float64", "float32", "published", "by chance")
    print(f"{'':>14}{'batch each':>12}{'seconds':>9}" + "".join(f"{title:>11}" for title in titles))
    for case, name in CASES.items():
        seconds = statistics.median(results[case][0] for results in rounds)
        pairs = itertools.combinations([results[case][1] for results in rounds], 2)
        chance = statistics.median(gap(a, b) for a, b in pairs) if args.rounds > 1 else 0.0
        print(
            f"{name:>14}{BATCH // max(1, case):>12}{seconds:>9.1f}{gap(exact[case], exact[0]):>11.0e}", end=""
        )
        print(f"{gap(plain[case], plain[0]):>11.2%}{gap(curves[case], curves[0]):>11.2%}{chance:>11.2%}")
    if args.to:
        draw(curves, args.to)


if __name__ == "__main__":
    main()
