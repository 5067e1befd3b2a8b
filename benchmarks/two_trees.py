"""`awsddp` of this checkout compared with that of another: `exec`, `sync`, `train`, `logs` and results.

    python benchmarks/two_trees.py TREE [--rows exec logs ...] [--rounds 5] [--shortest]

Each tree runs with its own home, local cloud and project; bytecode is compiled first. The measurements of
both trees are interleaved, and so is the reference of a row, if the row has one. A reference is ssh or rsync
to all of this tree's nodes at once, with the key exchange of awsddp's SSH library. The first round of a row
is not counted. The output shows the median times and the median of the rounds' ratios, with the middle half
of the ratios in brackets.

    exec       `exec true`, 32 hosts                                        compared with ssh
    sync       `sync` of 200 files, nothing changed, 32 hosts               compared with rsync
    changed    the same with one changed file
    train      a second `train` of a script that ends at once, on 2 nodes whose packages are ready
    far-train  the same, 100 ms each way to AWS and to the nodes
    logs       `logs` of 16 ranks x 100,000 lines on 8 hosts, not yet fetched
    small      `fetch` of 10,000 files of 1 kB from 2 hosts, not yet fetched
    again      the same, all fetched before
    large      the same of 4 files, together 4 GB

Hosts are SSH hosts on this machine (--loopback); nodes are those of the local cloud and need root. The
machine must be idle, because client and nodes share its cores. The time of ~/.bashrc counts (see fan_out.py).
`large` needs 12 GB of disk.
"""

import argparse
import compileall
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _rehearsal import Rehearsal, rehearsal
from fan_out import FILES, KEX, at_once, seconds
from many_lines import JOB, SCRIPT
from own_time import UP as UP_FAR
from own_time import far

HERE = Path(__file__).resolve().parents[1]
DELAYS_S = {"train": 0.0, "far-train": 0.1}
Turn = Callable[[Any, int], float]
"""A function that makes one measurement in one tree, and returns seconds. It takes the tree's Rehearsal or
Far, and the number of the round."""
UP = ("up", "--local", "-o", "local.gpus=off", "-o", "cluster.max_price_usd=10000", "-y", "-q", "--nodes")
WRITES = """
import os, sys
files, size = map(int, sys.argv[1:])
for number in range(int(os.environ["RANK"]), files, 2):
    with open(f"{number}.bin", "wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(size - start, 1 << 24)))
"""


class Sizes(NamedTuple):
    """The sizes of the rows."""

    nodes: int = 32
    log_nodes: int = 8
    ranks: int = 16
    lines: int = 100_000
    files: int = 10_000
    large_bytes: int = 4_000_000_000


SHORTEST = Sizes(nodes=1, log_nodes=1, ranks=1, lines=10, files=20, large_bytes=4_000_000)


class Pair:
    """This tree and the other one. `labs` has a Rehearsal or a Far for each tree."""

    def __init__(self, labs: Mapping[str, Any], args: argparse.Namespace) -> None:
        self.labs = labs
        self.sizes = SHORTEST if args.shortest else Sizes()
        self.args = args

    def up(self, nodes: int) -> None:
        """Start a cluster in each tree."""
        for lab in self.labs.values():
            lab.run(*UP, str(nodes))

    def write(self, name: str, text: str) -> None:
        """Write a file into both projects."""
        for lab in self.labs.values():
            (lab.project / name).write_text(text)

    def compare(self, row: str, turn: Turn, reference: Sequence[Sequence[str]] = ()) -> None:
        """Measure a row if it was requested, and print it. The reference's commands run at the same time."""
        if row not in self.args.rows:
            return
        turns = {name: partial(turn, lab) for name, lab in self.labs.items()}
        if reference:
            turns["reference"] = lambda _: seconds(partial(at_once, reference))
        orders = [[*turns][:: -1 if number % 2 else 1] for number in range(self.args.rounds + 1)]
        rounds = [{name: turns[name](number) for name in order} for number, order in enumerate(orders)]
        for other in [*turns][1:]:
            print(format_row(row, rounds[1:], other), flush=True)


def format_row(row: str, rounds: list[dict[str, float]], other: str) -> str:
    """Return the medians of this tree and of the other, and their ratio, in a line."""
    mine, theirs = (statistics.median(times[name] for times in rounds) for name in ("this", other))
    ratios = sorted(times["this"] / times[other] for times in rounds)
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    limit = 1.10 if (row, other) == ("exec", "reference") else 1.05
    ratio = f"ratio {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), at most {limit:.2f}"
    return f"  {row:<9} {mine:8.3f} s  {other:<9} {theirs:8.3f} s  {ratio}"


def time_awsddp(*words: str) -> Turn:
    """Return a turn that times `awsddp`."""
    command = [sys.executable, "-m", "awsddp", *words]
    run = partial(subprocess.run, command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return lambda lab, _: seconds(partial(run, cwd=lab.project, env=lab.environ))


def fan_out(pair: Pair) -> None:
    """Measure the rows exec, sync and changed."""
    for number in range(FILES):
        pair.write(f"file{number}.py", f"# {number}\n")
    pair.up(pair.sizes.nodes)
    for lab in pair.labs.values():
        lab.run("sync", "-q")
    this = pair.labs["this"]
    ssh = ["ssh", "-F", str(this.root / "home/clusters/default/ssh_config"), "-o", KEX]
    remote = this.run("exec", "--node", "0", "-q", "--", "pwd").split()[-1]
    rsync = ["rsync", "-a", "-e", " ".join(ssh), f"{this.project}/"]
    hosts = [f"node{number}" for number in range(pair.sizes.nodes)]

    def changed(lab: Rehearsal, number: int) -> float:
        (lab.project / "file0.py").write_text(f"# changed in round {number}\n")
        return time_awsddp("sync", "-q")(lab, number)

    pair.compare("exec", time_awsddp("exec", "-q", "--", "true"), [[*ssh, host, "true"] for host in hosts])
    pair.compare("sync", time_awsddp("sync", "-q"), [[*rsync, f"{host}:{remote}/"] for host in hosts])
    pair.compare("changed", changed)


def logs(pair: Pair) -> None:
    """The row logs."""
    pair.write("lines.py", SCRIPT)
    pair.up(pair.sizes.log_nodes)
    for lab in pair.labs.values():
        words = ("--world-size", str(pair.sizes.ranks), "-q", "--", str(pair.sizes.lines))
        lab.run("train", "lines.py", "--name", JOB, *words)

    def read(lab: Rehearsal, number: int) -> float:
        shutil.rmtree(lab.project / "runs" / JOB, ignore_errors=True)
        return time_awsddp("logs", JOB, "-q")(lab, number)

    pair.compare("logs", read)


def results(pair: Pair) -> None:
    """Measure the rows small, again and large."""
    pair.write("writes.py", WRITES)
    pair.up(2)
    pair.compare("small", partial(fetch, "small", pair.sizes.files, 1000))
    pair.compare("again", partial(fetch, "again", pair.sizes.files, 1000))
    pair.compare("large", partial(fetch, "large", 4, pair.sizes.large_bytes // 4))


def fetch(row: str, files: int, size: int, lab: Rehearsal, number: int) -> float:
    """Run a new job that writes the files, and return the seconds of `fetch` for these files."""
    name = f"{row}{number}"
    words = ("--world-size", "2", "--detach", "-q", "--", str(files), str(size))
    lab.run("train", "writes.py", "--name", name, *words)
    while json.loads(lab.run("jobs", "--json", name))["jobs"][-1]["state"] == "running":
        time.sleep(0.5)
    os.sync()
    taken = time_awsddp("fetch", name, "-q")(lab, number)
    if row == "again":
        # Without --output, this `fetch` would send no request to the nodes.
        taken = time_awsddp("fetch", name, "--output", "0.bin", "-q")(lab, number)
    came = [path.stat().st_size for path in (lab.project / "runs" / name).glob("node*/*.bin")]
    if came != [size] * files:
        raise SystemExit(
            f"{row}: {len(came)} files of {sum(came)} bytes were fetched, not {files} of {size} each"
        )
    shutil.rmtree(lab.project / "runs" / name)
    return taken


def trains(pair: Pair) -> None:
    """The rows train and far-train."""
    pair.write("first.py", "import tiny\n")
    pair.write("requirements.txt", "--no-index\n--find-links ./wheels\ntiny==1.0\n")
    pair.write("awsddp.toml", '[env]\nfile = "requirements.txt"\npackages_from = "client"\n')
    for lab in pair.labs.values():
        write_wheel(lab.project / "wheels")
    for row in [name for name in DELAYS_S if name in pair.args.rows]:
        with contextlib.ExitStack() as stack:
            away = partial(far, delay_s=DELAYS_S[row])
            clients = {name: stack.enter_context(away(lab)) for name, lab in pair.labs.items()}
            for client in clients.values():
                client.run("up", *UP_FAR)
            Pair(clients, pair.args).compare(row, lambda client, _: client.second_train()[0])
            for client in clients.values():
                client.run("down", "-y", "-q")


def write_wheel(folder: Path) -> None:
    """Write the wheel of an empty package."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")


GROUPS = {
    fan_out: ("exec", "sync", "changed"),
    trains: (*DELAYS_S,),
    logs: ("logs",),
    results: ("small", "again", "large"),
}
"""The rows that each function measures."""
ROWS = [row for rows in GROUPS.values() for row in rows]


def compile_tree(tree: Path) -> Path:
    """Compile a checkout's bytecode, so that the first start of awsddp is not slower.

    Raises SystemExit if Python would import awsddp from another folder.
    """
    command = [sys.executable, "-c", "import awsddp; print(awsddp.__file__)"]
    environ = os.environ | {"PYTHONPATH": str(tree)}
    imported = subprocess.check_output(command, cwd="/", env=environ, text=True).strip()
    if Path(imported) != tree / "awsddp/__init__.py":
        raise SystemExit(f"{tree}: {imported} would run")
    compileall.compile_dir(tree / "awsddp", quiet=1)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path, help="the other checkout of awsddp")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shortest", action="store_true", help="use the smallest sizes")
    args = parser.parse_args()
    trees = {"this": compile_tree(HERE), "before": compile_tree(args.tree.resolve())}
    print(f"{HERE} and {args.tree}, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
    for measure in [group for group, rows in GROUPS.items() if {*rows} & {*args.rows}]:
        start = () if measure is trains else ("--loopback",)
        with contextlib.ExitStack() as stack:
            labs = {name: stack.enter_context(rehearsal(*start, tree=tree)) for name, tree in trees.items()}
            measure(Pair(labs, args))


if __name__ == "__main__":
    main()
