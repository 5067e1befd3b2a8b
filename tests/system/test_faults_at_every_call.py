"""A fault at every call: each command succeeds or ends in one clear error, and `down` then leaves nothing.

The calls of a command are counted at run time. AWSDDP_FULL=1 runs all cases, else some are drawn by a seed.
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
from tests.support.acts import run_doctor, run_fetch, run_train
from tests.support.seed import FULL, SEED
from tests.support.world import Kill, Outcome, World, agree

NODES = 2
SOME = {"up": 6, "up again": 3, "down": 6}
FEW = 2


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the state that it starts from, and the instances that exist once it succeeded.

    `most` is the highest number of instances that may have been launched until then.
    """

    verb: Callable[..., Any]
    ground: str = "cluster"
    nodes: int = NODES
    requested: dict[str, Any] = field(default_factory=dict)
    living: int = NODES
    state: str = "running"
    most: int = 2 * NODES
    confirms: bool = True

    def run(self, world: World) -> Outcome:
        """Run the command, with every confirmation given."""
        choices = {"confirm": agree} if self.confirms else {}
        return world.run(self.verb, nodes=self.nodes, overrides=self.requested, **choices)


COMMANDS = {
    "up": Command(verb=up, ground="nothing", most=NODES),
    "up again": Command(verb=up),
    "larger": Command(verb=up, nodes=3, living=3, most=2 * NODES + 1),
    "smaller": Command(verb=up, nodes=1, living=1),
    "moved": Command(verb=up, requested={"network.ssh_cidr": "198.51.100.7/32", "cluster.expires": "48h"}),
    "stop": Command(verb=stop, state="stopped"),
    "start": Command(verb=up, ground="stopped"),
    "train": Command(verb=run_train, confirms=False),
    "fetch": Command(verb=run_fetch, ground="owing", confirms=False),
    "down": Command(verb=down, living=0),
    "down --orphans": Command(verb=inventory.down_orphans, ground="orphans", living=0, most=0),
    "status": Command(verb=status, confirms=False),
    "status --all": Command(verb=inventory.status_all, confirms=False),
    "plan": Command(verb=plan, confirms=False),
    "doctor": Command(verb=run_doctor, confirms=False),
}
# Services other than EC2 have other codes for a throttle and a denial.
OTHER_CODES = {
    "RequestLimitExceeded": "ThrottlingException",
    "UnauthorizedOperation": "AccessDeniedException",
}
NOT_EC2 = ("GetCallerIdentity", "GetParameters", "GetServiceQuota", "GetProducts")


@dataclass(frozen=True)
class Fault:
    """A fault of a call, and the exit codes that the command may have (0 is success)."""

    effect: str
    codes: tuple[int, ...]
    choices: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.effect} {self.choices or 'always'}"


TWICE = {"times": 2}
FAULTS = (
    *(Fault(effect, (0,), TWICE) for effect in ("RequestLimitExceeded", "InternalError", "cut", "lost")),
    *(Fault(effect, (0, 4)) for effect in ("RequestLimitExceeded", "InternalError", "cut", "lost")),
    *(Fault(effect, (0, 4)) for effect in ("UnauthorizedOperation", "ExpiredToken")),
    *(Fault("stale", (0,), {"seconds": seconds}) for seconds in (0, 5, 30)),
)
WRONG_CLOCKS = tuple(Fault("wrong clock", (4,), {"ahead_s": ahead}) for ahead in (3600, -86400))
REFUSALS = (
    Fault("InsufficientInstanceCapacity", (5,)),
    Fault("SpotMaxPriceTooLow", (5,)),
    Fault("VcpuLimitExceeded", (4,)),
    Fault("MaxSpotInstanceCountExceeded", (4,)),
    Fault("InsufficientFreeAddressesInSubnet", (4,)),
    Fault("Unsupported", (4,)),
    Fault("PendingVerification", (4,)),
    Fault("OptInRequired", (4,)),
    Fault("InvalidAMIID.NotFound", (4,)),
)


def prepare_start(world: World, ground: str) -> None:
    """Create the state that a command starts from, and save it by its name.

    A cluster is the second of its name: records of the first must not affect a command.
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
        "owing": (*made, run_train),
    }
    for step in before[ground]:
        assert world.run(step, nodes=NODES, confirm=agree).code == 0
    if ground == "orphans":
        kill = Kill("RunInstances", 1, "before it is sent")
        assert world.run(up, nodes=NODES, confirm=agree, kill=kill).code is None
    world.save(ground)


def run_faulty(world: World, command: Command, operation: str, fault: Fault) -> Outcome:
    """Run a command from its start with a fault, and end the fault afterwards."""
    effect, choices = fault.effect, fault.choices
    if effect == "wrong clock":
        world.restore(command.ground, **choices)
        outcome = command.run(world)
        world.save("wrong")
        world.restore("wrong")
        return outcome
    world.restore(command.ground)
    if operation in NOT_EC2:
        effect = OTHER_CODES.get(effect, effect)
    world.cloud.fault(operation, effect, **choices)
    outcome = command.run(world)
    world.cloud.clear_faults()
    return outcome


def check_fault(world: World, command: Command, operation: str, fault: Fault) -> None:
    """Run a command with a fault; check its exit code and instances, and that `down` then leaves nothing."""
    outcome = run_faulty(world, command, operation, fault)
    terminates = command.verb in (down, inventory.down_orphans) or operation == "TerminateInstances"
    incomplete = (8,) if terminates and not fault.choices else ()  # instances that could not be terminated
    assert outcome.code in fault.codes + incomplete, f"{outcome.code}: {outcome.text}"
    states = [instance["State"]["Name"] for instance in world.cloud.live_instances()]
    if outcome.code == 0:
        assert states == [command.state] * command.living
        assert command.verb is not down or world.cloud.find_leftovers() == []
    assert len(states) <= max(NODES, command.nodes)
    assert len(world.cloud.instances()) <= command.most
    again = world.run(down, nodes=NODES, discard=True, confirm=agree)
    assert again.code == 0, again.text
    assert world.cloud.find_leftovers() == []


def list_cases(world: World, command: Command) -> list[tuple[str, Fault]]:
    """Return each call of a command, which runs once to list them, with each fault that it may meet."""
    prepare_start(world, command.ground)
    world.restore(command.ground)
    calls = command.run(world).calls
    cases = [(operation, fault) for operation in sorted(dict(calls)) for fault in FAULTS]
    cases += [("*", fault) for fault in FAULTS if fault.effect == "stale"]
    cases += [("*", fault) for fault in WRONG_CLOCKS]
    refusals = {
        "RunInstances": REFUSALS,
        "StartInstances": REFUSALS[:1],
    }  # `doctor` reports a refusal in its checks
    refusals = {} if command.verb is run_doctor else refusals
    return cases + [
        (operation, refusal) for operation in sorted(dict(calls)) for refusal in refusals.get(operation, ())
    ]


@pytest.mark.parametrize("refusal", REFUSALS[:4:2], ids=lambda refusal: refusal.effect)
def test_a_launch_that_aws_refuses_leaves_nothing(world: World, refusal: Fault) -> None:
    prepare_start(world, "nothing")
    outcome = run_faulty(world, COMMANDS["up"], "RunInstances", refusal)
    assert (outcome.code, world.cloud.find_leftovers()) == (*refusal.codes, [])


@pytest.mark.prove
def test_down_that_may_not_list_instances_fails_and_keeps_the_key(world: World) -> None:
    prepare_start(world, "cluster")
    outcome = run_faulty(world, COMMANDS["down"], "DescribeInstances", Fault("UnauthorizedOperation", (4,)))
    assert (outcome.code, len(world.cloud.live_instances())) == (4, NODES)
    assert (world.home / "clusters/demo/key").exists()


@pytest.mark.prove
@pytest.mark.parametrize("name", ["up", "down"])
@pytest.mark.parametrize("fault", WRONG_CLOCKS)
def test_a_wrong_clock_is_reported_with_its_difference_to_aws(world: World, name: str, fault: Fault) -> None:
    prepare_start(world, COMMANDS[name].ground)
    outcome = run_faulty(world, COMMANDS[name], "*", fault)
    assert outcome.code == 4
    assert f"s {'behind' if fault.choices['ahead_s'] > 0 else 'ahead of'} AWS's" in outcome.text
    assert world.run(down, nodes=NODES, confirm=agree).code == 0
    assert world.cloud.find_leftovers() == []


@pytest.mark.prove
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_survives_each_fault_of_each_call(
    world: World, name: str, record_property: Callable[[str, object], None]
) -> None:
    command = COMMANDS[name]
    cases = every = list_cases(world, command)
    if not FULL:
        cases = random.Random(f"{SEED} {name}").sample(every, min(len(every), SOME.get(name, FEW)))
    for operation, fault in cases:
        try:
            check_fault(world, command, operation, fault)
        except BaseException as error:
            error.add_note(f"{name}, {operation}: {fault}")
            raise
    record_property("says", f"{name}: {len(cases)} faults of {len(every)}, each ended well or told, 0 left")
