"""rejoin: what `up` does for the torchrun jobs that lost a node, wherever it is interrupted."""

import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from awsddp.aws import poweroff
from awsddp.cluster import Job, JobNode, RankResult
from awsddp.errors import NodeError
from awsddp.verbs import launches, rejoining
from awsddp.verbs.rejoining import rejoin
from tests.jobs.conftest import all_processes, until
from tests.seed import FULL, SEED
from tests.verbs.conftest import World, start

SECONDS = 200.0
ELASTIC: dict[str, Any] = {"nnodes": "1:2", "max_restarts": 3, "heartbeat_timeout": "20s"}
RUNS = """
import os, pathlib, time
job = pathlib.Path(os.environ['AWSDDP_RUN_DIR']).parent.name
print('up of', os.environ['WORLD_SIZE'], flush=True)
while not pathlib.Path(os.environ['HOME'], f'end-{job}').exists(): time.sleep(0.1)
"""


def lose_node(world: World) -> None:
    """Lose node1 with all that runs on it; another machine takes its number."""
    home = f"HOME={world.homes.homes[1]}".encode()

    def running() -> list[int]:
        return [pid for pid, environ, _ in all_processes() if home in environ.split(b"\0")]

    for pid in running():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not running())
    world.replace_node(1)


def lines(world: World, node: int, job: str) -> list[str]:
    log = world.homes.folder(node, job) / "logs" / f"rank{node}.log"
    return log.read_text().splitlines() if log.exists() else []


def states(world: World) -> dict[str, str]:
    return {job.job: job.state for job in world.handle().jobs()}


def end(world: World, job: str) -> None:
    for home in world.homes.homes:
        (home / f"end-{job}").touch()


def rejoin_killed(world: World, *, at: int) -> bool:
    """Run rejoin in a process that gets kill -9 at its line number `at` of verbs/; tell if it came so far."""
    done = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if "/awsddp/verbs/" not in frame.f_code.co_filename:
            return None
        done += event == "line"
        if done == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.settrace(count)
            rejoin(world.handle())
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_client_killed_while_a_machine_joins_leaves_what_the_next_one_finishes(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def keep(aws: object, nodes: Any, job: str) -> None:
        world.keep(aws, nodes, job)
        (tmp_path / "tags").write_text(json.dumps(world.tags))  # AWS does not forget with its client

    monkeypatch.setattr(poweroff, "keep_on_poweroff", keep)
    start(world, RUNS, name="j", **ELASTIC)
    until(lambda: lines(world, 1, "j"), seconds=SECONDS)
    lose_node(world)
    until(lambda: world.homes.document(0, "j")["state"] == "running")
    draw = random.Random(f"{SEED} rejoin")
    at, kills = 0, []
    while rejoin_killed(world, at=(at := at + draw.randrange(1, 20 if FULL else 300))):
        kills.append(at)
        assert states(world) == {"j": "running"}, kills
    assert kills
    world.tags = json.loads((tmp_path / "tags").read_text())
    assert "j" in world.tags["i-new"], kills
    pids = world.homes.supervisors(1)
    assert len(pids) == 2, kills
    rejoin(world.handle())
    assert world.homes.supervisors(1) == pids, kills
    until(lambda: lines(world, 1, "j") == ["up of 2"], seconds=SECONDS)
    end(world, "j")
    job = world.homes.wait("j", seconds=SECONDS)
    assert (job.state, [rank.exit_code for rank in job.ranks]) == ("succeeded", [0, 0]), kills
    assert lines(world, 1, "j") == ["up of 2"], kills
    assert world.homes.processes() == []
    rejoin(world.handle())
    assert launches.kept(world.folder) == {}


@pytest.mark.prove(share=0.5)
@pytest.mark.timeout(400)
def test_job_that_waits_gets_its_machine_back_and_starts_on_all(world: World) -> None:
    start(world, RUNS, name="one", **ELASTIC)
    start(world, RUNS, name="two", after="one", **ELASTIC)
    until(lambda: lines(world, 1, "one"), seconds=SECONDS)
    lose_node(world)
    rejoin(world.handle())
    until(lambda: lines(world, 1, "one") == ["up of 2"], seconds=SECONDS)
    assert states(world) == {"one": "running", "two": "waiting"}
    end(world, "one")
    until(lambda: [lines(world, node, "two") for node in (0, 1)] == [["up of 2"]] * 2, seconds=SECONDS)
    end(world, "two")
    until(lambda: states(world) == {"one": "succeeded", "two": "succeeded"}, seconds=SECONDS)


def test_node_that_coordinates_is_the_first_and_need_not_run_rank_0(world: World) -> None:
    ranks = [
        RankResult(rank=rank, local_rank=0, node=1 - rank, exit_code=None, seconds=0.0) for rank in (0, 1)
    ]
    nodes = [JobNode(node=node, instance_id=f"i-{node}") for node in (0, 1)]
    job = Job(job="j", state="running", cause=None, ranks=tuple(ranks), nodes=tuple(nodes), home="")
    for lost in (1, 0):
        cluster = world.handle()
        cluster.nodes = tuple(
            replace(node, instance_id="i-new") if node.node == lost else node for node in world.nodes
        )
        assert [node.node for node in rejoining._new(cluster, job)] == [1] * (lost == 1)


def test_launch_is_not_forgotten_where_a_node_does_not_answer(world: World) -> None:
    ctx = world.ctx(script="w.py", nnodes="1:2")
    launch = launches.Launch(spec=ctx.job, ranks=(), slot=0, facts={}, secret="")
    launches.keep(world.folder, "j", launch)
    world.cut = {0}
    with pytest.raises(NodeError):
        rejoin(world.handle())
    assert launches.kept(world.folder) == {"j": launch}
    world.cut = set()
    rejoin(world.handle())
    assert launches.kept(world.folder) == {}
