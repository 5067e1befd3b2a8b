"""The launch request of a job with one process."""

from tests.support.fleet import launch_of

PROCESS = {"ranks": [0], "argv": [], "environment": {}, "log": ""}


REQUEST = launch_of(processes=[PROCESS])
