"""Shared parts of the campaigns: a local cluster of real nodes, drawn runs, and resumable results."""

import argparse
import contextlib
import json
import random
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks._rehearsal import Rehearsal, rehearsal

Row = dict[str, Any]


@contextlib.contextmanager
def cluster(nodes: int, scripts: dict[str, str], *options: str) -> Iterator[Rehearsal]:
    """Yield a Rehearsal with a cluster of `nodes` nodes, launched with `options`, and the files `scripts`."""
    with rehearsal() as lab:
        for name, text in scripts.items():
            (lab.project / name).write_text(text)
        lab.run("up", "--local", "--nodes", str(nodes), "-o", "local.gpus=off", "-y", *options)
        yield lab


def arguments(description: str, runs: int) -> argparse.ArgumentParser:
    """Return the options that every campaign has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--state", type=Path, help="store the rows in this file; resume from it")
    return parser


def campaign(
    args: argparse.Namespace,
    run: Callable[[int, random.Random], Row],
    *,
    parallel: int = 1,
    table: Callable[[list[Row]], str] | None = None,
) -> int:
    """Run the cases that `args.state` does not contain yet, print each, and return the number of failures.

    `table` formats all rows as a text that is printed at the end.
    """
    print(f"seed {args.seed}", flush=True)
    done = _read(args.state, args.seed)

    def carry_out(number: int) -> Row:
        if number in done:
            return done[number]
        row = {"run": number, **run(number, random.Random(f"{args.seed}/{number}"))}
        if args.state is not None:
            with args.state.open("a") as file:
                file.write(json.dumps({"seed": args.seed, **row}) + "\n")
        return row

    with ThreadPoolExecutor(max_workers=parallel) as pool:
        for row in pool.map(carry_out, range(args.runs)):
            done[row["run"]] = row
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if table is not None:
        print(table(list(done.values())))
    failed = sum(not row["ok"] for row in done.values())
    print(f"{len(done) - failed} of {len(done)} runs passed")
    return failed


def _read(state: Path | None, seed: int) -> dict[int, Row]:
    if state is None or not state.exists():
        return {}
    rows = [json.loads(line) for line in state.read_text().splitlines()]
    return {row["run"]: row for row in rows if row.pop("seed") == seed}


def begin(lab: Rehearsal, name: str, script: str, *options: str, ranks: int = 4) -> "subprocess.Popen[str]":
    """Start a job with `ranks` ranks; return its `train` process once each rank has written a line."""
    follower = lab.started("train", script, "--name", name, "--json", *options)
    logs = lab.project / "runs" / name / "logs"
    deadline = time.monotonic() + 60 + 10 * ranks
    while len([log for log in logs.glob("rank*.log") if log.stat().st_size]) < ranks:
        if time.monotonic() > deadline or follower.poll() is not None:
            raise RuntimeError(f"job {name} did not start: {follower.communicate()[0]}")
        time.sleep(0.1)
    return follower


def instances(lab: Rehearsal) -> list[str]:
    """Return the instance ids of the nodes, in the order of the nodes' numbers."""
    return [node["instance_id"] for node in json.loads(lab.run("status", "--json"))["nodes"]]
