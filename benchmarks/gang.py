"""Seconds of `awsddp train` and of torchrun before the ranks' first lines and after the last rank's end.

    python benchmarks/gang.py [--pairs 15] [--ranks 16] [--imports torch]

Needs root for two nodes of the local cloud, each a real host. Three ways to start the ranks are interleaved:
`awsddp train` with the launchers `ssh` and `torchrun`, and `by hand`, which starts torchrun on both nodes at
once, over open SSH connections, with the script already on the nodes.

    begins    the time from the call to the first line of user code on all ranks
    ends      the time from the end of the last rank to the end of the command

Each ratio is the median of the pairs' ratios. The script does not import torch, because this import is not
part of awsddp. With `--imports`, the script's first line is timed after the import, as in a real program.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count

from _rehearsal import Rehearsal, rehearsal

SCRIPT = """
import sys, {modules}
began = time.time()
time.sleep(4)
# One write: torchrun runs Python with -u, where print() writes each part separately, and lines of ranks mix.
sys.stdout.write(f"began {{began}} ended {{time.time()}}\\n")
"""
NODES = 2
PORT = 29600
_MARK = re.compile(r"began ([\d.]+) ended ([\d.]+)")
Seconds = tuple[float, float]


def measure_launch(ranks: int, start: Callable[[], Sequence["subprocess.Popen[str]"]]) -> Seconds:
    """Return the seconds from the call to all ranks' first lines, and from the last rank's end to the
    exit."""
    called = time.time()
    output = "".join(process.communicate(timeout=300)[0] for process in start())
    over = time.time()
    marks = _MARK.findall(output)
    if len(marks) != ranks:
        raise RuntimeError(f"{len(marks)} of {ranks} ranks printed their times: {output}")
    return max(float(began) for began, _ in marks) - called, over - max(float(ended) for _, ended in marks)


def by_hand(lab: Rehearsal, ranks: int) -> Callable[[], list["subprocess.Popen[str]"]]:
    """Open SSH connections; return a function that starts torchrun on all nodes over the connections."""
    ssh = ["ssh", "-F", str(lab.root / "home/clusters/default/ssh_config"), "-o", "ControlMaster=auto"]
    ssh += ["-o", f"ControlPath={lab.root}/%n", "-o", "ControlPersist=600"]
    show = "import sys; print(sys.executable, '{master_addr}')"
    python, address = json.loads(lab.run("exec", "--json", "python", "-c", show))["nodes"][0][
        "stdout"
    ].split()
    for node in range(NODES):
        subprocess.run([*ssh, f"node{node}", "true"], check=True)
    numbers = count()

    def start() -> list["subprocess.Popen[str]"]:
        run = next(numbers)
        words = f"--nnodes {NODES} --nproc-per-node {ranks // NODES} --rdzv-backend c10d --rdzv-id run{run}"
        words += f" --rdzv-endpoint {address}:{PORT + run} awsddp/work/first.py"
        return [
            subprocess.Popen(
                [*ssh, f"node{node}", f"OMP_NUM_THREADS=1 {python} -m torch.distributed.run {words}"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for node in range(NODES)
        ]

    return start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--imports")
    args = parser.parse_args()
    with rehearsal() as lab:
        modules = "time" if args.imports is None else f"time, {args.imports}"
        (lab.project / "first.py").write_text(SCRIPT.format(modules=modules))
        lab.run("up", "--local", "--nodes", str(NODES), "-o", "local.gpus=off", "-y", "-q")
        lab.run("sync", "-q")

        def train(launcher: str) -> Callable[[], list["subprocess.Popen[str]"]]:
            words = (
                "train",
                "first.py",
                "--world-size",
                str(args.ranks),
                "-o",
                f"job.launcher={launcher}",
                "-q",
            )
            return lambda: [lab.started(*words)]

        starts = {"by hand": by_hand(lab, args.ranks), "ssh": train("ssh"), "torchrun": train("torchrun")}
        rows: dict[str, list[Seconds]] = {name: [] for name in starts}
        for number in range(args.pairs + 1):  # the first one warms up
            for name, start in starts.items():
                row = measure_launch(args.ranks, start)
                if number:
                    rows[name].append(row)
                print(f"{number:>3} {name:<9} begins {row[0]:6.2f} s  ends {row[1]:6.2f} s", file=sys.stderr)
    print(f"{args.ranks} ranks, {args.pairs} pairs, medians")
    for name, times in rows.items():
        begins, ends = (statistics.median(column) for column in zip(*times, strict=True))
        pairs = list(zip(times, rows["by hand"], strict=True))
        ratio = statistics.median(ours[0] / theirs[0] for ours, theirs in pairs)
        more = statistics.median(ours[1] - theirs[1] for ours, theirs in pairs)
        print(
            f"{name:<9} begins {begins:6.2f} s, {ratio:4.2f} of by hand  ends {ends:5.2f} s, {more:+5.2f} s"
        )


if __name__ == "__main__":
    main()
