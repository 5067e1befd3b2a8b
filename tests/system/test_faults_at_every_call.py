"""A fault at every call: each ends in success or in one clear error, and nothing is left after `down`.

Which calls there are is counted at run time. AWSDDP_FULL=1 tries all cases, else some, drawn by a seed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from awsddp.cluster import inventory
from awsddp.cluster.down import down
from awsddp.cluster.plan import plan
from awsddp.cluster.status import status
from awsddp.cluster.stop import stop
from awsddp.cluster.up import up
from tests.support.acts import checked, fetched, trained
from tests.support.seed import FULL, SEED
from tests.support.world import Kill, Outcome, World, yes

NODES = 2
SOME = {"up": 6, "up again": 3, "down": 6}
FEW = 2


@dataclass(frozen=True, kw_only=True)
class Act:
    """A command: the ground that it starts from, how many instances live once it succeeded, in which state.

    `most` is how many may have been launched until then.
    """

    verb: Callable[..., Any]
    ground: str = "cluster"
    nodes: int = NODES
    asked: dict[str, Any] = field(default_factory=dict)
    living: int = NODES
    state: str = "running"
    most: int = 2 * NODES
    asks: bool = True

    def run(self, world: World) -> Outcome:
        """Run it, agreeing to everything."""
        choices = {"confirm": yes} if self.asks else {}
        return world.run(self.verb, nodes=self.nodes, asked=self.asked, **choices)


ACTS = {
    "up": Act(verb=up, ground="nothing", most=NODES),
    "up again": Act(verb=up),
    "larger": Act(verb=up, nodes=3, living=3, most=2 * NODES + 1),
    "smaller": Act(verb=up, nodes=1, living=1),
    "moved": Act(verb=up, asked={"network.ssh_cidr": "198.51.100.7/32", "cluster.expires": "48h"}),
    "stop": Act(verb=stop, state="stopped"),
    "start": Act(verb=up, ground="stopped"),
    "train": Act(verb=trained, asks=False),
    "fetch": Act(verb=fetched, ground="owing", asks=False),
    "down": Act(verb=down, living=0),
    "down --orphans": Act(verb=inventory.down_orphans, ground="orphans", living=0, most=0),
    "status": Act(verb=status, asks=False),
    "status --all": Act(verb=inventory.status_all, asks=False),
    "plan": Act(verb=plan, asks=False),
    "doctor": Act(verb=checked, asks=False),
}
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
WRONG_CLOCKS = tuple(Trouble("wrong clock", (4,), {"ahead_s": ahead}) for ahead in (3600, -86400))
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


def begin(world: World, ground: str) -> None:
    """Make what an act starts from, and keep it by its name.

    A cluster is the second of its name: what this machine remembers of the first must not mislead anyone.
    """
    if (world.root / ground).exists():
        return
    world.restore("empty")
    made = (up, down, up)
    before = {
        "nothing": (),
        "orphans": (),
        "cluster": made,
        "stopped": (*made, stop),
        "owing": (*made, trained),
    }
    for step in before[ground]:
        assert world.run(step, nodes=NODES, confirm=yes).code == 0
    if ground == "orphans":
        kill = Kill("RunInstances", 1, "before it is sent")
        assert world.run(up, nodes=NODES, confirm=yes, kill=kill).code is None
    world.save(ground)


def strike(world: World, act: Act, operation: str, trouble: Trouble) -> Outcome:
    """Carry an act out in trouble, from its ground; the trouble is over afterwards."""
    effect, choices = trouble.effect, trouble.choices
    if effect == "wrong clock":
        world.restore(act.ground, **choices)
        outcome = act.run(world)
        world.save("wrong")
        world.restore("wrong")
        return outcome
    world.restore(act.ground)
    if operation in NOT_EC2:
        effect = ELSEWHERE.get(effect, effect)
    world.cloud.fault(operation, effect, **choices)
    outcome = act.run(world)
    world.cloud.mend()
    return outcome


def check(world: World, act: Act, operation: str, trouble: Trouble) -> None:
    """Strike; it ends as it may, with what it says it has made or ended, and `down` then leaves nothing."""
    outcome = strike(world, act, operation, trouble)
    ends = act.verb in (down, inventory.down_orphans) or operation == "TerminateInstances"
    told = (8,) if ends and not trouble.choices else ()  # what could not be ended
    assert outcome.code in trouble.ends + told, f"{outcome.code}: {outcome.told}"
    states = [one["State"]["Name"] for one in world.cloud.living()]
    if outcome.code == 0:
        assert states == [act.state] * act.living
        assert act.verb is not down or world.cloud.left() == []
    assert len(states) <= max(NODES, act.nodes)
    assert len(world.cloud.instances()) <= act.most
    again = world.run(down, nodes=NODES, discard=True, confirm=yes)
    assert again.code == 0, again.told
    assert world.cloud.left() == []


def cases_of(world: World, act: Act) -> list[tuple[str, Trouble]]:
    """Return each call of an act with each trouble that it may meet; the calls are counted now."""
    begin(world, act.ground)
    world.restore(act.ground)
    calls = act.run(world).calls
    cases = [(operation, trouble) for operation in sorted(dict(calls)) for trouble in TROUBLES]
    cases += [("*", trouble) for trouble in TROUBLES if trouble.effect == "stale"]
    cases += [("*", trouble) for trouble in WRONG_CLOCKS]
    refusals = {
        "RunInstances": REFUSALS,
        "StartInstances": REFUSALS[:1],
    }  # `doctor` asks, and tells the answer
    refusals = {} if act.verb is checked else refusals
    return cases + [
        (operation, refusal) for operation in sorted(dict(calls)) for refusal in refusals.get(operation, ())
    ]


@pytest.mark.parametrize("refusal", REFUSALS[:4:2], ids=lambda refusal: refusal.effect)
def test_a_launch_that_is_refused_leaves_nothing(world: World, refusal: Trouble) -> None:
    begin(world, "nothing")
    outcome = strike(world, ACTS["up"], "RunInstances", refusal)
    assert (outcome.code, world.cloud.left()) == (*refusal.ends, [])


@pytest.mark.prove
def test_what_cannot_be_asked_about_is_not_told_to_be_absent(world: World) -> None:
    begin(world, "cluster")
    outcome = strike(world, ACTS["down"], "DescribeInstances", Trouble("UnauthorizedOperation", (4,)))
    assert (outcome.code, len(world.cloud.living())) == (4, NODES)
    assert (world.home / "clusters/demo/key").exists()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("trouble", WRONG_CLOCKS)
def test_a_wrong_clock_is_told_as_what_it_is(world: World, name: str, trouble: Trouble) -> None:
    begin(world, ACTS[name].ground)
    outcome = strike(world, ACTS[name], "*", trouble)
    assert outcome.code == 4
    assert f"s {'behind' if trouble.choices['ahead_s'] > 0 else 'ahead of'} AWS's" in outcome.told
    assert world.run(down, nodes=NODES, confirm=yes).code == 0
    assert world.cloud.left() == []


@pytest.mark.prove
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ACTS)
def test_every_call_may_fail_in_every_way(
    world: World, name: str, record_property: Callable[[str, object], None]
) -> None:
    act = ACTS[name]
    cases = every = cases_of(world, act)
    if not FULL:
        cases = random.Random(f"{SEED} {name}").sample(every, min(len(every), SOME.get(name, FEW)))
    for operation, trouble in cases:
        try:
            check(world, act, operation, trouble)
        except BaseException as error:
            error.add_note(f"{name}, {operation}: {trouble}")
            raise
    record_property("says", f"{name}: {len(cases)} faults of {len(every)}, each ended well or told, 0 left")
