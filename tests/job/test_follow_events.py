"""TensorBoard's event files come home while a job is followed."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from awsddp.errors import NodeError
from awsddp.job import follow as events
from awsddp.job.follow import BackgroundFetch
from awsddp.model.records import JobRecord
from awsddp.nodes.fleet import Result
from awsddp.nodes.node_failures import NodeFailure
from tests.support.folder_nodes import Line, World, start

WRITES = """
import os, pathlib
folder = pathlib.Path("runs/today")
folder.mkdir(parents=True)
(folder / "events.out.tfevents.7").write_text("step 1 of rank " + os.environ["RANK"])
(folder / "weights.pt").write_text("not yet")
"""


class Beside(Line):
    """Connections over which a program of its own can be started, too."""

    def run_each(self, commands: Mapping[int, Any], *, timeout_s: float) -> dict[int, Result | NodeError]:
        """Answer as `Fleet.run_each` does."""
        outcomes: dict[int, Result | NodeError] = {}
        for node, (_, stdin) in commands.items():
            if node in self.cut:
                outcomes[node] = NodeFailure(node, "lost", "the connection was lost")
                continue
            message = stdin[stdin.rindex(b'{"do"') :]
            out, err = self.homes.start(node, b"%d\n%s" % (len(message), message)).communicate(timeout=60)
            outcomes[node] = Result(exit_code=0, stdout=out, stderr=err)
        return outcomes


def at_home(world: World) -> dict[str, str]:
    folder = world.project / "runs" / "j"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def beside(world: World) -> Beside:
    return Beside(world.homes, world.nodes)


def test_what_has_grown_comes_home_and_nothing_else(world: World) -> None:
    job = start(world, WRITES, name="j")
    world.homes.wait("j")
    line = beside(world)
    following = BackgroundFetch(world.connected(line=line), job)
    following.fetch_event_files()
    place = "runs/today/events.out.tfevents.7"
    assert at_home(world) == {f"node{n}/{place}": f"step 1 of rank {n}" for n in (0, 1)}
    with (world.homes.workdirs[1] / place).open("a") as file:
        file.write(", step 2")
    following.fetch_event_files()
    assert at_home(world)[f"node1/{place}"] == "step 1 of rank 1, step 2"
    line.cut = {0}
    with (world.homes.workdirs[1] / place).open("a") as file:
        file.write(", step 3")
    following.fetch_event_files()
    assert at_home(world)[f"node1/{place}"] == "step 1 of rank 1, step 2, step 3"
    following._ended.set()
    with (world.homes.workdirs[1] / place).open("a") as file:
        file.write(", too late")
    following.fetch_event_files()
    assert at_home(world)[f"node1/{place}"] == "step 1 of rank 1, step 2, step 3"


def test_errors_do_not_end_what_is_followed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobRecord(job="j", state="running", cause=None, ranks=(), home="runs/j")
    monkeypatch.setattr(events, "FETCH_INTERVAL_S", 0.01)
    line = beside(world)
    tried = threading.Semaphore(0)

    def broken(*_: object, **__: object) -> None:
        tried.release()
        raise KeyError("a connection that is gone")

    monkeypatch.setattr(line, "run_each", broken)
    with BackgroundFetch(world.connected(line=line), job).running():
        for _ in range(3):  # it is tried again, and again
            assert tried.acquire(timeout=60)
    assert at_home(world) == {}
