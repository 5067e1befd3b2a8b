"""Save a job in S3 and read it while another writer, hostile or faulty, writes below the same prefix.

    python -m benchmarks.campaigns.bucket [--seed N] [--runs N] [--state FILE] [--parallel N]

Uses the S3 of a local cloud, the uploader of the nodes, and a simulated job. Each run is a history of one
kind, and the runs take the kinds in KINDS in turn. The number of nodes, the job's files and the other
writer's acts are drawn. Two clients, of which only one has the cluster's key, read the job while the other
writer is active, and again afterwards. Columns:

    did       the acts of the other writer
    refused   reads that ended with an error

These conditions must hold in every history:

- the client with the key downloads only files that equal, byte for byte, a version that the job wrote
- the same holds for the client without the key, unless it may accept objects that the other writer wrote
- nothing is written outside the job's folder, nor into the folder of another job of the same name
- verify_in_s3(), which decides whether nodes may terminate, returns True only if S3 has all files of the job
- after the other writer has stopped and the job has ended, S3 has every file
- only one launch owns the name of a job
"""

import contextlib
import copy
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from unittest.mock import patch

import botocore.session

from awsddp.agent.job_folder import write_json
from awsddp.agent.manifest import manifest
from awsddp.agent.messages import Manifest
from awsddp.agent.s3.store import MOST_BYTES, S3Uri, Store
from awsddp.agent.s3.uploader import Uploader
from awsddp.agent_client.job_reports import encode_job
from awsddp.errors import AwsddpError
from awsddp.model.records import JobNode, JobRecord, Target
from awsddp.nodes.download import VERSIONS
from awsddp.session.context import Session
from awsddp.settings.loader import load
from awsddp.state import Record
from awsddp.storage.saved_job import StoredJob, derive_signing_secret, verify_in_s3
from benchmarks.campaigns._campaign import Row, arguments, campaign
from benchmarks.campaigns.cuts import records
from tests.support.local_cloud import Cloud
from tests.support.saved_job import SavedJob
from tests.support.saving_bucket import MB, Bucket

JOB, LAUNCH, CREATED = "job-1", "launch-1", "2026-01-01T00:00:00Z"
_END_S = 240.0


class Job:
    """A simulated job, its uploaders, and every version of its files."""

    def __init__(
        self, bucket: Bucket, dice: random.Random, secret: str, *, launch: str = LAUNCH, nodes: int = 1
    ) -> None:
        self.bucket, self.dice, self.secret, self.launch = bucket, dice, secret, launch
        self.nodes = bucket.run(nodes, starts=False)
        for node in self.nodes:
            node.request.created = CREATED
            write_json(node.jobs / "job.json", node.request)
            node.state("running")
        self.versions: dict[str, set[bytes]] = {}
        self.savers: dict[int, Uploader] = {}
        self.lock, self.last_error = RLock(), ""
        self.start()

    def start(self) -> None:
        """Start a new uploader for each node; an earlier uploader is dropped, as if it had been killed."""
        for number, node in enumerate(self.nodes):
            self.savers[number] = Uploader(self._order(), node.folder, self.bucket.store())

    def _order(self) -> dict[str, Any]:
        pace = {"look_s": 0.0, "parts_s": 0.0, "beat_s": 0.02}
        return self.bucket.order("save", secret=self.secret, launch=self.launch, **pace)

    def start_process(self, number: int) -> Any:
        """Start the uploader of a node as a process."""
        order = self._order() | {"look_s": 0.02}
        return self.bucket.start(home=self.bucket.top / f"home{number}", **order)

    def step(self, seconds: float = 0.0) -> None:
        """Run the uploaders for `seconds`, at least once. Uploaders continue after errors, as on a node."""
        end = time.monotonic() + seconds
        while True:
            with self.lock:
                for number, saver in list(self.savers.items()):
                    try:
                        if saver.step():
                            saver.close()
                            del self.savers[number]
                    except Exception as error:
                        self.last_error = f"{type(error).__name__}: {error}"
            if time.monotonic() > end or not self.savers:
                return
            time.sleep(0.005)

    def end(self) -> None:
        """End the job, and run the uploaders until they end."""
        for node in self.nodes:
            node.state("succeeded")
            os.close(node.lock)
        end = time.monotonic() + _END_S
        while self.savers:
            assert time.monotonic() < end, f"the saver did not end: {self.last_error}"
            self.step(0.02)

    # ---- its files

    def work(self, *names: str) -> None:
        """Change some of the files."""
        for _ in range(self.dice.randint(1, 4)):
            number = self.dice.randrange(len(self.nodes))
            change = getattr(self, f"_{self.dice.choice(names or WORK)}")
            change(number)

    def _write(self, number: int, path: Path, body: bytes, *, keeps_time: bool = False) -> None:
        node = self.nodes[number]
        if path == node.log:
            home = f"logs/{path.name}"
        elif node.run in path.parents:
            home = f"node{number}/run/{path.relative_to(node.run)}"
        else:
            home = f"node{number}/{path.relative_to(node.work)}"
        self.versions.setdefault(home, set()).add(body)
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.stat() if keeps_time else None
        path.write_bytes(body)
        if before is not None:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _new(self, number: int) -> None:
        name = self.dice.choice(
            ("a.bin", "b.bin", "model.pt", "deep/er/c.bin", "step-1/.metadata", "step-1/x")
        )
        size = self.dice.choice((0, 10, 1000, 70_000, 300_000))
        if self.dice.random() < 0.02:
            size = 9 * MB
        self._write(number, self.nodes[number].run / name, self.dice.randbytes(size))

    def _equal(self, number: int) -> None:
        """Write up to three results: two are both listed as run/model.pt, the third is named
        run/model.pt~2."""
        node = self.nodes[number]
        for path in (node.run / "model.pt", node.work / "run/model.pt", node.run / "model.pt~2"):
            if self.dice.random() < 0.6:
                self._write(number, path, self.dice.randbytes(self.dice.choice((10, 1000))))

    def _in_place(self, number: int) -> None:
        """Rewrite a file with unchanged size and time."""
        files = [path for path in self.nodes[number].run.rglob("*.bin") if path.is_file()]
        if not files:
            return self._new(number)
        path = self.dice.choice(sorted(files))
        body = self.dice.randbytes(path.stat().st_size)
        return self._write(number, path, body, keeps_time=True)

    def _renamed(self, number: int) -> None:
        path, part = self.nodes[number].run / "renamed.bin", self.nodes[number].jobs / "part"
        body = self.dice.randbytes(self.dice.choice((10, 1000)))
        self.versions.setdefault(f"node{number}/run/renamed.bin", set()).add(body)
        part.write_bytes(body)
        part.replace(path)

    def _removed(self, number: int) -> None:
        files = [path for path in self.nodes[number].run.rglob("*") if path.is_file()]
        if files:
            self.dice.choice(sorted(files)).unlink()

    def _grown(self, number: int) -> None:
        path = self.dice.choice((self.nodes[number].log, self.nodes[number].run / "metrics.jsonl"))
        more = self.dice.randbytes(self.dice.choice((20, 1000, 100_000)))
        self._write(number, path, (path.read_bytes() if path.exists() else b"") + more)

    def _rotated(self, number: int) -> None:
        path = self.nodes[number].run / "train.log"
        older = path.with_name("train.1.log")
        if path.exists():
            self.versions.setdefault(f"node{number}/run/train.1.log", set()).add(path.read_bytes())
            path.replace(older)
        self._write(number, path, self.dice.randbytes(self.dice.choice((20, 5000))))

    def is_version(self, home: str, body: bytes) -> bool:
        """Return True if the job wrote these bytes to a file that may be listed as `home`."""
        homes = [home]
        while (shorter := re.sub(r"~\d+$", "", homes[-1])) != homes[-1]:
            homes.append(shorter)
        versions = [version for key in homes for version in self.versions.get(key, ())]
        if home.endswith((".log", ".jsonl")):
            return any(version.startswith(body) for version in versions)
        return body in versions

    def files(self) -> dict[str, bytes]:
        """Return {path: content} of the results; each path is the one under which the result is listed."""
        results: dict[str, bytes] = {}
        for node in self.nodes:
            listed: Any = manifest(Manifest(job=JOB, exclude=[], at_once=0), node.folder)
            results |= {line.home: Path(line.path).read_bytes() for line in listed.files}
        return results

    def is_in_bucket(self, files: dict[str, bytes]) -> bool:
        """Return True if the lists in S3, read without awsddp's reader, have exactly these files."""
        try:
            listed = {number: self.bucket.read_list(number) for number in range(len(self.nodes))}
        except (AssertionError, ValueError, AttributeError, TypeError):
            return False
        rows = {home: row for of_node in listed.values() for home, row in of_node.items()}
        return rows.keys() == files.keys() and all(
            self.bucket.join(rows[home]) == body for home, body in files.items()
        )


WORK = ("new", "new", "in_place", "grown", "renamed", "equal", "rotated", "removed")


class Client:
    """A client that reads the job in S3, with or without the key of its cluster."""

    def __init__(self, top: Path, bucket: Bucket, *, has_key: bool, nodes: int = 1) -> None:
        self.bucket, self.top = bucket, top
        self.where = S3Uri(bucket.name, f"runs/{JOB}")
        project = top / "project"
        project.mkdir(parents=True)
        self.events: list[str] = []
        self.session = Session(
            name="default",
            home=top / "home",
            settings=load("default", overrides={"sync.workdir": str(project)}, environ={}),
            on_event=lambda event: self.events.append(event.text),
        )
        machines = tuple(JobNode(node=node, instance_id=f"i-{node}") for node in range(nodes))
        of_job = {"job": JOB, "state": "running", "cause": None, "ranks": (), "home": f"runs/{JOB}"}
        self.job = JobRecord(**of_job, nodes=machines, save_to=f"s3://{bucket.name}/runs")
        if has_key:
            self._remember()
        self.store = bucket.store()
        self.refused = 0

    def _remember(self) -> None:
        info, now = self.bucket.cloud.info, datetime.now(UTC)
        keys = {"access_key_id": info.access_key_id, "secret_access_key": info.secret_access_key}
        target = Target(name="aws", region=info.region, endpoint=info.endpoint, **keys)
        self.session.folder.path.mkdir(parents=True)
        self.session.folder.key.write_text("the cluster's key")
        made = {"id": "c", "owner": "o", "target": target, "created": now, "expires": now}
        more = {"instance_type": "t", "nodes": 1, "gpus_per_node": 1, "pretended": False, "ssh_user": "u"}
        self.session.folder.write(Record(**made, **more, jobs=(self.job,)))

    @property
    def folder(self) -> Path:
        """The results folder of the job."""
        return self.session.results / JOB

    def read(self) -> bool:
        """Download the job; return True if awsddp reports that all of it was downloaded."""
        try:
            StoredJob(self.session, self.store, self.where).download(all_results=True)
        except AwsddpError:
            self.refused += 1
            return False
        return True

    def files(self) -> dict[str, bytes]:
        """Return the content of the downloaded files by their path in the folder of the job."""
        paths = [path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink()]
        names = {str(path.relative_to(self.folder)): path for path in paths}
        return {
            name: path.read_bytes()
            for name, path in names.items()
            if name not in ("job.json", VERSIONS) and not name.startswith(".part/")
        }

    def check_outside(self) -> None:
        """Raise AssertionError if anything was written outside the folder of the job."""
        project = self.session.results.parent
        paths = {*project.iterdir(), *self.session.results.glob("*")}
        assert paths <= {self.session.results, self.folder}, f"written outside: {paths}"
        assert {path.name for path in self.top.iterdir()} <= {"project", "home"}, "written outside"

    @contextlib.contextmanager
    def on_get(self, do: Callable[[], object]) -> Iterator[None]:
        """Call `do` before each read of an object."""
        events, name = self.store.client.meta.events, "before-parameter-build.s3.GetObject"

        def hook(**_: object) -> None:
            do()

        events.register(name, hook, "moving")
        try:
            yield
        finally:
            events.unregister(name, unique_id="moving")


class Writer:
    """The other writer below the prefix.

    If `has_forged` is True, a client without the key may accept objects that this writer wrote.
    """

    def __init__(self, job: Job, secrets: Callable[[str], str]) -> None:
        self.job, self.dice, self.secrets = job, job.dice, secrets
        self.bucket, self.store = job.bucket, job.bucket.store()
        self.where = S3Uri(self.bucket.name, f"runs/{JOB}")
        self.seen: dict[str, list[tuple[bytes, dict[str, str]]]] = {}
        self.has_forged = False
        self.did: Counter[str] = Counter()

    def remember_objects(self) -> None:
        """Remember the objects below the prefix, to restore them later."""
        for name in self.bucket.names():
            with contextlib.suppress(self.store.client.exceptions.ClientError):
                response = self.store.client.get_object(Bucket=self.bucket.name, Key=self.where.key(name))
                version = (response["Body"].read(), response["Metadata"])
                if version not in self.seen.setdefault(name, []):
                    self.seen[name].append(version)

    def act(self, *names: str) -> None:
        """Do one of these acts."""
        name = self.dice.choice(names)
        self.did[name] += 1
        getattr(self, f"_{name}")()

    def _put(self, name: str, body: bytes, **metadata: str) -> None:
        self.store.put(self.where, name, body, Metadata=metadata)

    def _names(self, pattern: str) -> list[str]:
        return [name for name in self.bucket.names() if re.match(pattern, name)]

    def _foreign(self, **more: Any) -> SavedJob:
        """Return a job that has the job's name and nodes, but other files."""
        count = len(self.job.nodes)
        homes = ["run/model.pt", "run/a.bin", "run/foreign.bin"]
        files = {f"node{node}/{home}": b"foreign" * 9 for node in range(count) for home in homes}
        made = SavedJob(files, **{"job": JOB, "launch": LAUNCH, "checkpoint": "run/model.pt", **more})
        made.objects = {f"foreign/{key}": body for key, body in files.items()}
        for row in made.rows.values():
            row["parts"][0][0] = f"foreign/{row['parts'][0][0]}"
        return made

    def _forged_job(self) -> None:
        """Write a job.json without a valid signature, whose nodes and state may differ from the job's."""
        self.has_forged = True
        made = self._foreign()
        machines = {
            "none": [],
            "others": [{"node": 0, "instance_id": "i-9"}],
            "more": [{"node": node, "instance_id": f"i-{node}"} for node in range(9)],
            "same": made.index["document"]["nodes"],
        }[self.dice.choice(("none", "others", "more", "same"))]
        made.index["document"]["nodes"] = machines
        made.index["nodes"] = [machine["node"] for machine in machines]
        made.index["state"] = self.dice.choice(("running", "succeeded", "claimed"))
        body = json.dumps({**made.index, "checkpoint": None}).encode()
        self._put("job.json", body, **self._signature_of("job.json"))

    def _signature_of(self, name: str) -> dict[str, str]:
        """Return, in half of the cases, the last signature of the document `name`; otherwise return {}."""
        return self.seen[name][-1][1] if name in self.seen and self.dice.random() < 0.5 else {}

    def _forged_node(self) -> None:
        self.has_forged = True
        made = self._foreign()
        for key, body in made.objects.items():
            self._put(key, body)
        rows = json.dumps({"files": made.rows}).encode()
        name = f"node{self.dice.randrange(len(self.job.nodes))}.json"
        ref = ["lists/foreign", len(rows), self.store.put(self.where, "lists/foreign", rows)]
        pages = self.dice.choice(([ref], [], [["lists/none", 9, "e"]], [ref] * 70))
        body = json.dumps({**made.nodes[0], "pages": pages, "generation": 0}).encode()
        self._put(name, body, **self._signature_of(name))

    def _forged_page(self) -> None:
        """Replace a listed page with another page, whose ETag differs from the listed ETag."""
        names = self._names("lists/")
        with contextlib.suppress(ValueError, AttributeError):  # node0.json is forged
            names = [ref[0] for ref in self.bucket.json("node0.json").get("pages", [])] or names
        body = json.dumps({"files": self._foreign().rows}).encode()
        self._put(self.dice.choice(names) if names else "lists/node0-0-0~1", body)

    def _other_secret(self) -> None:
        """Write the objects of another cluster's job."""
        self.has_forged = True
        self._foreign(secret="0" * 64).put(self.store, self.where)

    def _unsigned(self) -> None:
        self.has_forged = True
        self._foreign().put(self.store, self.where)

    def _other_launch(self) -> None:
        """Write the objects of an earlier job of this name, on other nodes of a cluster with the same key."""
        self.has_forged = True
        made = self._foreign(secret=self.secrets(JOB), launch="launch-0")
        for machine in made.index["document"]["nodes"]:
            machine["instance_id"] = f"i-0{machine['node']}"
        made.put(self.store, self.where)

    def _other_launch_of_a_node(self) -> None:
        """Write a node's list from an earlier job of this name."""
        made = self._foreign(secret=self.secrets(JOB), launch="launch-0")
        original = self.store.document(self.where, "job.json")
        made.put(self.store, self.where)
        if original is None:
            self.store.client.delete_object(Bucket=self.bucket.name, Key=self.where.key("job.json"))
        else:
            self._put("job.json", original.body, **{"awsddp-signature": original.signature})

    def _other_job(self) -> None:
        """Write the objects of another job of the same cluster."""
        self.has_forged = True
        self._foreign(secret=self.secrets("job-2"), job="job-2").put(self.store, self.where)

    def _huge(self) -> None:
        self.has_forged = True
        name = self.dice.choice(("job.json", "node0.json", "node1.json"))
        numbers = b'{"save":2,"launch":"l","state":"x","nodes":[' + b"300," * 500_000 + b"1]}"
        bodies = (b" " * (MOST_BYTES + 1), b"[" * 100_000, numbers, b"", b"\xff\xfe", b'"', b"{}", b"[]")
        self._put(name, self.dice.choice(bodies), **self._signature_of(name))

    def _replay(self, pattern: str = "") -> None:
        """Restore an older version of an object, with its signature."""
        older = [name for name in self.seen if re.match(pattern, name)]
        if older:
            name = self.dice.choice(sorted(older))
            body, metadata = self.dice.choice(self.seen[name])
            self._put(name, body, **metadata)

    def _replay_documents(self) -> None:
        self._replay(r"job\.json|node\d\.json")

    def _replay_all(self) -> None:
        """Restore the first version of every object."""
        for name, (first, *_) in self.seen.items():
            self._put(name, first[0], **first[1])

    def _resize(self) -> None:
        """Make objects longer or shorter, or replace them with random bytes of the same length."""
        for name in self._names(r"node\d+/|parts/|lists/"):
            if self.dice.random() < 0.4:
                body = self.bucket.get(name)
                others = (body + b"longer", body[: len(body) // 2], self.dice.randbytes(len(body)))
                self._put(name, self.dice.choice(others))

    def _delete(self) -> None:
        names = self._names("")
        for name in self.dice.sample(names, min(len(names), self.dice.choice((1, 3, 99)))):
            self.store.client.delete_object(Bucket=self.bucket.name, Key=self.where.key(name))

    def _swap(self) -> None:
        """Copy objects to the keys of other objects, or to keys that later versions would have."""
        names = self._names(r"node\d+/")
        for name in self.dice.sample(names, min(len(names), 3)):
            self._put(
                self.dice.choice((name, f"{name}~2", f"{name}~3")), self.bucket.get(self.dice.choice(names))
            )


EVERY = (
    *("forged_job", "forged_node", "forged_page", "other_secret", "unsigned", "other_launch", "other_job"),
    *(
        "other_launch_of_a_node",
        "huge",
        "replay",
        "replay_documents",
        "replay_all",
        "resize",
        "delete",
        "swap",
    ),
)
ON_OBJECTS = ("forged_page", "replay", "replay_all", "resize", "delete", "swap", "other_launch_of_a_node")


@dataclass
class History:
    """The job, the other writer, and both clients."""

    job: Job
    writer: Writer
    clients: tuple[Client, Client]
    top: Path
    row: Row

    def check(self) -> None:
        """Raise AssertionError if a client has a file that the job never wrote."""
        for client in self.clients:
            client.check_outside()
            if client is self.clients[0] or not self.writer.has_forged:
                for home, body in client.files().items():
                    assert self.job.is_version(home, body), f"the job never wrote this {home}: {body[:40]!r}"

    def check_release(self) -> None:
        """Raise AssertionError if awsddp would release nodes although S3 lacks their results."""
        client = self.clients[0]
        if verify_in_s3(client.session, client.job):
            assert not self.job.savers, "the nodes may terminate while they save"
            assert self.job.is_in_bucket(self.job.files()), "the nodes may terminate, but S3 lacks results"

    def play(self, acts: tuple[str, ...], work: tuple[str, ...] = ()) -> None:
        """Run the job, the other writer and the clients in turns."""
        for _ in range(self.job.dice.randint(2, 3)):
            self.job.work(*work)
            self.job.step(self.job.dice.choice((0.05, 0.2, 0.4)))
            self.writer.remember_objects()
            self.writer.act(*acts)
            self.job.step(self.job.dice.choice((0.0, 0.1)))
            for client in self.clients:
                client.read()
            self.check()
            self.check_release()

    def end(self, acts: tuple[str, ...]) -> None:
        """End the job and check that S3 has all files; then let the other writer act, and check the
        clients."""
        self.job.end()
        self.clients[0].read()
        self.clients[1].read()
        self.check()
        self._check_whole()
        self.writer.remember_objects()
        self.writer.act(*acts)
        self.check_release()
        for client in self.clients:
            client.read()
        self.check()

    def _check_whole(self) -> None:
        files = self.job.files()
        assert self.job.is_in_bucket(files), f"S3 lacks results: {self.job.last_error}"
        keyed = self.clients[0]
        for has_key in (True, False):
            fresh = Client(
                self.top / f"fresh{has_key}", keyed.bucket, has_key=has_key, nodes=len(self.job.nodes)
            )
            assert fresh.read(), f"not all files were downloaded: {fresh.events}"
            assert fresh.files() == files, "other files were downloaded"
        assert verify_in_s3(keyed.session, keyed.job) or (keyed.folder / "foreign").exists(), keyed.events


def hostile(*acts: str) -> Callable[[History], None]:
    """Return a kind of history in which the other writer does these acts."""

    def play(history: History) -> None:
        history.play(acts)
        history.end(acts)

    return play


def equal_names(history: History) -> None:
    """Two results have the same listed path; the other writer writes at the keys of the results' versions."""
    history.play(("swap", "resize"), ("equal",))
    history.end(("swap", "resize"))


def moving_lists(history: History) -> None:
    """Before each read of a client, the job changes files and the uploader changes lists."""
    job, turns = history.job, [12]

    def move() -> None:
        with job.lock:
            if turns[0]:
                turns[0] -= 1
                job.work()
                job.step(0.02)

    with contextlib.ExitStack() as stack:
        for client in history.clients:
            stack.enter_context(client.on_get(move))
        for _ in range(2):
            turns[0] = 12
            history.play(("replay", "resize"))
        turns[0] = 0
        history.end(ON_OBJECTS)


def in_place(history: History) -> None:
    history.play(ON_OBJECTS, ("in_place", "in_place", "renamed"))
    history.end(ON_OBJECTS)


def rotation(history: History) -> None:
    history.play(ON_OBJECTS, ("rotated", "rotated", "grown"))
    history.end(ON_OBJECTS)


def killed(history: History) -> None:
    """The uploaders are killed, the other writer acts, and the uploaders are started again."""
    for _ in range(2):
        history.job.work()
        history.job.step(history.job.dice.choice((0.1, 0.4)))
        history.writer.remember_objects()
        history.writer.act(*EVERY)
        history.job.start()
        history.job.step(0.1)
        history.check_release()
    history.end(EVERY)


def killed_process(history: History) -> None:
    """Like `killed`, but each uploader is a process that is ended by SIGKILL."""
    job = history.job
    for number in range(len(job.nodes)):
        job.work()
        process = job.start_process(number)
        time.sleep(job.dice.uniform(0.4, 1.2))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    history.writer.remember_objects()
    history.writer.act(*EVERY)
    job.start()
    history.play(EVERY)
    history.end(EVERY)


def two_jobs(history: History) -> None:
    """Two clusters claim one job name; the one whose claim is refused saves below the name nevertheless."""
    job, bucket, dice = history.job, history.job.bucket, history.job.dice
    for name in history.job.bucket.names():
        bucket.s3.delete_object(Bucket=bucket.name, Key=f"runs/{JOB}/{name}")
    stale = {"job": JOB, "save": 2, "launch": "launch-0", "by": "i-8", "state": "claimed", "at": 1.0}
    before = dice.choice((None, b"{}", b"[", json.dumps(stale).encode()))
    if before is not None:
        history.writer._put("job.json", before)
    launches = [{"by": f"i-{node}", "launch": f"launch-{node + 1}"} for node in range(2)]
    with ThreadPoolExecutor() as pool:
        codes = [claim.code for claim in pool.map(lambda launch: bucket.claim(**launch), launches)]
    owners = 0 if before in (b"{}", b"[") else 1
    assert sorted(codes) == sorted([""] * owners + ["taken"] * (2 - owners)), codes
    other = copy.copy(bucket)
    other.top = history.top / "other"
    second = Job(other, dice, "0" * 64, launch="launch-2", nodes=len(job.nodes))
    history.writer.has_forged = True
    for _ in range(2):
        for writer in (job, second, job):
            writer.work()
            writer.step(dice.choice((0.1, 0.3)))
        assert bucket.claim(by="i-7", launch="launch-7").code == "taken"
        for client in history.clients:
            client.read()
        history.check()
        history.check_release()
    history.end(EVERY)
    second.end()
    history.check_release()
    history.clients[0].read()
    history.check()


def local_results(history: History) -> None:
    """Both clients already have the results of another job with the same name."""
    expected: dict[Path, bytes] = {}
    for client in history.clients:
        client.folder.mkdir(parents=True)
        (client.folder / "node0/run").mkdir(parents=True)
        machines = (JobNode(node=0, instance_id="i-another"),)
        older = replace(client.job, nodes=machines)
        (client.folder / "job.json").write_bytes(encode_job(older))
        (client.folder / "foreign").write_bytes(b"mine")
        (client.folder / "node0/run/model.pt").write_bytes(b"mine")
        expected |= {path: path.read_bytes() for path in client.folder.rglob("*") if path.is_file()}

    def check() -> None:
        for client in history.clients:
            client.check_outside()
            files = {path: path.read_bytes() for path in client.folder.rglob("*") if path.is_file()}
            assert files == {path: body for path, body in expected.items() if client.folder in path.parents}

    with patch.object(history, "check", check):
        history.play(EVERY)
        history.end(EVERY)


KINDS: dict[str, Callable[[History], None]] = {
    "forged job.json": hostile("forged_job"),
    "forged nodeK.json": hostile("forged_node"),
    "forged pages": hostile("forged_page"),
    "another secret": hostile("other_secret"),
    "unsigned": hostile("unsigned"),
    "another launch": hostile("other_launch", "other_launch_of_a_node"),
    "another job": hostile("other_job"),
    "huge": hostile("huge"),
    "older documents": hostile("replay_documents"),
    "older objects": hostile("replay", "replay_all"),
    "longer, shorter": hostile("resize"),
    "deleted": hostile("delete"),
    "all of these": hostile(*EVERY),
    "equal names": equal_names,
    "moving lists": moving_lists,
    "in place": in_place,
    "rotation": rotation,
    "saver killed": killed,
    "process killed": killed_process,
    "two jobs": two_jobs,
    "local results": local_results,
}


def run(cloud: Cloud, number: int, dice: random.Random) -> Row:
    """Run one history, and return its row."""
    kind, began = list(KINDS)[number % len(KINDS)], time.monotonic()
    row: Row = {"kind": kind, "s": 0.0, "ok": True}
    with (
        tempfile.TemporaryDirectory() as top,
        contextlib.closing(LocalBucket(cloud, Path(top, "nodes"))) as bucket,
    ):
        nodes = dice.choice((1, 1, 2))
        clients = (
            Client(Path(top, "keyed"), bucket, has_key=True, nodes=nodes),
            Client(Path(top, "keyless"), bucket, has_key=False, nodes=nodes),
        )
        keyed = clients[0].session
        job = Job(bucket, dice, derive_signing_secret(keyed, JOB), nodes=nodes)
        writer = Writer(job, lambda name: derive_signing_secret(keyed, name))
        history = History(job, writer, clients, Path(top), row)
        try:
            KINDS[kind](history)
        except Exception as error:
            row |= {"ok": False, "wrong": f"{type(error).__name__}: {error}"[:500]}
        row["did"] = dict(writer.did)
        row["refused"] = [client.refused for client in clients]
    row["s"] = round(time.monotonic() - began, 1)
    return row


class LocalBucket(Bucket):
    """A bucket of the local cloud whose stores share botocore's service descriptions."""

    def store(self) -> Store:
        session, info = _session(self.cloud.info.access_key_id), self.cloud.info
        session.set_credentials(info.access_key_id, info.secret_access_key)
        return Store(region=info.region, endpoint=info.endpoint, session=session)

    def close(self) -> None:
        self.metadata.server.shutdown()


@cache
def _session(_: str) -> botocore.session.Session:
    """Return one botocore session per cloud, which reads the descriptions of the services once."""
    return botocore.session.Session()


def table(rows: list[Row]) -> str:
    """Return a table with the histories, successes, acts and refused reads per kind."""
    lines = [f"{'kind':18} {'runs':>5} {'ok':>5} {'acts':>5} {'refused':>8}"]
    for kind in KINDS:
        some = [row for row in rows if row["kind"] == kind]
        acts = sum(sum(row["did"].values()) for row in some)
        refused = sum(sum(row["refused"]) for row in some)
        ok = sum(row["ok"] for row in some)
        lines.append(f"{kind:18} {len(some):5} {ok:5} {acts:5} {refused:8}")
    return "\n".join(lines)


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=200)
    parser.add_argument("--parallel", type=int, default=2, help="the number of histories at the same time")
    args = parser.parse_args()
    with records() as cloud:
        return campaign(
            args, lambda number, dice: run(cloud, number, dice), parallel=args.parallel, table=table
        )


if __name__ == "__main__":
    sys.exit(min(main(), 1))
