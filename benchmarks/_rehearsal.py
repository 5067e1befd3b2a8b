"""A local cloud for the length of a benchmark, and `awsddp` on it."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Rehearsal:
    """A home with a local cloud of its own, and an empty folder to start `awsddp` in.

    `tree` is the checkout whose awsddp runs; without it the installed one does.
    """

    def __init__(self, root: Path, *, tree: Path | None = None) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AWSDDP_"))}
        kept = {key: os.environ[key] for key in ("AWSDDP_CACHE",) if key in os.environ}
        self.environ = clean | kept | {"AWSDDP_HOME": str(root / "home"), "AWS_EC2_METADATA_DISABLED": "true"}
        if tree is not None:
            self.environ["PYTHONPATH"] = str(tree)

    def run(self, *words: str, **environ: str) -> str:
        """Carry `awsddp` out and return its stdout."""
        with self.started(*words, **environ) as process:
            told, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        return told

    def started(self, *words: str, **environ: str) -> "subprocess.Popen[str]":
        """Return `awsddp`, just started; its stdout is a pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "awsddp", *words],
            cwd=self.project,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def keys(self) -> dict[str, str]:
        """Return the variables with which any EC2 client reaches the local cloud."""
        known: dict[str, Any] = json.loads(self.run("local", "status", "--json"))
        return {
            "AWS_ENDPOINT_URL": known["endpoint"],
            "AWS_DEFAULT_REGION": known["region"],
            "AWS_ACCESS_KEY_ID": known["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": known["secret_access_key"],
            "NO_PROXY": "127.0.0.1",
        }

    def client(self, service: str) -> Any:
        """Return boto3's client of a service of the local cloud."""
        import boto3

        keys = self.keys()
        return boto3.client(
            service,
            endpoint_url=keys["AWS_ENDPOINT_URL"],
            region_name=keys["AWS_DEFAULT_REGION"],
            aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        )


@contextlib.contextmanager
def rehearsal(*start: str, tree: Path | None = None) -> Iterator[Rehearsal]:
    """Yield a local cloud, started with the words `start`; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="awsddp-bench-") as folder:
        made = Rehearsal(Path(folder), tree=tree)
        made.run("local", "start", *start)
        try:
            yield made
        finally:
            made.run("local", "stop")
