"""A job in S3 as its nodes save it (docs/saving.md), made from the content of its files.

    job = SavedJob({"node0/run/model.pt": b"weights"}, checkpoint="run/model.pt")
    job.put(store, uri)                     # uri ends with the job's name

A test may change everything before `put`: `rows` and `links` by home, `nodes[K]` (nodeK.json) and `index`
(job.json) without the fields that `put` adds, `checkpoint` (a name, or None) and `of_checkpoint` (its rows),
`objects` by key. With `secret` the documents are signed. `put` may be called again.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from awsddp.agent.manifest import sample
from awsddp.agent.s3.store import SIGNATURE, S3Uri, Store, signature

PAGE_ROWS = 1000


class SavedJob:
    """The objects of a saved job."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        job: str = "first",
        state: str = "succeeded",
        launch: str = "launch-1",
        checkpoint: str | None = None,
        secret: str | None = None,
    ) -> None:
        matches = (re.match(r"node(\d+)/", home) for home in files)
        nodes = sorted({int(match[1]) for match in matches if match} | {0})
        machines = [{"node": node, "instance_id": f"i-{node}"} for node in nodes]
        ranks = [
            {"rank": node, "node": node, "local_rank": 0, "exit_code": 0, "seconds": 1.0} for node in nodes
        ]
        of_job = {"job": job, "node": 0, "state": state, "cause": None, "complete": True}
        document = {**of_job, "created": "2026-01-01T00:00:00Z", "ranks": ranks, "nodes": machines}
        self.index: dict[str, Any] = {
            "job": job,
            "save": 2,
            "launch": launch,
            "by": "i-0",
            "state": state,
            "nodes": nodes,
            "facts": {},
            "document": document,
        }
        node = {"launch": launch, "look": 1, "pending": [], "pending_files": 0, "ended": True, "error": ""}
        self.nodes: dict[int, dict[str, Any]] = {number: {"node": number, **node} for number in nodes}
        self.objects = dict(files)
        self.rows = {home: make_row(home, body) for home, body in files.items()}
        self.links: dict[str, str] = {}
        self.checkpoint, self.secret = checkpoint, secret
        self.of_checkpoint = {
            home: dict(self.rows[home])
            for home in files
            if checkpoint and f"{home.partition('/')[2]}/".startswith(f"{checkpoint}/")
        }

    def grow(self, home: str, body: bytes, *, part_bytes: int = 4) -> None:
        """Add a file that grows: each part is longer in S3 than in the list."""
        parts = []
        for at in range(0, len(body), part_bytes):
            data, key = body[at : at + part_bytes], f"parts/{home}/{at:015}"
            self.objects[key] = data + b"more"
            parts.append([key, len(data), "as it was", hashlib.sha256(data).hexdigest()])
        self.rows[home] = {**make_row(home, body), "parts": parts}

    def put(self, store: Store, uri: S3Uri) -> None:
        """Upload all objects, the documents last."""
        for key, body in self.objects.items():
            store.put(uri, key, body)
        for node, document in self.nodes.items():
            rows = {home: row for home, row in self.rows.items() if self._node(home) == node}
            links = {home: target for home, target in self.links.items() if self._node(home) == node}
            pages = self._pages(store, uri, f"lists/node{node}", rows, links)
            self._document(store, uri, f"node{node}.json", {**document, "pages": pages})
        checkpoint = None
        if self.checkpoint is not None:
            pages = self._pages(store, uri, "lists/checkpoint", self.of_checkpoint, {})
            checkpoint = {"name": self.checkpoint, "modified": 1, "pages": pages}
        self._document(store, uri, "job.json", {"checkpoint": checkpoint, **self.index})

    def _node(self, home: str) -> int:
        """Return the node that lists a home: the one in its name, else the first."""
        match = re.match(r"node(\d+)/|logs/rank(\d+)", home)
        node = int(match[1] or match[2]) if match else 0
        return node if node in self.nodes else min(self.nodes)

    def _pages(
        self, store: Store, uri: S3Uri, key: str, rows: Mapping[str, Any], links: Mapping[str, str]
    ) -> list[list[Any]]:
        homes, refs = list(rows), []
        for number, at in enumerate(range(0, max(1, len(homes)), PAGE_ROWS)):
            page = {"files": {home: rows[home] for home in homes[at : at + PAGE_ROWS]}}
            body = json.dumps({**page, "links": links if not at else {}}).encode()
            refs.append([f"{key}-{number}", len(body), store.put(uri, f"{key}-{number}", body)])
        return refs

    def _document(self, store: Store, uri: S3Uri, name: str, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        options = {}
        if self.secret is not None:
            options["Metadata"] = {SIGNATURE: signature(self.secret, document["launch"], name, body)}
        store.put(uri, name, body, **options)


def make_row(home: str, body: bytes, *, key: str = "", modified: int = 1) -> dict[str, Any]:
    """Return the row of a file that is one object; its ETag is the MD5 sum, as in S3 for small objects."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(body)
        digest = sample(path, len(body))
    parts = [[key or home, len(body), hashlib.md5(body).hexdigest(), ""]]
    return {"size": len(body), "modified": modified, "stamp": [modified, 1], "sample": digest, "parts": parts}
