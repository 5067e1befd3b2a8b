"""Waits for a condition."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, seconds: float = 90, every_s: float = 0.05) -> None:
    """Wait until `condition` is true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(every_s)
