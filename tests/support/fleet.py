"""Nodes on one machine, each with a home and a loopback address, that run the agent's program as sent."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from awsddp.agent import messages as requests
from awsddp.agent.job_folder import JobFolder
from awsddp.agent.messages import Launch, Request
from awsddp.agent_client import calls, launch_requests, program
from awsddp.agent_client.job_reports import merge_job
from awsddp.agent_client.logs import Merger
from awsddp.agent_client.rank_layout import Host, Rank, layout_ranks
from awsddp.model import node_answers
from awsddp.model.records import JobRecord, Node, PreparedNode
from awsddp.settings.spec import JobSection, JobSpec
from tests.support.waiting import until

Answer = TypeVar("Answer")
NODE_PYTHON = os.environ.get("AWSDDP_TEST_NODE_PYTHON", sys.executable)


def make_node(number: int) -> Node:
    """Return the record of a running node."""
    return Node(
        node=number,
        instance_id=f"i-{number}",
        state="running",
        instance_type="p4d.24xlarge",
        zone="us-east-1a",
        image_id="ami-1",
    )


def make_prepared_node(number: int, **fields: Any) -> PreparedNode:
    """Return the prepared record of the node of `node_of`, with changed fields."""
    usual = {"home": "/home/ubuntu", "python": "python", "nic": "ens5"}
    return PreparedNode(node=number, instance_id=f"i-{number}", **{**usual, **fields})


def make_launch(node: int = 0, **fields: Any) -> Launch:
    """Return the launch request of a job without processes on nodes 0 and 1, one rank per node."""
    usual = {
        "job": "job",
        "launch": "l",
        "slot": 0,
        "created": "",
        "node": node,
        "nodes": [{"node": n, "private_ip": "127.0.0.1", "instance_id": f"i-{n}"} for n in (0, 1)],
        "layout": [[0, 0, 0], [1, 0, 1]],
        "folder": "",
        "workdir": "",
        "path": "",
        "processes": [],
        "secret": "s",
        "master_port": 0,
        "link_port": 0,
        "join_s": 60.0,
        "silent_s": 5.0,
        "timeout": None,
        "grace": 30.0,
        "outputs": [],
        "defaults": {},
    }
    return Launch.from_json({**usual, **fields})


class Fleet:
    """Nodes 0 to count-1, and the jobs on them."""

    def __init__(self, top: Path, count: int) -> None:
        self.top = top
        self.port = free_ports()
        self.homes = [top / f"home{node}" for node in range(count)]
        self.workdirs = [home / "my project" for home in self.homes]
        address = f"127.{secrets.randbelow(200) + 10}.{secrets.randbelow(250)}"
        self.hosts = [
            Host(
                node=replace(make_node(node), private_ip=f"{address}.{node + 1}"),
                prepared=make_prepared_node(
                    node, home=str(self.homes[node]), python=sys.executable, nic="lo"
                ),
                workdir=str(self.workdirs[node]),
            )
            for node in range(count)
        ]
        for folder in self.workdirs:
            folder.mkdir(parents=True)
        self.ranks: tuple[Rank, ...] = ()
        self.jobs: list[str] = []
        self.environment: dict[str, str] = {}

    def write(self, name: str, text: str) -> None:
        """Write a file into the project folder of every node."""
        for folder in self.workdirs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    def start(
        self, node: int, *requests: Request[Any] | bytes, close: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start the agent's program with requests on its stdin, as SSH would; `close` ends the stdin."""
        messages = [item if isinstance(item, bytes) else calls.encode_request(item) for item in requests]
        argv, stdin = program.agent_program()
        process = subprocess.Popen(
            [NODE_PYTHON, *argv[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.homes[node],
            env={"PATH": os.environ["PATH"], "HOME": str(self.homes[node]), **self.environment},
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(stdin + b"".join(messages))
        process.stdin.flush()
        if close:
            process.stdin.close()
            process.stdin = None
        return process

    def send_request(self, node: int, request: Request[Answer]) -> Answer:
        """Send a request and return its answer."""
        out, err = self.start(node, request).communicate(timeout=90)
        return calls.parse_response(out, request=request, node=node, stderr=err)

    def requests(self, script: str, *, job: str = "job", slot: int = 0, **settings: Any) -> dict[int, Launch]:
        """Return the launch request of each node for `script` (a file, or its text), two ranks per node."""
        if "\n" in script:
            self.write(f"{job}.py", script)
            script = f"{job}.py"
        world_size = settings.pop("world_size", None)
        env = {key: settings.pop(key) for key in ("variables", "secrets") if key in settings}
        self.ranks = layout_ranks(range(len(self.hosts)), gpus=0, world_size=world_size)
        section = replace(JobSection(script=script), **settings)
        spec = replace(JobSpec(job=section), env=replace(JobSpec().env, **env))
        with patch.object(
            launch_requests, "FIRST_PORT", self.port - 10 * slot
        ):  # the hosts share the ports of a machine
            return launch_requests.make_launch_requests(
                spec, job=job, ranks=self.ranks, hosts=self.hosts, slot=slot
            )

    def launch(self, script: str, *, job: str = "job", **settings: Any) -> None:
        """Launch a job on all nodes at once."""
        self.jobs.append(job)
        requests = self.requests(script, job=job, **settings)
        running = {node: self.start(node, request) for node, request in requests.items()}
        for node, process in running.items():
            request = requests[node]
            out, err = process.communicate(timeout=60)
            calls.parse_response(out, request=request, node=node, stderr=err)

    def document(self, node: int, job: str = "job") -> dict[str, Any]:
        """Return the job document of a node, read in this process, as a request starts another process."""
        return JobFolder(job, self.folder(node, job)).document().to_json()

    def node_job(self, node: int, job: str = "job") -> node_answers.NodeJob:
        """Return the job document of a node as a client parses it."""
        return node_answers.convert_answer(self.document(node, job), node_answers.NodeJob)

    def wait(self, job: str = "job", *, nodes: list[int] | None = None, seconds: float = 60) -> JobRecord:
        """Return the job when it is over on all nodes."""
        chosen = list(range(len(self.hosts))) if nodes is None else nodes
        until(lambda: all(self.document(node, job)["state"] != "running" for node in chosen), seconds=seconds)
        return merge_job({node: self.node_job(node, job) for node in chosen})

    def run(self, script: str, **settings: Any) -> JobRecord:
        """Launch a job and return it when it is over."""
        self.launch(script, **settings)
        return self.wait(self.jobs[-1])

    def log(self, rank: int, job: str = "job") -> bytes:
        """Return the log of a rank."""
        node = next(entry.node for entry in self.ranks if entry.rank == rank)
        return (self.folder(node, job) / "logs" / f"rank{rank}.log").read_bytes()

    def ranks_are_up(self) -> bool:
        """Return True if the log of every rank contains "up"."""
        return all(
            self.folder(rank.node).joinpath("logs", f"rank{rank.rank}.log").exists()
            and b"up" in self.log(rank.rank)
            for rank in self.ranks
        )

    def folder(self, node: int, job: str = "job") -> Path:
        return self.homes[node] / ".awsddp" / "jobs" / job

    def follow(self, merger: Merger, node: int, job: str = "job") -> bytes:
        """Follow a job on a node to its end and return the lines for the client."""
        request = requests.Follow(job=job, offsets=merger.attach(node), tail=merger.tail)
        process = self.start(node, request)
        assert process.stdout is not None
        lines = b""
        while data := os.read(process.stdout.fileno(), 100_000):
            lines += merger.feed(node, data)
        process.communicate(timeout=10)
        return lines

    def processes(self) -> list[int]:
        """Return the pid of every process of the fleet's jobs, without their supervisors."""
        return [
            pid
            for pid, environ, line in all_processes()
            if any(str(home).encode() in environ for home in self.homes) and b"-I" not in line[1:2]
        ]

    def supervisors(self, node: int) -> list[int]:
        """Return the pids of the supervisors of a node, and of their guards."""
        home = f"HOME={self.homes[node]}".encode()
        return [
            pid for pid, environ, line in all_processes() if home in environ.split(b"\0") and b"-I" in line
        ]

    def end(self) -> None:
        """Kill the processes that a failed test left."""
        for pid in self.processes() + [
            pid for node in range(len(self.homes)) for pid in self.supervisors(node)
        ]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def all_processes() -> Iterator[tuple[int, bytes, list[bytes]]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z":
                yield (
                    int(folder.name),
                    (folder / "environ").read_bytes(),
                    (folder / "cmdline").read_bytes().split(b"\0"),
                )
        except OSError:
            continue


def free_ports() -> int:
    """Return a free port whose successor is free, too, outside the kernel's range for connections."""
    while True:
        port = 12_000 + secrets.randbelow(16_000)
        with socket.socket() as first, socket.socket() as second, contextlib.suppress(OSError):
            first.bind(("", port))
            second.bind(("", port + 1))
            return port


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[[int], Fleet]]:
    """A function that makes a fleet of so many nodes; their processes end with the test."""
    fleets: list[Fleet] = []

    def make(count: int) -> Fleet:
        fleets.append(Fleet(tmp_path / f"fleet{len(fleets)}", count))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.end()
        for log in fleet.top.glob("home*/.awsddp/jobs/*/supervisor.log"):
            sys.stdout.write(f"{log}: {log.read_text()}\n")  # pytest shows it if the test failed


@pytest.fixture
def fleet(make_fleet: Callable[[int], Fleet]) -> Fleet:
    """A fleet of two nodes."""
    return make_fleet(2)
