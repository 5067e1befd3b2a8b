"""Fetch random trees of results from nodes and from S3: the names and the bytes must be equal.

    python -m benchmarks.campaigns.trees [--seed N] [--runs N] [--state FILE] [--parallel N]
    python -m benchmarks.campaigns.trees --nodes ...          # real nodes; needs root

Each run draws a tree (_tree.py). A tree has names that are special for file systems, shells and programs,
equal names in the run folder and the project folder, and links to files and folders inside and outside the
tree. 5 times per second, files are rewritten in place with unchanged size and time, or renamed, and a log is
rotated. Every sixth tree has 3,000 small files. Without --nodes, the files that a node lists are copied with
the code of `fetch`, and compared with the files that awsddp's uploader saves and awsddp's reader then
downloads. With --nodes, `fetch JOB`, `fetch s3://...` and `down` must fetch the same tree.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from awsddp.agent import messages
from awsddp.agent.manifest import manifest
from awsddp.agent.messages import to_json_value
from awsddp.model.node_answers import Manifest, ResultFile, check_manifest, read_answer
from awsddp.nodes.download import VERSIONS, pull
from awsddp.storage.local_names import assign_local_names, matches_sample
from benchmarks._rehearsal import Rehearsal, rehearsal
from benchmarks.campaigns import _tree as tree
from benchmarks.campaigns._campaign import Row, arguments, campaign
from benchmarks.campaigns.bucket import JOB, Client, Job, LocalBucket
from benchmarks.campaigns.cuts import records
from tests.support.local_cloud import Cloud

MANY = 3000
SAVE_TO = "s3://results/runs"
_NOT_OF_THE_JOB = {b"job.json", b"loss.svg", VERSIONS.encode()}

Tree = dict[bytes, tuple[str, bytes]]


def tree_at(folder: Path, label: str = "tree") -> Tree:
    """Return the type and the content (bytes or link target) of each entry of a results folder, by name.

    `label`, which differs between jobs, is replaced by LABEL.
    """
    entries: Tree = {}
    for path in folder.rglob("*"):
        name = os.fsencode(path.relative_to(folder)).replace(label.encode(), b"LABEL")
        if path.is_symlink():
            entries[name] = "link", os.fsencode(path.readlink()).replace(label.encode(), b"LABEL")
        elif path.is_file() and name not in _NOT_OF_THE_JOB:
            entries[name] = "file", path.read_bytes()
    return entries


def difference(first: Tree, second: Tree) -> str:
    """Return the differences between two trees as a short text, or "" if the trees are equal."""
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))

    def kind(tree: Tree, name: bytes) -> str:
        entry = tree.get(name)
        return f"{entry[0]} {entry[1][:40]!r} of {len(entry[1])}" if entry else "nothing"

    few = [f"{name!r}: {kind(first, name)}, {kind(second, name)}" for name in names[:3]]
    return f"{len(names)}: {'; '.join(few)}" if names else ""


def fetch(job: Job, folder: Path) -> None:
    """Fetch the results that the node lists with the code of `fetch`, but copy the files locally."""

    def look(_: object = None) -> dict[tuple[int, str], ResultFile]:
        return {(0, file.path): file for file in listed().files}

    def listed() -> Manifest:
        document: Any = manifest(messages.Manifest(job=JOB, exclude=[], at_once=0), job.nodes[0].folder)
        checked = read_answer(json.dumps(to_json_value(document)).encode(), Manifest, node=0, paths=True)
        check_manifest(checked, 0, [0])
        return checked

    def transfer(files: Sequence[ResultFile], came: Path, *_: object) -> None:
        for file in files:
            to = came / file.path[1:]
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.path, to)

    wanted = {0: assign_local_names({0: listed()})}
    changed: list[ResultFile] = []
    pull(
        wanted,
        folder,
        transfer=transfer,
        list_files=look,
        matches_sample=matches_sample,
        last_files=lambda some: changed.extend(some) or {},
    )
    assert not changed, changed


def run(cloud: Cloud, number: int, dice: random.Random, *, seconds: float = 2.0, many: int = MANY) -> Row:
    """Draw a tree without nodes, fetch it by a node's list and from S3, and return the row."""
    began = time.monotonic()
    files = many if number % 6 == 5 else dice.choice((0, 20))
    with (
        tempfile.TemporaryDirectory() as top,
        contextlib.closing(LocalBucket(cloud, Path(top, "nodes"))) as bucket,
    ):
        job = Job(bucket, dice, "0" * 64)
        drawn = tree.Tree(
            str(dice.random()), "tree", job.nodes[0].run, job.nodes[0].work, Path(top, "outside")
        )
        drawn.draw(files)
        changing = threading.Thread(target=drawn.change, args=[seconds])
        changing.start()
        while changing.is_alive():
            job.step(0.1)
        job.end()
        fetch(job, Path(top, "fetched"))
        client = Client(Path(top, "client"), bucket, has_key=False)
        came = client.read()
        fetched = tree_at(Path(top, "fetched"))
        wrong = difference(fetched, tree_at(client.folder)) if came else f"not all came: {client.events}"
    took = round(time.monotonic() - began, 1)
    return {
        "kind": "without nodes",
        "s": took,
        "files": len(fetched),
        "wrong": wrong,
        "ok": not wrong and came,
    }


def run_on_nodes(lab: Rehearsal, number: int, seed: str, *, seconds: float = 2.0, many: int = MANY) -> Row:
    """Draw the same tree in two jobs; fetch it with `fetch`, from S3, and with `down`; return the row."""
    files, runs = many if number % 6 == 5 else 20, lab.project / "runs"

    def draw(label: str, *options: str) -> None:
        words = ["train", "tree.py", "--name", label, "--world-size", "2", "--detach", *options]
        lab.run(*words, "--", seed, label, str(files), str(seconds))
        while json.loads(lab.run("jobs", "--json"))["jobs"][-1]["state"] == "running":
            time.sleep(0.5)  # a client that follows the job would fetch its results

    lab.run("up", "--local", "--nodes", "2", "-o", "local.gpus=off", "-o", f"job.save_to={SAVE_TO}", "-y")
    saved, unsaved = f"saved{number}", f"unsaved{number}"
    draw(saved, "--save-to", SAVE_TO)
    lab.run("fetch", saved)
    fetched = tree_at(runs / saved, saved)
    shutil.rmtree(runs / saved)
    lab.run("fetch", f"{SAVE_TO}/{saved}")
    wrong = difference(fetched, tree_at(runs / saved, saved))
    draw(unsaved)  # not earlier, because its files would then count as results of both jobs
    assert not list((runs / unsaved).glob("node*")), "down has nothing to bring"
    lab.run("down", "-y")
    wrong = wrong or difference(fetched, tree_at(runs / unsaved, unsaved))
    return {"kind": "nodes", "files": len(fetched), "wrong": wrong, "ok": not wrong}


@contextlib.contextmanager
def laboratory() -> Iterator[Rehearsal]:
    """Yield a local cloud, and a project whose program draws a tree."""
    with rehearsal() as lab:
        (lab.project / "tree.py").write_text(
            Path(tree.__file__).read_text(encoding="utf-8"), encoding="utf-8"
        )
        yield lab


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=30)
    parser.add_argument(
        "--parallel", type=int, default=2, help="the number of trees at the same time, without --nodes"
    )
    parser.add_argument("--nodes", action="store_true", help="use real nodes of a local cluster")
    args = parser.parse_args()
    if not args.nodes:
        with records() as cloud:
            return campaign(args, lambda number, dice: run(cloud, number, dice), parallel=args.parallel)
    with laboratory() as lab:
        return campaign(args, lambda number, _: run_on_nodes(lab, number, f"{args.seed}/{number}"))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
