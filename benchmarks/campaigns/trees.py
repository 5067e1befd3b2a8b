"""Random trees of results: what comes home from nodes and from S3 is equal, names and bytes.

    python -m benchmarks.campaigns.trees [--seed N] [--runs N] [--state FILE] [--parallel N]
    python -m benchmarks.campaigns.trees --nodes ...          # real nodes; needs root

Each run draws a tree (_tree.py): names that file systems, shells and programs take for something else, equal
names in the run folder and the working folder, links to files and folders and out of them, files that are
rewritten in place with their size and time, renamed, and rotated 5 times a second; every sixth has 3,000
small files. Without nodes the list of a node is copied as `fetch` does, and the saver and the reader of S3
are those of awsddp. With nodes, `fetch JOB`, `fetch s3://...` and `down` bring the same tree.
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
    """Return what is in a folder of results: by name what it is, and its bytes or where it leads.

    `label`, which differs between jobs, is replaced.
    """
    found: Tree = {}
    for path in folder.rglob("*"):
        name = os.fsencode(path.relative_to(folder)).replace(label.encode(), b"LABEL")
        if path.is_symlink():
            found[name] = "link", os.fsencode(path.readlink()).replace(label.encode(), b"LABEL")
        elif path.is_file() and name not in _NOT_OF_THE_JOB:
            found[name] = "file", path.read_bytes()
    return found


def difference(one: Tree, other: Tree) -> str:
    """Return what two trees do not have in common, in a few words; "" where they are equal."""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))

    def kind(tree: Tree, name: bytes) -> str:
        found = tree.get(name)
        return f"{found[0]} {found[1][:40]!r} of {len(found[1])}" if found else "nothing"

    few = [f"{name!r}: {kind(one, name)}, {kind(other, name)}" for name in names[:3]]
    return f"{len(names)}: {'; '.join(few)}" if names else ""


def fetch(job: Job, folder: Path) -> None:
    """Bring the results as `fetch` does, from the list of the node, but by a copy."""

    def look(_: object = None) -> dict[tuple[int, str], ResultFile]:
        return {(0, one.path): one for one in listed().files}

    def listed() -> Manifest:
        told: Any = manifest(messages.Manifest(job=JOB, exclude=[], at_once=0), job.nodes[0].folder)
        found = read_answer(json.dumps(to_json_value(told)).encode(), Manifest, node=0, paths=True)
        check_manifest(found, 0, [0])
        return found

    def transfer(files: Sequence[ResultFile], came: Path, *_: object) -> None:
        for one in files:
            to = came / one.path[1:]
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one.path, to)

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
    """Draw a tree without nodes, and bring it home from the list of its node and from S3."""
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
        wrong = difference(fetched, tree_at(client.folder)) if came else f"not all came: {client.said}"
    took = round(time.monotonic() - began, 1)
    return {
        "kind": "without nodes",
        "s": took,
        "files": len(fetched),
        "wrong": wrong,
        "ok": not wrong and came,
    }


def run_on_nodes(lab: Rehearsal, number: int, seed: str, *, seconds: float = 2.0, many: int = MANY) -> Row:
    """Draw a tree twice, on two nodes each; bring it by `fetch`, from S3, and by `down`."""
    files, runs = many if number % 6 == 5 else 20, lab.project / "runs"

    def draw(label: str, *options: str) -> None:
        words = ["train", "tree.py", "--name", label, "--world-size", "2", "--detach", *options]
        lab.run(*words, "--", seed, label, str(files), str(seconds))
        while json.loads(lab.run("jobs", "--json"))["jobs"][-1]["state"] == "running":
            time.sleep(0.5)  # who follows it fetches its results

    lab.run("up", "--local", "--nodes", "2", "-o", "local.gpus=off", "-o", f"job.save_to={SAVE_TO}", "-y")
    saved, unsaved = f"saved{number}", f"unsaved{number}"
    draw(saved, "--save-to", SAVE_TO)
    lab.run("fetch", saved)
    fetched = tree_at(runs / saved, saved)
    shutil.rmtree(runs / saved)
    lab.run("fetch", f"{SAVE_TO}/{saved}")
    wrong = difference(fetched, tree_at(runs / saved, saved))
    draw(unsaved)  # later: what it writes is new in the working folder of both
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
    parser.add_argument("--parallel", type=int, default=2, help="trees side by side, without nodes")
    parser.add_argument("--nodes", action="store_true", help="on real nodes of a local cluster")
    asked = parser.parse_args()
    if not asked.nodes:
        with records() as cloud:
            return campaign(asked, lambda number, dice: run(cloud, number, dice), parallel=asked.parallel)
    with laboratory() as lab:
        return campaign(asked, lambda number, _: run_on_nodes(lab, number, f"{asked.seed}/{number}"))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
