"""S3 is slow and loses connections and responses: no partial file may be listed, no upload may remain.

    python -m benchmarks.campaigns.cuts [--seed N] [--runs N] [--state FILE] [--parallel N]

Uses the S3 of a local cloud, the programs of the nodes, and a simulated job. The runs take these kinds in
turn:

    save      a job is saved
    kill      the uploader of a job is killed, and its uploads are aborted with the code of `down`
    deny      a permission is revoked during a job and restored later
    data      a data set is copied to a node
    resume    a checkpoint is copied to a node

Each run draws its files and its faults. At every check, including the check at the end, each file that S3
lists must equal a version that the job wrote.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from awsddp.agent.s3.store import MOST_PART_BYTES, PARTIAL_FOLDER, S3Uri
from awsddp.local import control, machine, s3_files
from benchmarks.campaigns._campaign import Row, arguments, campaign
from tests.agent.s3 import test_download as test_copying
from tests.support.local_cloud import Cloud, add_fault, clear_fault
from tests.support.saving_bucket import MB, Bucket
from tests.support.waiting import until

EFFECTS = ("SlowDown", "ServiceUnavailable", "InternalError", "cut", "cut", "lost", "delay", "late")
UP = (
    *("PutObject", "PutObject", "CreateMultipartUpload", "UploadPart", "UploadPart"),
    *("CompleteMultipartUpload", "AbortMultipartUpload", "ListMultipartUploads", "GetObject"),
)
DOWN = ("GetObject", "GetObject", "GetObject", "ListObjectsV2")
LARGE = "node0/run/large.bin"
_END_S = 240.0


def faults(cloud: Cloud, bucket: str, dice: random.Random, operations: tuple[str, ...]) -> str:
    """Add faults to the next requests to a bucket, and return the faults as a text."""
    added = []
    for _ in range(dice.randint(1, 4)):
        operation, effect, times = dice.choice(operations), dice.choice(EFFECTS), dice.randint(1, 4)
        seconds = round(dice.uniform(0.1, 1), 1)
        add_fault(cloud.info, operation, effect, times=times, seconds=seconds, only=bucket)
        added.append(f"{operation}:{effect}*{times}")
    return ",".join(added)


class Saving:
    """A job that saves to a bucket. `were` has all versions of each file, but only the last one of a log."""

    def __init__(self, cloud: Cloud, top: Path, dice: random.Random) -> None:
        self.bucket, self.dice = Bucket(cloud, top), dice
        self._at = machine.CloudPaths(cloud.home).buckets / self.bucket.name
        self.were: dict[str, list[bytes]] = {}
        [self.node] = self.bucket.run()

    def write(self, home: str, body: bytes) -> None:
        """Write a new version of a file of the job."""
        self.were.setdefault(home, []).append(body)
        (self.node.run / home.removeprefix("node0/run/")).write_bytes(body)

    def grow(self) -> None:
        """Append to the log and the metrics of the job."""
        for home, path in (
            ("logs/rank0.log", self.node.log),
            ("node0/run/metrics.jsonl", self.node.run / "metrics.jsonl"),
        ):
            more = self.dice.randbytes(self.dice.choice((20, 1000, 3 * MB)))
            self.were[home] = [b"".join(self.were.get(home, [])) + more]
            with path.open("ab") as file:
                file.write(more)

    def work(self) -> None:
        """In three steps, write files of several sizes, rewrite a checkpoint and append to the logs."""
        sizes = (0, 1, self.dice.randrange(MB), self.dice.randrange(MB, 8 * MB))
        for step in range(3):
            self.grow()
            self.write("node0/run/model.pt", self.dice.randbytes(self.dice.choice(sizes)))
            self.write(f"node0/run/file{step}", self.dice.randbytes(self.dice.choice(sizes)))
            if step == 1:
                self.write(LARGE, self.dice.randbytes(self.dice.randrange(9 * MB, 30 * MB)))
            time.sleep(self.dice.uniform(0.1, 0.6))
            self.check()

    def object(self, key: str) -> bytes:
        """Return an object, read from the local S3's disk without a request, or b"" if there is no such
        object."""
        named = hashlib.sha256(f"runs/job-1/{key}".encode()).hexdigest()
        with contextlib.suppress(FileNotFoundError), (self._at / "objects" / named).open("rb") as file:
            return file.read(s3_files.parse_description(file).size)
        return b""

    def body(self, parts: list[Any]) -> bytes:
        """Return the content of a file, joined from its parts in S3."""
        return b"".join(self.object(key)[:length] for key, length, *_ in parts)

    def lists(self) -> list[tuple[str, int, list[Any]]]:
        """Return the path, size and parts of each file that node0.json and job.json list."""
        while True:
            node, job = (json.loads(self.object(name) or b"{}") for name in ("node0.json", "job.json"))
            refs = [*node.get("pages", ()), *(job.get("checkpoint") or {"pages": ()})["pages"]]
            pages = [self.object(key) for key, *_ in refs]
            if [hashlib.md5(page).hexdigest() for page in pages] == [etag for *_, etag in refs]:
                break
        rows = [row for page in pages for row in json.loads(page).get("files", {}).items()]
        return [(home, row["size"], row["parts"]) for home, row in rows]

    def check(self) -> int:
        """Return the number of listed files. Raises AssertionError if a file equals no version."""
        while True:
            named = self.lists()
            held = [self.body(parts) for _, _, parts in named]
            if named == self.lists():
                break
        for (home, size, _), body in zip(named, held, strict=True):
            is_log = home.endswith((".log", ".jsonl"))
            were = self.were[home]
            assert len(body) == size, f"{home} has {len(body)} bytes and not {size}"
            assert were[-1].startswith(body) if is_log else body in were, f"{home} is none of its versions"
        return len(named)

    def left(self) -> int:
        """Return the number of incomplete uploads."""
        return len(list((self._at / "uploads").iterdir()))

    def saving(self) -> Any:
        """Return saving.json, which the uploader writes for clients, or {} if there is no such file."""
        return json.loads(self.node.folder.saving.read_text()) if self.node.folder.saving.exists() else {}

    def end(self) -> Row:
        """End the job, check that all files are saved, and return the figures of the row."""
        self.node.state("succeeded")
        os.close(self.node.lock)
        _, errors = self.node.saver.communicate(timeout=_END_S)
        assert self.node.saver.returncode == 0, errors.decode()
        named, saving = self.check(), self.saving()
        saved = {home: self.body(parts) for home, _, parts in self.lists()}
        assert saved == {home: were[-1] for home, were in self.were.items()}, "not all is saved"
        state = json.loads(self.object("job.json"))["state"]
        assert (state, saving["error"], saving["ended"]) == ("succeeded", "", True), (state, saving)
        return {"named": named, "failed": errors.count(b"\n"), "left": self.left()}

    def close(self) -> None:
        """Stop the uploader and the metadata service."""
        self.node.saver.kill()
        self.node.saver.communicate()
        self.bucket.metadata.server.shutdown()


def save(cloud: Cloud, top: Path, dice: random.Random) -> Row:
    with contextlib.closing(Saving(cloud, top, dice)) as job:
        injected = faults(cloud, job.bucket.name, dice, UP)
        job.work()
        return {"faults": injected, **job.end()}


def kill(cloud: Cloud, top: Path, dice: random.Random) -> Row:
    """Kill the uploader during the upload of a large file, and abort the uploads with the code of `down`."""
    with contextlib.closing(Saving(cloud, top, dice)) as job:
        injected = faults(cloud, job.bucket.name, dice, UP)
        job.work()
        until(lambda: len(job.lists()) > 3, seconds=_END_S)
        job.write(LARGE, dice.randbytes(60 * MB))
        with contextlib.suppress(AssertionError):
            until(job.left, seconds=5)
        time.sleep(dice.uniform(0, 0.3))
        os.kill(job.node.saver.pid, signal.SIGKILL)
        job.node.saver.wait()
        named, begun = job.check(), job.left()
        for _ in range(2):  # if the faults outlast all retries of a request, the next call aborts
            job.bucket.store().abort(S3Uri(job.bucket.name, "runs/job-1"))
        return {"faults": injected, "named": named, "failed": begun, "left": job.left()}


def deny(cloud: Cloud, top: Path, dice: random.Random) -> Row:
    """Revoke a permission, which must be reported. Restore the permission: all files must then be saved."""
    with contextlib.closing(Saving(cloud, top, dice)) as job:
        until(lambda: job.object("job.json"), seconds=_END_S)
        operation = dice.choice(("PutObject", "CreateMultipartUpload", "UploadPart"))
        number = add_fault(cloud.info, operation, "AccessDenied", only=job.bucket.name)[-1]["id"]
        job.work()
        until(lambda: "AccessDenied" in job.saving()["error"], seconds=_END_S)
        injected = faults(cloud, job.bucket.name, dice, UP)
        clear_fault(cloud.info, number)
        return {"faults": f"{operation}:AccessDenied,{injected}", **job.end()}


def data(cloud: Cloud, top: Path, dice: random.Random) -> Row:
    node = test_copying.Node(cloud, top / "home")
    bodies = {f"x{number}": dice.randbytes(_size(dice)) for number in range(dice.randint(1, 40))}
    node.put(**bodies)
    operation = dice.choice(DOWN)
    number, failed, injected = None, 0, ""
    if dice.random() < 0.2:
        number = add_fault(cloud.info, operation, "AccessDenied", only=node.bucket)[-1]["id"]
        injected = f"{operation}:AccessDenied,"
    injected += faults(cloud, node.bucket, dice, DOWN)
    while "failed" in (reply := node.copy()):
        failed += 1
        whole = {path: body for path, body in node.files.items() if not path.startswith(PARTIAL_FOLDER)}
        assert whole.items() <= bodies.items(), "a file is half"
        assert reply["why"] and reply["next"], reply
        assert number is None or "may not be read" in reply["failed"], reply
        assert failed <= 3 or number is not None, reply
        if number is not None:
            clear_fault(cloud.info, number)
            number = None
    assert node.files == bodies, "not all came"
    again = node.copy()
    assert again == {"copied": 0, "bytes": 0}, again
    return {"faults": injected, "named": len(bodies), "failed": failed, "left": 0}


def resume(cloud: Cloud, top: Path, dice: random.Random) -> Row:
    node = test_copying.Node(cloud, top / "home")
    wanted, files = {}, {}
    for number in range(dice.randint(1, 12)):
        parts = [dice.randbytes(min(_size(dice), MOST_PART_BYTES)) for _ in range(dice.randint(1, 3))]
        node.put(**{f"{number}_{at}": part + b"more" for at, part in enumerate(parts)})
        files[f"step-1/{number}"] = [
            [f"{number}/{at}", len(part), "of then", hashlib.sha256(part).hexdigest()]
            for at, part in enumerate(parts)
        ]
        wanted[f"step-1/{number}"] = b"".join(parts)
    injected, failed = faults(cloud, node.bucket, dice, ("GetObject",)), 0
    node.top = node.home / "awsddp/resume-first"
    order = {"place": (node.bucket, "set"), "files": files, "folder": str(node.top)}
    while "failed" in (reply := node.copy(**order)):
        failed += 1
        whole = {path: body for path, body in node.files.items() if not path.startswith(PARTIAL_FOLDER)}
        assert whole.items() <= wanted.items(), "a file is half"
        assert reply["why"] and reply["next"] and failed <= 3, reply
    assert node.files == wanted, "not all came"
    return {"faults": injected, "named": len(files), "failed": failed, "left": 0}


def _size(dice: random.Random) -> int:
    return dice.choice((0, 1, 1000, 100_000, MB, dice.randrange(9 * MB, 20 * MB)))


KINDS: tuple[Callable[[Cloud, Path, random.Random], Row], ...] = (save, kill, deny, data, resume)


def run(cloud: Cloud, number: int, dice: random.Random) -> Row:
    """Run one case, and return its row; `left` counts incomplete uploads, `failed` counts failures."""
    kind, began = KINDS[number % len(KINDS)], time.monotonic()
    with tempfile.TemporaryDirectory() as top:
        try:
            row = kind(cloud, Path(top), dice)
            row["ok"] = row["left"] == 0
        except Exception as error:
            row = {"ok": False, "wrong": f"{type(error).__name__}: {error}"[:500]}
    return {"kind": kind.__name__, "s": round(time.monotonic() - began, 1), **row}


@contextlib.contextmanager
def records() -> Iterator[Cloud]:
    """Yield a local cloud without hosts."""
    with tempfile.TemporaryDirectory() as home:
        yield Cloud(Path(home), control.start(Path(home), mode="records"))
        control.stop(Path(home))


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=200)
    parser.add_argument("--parallel", type=int, default=4, help="the number of runs at the same time")
    args = parser.parse_args()
    with records() as cloud:
        return campaign(args, lambda number, dice: run(cloud, number, dice), parallel=args.parallel)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
