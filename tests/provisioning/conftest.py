"""One world for each module of the matrices: an empty account, an empty home."""

from collections.abc import Iterator

import pytest

from tests.provisioning.world import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    made.cloud.start()
    made.make_roles()
    made.save("empty")
    yield made
    made.cloud.kill()


@pytest.fixture(autouse=True)
def empty(world: World) -> None:
    """Each test begins with an empty account and an empty home."""
    world.restore("empty")
