"""The launch request of a job with one process."""

from tests.support.fleet import make_launch

PROCESS = {"ranks": [0], "argv": [], "environment": {}, "log": ""}


REQUEST = make_launch(processes=[PROCESS])
