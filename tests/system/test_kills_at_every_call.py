"""A kill at every call of `up` and `down`: afterwards `up` completes the cluster, and `down` leaves nothing.

The calls are counted at run time. A command is killed once in each phase of each call; the resulting state,
of the cloud and of the client, is recovered in each way. AWSDDP_FULL=1 runs all kills.
"""

import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from awsddp.cluster.down import down
from awsddp.cluster.status import status
from awsddp.cluster.up import up
from tests.support.seed import FULL, SEED
from tests.support.world import PHASES, Kill, Outcome, World, agree

SOME = 2
VERBS = {"up": up, "down": down}
RECOVERIES = ("up", "down", "down without the folder", "down from another home")


def prepare_start(world: World, verb: str, nodes: int) -> str:
    """Create the state that a verb starts from, and return the name under which it is saved."""
    if verb == "up":
        return "empty"
    world.restore("empty")
    assert world.run(up, nodes=nodes, confirm=agree).code == 0
    world.save("cluster")
    return "cluster"


def recover(world: World, recovery: str, nodes: int, *, launches: int) -> None:
    """Recover from a kill; check that no more was launched than requested, and that nothing is left."""
    if recovery == "up":
        cluster = get_document(world.run(up, nodes=nodes, confirm=agree))
        assert cluster["state"] == "ready"
        assert sorted(node["node"] for node in cluster["nodes"]) == list(range(nodes))
        assert len(world.cloud.live_instances()) == nodes
    if recovery == "down without the folder":
        shutil.rmtree(world.home, ignore_errors=True)
    home = world.root / "elsewhere" if recovery == "down from another home" else world.home
    get_document(world.run(down, nodes=nodes, home=home, confirm=agree))
    assert world.cloud.find_leftovers() == []
    assert len(world.cloud.instances()) <= launches * nodes
    assert not (home / "clusters/demo").exists()


def get_document(outcome: Outcome) -> dict[str, Any]:
    """Check that a command succeeded, and return its document."""
    assert outcome.code == 0, outcome.text
    return outcome.document


def kill_and_recover(
    world: World,
    verb: str,
    nodes: int,
    kills: list[Kill],
    recoveries: tuple[str, ...],
    enough: int | None = None,
) -> int:
    """Kill a verb at each of these calls, and recover in each of these ways; return the number of kills.

    A polled request may be sent less often than when the calls were counted: such a kill does not happen, and
    the next one is taken, until there are `enough`.
    """
    start = prepare_start(world, verb, nodes)
    count = 0
    for kill in kills:
        if count == enough:
            break
        world.restore(start)
        was_killed = world.run(VERBS[verb], nodes=nodes, kill=kill, confirm=agree).code is None
        assert len(world.cloud.live_instances()) <= nodes, kill
        if not was_killed:
            assert kill.nth > 1 and kill.operation.startswith("Describe"), f"{kill} was counted, but not made"
            continue
        count += 1
        world.save("killed")
        for recovery in recoveries:
            world.restore("killed")
            try:
                recover(world, recovery, nodes, launches=2 if (verb, recovery) == ("down", "up") else 1)
            except BaseException as error:
                error.add_note(f"{nodes} nodes, {verb} killed at {kill}; then {recovery}")
                raise
    return count


def list_kills(world: World, verb: str, nodes: int) -> list[Kill]:
    """Return the kills of a verb at all its calls, in an order drawn by a seed."""
    world.restore(prepare_start(world, verb, nodes))
    calls = world.run(VERBS[verb], nodes=nodes, confirm=agree).calls
    kills = [Kill(*call, phase) for call in calls for phase in PHASES]
    random.Random(f"{SEED} {verb} {nodes}").shuffle(kills)
    return kills


@pytest.mark.prove
@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_launch_can_be_completed_and_terminated(world: World, phase: Any) -> None:
    recoveries = ("up", "down without the folder")
    assert kill_and_recover(world, "up", 2, [Kill("RunInstances", 1, phase)], recoveries) == 1


def test_a_killed_launch_is_reported_for_as_long_as_aws_may_still_list_it(world: World) -> None:
    assert world.run(up, kill=Kill("RunInstances", 1, PHASES[0]), confirm=agree).code is None
    elsewhere = world.root / "elsewhere"
    assert get_document(world.run(down, home=elsewhere, confirm=agree))["removed"] > 0
    assert get_document(world.run(status))["state"] == "launching"
    world.clock.move(world.clock.read() + 120)
    assert get_document(world.run(status))["state"] == "absent"


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize("verb", VERBS)
def test_a_command_killed_at_any_call_can_be_recovered_without_leftovers(
    world: World, verb: str, nodes: int, record_property: Callable[[str, object], None]
) -> None:
    kills = list_kills(world, verb, nodes)
    count = kill_and_recover(world, verb, nodes, kills, RECOVERIES, None if FULL else SOME)
    assert count > 0.5 * len(kills) if FULL else count == SOME
    text = f"{verb}, {nodes} nodes: {count} kills struck, of {len(kills)}; {count * len(RECOVERIES)} cases"
    record_property("says", f"{text}, 0 left")
