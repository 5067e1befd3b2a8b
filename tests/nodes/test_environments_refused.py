"""Environments that cannot be built on real SSH hosts: a timely error with the cause, and exit code 6."""

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
from tests.nodes.test_environments import PLAN, build_envs, index, python, run_python
from tests.support.seed import draw_cases
from tests.support.ssh_hosts import Lab
from tests.support.wheels import torch_text, write_wheel

__all__ = ["index", "python"]
pytestmark = pytest.mark.prove
MakeLab = Callable[[int], Lab]
VENV = dataclasses.replace(PLAN, kind="venv", torch=("torch==2.13.*", "torchvision==0.28.*"))
LIMIT_S = 300
CASES = list(itertools.product(["client", "node"], ["image", "venv"]))


def expect_refusal(lab: Lab, plan: EnvironmentPlan, python: str, pattern: str) -> NodeError:
    """Build an environment, and return its error, which must match and arrive in time."""
    start = time.monotonic()
    with pytest.raises(NodeError, match=pattern) as error:
        build_envs(lab, plan, python)
    assert (error.value.exit_code, time.monotonic() - start < LIMIT_S) == (6, True)
    return error.value


@pytest.fixture
def uv(index: Path) -> str:
    """The real uv, which each node has; the uv wheel that the client sends is empty."""
    write_wheel(index, "torch", "2.13.0", text=torch_text("2.13.0"))
    write_wheel(index, "torchvision", "0.28.0", requires=("torch",))
    write_wheel(index, "uv")
    path = shutil.which("uv", path=str(Path(sys.executable).parent))
    if path is None:
        pytest.skip("uv is not installed: pip install -e '.[dev]'")
    return path


@pytest.mark.parametrize(("packages_from", "kind"), draw_cases(CASES, 1, label="unmet requirement"))
def test_unmet_requirement_is_named(
    make_lab: MakeLab, index: Path, python: str, uv: str, kind: str, packages_from: str
) -> None:
    lab = make_lab(1)
    lab.hosts[0].script("uv", f'#!/bin/sh\nexec {uv} "$@"\n')
    indexes = Indexes(no_index=True, find_links=(str(index),)) if packages_from == "node" else Indexes()
    base = VENV if kind == "venv" else PLAN
    plan = dataclasses.replace(
        base, lines=("small>=7",), packages_from=packages_from, indexes=indexes, python=None
    )
    if kind == "venv" and packages_from == "node":
        plan = dataclasses.replace(plan, python=".".join(map(str, sys.version_info[:2])))
    with pytest.raises(ConfigError, match=r"requirements\.txt: small>=7 cannot be met"):
        build_envs(lab, plan, python)


def test_absent_index_is_reported(make_lab: MakeLab, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    indexes = Indexes(index_url="http://127.0.0.1:9/simple")
    lab = make_lab(1)
    for packages_from in ("client", "node"):
        plan = dataclasses.replace(PLAN, packages_from=packages_from, indexes=indexes)
        expect_refusal(lab, plan, python, "the package index does not answer")


@pytest.fixture
def impatient_lab(make_lab: MakeLab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A host; pip's timeout is set to 3 s on both machines (default: 15 s)."""
    lab = make_lab(1)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "3")
    (lab.hosts[0].home / ".config/pip").mkdir(parents=True)
    (lab.hosts[0].home / ".config/pip/pip.conf").write_text("[global]\ntimeout = 3\n")
    return lab


@pytest.mark.prove
@pytest.mark.parametrize(("packages_from", "kind"), draw_cases(CASES, 2, label="silent index"))
def test_index_that_never_answers_is_reported(
    impatient_lab: Lab, python: str, kind: str, packages_from: str
) -> None:
    uv = Path(sys.executable).with_name("uv")
    impatient_lab.hosts[0].script("uv", f'#!/bin/sh\nUV_HTTP_TIMEOUT=3 UV_HTTP_RETRIES=1 exec {uv} "$@"\n')
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:  # the kernel accepts
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        plan = dataclasses.replace(PLAN, packages_from=packages_from, indexes=Indexes(index_url=url))
        if kind == "venv":
            version = ".".join(map(str, sys.version_info[:2]))
            torch = ("torch==2.13.*", "--index-url", url)
            plan = dataclasses.replace(plan, kind="venv", torch=torch, python=version)
        expect_refusal(impatient_lab, plan, python, "the package index does not answer")


@pytest.mark.prove
@pytest.mark.parametrize("packages_from", draw_cases(["client", "node"], 1, label="slow index"))
def test_slow_index_that_answers_is_waited_for(
    impatient_lab: Lab, index: Path, python: str, monkeypatch: pytest.MonkeyPatch, packages_from: str
) -> None:
    """The answer takes longer than pip's timeout, each piece less."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with serve_slowly(index) as url:
        indexes = Indexes(index_url=url)
        plan = dataclasses.replace(PLAN, lines=("tiny",), packages_from=packages_from, indexes=indexes)
        start = time.monotonic()
        env = build_envs(impatient_lab, plan, python)[0]
    assert time.monotonic() - start > 4
    assert run_python(env.python, "import tiny; print(tiny.VERSION)") == "1.0"


@contextmanager
def serve_slowly(folder: Path) -> Iterator[str]:
    """Serve wheels, each answer in four pieces with a second between them."""

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            file = folder / Path(self.path).name
            prefix = file.name.replace("-", "_")
            links = (f'<a href="/{path.name}">{path.name}</a>' for path in folder.glob(f"{prefix}-*"))
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


def test_missing_python_version_is_reported(make_lab: MakeLab, index: Path, python: str, uv: str) -> None:
    lab = make_lab(1)
    lab.hosts[0].script("uv", f'#!/bin/sh\nUV_PYTHON_DOWNLOADS=never exec {uv} "$@"\n')
    for packages_from in ("client", "node"):
        plan = dataclasses.replace(VENV, python="3.99", packages_from=packages_from)
        expect_refusal(lab, plan, python, "Python version not found")


@contextmanager
def mount_small_disk(path: Path) -> Iterator[None]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mount needs root")
def test_full_disk_is_reported_with_its_node(make_lab: MakeLab, index: Path, python: str) -> None:
    lab = make_lab(2)
    write_wheel(index, "large", text=f"DATA = {os.urandom(300_000)!r}\n")
    plan = dataclasses.replace(PLAN, lines=("large",))
    with mount_small_disk(lab.hosts[1].home / "awsddp/env"):
        error = expect_refusal(lab, plan, python, "a disk is full")
        assert "node1" in error.message and "disk_gb" in error.next
    assert run_python(build_envs(lab, plan, python)[1].python, "import large; print(large.VERSION)") == "1.0"


def test_venv_has_its_own_torch_and_the_packages_of_the_project(
    make_lab: MakeLab, index: Path, python: str, uv: str
) -> None:
    lab = make_lab(2)
    for host in lab.hosts:
        host.script("uv", f'#!/bin/sh\necho "$@" >> \'{host.root}/uv.log\'\nexec {uv} "$@"\n')
    for env in build_envs(lab, VENV, python).values():
        assert (
            run_python(env.python, "import small, tiny, torchvision, torch; print(torch.__version__)")
            == "2.13.0"
        )
        assert env.python is not None and "/awsddp/env/" in env.python
    calls = (lab.hosts[1].root / "uv.log").read_text().splitlines()
    assert [call.split()[:2] for call in calls] == [
        ["venv", "--no-project"],
        ["pip", "install"],
        ["pip", "install"],
    ]
    assert all("--no-index" in call for call in calls[1:]), "nothing is fetched by the node"


def test_torch_of_a_venv_comes_from_the_find_links_of_the_requirements(
    make_lab: MakeLab, index: Path, python: str, uv: str, tmp_path: Path
) -> None:
    lab = make_lab(1)
    host = lab.hosts[0]
    (host.home / "uv.toml").write_text("no-index = true\n")
    host.script("uv", f'#!/bin/sh\nUV_CONFIG_FILE="$HOME/uv.toml" exec {uv} "$@"\n')
    version = ".".join(map(str, sys.version_info[:2]))
    file = tmp_path / "requirements.txt"
    file.write_text(f"--find-links {index}\n")
    section = EnvSection(kind="venv", python=version, file=str(file))
    env = build_envs(lab, make_environment_plan(section, internet=True, driver=None), python)[0]
    assert env.facts["torch"] == "2.13.0"
