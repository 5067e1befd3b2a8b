"""How a client cancels a job."""

import json
from typing import TYPE_CHECKING

from awsddp.agent import messages
from tests.support.gangs import SLEEP, exit_codes
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_cancel_of_one_launch_does_not_end_a_job_of_the_same_name_of_another(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    launch = json.loads((fleet.folder(0) / "job.json").read_text())["launch"]
    assert fleet.send_request(0, messages.Cancel(job="job", grace=0, launch="other")).state == "running"
    assert fleet.document(1)["state"] == "running"
    assert fleet.send_request(0, messages.Cancel(job="job", grace=0, launch=launch)).state == "cancelled"


def test_cancel_leaves_ranks_the_grace_to_save(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(1.5); print('saved', flush=True); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.ranks_are_up)
    answer = fleet.send_request(1, messages.Cancel(job="job", grace=20))
    assert (answer.state, answer.cause and answer.cause.kind) == ("cancelled", "cancelled")
    assert all(b"saved" in fleet.log(rank) for rank in range(4))
    assert fleet.wait().state == "cancelled"
    assert fleet.send_request(0, messages.Cancel(job="job")).state == "cancelled"


def test_cancel_kills_after_the_grace(fleet: "Fleet") -> None:
    fleet.launch(
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.ranks_are_up)
    fleet.send_request(0, messages.Cancel(job="job", grace=0.5))
    job = fleet.wait()
    assert (job.state, exit_codes(job)) == ("cancelled", [-9] * 4)
