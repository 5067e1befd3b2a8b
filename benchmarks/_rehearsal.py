"""Start a local cloud for a benchmark, and run `awsddp` in it."""

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
    """An awsddp home with a separate local cloud, and an empty project folder.

    `tree` is the checkout whose awsddp runs; the default is the installed awsddp.
    """

    def __init__(self, root: Path, *, tree: Path | None = None) -> None:
        self.root = root
        self.project = root / "project"
        self.project.mkdir()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AWSDDP_"))}
        cache = {key: os.environ[key] for key in ("AWSDDP_CACHE",) if key in os.environ}
        home = {"AWSDDP_HOME": str(root / "home"), "AWS_EC2_METADATA_DISABLED": "true"}
        self.environ = clean | cache | home
        if tree is not None:
            self.environ["PYTHONPATH"] = str(tree)

    def run(self, *words: str, **environ: str) -> str:
        """Run `awsddp` and return its stdout."""
        with self.started(*words, **environ) as process:
            output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        return output

    def started(
        self, *words: str, process_group: int | None = None, **environ: str
    ) -> "subprocess.Popen[str]":
        """Start `awsddp` and return its process; stdout is a pipe. `process_group` is that of Popen."""
        return subprocess.Popen(
            [sys.executable, "-m", "awsddp", *words],
            cwd=self.project,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=process_group,
        )

    def keys(self) -> dict[str, str]:
        """Return the environment variables with which an EC2 client connects to the local cloud."""
        status: dict[str, Any] = json.loads(self.run("local", "status", "--json"))
        return {
            "AWS_ENDPOINT_URL": status["endpoint"],
            "AWS_DEFAULT_REGION": status["region"],
            "AWS_ACCESS_KEY_ID": status["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": status["secret_access_key"],
            "NO_PROXY": "127.0.0.1",
        }

    def client(self, service: str) -> Any:
        """Return a boto3 client for a service of the local cloud."""
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
    """Yield a Rehearsal whose local cloud was started with the options `start`; stop the cloud afterwards."""
    with tempfile.TemporaryDirectory(prefix="awsddp-bench-") as folder:
        lab = Rehearsal(Path(folder), tree=tree)
        lab.run("local", "start", *start)
        try:
            yield lab
        finally:
            lab.run("local", "stop")
