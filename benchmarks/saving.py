"""Cost of --save-to in a training step, and seconds to copy files to and from S3, against `aws s3 sync`.

    python benchmarks/saving.py [step] [saver] [fetch] [data] [--pairs 4] [--steps 300] [--rounds 3]
        [--small 20000] [--medium 200] [--large 2000] [--sets small medium large] [--limit 900]

Needs root, and an idle machine with a free core for the saver, because the local S3 runs on the cores of this
machine, unlike the S3 of AWS.

- step: one node of the local cloud trains resnet18 on one core (--steps) and writes a checkpoint of 90 MB
  every 100 steps. Jobs with and without --save-to are interleaved. `median` and `mean` summarize the times of
  a job's steps; only `mean` shows the time to write checkpoints. The promise is a ratio of at most 1.03.
- saver: a job writes its files at its end. The figure is the seconds from the program's end until `ended` is
  true in saving.json on the node. It is compared with `aws s3 sync` of a folder with such files on the same
  node, with the same role and to the same bucket. The promise is a ratio of at most 1.2.
- fetch: the seconds of `awsddp fetch s3://...` of such a job into an empty folder, compared with
  `aws s3 sync` of the same prefix, both on this machine.
- data: the seconds that `--data s3://...` adds to a `train` that ends at once, compared with `aws s3 sync` of
  the same prefix on the same node.

awsddp and `aws s3 sync` take turns to be first in a round. There are three sets of files: --small files of
100 bytes, --medium files of 1 MB, and one file of --large MB. The saver has a timeout of --limit seconds.
`fetch` and `data` need the files of `saver`, which is therefore always measured with them.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from _rehearsal import Rehearsal, rehearsal

WARM_UP = 10
OPTIONS = ("-q", "--env-var", "OMP_NUM_THREADS=1", "--world-size", "1")
PROGRAM = (
    *("--recipe", "synthetic", "--image-size", "32", "--batch-size", "8"),
    *("--log-every", "1", "--checkpoint-every", "100", "--steps"),
)
PLACE = "s3://results/runs"
PACKAGES = sysconfig.get_path("purelib")
WRITE = """import os, pathlib, sys, time
folder, count, size = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir()
for number in range(count):
    with (folder / f"{number:05}").open("wb") as file:
        for start in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - start)))
pathlib.Path.home().joinpath(f"{folder.name}.end").write_text(f"{time.time()}\\n")
"""
ENDED = """deadline=$((SECONDS + {limit}))
until grep -q '"ended": *true' ~/.awsddp/jobs/{name}/saving.json 2>/dev/null; do
  [ $SECONDS -lt $deadline ] || exit 1; sleep 0.1
done
stat -c %.6Y ~/.awsddp/jobs/{name}/saving.json; cat ~/{name}.end; cat ~/.awsddp/jobs/{name}/saving.json"""
SYNC = """set -e; start=$(date +%s.%N)
export PYTHONPATH={packages} AWS_ENDPOINT_URL={endpoint} AWS_DEFAULT_REGION=us-east-1
/opt/pytorch/bin/python -m awscli s3 sync --only-show-errors {source} {target}
date +%s.%N; echo $start"""


def cpu_s(lab: Rehearsal) -> float:
    """Return the CPU time of the node since its boot."""
    [node] = json.loads(lab.run("status", "--json"))["nodes"]
    files = Path("/sys/fs/cgroup").glob(f"**/{node['instance_id']}/cpu.stat")
    [used] = [words[1] for words in map(str.split, map(Path.read_text, files)) if words[0] == "usage_usec"]
    return int(used) / 1e6


def measure_job(lab: Rehearsal, name: str, steps: int, *options: str) -> tuple[float, float, float]:
    """Run a job of `steps` steps; return the median and the mean of its steps (ms), and the CPU time (s)."""
    before = cpu_s(lab)
    lab.run("train", *OPTIONS, "--name", name, *options, "--", *PROGRAM, str(steps))
    used = cpu_s(lab) - before
    [metrics] = (lab.project / "runs" / name).glob("**/metrics.jsonl")
    ends = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines()][WARM_UP:]
    times = [1e3 * (end - start) for start, end in itertools.pairwise(ends)]
    return statistics.median(times), statistics.mean(times), used


def measure_step(lab: Rehearsal, pairs: int, steps: int) -> None:
    kinds = {"with": ("--save-to", PLACE), "without": ()}
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    for number in range(pairs):
        for kind in sorted(kinds, reverse=number % 2 == 1):
            rows[kind].append(measure_job(lab, f"{kind}{number}", steps, *kinds[kind]))
    for column, name in enumerate(("median, ms", "mean, ms", "CPU, s")):
        saved, bare = ([row[column] for row in rows[kind]] for kind in ("with", "without"))
        ratios = sorted(with_s / without_s for with_s, without_s in zip(saved, bare, strict=True))
        print(
            f"{name:12}{statistics.median(saved):8.1f} with{statistics.median(bare):8.1f} without   ratio "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {pairs} pairs)",
            flush=True,
        )


class Files:
    """A set of `count` files with `size` bytes each, which is copied to S3 and back."""

    def __init__(self, lab: Rehearsal, name: str, count: int, size: int, *, limit_s: int) -> None:
        self._lab = lab
        self.name, self._count, self._size, self._limit_s = name, count, size, limit_s
        self._keys = lab.keys()
        daemon = json.loads((lab.root / "home/local/daemon.json").read_text())
        self._node_s3 = daemon["node_s3"]

    def __str__(self) -> str:
        return f"{self._count:,} x {self._size:,} bytes"

    def on_node(self, command: str) -> list[str]:
        """Run a shell command on the node; return the lines that it prints."""
        lines = self._lab.run("exec", "-q", command).splitlines()
        return [line.partition("] ")[2] for line in lines]  # after the name of the node

    def check(self, count: int) -> None:
        """Raise SystemExit if files are missing."""
        if count < self._count:
            sys.exit(f"only {count:,} of {self}")

    def job(self, number: int) -> str:
        """Return the name of a job of this set."""
        return f"{self.name}{number}"

    def save(self, number: int) -> float:
        """Run the job that writes the files; return the seconds from the job's end until all are saved."""
        name = self.job(number)
        words = (name, str(self._count), str(self._size))
        self._lab.run(
            *("train", "write.py", "-q", "--detach", "--nproc-per-node", "1", "--save-to", PLACE),
            *("--name", name, "--", *words),
        )
        try:
            ended_at, written_at, saving = self.on_node(ENDED.format(name=name, limit=self._limit_s))
        except subprocess.CalledProcessError:
            return float("inf")
        self.check(json.loads(saving)["files"])
        return float(ended_at) - float(written_at)

    def sync_up(self, number: int) -> float:
        """Write the same files on the node and return the seconds of `aws s3 sync` of them."""
        folder = f"copy-{self.job(number)}"
        self.on_node(f"/opt/pytorch/bin/python write.py ~/{folder} {self._count} {self._size}")
        return self._sync_on_node(f"~/{folder}", f"{PLACE}/{folder}")

    def _sync_on_node(self, source: str, target: str) -> float:
        command = SYNC.format(packages=PACKAGES, endpoint=self._node_s3, source=source, target=target)
        end, start = self.on_node(command)
        return float(end) - float(start)

    def _check_on_node(self, folder: str) -> None:
        [count] = self.on_node(f"find {folder} -type f | wc -l")
        self.check(int(count))

    def fetch(self, number: int) -> float:
        """Return the seconds of `awsddp fetch` of a job into an empty folder."""
        runs = self._lab.project / "runs"
        shutil.rmtree(runs, ignore_errors=True)
        taken = _seconds(lambda: self._lab.run("fetch", "-q", f"{PLACE}/{self.job(number)}"))
        self.check(_count(runs))
        return taken

    def sync_down(self, number: int) -> float:
        """Return the seconds of `aws s3 sync` of the same prefix into an empty folder."""
        folder = self._lab.root / "fetched"
        words = ("s3", "sync", "--only-show-errors", f"{PLACE}/{self.job(number)}", str(folder))
        command = [str(Path(sys.executable).with_name("aws")), *words]
        environ = {**os.environ, **self._keys}
        taken = _seconds(lambda: subprocess.run(command, env=environ, check=True))
        self.check(_count(folder))
        shutil.rmtree(folder)
        return taken

    def copy_data(self, number: int) -> float:
        """Return the seconds that --data with these files adds to a job that ends at once."""
        words = ("train", "ends.py", "-q", "--nproc-per-node", "1")
        data = ("--data", f"{self.job(number)}={PLACE}/copy-{self.job(0)}")
        without, with_data = (_seconds(lambda more=more: self._lab.run(*words, *more)) for more in ((), data))
        self._check_on_node(f"~/awsddp/data/{self.job(number)}/")
        return with_data - without

    def sync_data(self, number: int) -> float:
        """Return the seconds of `aws s3 sync` of the same files to the node."""
        folder = f"~/down-{self.job(number)}"
        taken = self._sync_on_node(f"{PLACE}/copy-{self.job(0)}", folder)
        self._check_on_node(folder)
        return taken

    def forget(self) -> None:
        """Remove the files on the node, and the fetched ones."""
        self.on_node(
            f"rm -rf ~/copy-{self.name}* ~/down-{self.name}* ~/awsddp/data ~/awsddp/work/{self.name}*"
        )
        shutil.rmtree(self._lab.project / "runs", ignore_errors=True)


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def compare(
    label: str, files: Files, rounds: int, ours: Callable[[int], float], theirs: Callable[[int], float]
) -> None:
    """Print the seconds of awsddp and of `aws s3 sync`, which take turns to be first, and the ratio."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        acts = {"ours": ours, "theirs": theirs}
        taken = {name: acts[name](number) for name in sorted(acts, reverse=number % 2 == 1)}
        pairs.append((taken["ours"], taken["theirs"]))
    mine, reference = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(our_s / their_s for our_s, their_s in pairs)
    print(
        f"{label:6}{files!s:>24}  awsddp {mine:7.1f} s   aws s3 sync {reference:7.1f} s   ratio "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} rounds)",
        flush=True,
    )


def measure_files(lab: Rehearsal, files: Files, measures: list[str], rounds: int) -> None:
    """Run the requested comparisons with one set of files."""
    compare("saver", files, rounds, files.save, files.sync_up)
    if "fetch" in measures:
        compare("fetch", files, rounds, files.fetch, files.sync_down)
    if "data" in measures:
        compare("data", files, rounds, files.copy_data, files.sync_data)
    files.forget()


def main() -> None:
    kinds = ("step", "saver", "fetch", "data")
    parser = argparse.ArgumentParser()
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"{', '.join(kinds)}; default: all")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="training steps of a job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", type=int, default=20_000, help="files of 100 bytes")
    parser.add_argument("--medium", type=int, default=200, help="files of 1 MB")
    parser.add_argument("--large", type=int, default=2000, help="the size of one file in MB")
    parser.add_argument(
        "--sets", nargs="+", choices=("small", "medium", "large"), default=["small", "medium", "large"]
    )
    parser.add_argument("--limit", type=int, default=900, help="timeout of the saver in seconds")
    chosen = parser.parse_args()
    measures = chosen.measures or list(kinds)
    if strange := sorted(set(measures) - set(kinds)):
        parser.error(f"{strange[0]} is unknown; choose from {', '.join(kinds)}")
    sizes = {
        "small": (chosen.small, 100),
        "medium": (chosen.medium, 1_000_000),
        "large": (1, chosen.large * 1_000_000),
    }
    with rehearsal("--share", PACKAGES) as lab:
        (lab.project / "write.py").write_text(WRITE)
        (lab.project / "ends.py").write_text("print('ends')\n")
        words = ("-o", "local.gpus=off", "-o", f"job.save_to={PLACE}")
        lab.run("up", "--local", "--nodes", "1", "-y", *words)
        lab.run("train", "ends.py", "-q", "--nproc-per-node", "1")  # the first job prepares the node
        if "step" in measures:
            measure_step(lab, chosen.pairs, chosen.steps)
        for name in chosen.sets if set(measures) - {"step"} else ():
            files = Files(lab, name, *sizes[name], limit_s=chosen.limit)
            measure_files(lab, files, measures, chosen.rounds)


if __name__ == "__main__":
    main()
