"""A job of several nodes: its program, and its end."""

from typing import Any


def exit_codes(job: Any) -> list[int | None]:
    return [rank.exit_code for rank in job.ranks]


SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
