"""Bytes that this machine sends for a --data folder, and the time that --data adds to a second `train`.

    python benchmarks/data.py [--nodes 2 8 16] [--mb 300] [--times 3]

Needs root for the nodes of the local cloud. The bytes are counted with and without a bucket. nftables counts
the bytes that this machine sends to the nodes' SSH servers. The bytes to the bucket are the sizes of the
bucket's new objects. The seconds are those of a `train` whose program ends at once; runs with and without
--data are interleaved. Nodes and client share the cores of this machine.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

from _rehearsal import Rehearsal, rehearsal

FILES = 30
TABLE = "awsddp-benchmark"
PLACE = "s3://results/runs"
UP = ("--local", "-y", "-q", "-o", "local.gpus=off", "-o", "cluster.max_price_usd=10000")
TRAIN = ("train", "ends.py", "-q", "--nproc-per-node", "1")


@contextlib.contextmanager
def count_sent_bytes(lab: Rehearsal) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of bytes that this machine has sent to the nodes' SSH
    servers."""
    nodes = ", ".join(node["private_ip"] for node in json.loads(lab.run("status", "--json"))["nodes"])
    rule = f"ip daddr {{ {nodes} }} tcp dport 22 counter"
    chain = "{ type filter hook output priority 0; }"
    nft("add", "table", "inet", TABLE)
    try:
        nft("add", "chain", "inet", TABLE, "out", chain)
        nft("add", "rule", "inet", TABLE, "out", rule)
        yield lambda: int(nft("list", "table", "inet", TABLE).partition(" bytes ")[2].split()[0])
    finally:
        nft("delete", "table", "inet", TABLE)


def nft(*words: str) -> str:
    return subprocess.run(["nft", *words], check=True, stdout=subprocess.PIPE, text=True).stdout


def bucket_bytes(lab: Rehearsal) -> int:
    pages = lab.client("s3").get_paginator("list_objects_v2").paginate(Bucket="results", Prefix="runs/.data/")
    return sum(row["Size"] for page in pages for row in page.get("Contents", ()))


def time_train(lab: Rehearsal, *words: str) -> float:
    start = time.perf_counter()
    lab.run(*TRAIN, *words)
    return time.perf_counter() - start


def measure(lab: Rehearsal, nodes: int, times: int) -> None:
    lab.run("up", *UP, "--nodes", str(nodes), "-o", f"job.save_to={PLACE}")
    lab.run(*TRAIN)
    for name, words in (("to each node", ()), ("by the bucket", ("--save-to", PLACE))):
        before = bucket_bytes(lab)
        with count_sent_bytes(lab) as sent:
            first = time_train(lab, "--data", f"{name.replace(' ', '-')}-{nodes}=./set", *words)
            to_nodes, to_bucket = sent(), bucket_bytes(lab) - before
        print(
            f"  {nodes:>3} nodes, {name:<14} {to_nodes / 1e6:8.1f} MB to nodes {to_bucket / 1e6:8.1f} MB to "
            f"the bucket {first:6.1f} s",
            flush=True,
        )
    saved = ("--save-to", PLACE)
    pairs = [
        (time_train(lab, *saved, "--data", f"by-the-bucket-{nodes}=./set"), time_train(lab, *saved))
        for _ in range(times)
    ]
    with_data, without = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = with_data / without
    print(
        f"  {nodes:>3} nodes, again {with_data:6.2f} s  without data {without:6.2f} s  ratio {ratio:5.2f}",
        flush=True,
    )
    lab.run("down", "-y", "-q")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--times", type=int, default=3)
    chosen = parser.parse_args()
    with rehearsal() as lab:
        (lab.project / "ends.py").write_text("import os\nprint('rank', os.environ['RANK'], 'ends')\n")
        (lab.project / ".awsddpignore").write_text("set/\n")
        (lab.project / "set").mkdir()
        for number in range(FILES):
            (lab.project / "set" / str(number)).write_bytes(os.urandom(chosen.mb * 1_000_000 // FILES))
        for nodes in chosen.nodes:
            measure(lab, nodes, chosen.times)


if __name__ == "__main__":
    main()
