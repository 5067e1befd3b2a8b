"""A job that saves to S3: its nodes are released by whoever sees that all of it is there."""

import json

from awsddp.known import jobs_of_all
from tests.verbs.conftest import World, start

WHOLE = {"files": 1, "bytes": 1, "pending_files": 0, "pending_bytes": 0, "error": "", "ended": True}


def test_who_looks_releases_the_nodes_once_all_is_saved_and_not_while_a_node_has_the_only_copy(
    world: World,
) -> None:
    start(world, "", name="j")
    world.homes.wait("j")
    first, second = (home / ".awsddp" / "jobs" / "j" / "saving.json" for home in world.homes.homes)
    first.write_text(json.dumps(WHOLE))
    held = {"i-0": ["j"], "i-1": ["j"]}
    for less in ({"ended": False}, {"error": "AccessDenied"}):
        second.write_text(json.dumps(WHOLE | less))
        jobs_of_all(world.ctx())
        assert world.tags == held
    world.set_state(1, "stopped")
    second.write_text(json.dumps(WHOLE))
    jobs_of_all(world.ctx())
    assert world.tags == held  # it cannot be asked
    world.set_state(1, "running")
    jobs_of_all(world.ctx())
    assert world.tags == {"i-0": [], "i-1": []}
