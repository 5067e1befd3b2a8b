"""Kills at every call: whatever `up` and `down` were doing, `up` finishes it and `down` leaves nothing.

The calls are counted at run time. A command is killed once at each and each moment about it; what then is on
the disks, the cloud's and the laptop's, is recovered in each way. AWSDDP_FULL=1 does so with all kills.
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
from tests.support.world import PHASES, Kill, Outcome, World, yes

SOME = 2
VERBS = {"up": up, "down": down}
RECOVERIES = ("up", "down", "down without the folder", "down from another home")


def begin(world: World, verb: str, nodes: int) -> str:
    """Make what a verb starts from, and return the name by which it is kept."""
    if verb == "up":
        return "empty"
    world.restore("empty")
    assert world.run(up, nodes=nodes, confirm=yes).code == 0
    world.save("cluster")
    return "cluster"


def recover(world: World, recovery: str, nodes: int, *, launches: int) -> None:
    """Go on after a kill; prove that no more was launched than asked, and that nothing is left in the end."""
    if recovery == "up":
        made = ended(world.run(up, nodes=nodes, confirm=yes))
        assert made["state"] == "ready"
        assert sorted(node["node"] for node in made["nodes"]) == list(range(nodes))
        assert len(world.cloud.living()) == nodes
    if recovery == "down without the folder":
        shutil.rmtree(world.home, ignore_errors=True)
    home = world.root / "elsewhere" if recovery == "down from another home" else world.home
    ended(world.run(down, nodes=nodes, home=home, confirm=yes))
    assert world.cloud.left() == []
    assert len(world.cloud.instances()) <= launches * nodes
    assert not (home / "clusters/demo").exists()


def ended(outcome: Outcome) -> dict[str, Any]:
    """Return the document of a command that must have succeeded."""
    assert outcome.code == 0, outcome.told
    return outcome.document


def matrix(
    world: World,
    verb: str,
    nodes: int,
    kills: list[Kill],
    recoveries: tuple[str, ...],
    enough: int | None = None,
) -> int:
    """Kill a verb at each of these calls, recover in each of these ways; return how often it was killed.

    A question that is polled may be asked less often than when the calls were counted: such a kill does not
    strike, and the next one is taken, until `enough` have struck.
    """
    start = begin(world, verb, nodes)
    struck = 0
    for kill in kills:
        if struck == enough:
            break
        world.restore(start)
        is_struck = world.run(VERBS[verb], nodes=nodes, kill=kill, confirm=yes).code is None
        assert len(world.cloud.living()) <= nodes, kill
        if not is_struck:
            assert kill.nth > 1 and kill.operation.startswith("Describe"), f"{kill} was counted, but not made"
            continue
        struck += 1
        world.save("killed")
        for recovery in recoveries:
            world.restore("killed")
            try:
                recover(world, recovery, nodes, launches=2 if (verb, recovery) == ("down", "up") else 1)
            except BaseException as error:
                error.add_note(f"{nodes} nodes, {verb} killed at {kill}; then {recovery}")
                raise
    return struck


def kills_of(world: World, verb: str, nodes: int) -> list[Kill]:
    """Return the kills of a verb at all its calls, in an order drawn by a seed."""
    world.restore(begin(world, verb, nodes))
    calls = world.run(VERBS[verb], nodes=nodes, confirm=yes).calls
    kills = [Kill(*call, phase) for call in calls for phase in PHASES]
    random.Random(f"{SEED} {verb} {nodes}").shuffle(kills)
    return kills


@pytest.mark.prove
@pytest.mark.parametrize("phase", PHASES)
def test_a_launch_that_is_killed_is_finished_or_ended(world: World, phase: Any) -> None:
    recoveries = ("up", "down without the folder")
    assert matrix(world, "up", 2, [Kill("RunInstances", 1, phase)], recoveries) == 1


def test_a_launch_that_never_showed_is_told_for_as_long_as_it_may_show(world: World) -> None:
    assert world.run(up, kill=Kill("RunInstances", 1, PHASES[0]), confirm=yes).code is None
    elsewhere = world.root / "elsewhere"
    assert ended(world.run(down, home=elsewhere, confirm=yes))["removed"] > 0
    assert ended(world.run(status))["state"] == "launching"
    world.clock.move(world.clock.read() + 120)
    assert ended(world.run(status))["state"] == "absent"


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize("verb", VERBS)
def test_a_command_killed_at_any_call_leaves_nothing_behind(
    world: World, verb: str, nodes: int, record_property: Callable[[str, object], None]
) -> None:
    kills = kills_of(world, verb, nodes)
    struck = matrix(world, verb, nodes, kills, RECOVERIES, None if FULL else SOME)
    assert struck > 0.5 * len(kills) if FULL else struck == SOME
    told = f"{verb}, {nodes} nodes: {struck} kills struck, of {len(kills)}; {struck * len(RECOVERIES)} cases"
    record_property("says", f"{told}, 0 left")
