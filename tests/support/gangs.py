"""Waits for a job of several nodes, and reads its end."""

from typing import Any


def wait(condition: Any, seconds: float = 30) -> None:
    from tests.support.fleet import until

    until(condition, seconds=seconds)


def codes(job: Any) -> list[int | None]:
    return [rank.exit_code for rank in job.ranks]


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
