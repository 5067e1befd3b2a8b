"""Wait for AWS: poll with a deadline, growing pauses and jitter, on a clock that a test can move."""

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from awsddp.aws.api_errors import AwsRefused
from awsddp.model.events import Event, OnEvent

T = TypeVar("T")

# How long an id, a tag or a group may stay unknown after it was created; AWS calls this "eventual
# consistency":
# https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html
VISIBLE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A monotonic clock and a sleep function, both in seconds, and a function for the current time in UTC."""

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
    is_transient: Callable[[AwsRefused], bool] = lambda refusal: False,
) -> T | None:
    """Call `check` until its result is not None, and return the result; return None at the deadline.

    The pause grows from `first_s` to `most_s`, with 20 % jitter so that clients do not call all at once.
    A check is repeated if AWS throttles it or does not respond, or if `is_transient` returns True for its
    error; the last such error is raised at the deadline.
    """
    end = CLOCK.monotonic() + deadline_s
    for pause in growing_pauses(first_s, most_s):
        error = None
        try:
            if (result := check()) is not None:
                return result
        except AwsRefused as refusal:
            if not is_transient(refusal) and not refusal.retryable:
                raise
            error = refusal
        remaining_s = end - CLOCK.monotonic()
        if remaining_s <= 0:
            if error is not None:
                raise error
            return None
        CLOCK.sleep(min(pause, remaining_s))
    raise AssertionError("growing() never ends")


def retry_while_transient(
    act: Callable[[], T],
    *,
    is_transient: Callable[[AwsRefused], bool],
    on_event: OnEvent = lambda event: None,
) -> T:
    """Call `act` and return its result; retry for two minutes while its error is transient.

    An error is transient if AWS throttles the call or does not respond, or if `is_transient` returns True for
    the error, for example because a new id is not visible everywhere yet. The first error for which
    `is_transient` returns True is reported as an event. Raises the last error at the deadline.
    """
    reported: list[str] = []

    def will_pass(refusal: AwsRefused) -> bool:
        if not is_transient(refusal):
            return False
        if not reported:
            reported.append(refusal.why)
            on_event(Event(f"retrying: {refusal.why}"))
        return True

    result = poll(lambda: (act(),), deadline_s=VISIBLE_S, is_transient=will_pass)
    assert result is not None, "the result of the check is a tuple, and at the deadline its error is raised"
    return result[0]


def growing_pauses(first_s: float, most_s: float) -> Iterator[float]:
    """Yield pauses in seconds forever; they grow from `first_s` to `most_s`, with 20 % jitter."""
    pause = first_s
    while True:
        yield pause * random.uniform(0.8, 1.2)
        pause = min(pause * 1.6, most_s)


def deadline_s(instance_types: Iterable[str]) -> float:
    """Return how many seconds instances of these types may take to start or to terminate.

    Bare metal types, and the families P4 and later, may take more than 10 minutes to terminate, which is the
    time limit of AWS's own waiters.
    """
    is_slow = any(".metal" in name or name.startswith(("p4", "p5", "p6")) for name in instance_types)
    return 1800.0 if is_slow else 600.0
