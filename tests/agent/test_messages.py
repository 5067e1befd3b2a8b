"""Each request to a node's own program, and what an awsddp without request classes left on a node."""

import json
import os
import signal
from typing import TYPE_CHECKING, Any

from awsddp.agent import messages
from awsddp.agent.messages import KINDS, Launch
from awsddp.agent_client import launch_requests
from awsddp.agent_client.job_reports import job_document
from tests.agent.test_probe import Conversation
from tests.support.fleet import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
# Written by 5937cdd; shortened: one rank of each node, and the variables of their processes.
LAUNCHED: dict[str, Any] = {
    "do": "launch",
    "job": "job",
    "launch": "3e5257e00063753e",
    "slot": 0,
    "created": "2026-11-25T22:15:22+00:00",
    "nodes": [
        {"node": 0, "private_ip": "127.55.19.1", "instance_id": "i-0"},
        {"node": 1, "private_ip": "127.55.19.2", "instance_id": "i-1"},
    ],
    "facts": {"script": "job.py", "args": [], "launcher": "ssh"},
    "layout": [[0, 0, 0], [1, 0, 1]],
    "secret": "2dd5cd80d23b6ef9",
    "master_port": 16797,
    "link_port": 16798,
    "join_s": 60.0,
    "silent_s": 300.0,
    "timeout": None,
    "hang_after": None,
    "grace": 30.0,
    "outputs": [],
    "defaults": {"OMP_NUM_THREADS": "1"},
    "after": [],
    "secrets": [],
    "elastic": None,
    "node": 0,
    "folder": "/home/ubuntu/.awsddp/jobs/job",
    "workdir": "/home/ubuntu/awsddp/work",
    "path": "/opt/pytorch/bin",
    "gpus": [],
    "processes": [
        {
            "ranks": [0],
            "argv": ["/opt/pytorch/bin/python", "job.py"],
            "environment": {"RANK": "0", "GLOO_SOCKET_IFNAME": "lo"},
            "log": "rank0.log",
            "script": "job.py",
            "files": {},
        }
    ],
}
STATE: dict[str, Any] = {
    "job": "job",
    "node": 0,
    "state": "running",
    "cause": None,
    "complete": True,
    "boot": "fb51b06e-03f0-40eb-8b12-c879c7db5549",
    "created": "2026-11-25T22:15:22+00:00",
    "ranks": [
        {"rank": 0, "local_rank": 0, "node": 0, "exit_code": 3, "seconds": 2.0, "started": 1795644924.5},
        {"rank": 1, "local_rank": 0, "node": 1, "exit_code": None, "seconds": 0.0, "started": None},
    ],
    "pid": 5272,
}


def test_what_the_nodes_program_writes_is_what_its_client_expects_of_each_request(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(fleet.up)
    launch, address = fleet.requests(SLEEP, job="job2", slot=1)[0], fleet.hosts[0].node.private_ip
    assert fleet.ask(0, messages.Claim(owner="ann", wait_s=0)).claimed
    assert not fleet.ask(0, messages.Unclaim()).claimed
    assert fleet.ask(0, messages.Slots(ports=launch_requests.job_ports())).used == (0,)
    assert [one.job for one in fleet.ask(0, messages.State()).jobs] == ["job"]
    assert {one.rank for one in fleet.ask(0, messages.Stacks(job="job")).processes} == {0, 1}
    listed = fleet.ask(0, messages.Manifest(job="job", ranks=[(0, 0), (1, 0)]))
    assert all(one.sample and one.modified for one in listed.files)
    connected = Conversation(fleet, 0)
    assert len(connected.ask(messages.Probe(address=str(address), thorough=True)).ports) == 1
    assert connected.ask(messages.Dial(peers=[(1, str(address), 1)], seconds=1)).dials[0][2]
    connected.close()
    assert fleet.ask(0, messages.Lost(job="job", node=1, why="it burnt", kind="node_lost")).heard
    assert fleet.ask(0, messages.Cancel(job="job", grace=0)).job == "job"
    fleet.jobs.append("job2")
    assert fleet.ask(0, launch).job == "job2"
    told = {"claim", "unclaim", "slots", "state", "stacks", "manifest", "probe", "dial", "lost"}
    assert told | {"cancel", "launch", "follow"} == set(KINDS), "follow: tests/agent_client/test_logs.py"


def test_a_job_that_an_older_awsddp_launched_is_known_and_fetched(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank0.log").write_text("said\n")
    (folder / "snapshot.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(STATE))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (told,) = fleet.ask(0, messages.State()).jobs
    job = job_document({0: told})
    assert (job.state, job.cause and job.cause.kind) == ("interrupted", "interrupted")
    assert [one.exit_code for one in job.ranks] == [3, None]
    assert [one.instance_id for one in job.nodes] == ["i-0", "i-1"]
    assert (job.script, job.started) == ("job.py", "2026-11-25T22:15:24Z")
    assert fleet.ask(0, messages.Slots()).jobs == {"job": ()}
    listed = fleet.ask(0, messages.Manifest(job="job", ranks=[(0, 0), (1, 1)]))
    assert "logs/rank0.log" in {one.home for one in listed.files}


def test_a_cause_that_has_no_kind_yet_is_told(fleet: "Fleet") -> None:
    folder = fleet.folder(0)
    folder.mkdir(parents=True)
    cause = {"rank": 0, "node": 0, "exit_code": 3, "explanation": "it burnt"}
    (folder / "state.json").write_text(json.dumps({**STATE, "state": "failed", "cause": cause}))
    (folder / "job.json").write_text(json.dumps(LAUNCHED))
    (told,) = fleet.ask(0, messages.State()).jobs
    assert told.cause is not None
    assert (told.cause.kind, told.cause.exit_code, told.cause.explanation) == ("unknown", 3, "it burnt")


def test_a_launch_is_written_with_the_names_that_an_older_awsddp_reads() -> None:
    written = Launch.from_json(LAUNCHED).to_json()
    assert {key: written[key] for key in LAUNCHED} == LAUNCHED


def test_a_supervisor_of_an_older_awsddp_is_ended_by_what_it_reads(fleet: "Fleet") -> None:
    """cancel.json has no key that is not set: "lost" in it meant that the first node is gone."""
    fleet.launch(SLEEP)
    os.kill(fleet.document(0)["pid"], signal.SIGSTOP)
    process = fleet.start(0, messages.Cancel(job="job", grace=1))
    file = fleet.folder(0) / "cancel.json"
    until(file.exists)
    assert set(json.loads(file.read_text())) == {"state", "grace", "cause"}
    os.kill(fleet.document(0)["pid"], signal.SIGCONT)
    process.communicate(timeout=60)
