"""Waiting for AWS: polls with a deadline, a growing pause and jitter, on a clock that a test can move."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from awsddp.aws.api_errors import Refused
from awsddp.model.events import Event, OnEvent

T = TypeVar("T")

# How long an id, a tag or a group may stay unknown after it was made. AWS: "eventual consistency",
# https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
VISIBLE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What waiting needs: a monotonic clock and a sleep in seconds, and the time of day in UTC."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


CLOCK = Clock()


def poll(
    check: Callable[[], T | None],
    *,
    deadline_s: float,
    first_s: float = 0.3,
    most_s: float = 5.0,
    passes: Callable[[Refused], bool] = lambda refusal: False,
) -> T | None:
    """Call `check` until it returns something, and return that; None when the deadline passes first.

    The pause grows from `first_s` to `most_s`, with a fifth of jitter: many clients must not ask at once.
    A check that AWS throttles or does not answer is made again, and one whose refusal `passes` with time;
    the last such refusal is raised at the end.
    """
    end = CLOCK.monotonic() + deadline_s
    for pause in growing(first_s, most_s):
        trouble = None
        try:
            if (found := check()) is not None:
                return found
        except Refused as refusal:
            if not passes(refusal) and not refusal.retryable:
                raise
            trouble = refusal
        left = end - CLOCK.monotonic()
        if left <= 0:
            if trouble is not None:
                raise trouble
            return None
        CLOCK.sleep(min(pause, left))
    raise AssertionError("growing() never ends")


def patiently(
    act: Callable[[], T], *, passes: Callable[[Refused], bool], on_event: OnEvent = lambda event: None
) -> T:
    """Do `act`, and again for two minutes while AWS throttles it, does not answer, or the refusal `passes`.

    `passes` says of a refusal whether it may pass with time, as ids are not visible everywhere at once.
    The first of these is an event. Raises the last refusal at the deadline.
    """
    told: list[str] = []

    def will_pass(refusal: Refused) -> bool:
        if not passes(refusal):
            return False
        if not told:
            told.append(refusal.why)
            on_event(Event(f"retrying: {refusal.why}"))
        return True

    done = poll(lambda: (act(),), deadline_s=VISIBLE_S, passes=will_pass)
    assert done is not None, "an act that ends returns something, and one that does not is refused"
    return done[0]


def growing(first_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses without end, from `first_s` growing to `most_s`, with a fifth of jitter."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.8, 1.2)
        pause = min(pause * 1.6, most_s)


def deadline_s(instance_types: Iterable[str]) -> float:
    """Return how long such instances may take to start or to end: 10 minutes, 30 for bare metal and P4 on.

    These take longer than the 10 minutes of AWS's own waiters to count as terminated.
    """
    slow = any(".metal" in name or name.startswith(("p4", "p5", "p6")) for name in instance_types)
    return 1800.0 if slow else 600.0
