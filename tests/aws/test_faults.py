"""A fault at every call: each ends in success or in one clear error, and nothing is left after `down`.

Which calls there are is counted at run time; a fault strikes the first of its operation, or all of them.
"""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from moto_cloud import Cloud, Fault, Server
from test_crashes import Client, World, fresh, left, living, told, world

from awsddp.errors import AwsddpError

__all__ = ["world"]
ALWAYS = 1000


@dataclass(frozen=True)
class Trouble:
    """What goes wrong with a call, how often, and the exit codes that it may end in (0 is success)."""

    name: str
    fault: Fault
    times: int
    ends: tuple[int, ...]


TROUBLES = (
    Trouble("throttled a while", Fault("RequestLimitExceeded", status=503), 2, (0,)),
    Trouble("throttled for ever", Fault("RequestLimitExceeded", status=503), ALWAYS, (0, 4)),
    Trouble("500 a while", Fault("InternalError", status=500), 2, (0,)),
    Trouble("500 for ever", Fault("InternalError", status=500), ALWAYS, (0, 4)),
    Trouble("effect without a reply", Fault("InternalError", status=500, after=True), 1, (0,)),
    Trouble("denied", Fault("UnauthorizedOperation", status=403), ALWAYS, (0, 4)),
    Trouble("credentials ended", Fault("ExpiredToken", status=400), ALWAYS, (0, 4)),
)
LAUNCH_TROUBLES = tuple(
    Trouble(code, Fault(code, status=status), ALWAYS, ends)
    for code, status, ends in (
        ("InsufficientInstanceCapacity", 500, (5,)),
        ("SpotMaxPriceTooLow", 400, (5,)),
        ("VcpuLimitExceeded", 400, (4,)),
        ("MaxSpotInstanceCountExceeded", 400, (4,)),
        ("InsufficientFreeAddressesInSubnet", 400, (4,)),
        ("Unsupported", 400, (4,)),
        ("PendingVerification", 400, (4,)),
        ("OptInRequired", 400, (4,)),
        ("InvalidAMIID.NotFound", 400, (4,)),
    )
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """botocore's own pauses between its attempts take no time."""
    monkeypatch.setattr("botocore.retries.standard.time.sleep", lambda seconds: None)
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda seconds: None)
    yield


Act = Callable[[], object]


def strike(client: Client, verb: Act, operation: str, trouble: Trouble, *, begin: Act) -> int:
    """Run a verb in trouble; return the exit code it ends in, after proving that nothing can be left."""
    fresh(client.server, client.home)
    begin()
    client.server.cloud.faults[operation].extend([trouble.fault] * trouble.times)
    try:
        verb()
        code = 0
    except AwsddpError as error:
        code = error.exit_code
        assert error.message
        assert error.why
    client.server.cloud.faults.clear()
    assert living(client.server) <= client.nodes
    client.down()
    assert living(client.server) == 0
    assert left(client.server) == []
    return code


def check(client: Client, verb: Act, operation: str, trouble: Trouble, *, begin: Act) -> None:
    """Strike, and name the case where it ends otherwise than it should."""
    try:
        code = strike(client, verb, operation, trouble, begin=begin)
        assert code in trouble.ends, f"it ended with {code}"
    except BaseException as error:
        error.add_note(f"{operation}: {trouble.name}")
        raise


def nothing() -> None:
    """Begin with an empty account."""


@pytest.mark.parametrize(
    "trouble", LAUNCH_TROUBLES[:2] + LAUNCH_TROUBLES[2:3] + LAUNCH_TROUBLES[6:7], ids=lambda one: one.name
)
def test_a_launch_that_is_refused_leaves_nothing(world: World, server: Server, trouble: Trouble) -> None:
    client = world(2)
    check(client, client.up, "RunInstances", trouble, begin=nothing)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", ["up", "down"])
def test_every_call_may_fail_in_every_way(world: World, server: Server, cloud: Cloud, verb: str) -> None:
    client = world(2)
    fresh(server, client.home)
    begin = client.up if verb == "down" else nothing
    begin()
    act = client.down if verb == "down" else client.up
    operations = sorted({operation for operation, _ in client.calls(act)})
    if not os.environ.get("AWSDDP_FULL"):
        operations = random.Random(verb).sample(operations, 3)
    for operation in operations:
        for trouble in TROUBLES:
            if verb == "down" and trouble.times == ALWAYS:
                trouble = replace(trouble, ends=(*trouble.ends, 8))  # what stays is told
            check(client, act, operation, trouble, begin=begin)
    for trouble in LAUNCH_TROUBLES if verb == "up" else ():
        check(client, act, "RunInstances", trouble, begin=begin)
    told(f"{verb}: {len(operations)} calls x {len(TROUBLES)} faults, each ended clearly, 0 left")
