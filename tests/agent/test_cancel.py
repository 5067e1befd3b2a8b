"""How a job ends by a client's wish."""

import json
from typing import TYPE_CHECKING

from awsddp.agent import messages
from tests.support.gangs import SLEEP, codes
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def test_cancel_of_a_refused_launch_leaves_another_launchs_job_of_the_name_alone(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    mine = json.loads((fleet.folder(0) / "job.json").read_text())["launch"]
    assert fleet.ask(0, messages.Cancel(job="job", grace=0, launch="other")).state == "running"
    assert fleet.document(1)["state"] == "running"
    assert fleet.ask(0, messages.Cancel(job="job", grace=0, launch=mine)).state == "cancelled"


def test_cancel_gives_time_to_save(fleet: "Fleet") -> None:
    fleet.launch(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(1.5); print('saved', flush=True); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.up)
    answer = fleet.ask(1, messages.Cancel(job="job", grace=20))
    assert (answer.state, answer.cause and answer.cause.kind) == ("cancelled", "cancelled")
    assert all(b"saved" in fleet.log(rank) for rank in range(4))
    assert fleet.wait().state == "cancelled"
    assert fleet.ask(0, messages.Cancel(job="job")).state == "cancelled"


def test_cancel_kills_after_the_grace(fleet: "Fleet") -> None:
    fleet.launch(
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.up)
    fleet.ask(0, messages.Cancel(job="job", grace=0.5))
    job = fleet.wait()
    assert (job.state, codes(job)) == ("cancelled", [-9] * 4)
