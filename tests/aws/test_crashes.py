"""Kills at every call: whatever `up` and `down` were doing, `up` finishes it and `down` leaves nothing.

The client is a process of its own (forked, so that it has its imports already) and is killed with SIGKILL:
before a call is sent, after its effect and before the reply, after the reply and before anything was written
down. Which calls there are is counted at run time.
"""

import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from moto_cloud import Cloud, Server

from awsddp import compat
from awsddp.aws.session import Aws
from awsddp.aws.waits import CLOCK
from awsddp.cluster import Target
from awsddp.spec import load
from awsddp.state import Folder
from awsddp.verbs.context import Context
from awsddp.verbs.down import down
from awsddp.verbs.up import up

Phase = Literal["before it is sent", "before the reply", "before it is written down"]
PHASES: tuple[Phase, ...] = ("before it is sent", "before the reply", "before it is written down")
SOME = 4
RECOVERIES = ("up", "down", "down without the folder", "down from another home")
KINDS = {
    "DescribeInstances": "Reservations",
    "DescribeSecurityGroups": "SecurityGroups",
    "DescribeKeyPairs": "KeyPairs",
    "DescribePlacementGroups": "PlacementGroups",
    "DescribeVolumes": "Volumes",
    "DescribeNetworkInterfaces": "NetworkInterfaces",
}


@dataclass(frozen=True)
class Kill:
    """The `nth` call of an operation, and when about it the client is killed."""

    operation: str
    nth: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.operation} {self.nth}, {self.phase}"


class Client:
    """`awsddp` on a machine: a home, and a cloud that it speaks to."""

    def __init__(self, home: Path, server: Server, nodes: int) -> None:
        self.home, self.server, self.nodes = home, server, nodes

    def context(self, home: Path | None = None) -> Context:
        asked = {
            "cluster.region": "us-east-1",
            "cluster.nodes": self.nodes,
            "cluster.instance_type": "g5.xlarge",
            "network.ssh_cidr": "203.0.113.7/32",
        }
        spec, job = load("demo", environ={}, overrides=asked)
        return Context(
            spec=spec, job=job, folder=Folder(home or self.home, "demo"), on_event=lambda event: None
        )

    def up(self) -> dict[str, Any]:
        return up(self.context(), confirm=lambda plan: None)

    def down(self, home: Path | None = None) -> dict[str, Any]:
        return down(self.context(home), confirm=lambda what: None)

    def calls(self, verb: Callable[[], object]) -> list[tuple[str, int]]:
        """Run a verb and return the calls that it made, each with how often it was made before."""
        self.server.cloud.requests.clear()
        verb()
        counted: Counter[str] = Counter()
        found = []
        for operation, _ in self.server.cloud.requests:
            counted[operation] += 1
            found.append((operation, counted[operation]))
        return found

    def killed(self, verb: Callable[[], object], kill: Kill) -> bool:
        """Run a verb in a process that is killed at a call; return whether it was."""
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)  # the cloud must know whom to kill first
            try:
                _die_at(kill)
                verb()
            finally:
                os._exit(0)
        self.server.cloud.kill = (kill.operation, kill.nth, child) if kill.phase == PHASES[1] else None
        self.server.cloud.requests.clear()
        os.close(reads)
        os.close(writes)
        _, status = os.waitpid(child, 0)
        self.server.cloud.kill = None
        return os.WIFSIGNALED(status)


def _die_at(kill: Kill) -> None:
    """Have this process kill itself at a call, before it is sent or when its answer is here."""
    counted: Counter[str] = Counter()
    call = Aws.call

    def watched(self: Aws, operation: str, parameters: dict[str, Any], **where: Any) -> dict[str, Any]:
        counted[operation] += 1
        struck = operation == kill.operation and counted[operation] == kill.nth
        if struck and kill.phase == PHASES[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        reply = call(self, operation, parameters, **where)
        if struck and kill.phase == PHASES[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        return reply

    Aws.call = watched  # type: ignore[method-assign]


@pytest.fixture
def world(
    server: Server, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], Client]]:
    """Clients of a cloud where nothing boots, on a clock that only sleeping moves."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", cloud.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    passed = [0.0]

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    before = CLOCK.monotonic, CLOCK.sleep
    object.__setattr__(CLOCK, "monotonic", lambda: passed[0])
    object.__setattr__(CLOCK, "sleep", sleep)
    yield lambda nodes: Client(tmp_path / "home", server, nodes)
    object.__setattr__(CLOCK, "monotonic", before[0])
    object.__setattr__(CLOCK, "sleep", before[1])


def fresh(server: Server, home: Path) -> None:
    """An empty account with one image whose machines do not boot, and an empty home."""
    from moto.moto_api._internal.models import moto_api_backend

    moto_api_backend.reset()
    server.cloud = Cloud(endpoint=server.cloud.endpoint)
    server.cloud.add_image(
        "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.12 (Ubuntu 24.04) 20260822",
        parameter=compat.DLAMI_PARAMETERS[0],
        tags={"awsddp:gpus": "pretended", "awsddp:hosts": "none"},
    )
    shutil.rmtree(home, ignore_errors=True)


def living(server: Server) -> int:
    return sum(
        instance.state not in ("terminated", "shutting-down")
        for reservation in server.cloud.backend.reservations.values()
        for instance in reservation.instances
    )


def left(server: Server) -> list[str]:
    """Everything that carries our tags and exists."""
    aws = Aws(Target(region="us-east-1"))
    filters = [{"Name": "tag-key", "Values": ["awsddp:id"]}]
    found = []
    for operation, key in KINDS.items():
        for item in aws.pages(operation, {"Filters": filters}, key):
            instances = item.get("Instances")
            if instances is None or any(one["State"]["Name"] != "terminated" for one in instances):
                found.append(f"{operation}: {item}")
    return found


def recover(client: Client, recovery: str) -> None:
    """Go on after a kill, and prove that nothing is left in the end."""
    if recovery == "up":
        result = client.up()
        assert result["state"] == "ready"
        assert living(client.server) == client.nodes
        assert sorted(node["node"] for node in result["nodes"]) == list(range(client.nodes))
        client.down()
    elif recovery == "down":
        client.down()
    elif recovery == "down without the folder":
        shutil.rmtree(client.home, ignore_errors=True)
        client.down()
    else:
        client.down(client.home.with_name("elsewhere"))
    assert living(client.server) == 0
    assert left(client.server) == []


def kills_of(client: Client, verb: Callable[[], object]) -> list[Kill]:
    """Return the kills to make: all with AWSDDP_FULL, else some, drawn by a seed of the number of nodes."""
    kills = [Kill(*call, phase) for call in client.calls(verb) for phase in PHASES]
    if os.environ.get("AWSDDP_FULL"):
        return kills
    return random.Random(client.nodes).sample(kills, min(SOME, len(kills)))


def matrix(
    client: Client,
    kills: list[Kill],
    recoveries: tuple[str, ...],
    *,
    begin: Callable[[], object],
    verb: Callable[[], object],
) -> int:
    """Kill a verb at each of these calls, recover in each of these ways; return how often it was killed."""
    struck = 0
    for kill in kills:
        for recovery in recoveries:
            fresh(client.server, client.home)
            begin()
            struck += client.killed(verb, kill)
            assert living(client.server) <= client.nodes, kill
            try:
                recover(client, recovery)
            except BaseException as error:
                error.add_note(f"{client.nodes} nodes, killed at {kill}; then {recovery}")
                raise
    return struck


def told(text: str) -> None:
    """Show a line of the matrix's result, with `pytest -s`."""
    sys.stdout.write(text + "\n")


def nothing() -> None:
    """Begin with an empty account."""


World = Callable[[int], Client]


@pytest.mark.parametrize(
    ("phase", "recovery"), [*((phase, "up") for phase in PHASES), (PHASES[1], "down without the folder")]
)
def test_a_launch_that_is_killed_is_finished_or_ended(
    world: World, server: Server, phase: Phase, recovery: str
) -> None:
    client = world(2)
    kill = Kill("RunInstances", 1, phase)
    assert matrix(client, [kill], (recovery,), begin=nothing, verb=client.up) == 1


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_up_killed_at_any_call_leaves_nothing_behind(world: World, server: Server, nodes: int) -> None:
    client = world(nodes)
    fresh(server, client.home)
    kills = kills_of(client, client.up)
    struck = matrix(client, kills, RECOVERIES, begin=nothing, verb=client.up)
    told(f"{nodes} nodes, up: {len(kills) * len(RECOVERIES)} cases, {struck} kills, 0 left")


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_down_killed_at_any_call_leaves_nothing_behind(world: World, server: Server, nodes: int) -> None:
    client = world(nodes)
    fresh(server, client.home)
    client.up()
    kills = kills_of(client, client.down)
    struck = matrix(client, kills, RECOVERIES, begin=client.up, verb=client.down)
    told(f"{nodes} nodes, down: {len(kills) * len(RECOVERIES)} cases, {struck} kills, 0 left")
