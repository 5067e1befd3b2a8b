"""A fault at every call: each ends in success or in one clear error, and nothing is left after `down`.

Which calls there are is counted at run time. AWSDDP_FULL=1 tries all cases, else some, drawn by a seed.
"""

import os
import random
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from awsddp.verbs.down import down
from awsddp.verbs.up import up
from tests.provisioning.world import Outcome, World, yes

NODES = 2
SOME = 40
VERBS = {"up": up, "up again": up, "down": down}
# The codes of a throttle and of a denial are not the same in each service.
ELSEWHERE = {
    "RequestLimitExceeded": "ThrottlingException",
    "UnauthorizedOperation": "AccessDeniedException",
}
NOT_EC2 = ("GetCallerIdentity", "GetParameters", "GetServiceQuota", "GetProducts")


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with a call, and the exit codes that it may end in (0 is success)."""

    effect: str
    ends: tuple[int, ...]
    choices: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.effect} {self.choices or 'always'}"


WHILE = {"times": 2}
TROUBLES = (
    *(Trouble(effect, (0,), WHILE) for effect in ("RequestLimitExceeded", "InternalError", "cut", "lost")),
    *(Trouble(effect, (0, 4)) for effect in ("RequestLimitExceeded", "InternalError", "cut", "lost")),
    *(Trouble(effect, (0, 4)) for effect in ("UnauthorizedOperation", "ExpiredToken")),
    *(Trouble("stale", (0,), {"seconds": seconds}) for seconds in (0, 5, 30)),
)
REFUSALS = (
    Trouble("InsufficientInstanceCapacity", (5,)),
    Trouble("SpotMaxPriceTooLow", (5,)),
    Trouble("VcpuLimitExceeded", (4,)),
    Trouble("MaxSpotInstanceCountExceeded", (4,)),
    Trouble("InsufficientFreeAddressesInSubnet", (4,)),
    Trouble("Unsupported", (4,)),
    Trouble("PendingVerification", (4,)),
    Trouble("OptInRequired", (4,)),
    Trouble("InvalidAMIID.NotFound", (4,)),
)


def begin(world: World, verb: str) -> str:
    """Make what a verb starts from, and return the name by which it is kept.

    It is the second cluster of its name: what this machine remembers of the first must not mislead anyone.
    """
    if verb == "up":
        return "empty"
    world.restore("empty")
    for step in (up, down, up):
        assert world.run(step, nodes=NODES, confirm=yes).code == 0
    world.save("cluster")
    return "cluster"


def strike(world: World, start: str, verb: str, operation: str, trouble: Trouble) -> Outcome:
    """Run a verb in trouble, from what is kept as `start`; the trouble is over afterwards."""
    world.restore(start)
    effect = trouble.effect
    if operation in NOT_EC2:
        effect = ELSEWHERE.get(effect, effect)
    world.cloud.fault(operation, effect, **trouble.choices)
    outcome = world.run(VERBS[verb], nodes=NODES, confirm=yes)
    world.cloud.mend()
    return outcome


def check(world: World, start: str, verb: str, operation: str, trouble: Trouble) -> None:
    """Strike; it ends as it may, with what it says it has made or ended, and `down` then leaves nothing."""
    outcome = strike(world, start, verb, operation, trouble)
    told = (8,) if verb == "down" and not trouble.choices else ()  # what could not be ended
    assert outcome.code in trouble.ends + told, f"{outcome.code}: {outcome.told}"
    living = len(world.cloud.living())
    if outcome.code == 0:
        assert living == (0 if verb == "down" else NODES)
        assert verb != "down" or world.cloud.left() == []
    assert living <= NODES
    assert len(world.cloud.instances()) <= NODES * (1 if verb == "up" else 2)
    again = world.run(down, nodes=NODES, confirm=yes)
    assert again.code == 0, again.told
    assert world.cloud.left() == []


def matrix(world: World, verb: str) -> int:
    """Check the cases of a verb: all, or some; return how many."""
    start = begin(world, verb)
    world.restore(start)
    calls = world.run(VERBS[verb], nodes=NODES, confirm=yes).calls
    cases = [(operation, trouble) for operation in sorted(dict(calls)) for trouble in TROUBLES]
    cases += [("*", trouble) for trouble in TROUBLES if trouble.effect == "stale"]
    if verb == "up":
        cases += [("RunInstances", refusal) for refusal in REFUSALS]
    if not os.environ.get("AWSDDP_FULL"):
        cases = random.Random(verb).sample(cases, SOME)
    for operation, trouble in cases:
        try:
            check(world, start, verb, operation, trouble)
        except BaseException as error:
            error.add_note(f"{verb}, {operation}: {trouble}")
            raise
    return len(cases)


@pytest.mark.parametrize("refusal", REFUSALS[:4:2], ids=lambda refusal: refusal.effect)
def test_a_launch_that_is_refused_leaves_nothing(world: World, refusal: Trouble) -> None:
    outcome = strike(world, "empty", "up", "RunInstances", refusal)
    assert (outcome.code, world.cloud.left()) == (*refusal.ends, [])


def test_what_cannot_be_asked_about_is_not_told_to_be_absent(world: World) -> None:
    start = begin(world, "down")
    outcome = strike(world, start, "down", "DescribeInstances", Trouble("UnauthorizedOperation", (4,)))
    assert (outcome.code, len(world.cloud.living())) == (4, NODES)
    assert (world.home / "clusters/demo/key").exists()


@pytest.mark.parametrize("verb", ["up", "down"])
@pytest.mark.parametrize("ahead_s", [3600, -86400])
def test_a_wrong_clock_is_told_as_what_it_is(world: World, verb: str, ahead_s: int) -> None:
    start = begin(world, verb)
    world.restore(start, ahead_s=ahead_s)
    outcome = world.run(VERBS[verb], nodes=NODES, confirm=yes)
    assert outcome.code == 4
    assert f"s {'behind' if ahead_s > 0 else 'ahead of'} AWS's" in outcome.told
    world.save("wrong")
    world.restore("wrong")
    assert world.run(down, nodes=NODES, confirm=yes).code == 0
    assert world.cloud.left() == []


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS)
def test_every_call_may_fail_in_every_way(world: World, verb: str) -> None:
    cases = matrix(world, verb)
    sys.stdout.write(f"{verb}: {cases} faults, each ended in success or one clear error, 0 left\n")
