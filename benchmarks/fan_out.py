"""`awsddp exec` and an unchanged `awsddp sync` on many nodes, compared with ssh and rsync to all at once.

    python benchmarks/fan_out.py [--nodes 32] [--times 3]

The nodes are those of a local cloud without root (--loopback: SSH hosts on this machine). The reference logs
in through the cluster's ssh_config, with the key exchange that awsddp's SSH library has. Both sides are
interleaved, and the ratio is that of the median times. The machine must be idle, because client and nodes
share its cores. Each host runs the shell of this user and reads ~/.bashrc, whose time counts on both sides. A
~/.bashrc that takes a lock, for example pyenv's, hides the difference. In this case, run as root and replace
the file by an empty one (`unshare -m`, then `mount --bind`).
"""

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

from _rehearsal import Rehearsal, rehearsal

FILES = 200
KEX = "KexAlgorithms=curve25519-sha256"
UP = ("--local", "-o", "cluster.max_price_usd=10000", "-y", "-q")


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def at_once(commands: Sequence[Sequence[str]]) -> None:
    """Run commands at the same time. Raises CalledProcessError for the first command that fails."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    started = [subprocess.Popen(command, **quiet) for command in commands]
    for process in started:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, process.args)


def compare(name: str, ours: Callable[[], object], reference: Callable[[], object], times: int) -> None:
    pairs = [(seconds(ours), seconds(reference)) for _ in range(times)]
    mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"  {name:<14} {mine:6.2f} s  reference {theirs:6.2f} s  ratio {mine / theirs:5.2f}", flush=True)


def measure(lab: Rehearsal, nodes: int, times: int) -> None:
    for number in range(FILES):
        (lab.project / f"file{number}.py").write_text(f"# {number}\n")
    lab.run("up", *UP, "--nodes", str(nodes))
    lab.run("sync", "-q")
    config = lab.root / "home" / "clusters" / "default" / "ssh_config"
    ssh = ["ssh", "-F", str(config), "-o", KEX]
    remote = lab.run("exec", "--node", "0", "-q", "--", "pwd").split()[-1]
    hosts = [f"node{number}" for number in range(nodes)]
    rsync = ["rsync", "-a", "-e", " ".join(ssh), f"{lab.project}/"]
    print(f"{nodes} nodes, {times} times")
    compare(
        "exec true",
        lambda: lab.run("exec", "-q", "--", "true"),
        lambda: at_once([[*ssh, host, "true"] for host in hosts]),
        times,
    )
    compare(
        "unchanged sync",
        lambda: lab.run("sync", "-q"),
        lambda: at_once([[*rsync, f"{host}:{remote}/"] for host in hosts]),
        times,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    with rehearsal("--loopback") as lab:
        measure(lab, chosen.nodes, chosen.times)


if __name__ == "__main__":
    main()
