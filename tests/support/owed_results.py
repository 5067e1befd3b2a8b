"""A cluster with unfetched results of a job."""

from typing import Any

import pytest

from awsddp.job.logs import logs
from tests.support.folder_nodes import World, start_script

SAVES = """
import os
print("line of", os.environ["RANK"])
open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write(os.environ["RANK"])
"""


@pytest.fixture
def unfetched(world: World) -> World:
    """A cluster with the unfetched results of job `j`, which has succeeded."""
    start_script(world, SAVES, name="j")
    world.homes.wait("j")
    return world


def fetched_nodes(world: World) -> list[str]:
    home = world.project / "runs" / "j"
    return sorted(path.parent.parent.name for path in home.rglob("saved.txt"))


def read_logs(world: World, **options: Any) -> bytes:
    pieces: list[bytes] = []
    logs(world.session(), job="j", follow=False, on_lines=pieces.append, **options)
    return b"".join(pieces)
