"""TensorBoard's event files are fetched while a job is followed."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from awsddp.errors import NodeError
from awsddp.job import follow
from awsddp.job.follow import BackgroundFetch
from awsddp.model.records import JobRecord
from awsddp.nodes.fleet import Result
from awsddp.nodes.node_failures import NodeFailure
from tests.support.folder_nodes import NodeConnections, World, start_script

WRITES = """
import os, pathlib
folder = pathlib.Path("runs/today")
folder.mkdir(parents=True)
(folder / "events.out.tfevents.7").write_text("step 1 of rank " + os.environ["RANK"])
(folder / "weights.pt").write_text("not yet")
"""


class ProgramLine(NodeConnections):
    """Connections over which another program can be started, too."""

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


def read_results(world: World) -> dict[str, str]:
    folder = world.project / "runs" / "j"
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def make_line(world: World) -> ProgramLine:
    return ProgramLine(world.homes, world.nodes)


def test_grown_event_files_are_fetched_and_nothing_else(world: World) -> None:
    job = start_script(world, WRITES, name="j")
    world.homes.wait("j")
    line = make_line(world)
    fetcher = BackgroundFetch(world.connected(line=line), job)
    fetcher.fetch_event_files()
    path = "runs/today/events.out.tfevents.7"
    assert read_results(world) == {f"node{n}/{path}": f"step 1 of rank {n}" for n in (0, 1)}
    with (world.homes.workdirs[1] / path).open("a") as file:
        file.write(", step 2")
    fetcher.fetch_event_files()
    assert read_results(world)[f"node1/{path}"] == "step 1 of rank 1, step 2"
    line.cut = {0}
    with (world.homes.workdirs[1] / path).open("a") as file:
        file.write(", step 3")
    fetcher.fetch_event_files()
    assert read_results(world)[f"node1/{path}"] == "step 1 of rank 1, step 2, step 3"
    fetcher._ended.set()
    with (world.homes.workdirs[1] / path).open("a") as file:
        file.write(", too late")
    fetcher.fetch_event_files()
    assert read_results(world)[f"node1/{path}"] == "step 1 of rank 1, step 2, step 3"


def test_errors_do_not_end_the_background_fetch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JobRecord(job="j", state="running", cause=None, ranks=(), home="runs/j")
    monkeypatch.setattr(follow, "FETCH_INTERVAL_S", 0.01)
    line = make_line(world)
    attempts = threading.Semaphore(0)

    def fail(*_: object, **__: object) -> None:
        attempts.release()
        raise KeyError("a connection that is gone")

    monkeypatch.setattr(line, "run_each", fail)
    with BackgroundFetch(world.connected(line=line), job).running():
        for _ in range(3):  # it is retried
            assert attempts.acquire(timeout=60)
    assert read_results(world) == {}
