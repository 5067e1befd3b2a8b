"""What cannot be met, on real SSH hosts: each is named, ends in time, and is exit 6."""

import dataclasses
import http.server
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from awsddp.errors import ConfigError, NodeError
from awsddp.plan.environment import EnvironmentPlan, make_environment_plan
from awsddp.plan.indexes import Indexes
from awsddp.settings.spec import EnvSection
from tests.nodes.test_environments import PLAN, imported, index, made, python
from tests.support.seed import drawn
from tests.support.ssh_hosts import Lab
from tests.support.wheels import torch_text, wheel

__all__ = ["index", "python"]
pytestmark = pytest.mark.prove
MakeLab = Callable[[int], Lab]
VENV = dataclasses.replace(PLAN, kind="venv", torch=("torch==2.13.*", "torchvision==0.28.*"))
BOUND_S = 300
WAYS = list(itertools.product(["client", "node"], ["image", "venv"]))


def refused(here: Lab, plan: EnvironmentPlan, python: str, words: str) -> NodeError:
    """Return the error with which an environment is refused, in time, by its words."""
    began = time.monotonic()
    with pytest.raises(NodeError, match=words) as caught:
        made(here, plan, python)
    assert (caught.value.exit_code, time.monotonic() - began < BOUND_S) == (6, True)
    return caught.value


@pytest.fixture
def uv(index: Path) -> str:
    """The real uv, which each node has; of what the client sends it is a name only."""
    wheel(index, "torch", "2.13.0", text=torch_text("2.13.0"))
    wheel(index, "torchvision", "0.28.0", requires=("torch",))
    wheel(index, "uv")
    found = shutil.which("uv", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("uv is not installed: pip install -e '.[dev]'")
    return found


@pytest.mark.parametrize(("packages_from", "kind"), drawn(WAYS, 1, what="unmet requirement"))
def test_a_requirement_that_cannot_be_met(
    lab: MakeLab, index: Path, python: str, uv: str, kind: str, packages_from: str
) -> None:
    here = lab(1)
    here.hosts[0].script("uv", f'#!/bin/sh\nexec {uv} "$@"\n')
    own = Indexes(no_index=True, find_links=(str(index),)) if packages_from == "node" else Indexes()
    of = VENV if kind == "venv" else PLAN
    plan = dataclasses.replace(of, lines=("small>=7",), packages_from=packages_from, indexes=own, python=None)
    if kind == "venv" and packages_from == "node":
        plan = dataclasses.replace(plan, python=".".join(map(str, sys.version_info[:2])))
    with pytest.raises(ConfigError, match=r"requirements\.txt: small>=7 cannot be met"):
        made(here, plan, python)


def test_an_index_that_is_not_there(lab: MakeLab, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    indexes = Indexes(index_url="http://127.0.0.1:9/simple")
    here = lab(1)
    for place in ("client", "node"):
        plan = dataclasses.replace(PLAN, packages_from=place, indexes=indexes)
        refused(here, plan, python, "the package index does not answer")


@pytest.fixture
def patient(lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A node; pip waits for 3 s on both sides, by its own settings. Without them it waits for 15 s."""
    here = lab(1)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "3")
    (here.hosts[0].home / ".config/pip").mkdir(parents=True)
    (here.hosts[0].home / ".config/pip/pip.conf").write_text("[global]\ntimeout = 3\n")
    return here


@pytest.mark.prove
@pytest.mark.parametrize(("packages_from", "kind"), drawn(WAYS, 2, what="silent index"))
def test_an_index_that_accepts_connections_and_never_answers(
    patient: Lab, python: str, kind: str, packages_from: str
) -> None:
    here = patient
    uv = Path(sys.executable).with_name("uv")
    here.hosts[0].script("uv", f'#!/bin/sh\nUV_HTTP_TIMEOUT=3 UV_HTTP_RETRIES=1 exec {uv} "$@"\n')
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:  # the kernel accepts
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        plan = dataclasses.replace(PLAN, packages_from=packages_from, indexes=Indexes(index_url=url))
        if kind == "venv":
            own = ".".join(map(str, sys.version_info[:2]))
            torch = ("torch==2.13.*", "--index-url", url)
            plan = dataclasses.replace(plan, kind="venv", torch=torch, python=own)
        refused(here, plan, python, "the package index does not answer")


@pytest.mark.prove
@pytest.mark.parametrize("packages_from", drawn(["client", "node"], 1, what="slow index"))
def test_an_index_that_is_slow_and_answers_is_waited_for(
    patient: Lab, index: Path, python: str, monkeypatch: pytest.MonkeyPatch, packages_from: str
) -> None:
    """All of it takes longer than pip waits for a word."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with slow_index(index) as url:
        indexes = Indexes(index_url=url)
        plan = dataclasses.replace(PLAN, lines=("tiny",), packages_from=packages_from, indexes=indexes)
        began = time.monotonic()
        found = made(patient, plan, python)[0]
    assert time.monotonic() - began > 4
    assert imported(found.python, "import tiny; print(tiny.VERSION)") == "1.0"


@contextmanager
def slow_index(folder: Path) -> Iterator[str]:
    """Serve wheels, each answer in four pieces with a second between them."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = folder / Path(self.path).name
            named = file.name.replace("-", "_")
            links = (f'<a href="/{one.name}">{one.name}</a>' for one in folder.glob(f"{named}-*"))
            body = file.read_bytes() if file.is_file() else "".join(links).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            size = len(body) // 4 + 1
            for start in range(0, len(body), size):
                time.sleep(1)
                self.wfile.write(body[start : start + size])

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()


def test_a_python_that_does_not_exist(lab: MakeLab, index: Path, python: str, uv: str) -> None:
    here = lab(1)
    here.hosts[0].script("uv", f'#!/bin/sh\nUV_PYTHON_DOWNLOADS=never exec {uv} "$@"\n')
    for place in ("client", "node"):
        plan = dataclasses.replace(VENV, python="3.99", packages_from=place)
        refused(here, plan, python, "Python version not found")


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk is root's to make")
def test_a_full_disk(lab: MakeLab, index: Path, python: str) -> None:
    here = lab(2)
    wheel(index, "large", text=f"DATA = {os.urandom(300_000)!r}\n")
    plan = dataclasses.replace(PLAN, lines=("large",))
    with small_disk(here.hosts[1].home / "awsddp/env"):
        error = refused(here, plan, python, "a disk is full")
        assert "node1" in error.message and "disk_gb" in error.next
    assert imported(made(here, plan, python)[1].python, "import large; print(large.VERSION)") == "1.0"


def test_a_venv_has_a_torch_of_its_own_and_the_projects_packages(
    lab: MakeLab, index: Path, python: str, uv: str
) -> None:
    here = lab(2)
    for host in here.hosts:
        host.script("uv", f'#!/bin/sh\necho "$@" >> \'{host.root}/uv.log\'\nexec {uv} "$@"\n')
    for one in made(here, VENV, python).values():
        assert (
            imported(one.python, "import small, tiny, torchvision, torch; print(torch.__version__)")
            == "2.13.0"
        )
        assert one.python is not None and "/awsddp/env/" in one.python
    calls = (here.hosts[1].root / "uv.log").read_text().splitlines()
    assert [words.split()[:2] for words in calls] == [
        ["venv", "--no-project"],
        ["pip", "install"],
        ["pip", "install"],
    ]
    assert all("--no-index" in words for words in calls[1:]), "nothing is fetched by the node"


def test_the_torch_of_a_venv_comes_from_the_wheels_or_the_index_of_the_settings(
    lab: MakeLab, index: Path, python: str, uv: str, tmp_path: Path
) -> None:
    here = lab(1)
    host = here.hosts[0]
    (host.home / "uv.toml").write_text("no-index = true\n")
    host.script("uv", f'#!/bin/sh\nUV_CONFIG_FILE="$HOME/uv.toml" exec {uv} "$@"\n')
    own = ".".join(map(str, sys.version_info[:2]))
    file = tmp_path / "requirements.txt"
    file.write_text(f"--find-links {index}\n")
    env = EnvSection(kind="venv", python=own, file=str(file))
    found = made(here, make_environment_plan(env, internet=True, driver=None), python)[0]
    assert found.facts["torch"] == "2.13.0"
