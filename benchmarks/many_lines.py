"""`awsddp logs` of 16 ranks that wrote 100,000 lines each, compared with `ssh cat` of the same files.

    python benchmarks/many_lines.py [--rounds 5] [--nodes 8] [--ranks 16] [--lines 100000]

The nodes are those of a local cloud without root (--loopback: SSH hosts on this machine). The job has ended
and no log has been fetched, so that `logs` reads every file from its node, over new connections. The
reference reads the same files, also over new connections: one `ssh` process per node, all at once, with the
key exchange of awsddp's SSH library. Both sides are interleaved. The seconds, the CPU seconds of the
processes on the client, and the bytes are compared; the bytes of `logs` are compared without the labels. The
exit code is 1 if, in any round, a rank's bytes differed from the rank's log.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from _rehearsal import Rehearsal, rehearsal

SCRIPT = """
import os, sys
rank = os.environ["RANK"]
for step in range(int(sys.argv[1])):
    print(f"rank {rank} step {step} loss {2.3 / (step + 1):.6f} lr 0.1")
"""
JOB = "lines"
_LABEL = re.compile(rb"^\[rank (\d+) @ node\d+\] (.*\n)", re.MULTILINE)


def time_call(act: Callable[[], bytes]) -> tuple[float, float, bytes]:
    """Return the seconds, the CPU seconds of the started processes, and the output."""
    before, start = os.times(), time.perf_counter()
    output = act()
    took, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return took, cpu, output


def digest(lines: bytes) -> list[str]:
    """Return the hash of each rank's lines, in the order of ranks, without labels."""
    ranks: dict[int, list[bytes]] = {}
    for rank, line in _LABEL.findall(lines):
        ranks.setdefault(int(rank), []).append(line)
    return [hashlib.sha256(b"".join(ranks[rank])).hexdigest() for rank in sorted(ranks)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--lines", type=int, default=100_000)
    args = parser.parse_args()
    with rehearsal("--loopback") as lab:
        return 0 if measure(lab, args) else 1


def measure(lab: Rehearsal, args: argparse.Namespace) -> bool:
    """Print the figures, and return True if the bytes were equal in each round."""
    (lab.project / "lines.py").write_text(SCRIPT)
    lab.run("up", "--local", "--nodes", str(args.nodes), "-o", "local.gpus=off", "-y", "-q")
    lab.run("train", "lines.py", "--name", JOB, "--world-size", str(args.ranks), "-q", "--", str(args.lines))
    home = lab.project / "runs" / JOB
    written = [(home / f"logs/rank{rank}.log").read_bytes() for rank in range(args.ranks)]
    expected = [hashlib.sha256(data).hexdigest() for data in written]
    homes = json.loads(lab.run("exec", "--json", "--", "echo ~"))["nodes"]
    ssh = ["ssh", "-F", str(lab.root / "home/clusters/default/ssh_config")]
    ssh += ["-o", "KexAlgorithms=curve25519-sha256"]

    def cat(node: int) -> bytes:
        words = [
            *ssh,
            f"node{node}",
            f"cat {homes[node]['stdout'].strip()}/.awsddp/jobs/{JOB}/logs/rank*.log",
        ]
        return subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout

    def cats() -> bytes:
        with ThreadPoolExecutor(args.nodes) as pool:
            return b"".join(pool.map(cat, range(args.nodes)))

    def logs() -> bytes:
        words = [sys.executable, "-m", "awsddp", "logs", JOB, "-q"]
        done = subprocess.run(words, cwd=lab.project, env=lab.environ, check=True, stdout=subprocess.PIPE)
        return done.stdout

    rows = []
    for _ in range(args.rounds):
        shutil.rmtree(home, ignore_errors=True)
        ours, theirs = time_call(logs), time_call(cats)
        equal = digest(ours[2]) == expected and sum(map(len, written)) == len(theirs[2])
        rows.append((ours[0], ours[1], theirs[0], theirs[1], equal))
        print(f"  round {len(rows)}: bytes {'equal' if equal else 'differ'}", flush=True)
    columns = list(zip(*rows, strict=True))
    mine, mine_cpu, other, other_cpu = (statistics.median(column) for column in columns[:4])
    size = sum(map(len, written)) / 1e6
    print(f"{args.ranks} ranks x {args.lines} lines on {args.nodes} nodes, {size:.0f} MB, medians")
    print(f"  logs     {mine:6.2f} s  CPU {mine_cpu:5.2f} s  bytes equal: {sum(columns[4])} of {len(rows)}")
    print(f"  ssh cat  {other:6.2f} s  CPU {other_cpu:5.2f} s  ratio {mine / other:5.2f}")
    return all(columns[4])


if __name__ == "__main__":
    sys.exit(main())
