"""A cluster of two nodes of the local cloud, shared by the tests that do not change it."""

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from awsddp.local import control, image
from tests.support import quick_start, schema
from tests.support.advice_lines import parse_commands
from tests.support.terminal import Story, Terminal


def next_steps(document: Any) -> Iterator[str]:
    """Yield every `next` of a document."""
    if isinstance(document, dict) and isinstance(document.get("next"), str):
        yield document["next"]
    inner = (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    )
    for value in inner:
        yield from next_steps(value)


class Lab:
    """A separate awsddp home with a local cloud, and folders to start `awsddp` in."""

    def __init__(self, root: Path) -> None:
        make_ready()
        self.root = root
        self.home = root / "home"
        self.project = root / "project"
        self.project.mkdir(parents=True)
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "AWSDDP_", "SSH_"))
        }
        cache = {key: os.environ[key] for key in ("AWSDDP_CACHE",) if key in os.environ}
        self.environ = (
            clean
            | cache
            | {
                "HOME": str(root),
                "AWSDDP_HOME": str(self.home),
                "AWS_CONFIG_FILE": str(root / "none"),
                "AWS_SHARED_CREDENTIALS_FILE": str(root / "none"),
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        )

    def run(
        self, *words: str, timeout: float = 170, cwd: Path | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run `awsddp` and return its output and exit code; check every JSON document and its next steps."""
        try:
            shown = quick_start.run(
                words, cwd=cwd or self.project, env=self.environ, text=stdin, timeout=timeout
            )
            if "--json" in words and shown.stdout.startswith(("{", "[")):
                document = json.loads(shown.stdout)
                schema.check(document, *words)
                for text in next_steps(document):
                    parse_commands(text)
            return shown
        except subprocess.TimeoutExpired as late:
            cloud = self.home / "local"
            logs = [*cloud.glob("daemon.log"), *cloud.glob("nodes/*/console.log")]
            outputs = [late.stdout or b"", late.stderr or b"", *(log.read_bytes()[-4000:] for log in logs)]
            pytest.fail("\n".join([str(late), *(text.decode(errors="replace") for text in outputs)]))

    def json(self, *words: str, code: int = 0, cwd: Path | None = None) -> dict[str, Any]:
        """Start `awsddp --json` and return its document."""
        shown = self.run(*words[:1], "--json", *words[1:], cwd=cwd)
        assert shown.returncode == code, shown.stderr + shown.stdout
        document: dict[str, Any] = json.loads(shown.stdout)
        return document

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs that the cluster's nodes report, the oldest first."""
        return [job for job in self.json("jobs")["jobs"] if job["reported"]]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start `awsddp` and return at once."""
        return subprocess.Popen(
            [sys.executable, "-m", "awsddp", *words],
            cwd=self.project,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def script(self, name: str, text: str) -> None:
        """Write a script into the project."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def close(self) -> None:
        """Stop the local cloud."""
        control.stop(self.home)


@functools.cache
def make_ready() -> None:
    """Restore signals that a shell ignores in the background, so that clients receive them; install the
    nodes' torch if it is missing, so that no command of a test reports the installation.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    image.ensure_torch("nspawn" if os.geteuid() == 0 else "loopback")


@pytest.fixture(scope="session", autouse=True)
def ready() -> None:
    """Prepare this machine also for tests that start clients without a lab."""
    make_ready()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab without a cluster."""
    made = Lab(tmp_path / "lab")
    yield made
    made.close()


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose local cloud has no hosts, only records, so that clusters start and end within a second."""
    made = Lab(tmp_path_factory.mktemp("records"))
    assert made.run("local", "start", "--no-hosts").returncode == 0
    yield made
    made.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab whose cluster `default` has two ready nodes, without GPUs, so that ranks start fast."""
    made = Lab(tmp_path_factory.mktemp("lab"))
    shown = made.run("up", "--local", "--nodes", "2", "-y", "-o", "local.gpus=off")
    try:
        assert shown.returncode == 0, shown.stderr
        yield made
        ended = made.run("down", "-y")
        assert ended.returncode == 0, ended.stderr
    finally:
        made.close()


@pytest.fixture
def story(lab: Lab) -> Story:
    """A user at a terminal, with an empty project and a separate awsddp home."""
    return Story(Terminal(lab.project, lab.environ))


@pytest.fixture
def says(record_property: Callable[[str, object], None]) -> Callable[[str, Story], None]:
    """A function that adds the count of a story to the summary of the test run."""

    def add(who: str, story: Story) -> None:
        record_property("says", f"{who}: {story.report().splitlines()[0]}")

    return add
