"""Each request to an agent, and the files of an awsddp that had no request classes."""

import json
import os
import signal
from typing import TYPE_CHECKING

from awsddp.agent import messages
from awsddp.agent.messages import REQUEST_TYPES, Launch
from awsddp.agent_client import launch_requests
from tests.agent.test_probe import AgentConnection
from tests.support.older_job import LAUNCHED
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def test_client_can_parse_the_answer_to_each_request(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(fleet.ranks_are_up)
    launch, address = fleet.requests(SLEEP, job="job2", slot=1)[0], fleet.hosts[0].node.private_ip
    assert fleet.send_request(0, messages.Claim(owner="ann", wait_s=0)).claimed
    assert not fleet.send_request(0, messages.Unclaim()).claimed
    assert fleet.send_request(0, messages.Slots(ports=launch_requests.list_job_ports())).used == (0,)
    assert [job.job for job in fleet.send_request(0, messages.State()).jobs] == ["job"]
    assert {process.rank for process in fleet.send_request(0, messages.Stacks(job="job")).processes} == {0, 1}
    manifest = fleet.send_request(0, messages.Manifest(job="job", ranks=[(0, 0), (1, 0)]))
    assert all(file.sample and file.modified for file in manifest.files)
    connection = AgentConnection(fleet, 0)
    assert len(connection.ask(messages.Probe(address=str(address), thorough=True)).ports) == 1
    assert connection.ask(messages.Dial(peers=[(1, str(address), 1)], seconds=1)).dials[0][2]
    connection.close()
    assert fleet.send_request(0, messages.TakeEvent(job="job")).event is None
    assert fleet.send_request(0, messages.Lost(job="job", node=1, why="it burnt", kind="node_lost")).heard
    assert fleet.send_request(0, messages.Cancel(job="job", grace=0)).job == "job"
    fleet.jobs.append("job2")
    assert fleet.send_request(0, launch).job == "job2"
    requested = {"claim", "unclaim", "slots", "state", "stacks", "manifest", "probe", "dial", "takeevent"}
    assert requested | {"lost", "cancel", "launch", "follow"} == set(REQUEST_TYPES), (
        "follow: tests/agent_client/test_logs.py"
    )


def test_launch_has_the_keys_that_an_older_awsddp_reads() -> None:
    document = Launch.from_json(LAUNCHED).to_json()
    assert [process.pop("defaults") for process in document["processes"]] == [{}] * len(LAUNCHED["processes"])
    assert {key: document[key] for key in LAUNCHED} == LAUNCHED


def test_cancel_has_the_keys_that_an_older_agent_reads(fleet: "Fleet") -> None:
    """Keys that are not set are left out: "lost" in cancel.json meant that the first node is gone."""
    fleet.launch(SLEEP)
    os.kill(fleet.document(0)["pid"], signal.SIGSTOP)
    process = fleet.start(0, messages.Cancel(job="job", grace=1))
    file = fleet.folder(0) / "cancel.json"
    until(file.exists)
    assert set(json.loads(file.read_text())) == {"state", "grace", "cause"}
    os.kill(fleet.document(0)["pid"], signal.SIGCONT)
    process.communicate(timeout=60)
