"""What --save-to costs a training step, beside the same job without it.

    python benchmarks/saving.py [PAIRS]

One node of the local cloud trains resnet18 on one core: 300 steps, a checkpoint of 90 MB every 100. Jobs with
and without --save-to take turns, and which comes first alternates. `median` is of the steps of a job, `mean`
is their sum, with the writing of checkpoints. The promise is a ratio of at most 1.03. An idle machine with
a core for the saver is needed: the local S3 works on the same cores, where AWS has its own.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

from _rehearsal import Rehearsal, rehearsal

WARM_UP = 10
OPTIONS = ("-q", "--env-var", "OMP_NUM_THREADS=1", "--world-size", "1")
PROGRAM = (
    *("--recipe", "synthetic", "--image-size", "32", "--batch-size", "8", "--steps", "300"),
    *("--log-every", "1", "--checkpoint-every", "100"),
)


def cpu_s(lab: Rehearsal) -> float:
    """Return the CPU time of the node since its boot."""
    [node] = json.loads(lab.run("status", "--json"))["nodes"]
    files = Path("/sys/fs/cgroup").glob(f"**/{node['instance_id']}/cpu.stat")
    [used] = [words[1] for words in map(str.split, map(Path.read_text, files)) if words[0] == "usage_usec"]
    return int(used) / 1e6


def measure(lab: Rehearsal, name: str, *options: str) -> tuple[float, float, float]:
    """Carry a job out; return the median and the mean of its steps (ms), and the CPU time (s)."""
    before = cpu_s(lab)
    lab.run("train", *OPTIONS, "--name", name, *options, "--", *PROGRAM)
    used = cpu_s(lab) - before
    [metrics] = (lab.project / "runs" / name).glob("**/metrics.jsonl")
    ends = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines()][WARM_UP:]
    steps = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
    return statistics.median(steps), statistics.mean(steps), used


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", type=int, nargs="?", default=4)
    pairs = parser.parse_args().pairs
    kinds = {"with": ("--save-to", "s3://results/runs"), "without": ()}
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    with rehearsal() as lab:
        words = ("-o", "local.gpus=off", "-o", "job.save_to=s3://results/runs")
        lab.run("up", "--local", "--nodes", "1", "-y", *words)
        for number in range(pairs):
            for kind in sorted(kinds, reverse=number % 2 == 1):
                found[kind].append(measure(lab, f"{kind}{number}", *kinds[kind]))
    for column, name in enumerate(("median, ms", "mean, ms", "CPU, s")):
        saved, bare = ([row[column] for row in found[kind]] for kind in ("with", "without"))
        ratios = sorted(one / other for one, other in zip(saved, bare, strict=True))
        print(
            f"{name:12}{statistics.median(saved):8.1f} with{statistics.median(bare):8.1f} without   ratio "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {pairs} pairs)"
        )


if __name__ == "__main__":
    main()
