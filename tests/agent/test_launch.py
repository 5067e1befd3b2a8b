"""A node runs one job, for one client at a time: what it answers to a second client."""

import json
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from awsddp.agent import messages
from awsddp.agent_client import calls, launch_requests
from awsddp.errors import InUse
from tests.support.fleet import free_ports
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


def wait_until_claimed(holder: subprocess.Popen[bytes]) -> None:
    """Wait until a client that stays connected holds the claim."""
    assert holder.stdout is not None
    while line := holder.stdout.readline():
        if b'"claimed": true' in line:
            return
    pytest.fail("the claim was refused")


def test_node_with_a_running_job_refuses_another_and_names_the_first(fleet: "Fleet") -> None:
    fleet.launch(SLEEP, job="one")
    slots = fleet.send_request(0, messages.Slots(ports=launch_requests.list_job_ports()))
    assert (slots.used, slots.jobs) == ((0,), {"one": (0, 1)})
    fleet.port = free_ports()
    with pytest.raises(InUse, match="job one runs on this node"):
        fleet.send_request(0, fleet.requests("print()\n", job="two", slot=1)[0])
    assert not fleet.folder(0, "two").exists()
    fleet.send_request(0, messages.Cancel(job="one"))
    assert fleet.send_request(0, messages.Slots(ports=launch_requests.list_job_ports())).jobs == {"one": ()}
    fleet.launch("print()\n", job="two")
    assert fleet.wait("two").state == "succeeded"


def test_one_of_two_concurrent_launches_of_the_same_name_is_refused(
    fleet: "Fleet",
) -> None:
    launches = [fleet.requests(SLEEP)[0] for _ in range(2)]
    running = [fleet.start(0, launch) for launch in launches]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    winners: list[str] = []
    refused: list[Exception] = []
    for launch, output in zip(launches, outputs, strict=True):
        try:
            winners.append(calls.parse_response(output, request=launch, node=0).job and launch.launch)
        except calls.NameTaken as taken:
            refused.append(taken)
    assert (len(winners), [str(error).splitlines()[0] for error in refused]) == (
        1,
        ["node0: job job already exists on this node"],
    )
    assert [json.loads((fleet.folder(0) / "job.json").read_text())["launch"]] == winners


def test_second_client_waits_for_the_claim_and_learns_its_holder(fleet: "Fleet") -> None:
    first = messages.Claim(owner="ann on laptop", wait_s=0)
    holder = fleet.start(0, first, close=False)
    wait_until_claimed(holder)
    with pytest.raises(InUse, match="another client is starting a job") as refused:
        fleet.send_request(0, messages.Claim(owner="bob", wait_s=0.2))
    assert refused.value.why == "held by ann on laptop"
    holder.kill()
    holder.communicate()
    assert fleet.send_request(0, messages.Claim(owner="bob", wait_s=0)).claimed


def test_claim_reports_for_how_long_no_other_client_has_held_it(fleet: "Fleet") -> None:
    request = messages.Claim(owner="ann", wait_s=0)
    assert fleet.send_request(0, request).free_s > 1e9
    start = time.time()
    holder = fleet.start(0, messages.Claim(owner="bob", wait_s=0), close=False)
    wait_until_claimed(holder)
    time.sleep(1.0)
    holder.communicate(b"")
    assert 0.0 <= fleet.send_request(0, request).free_s < time.time() - start - 1.0


def test_released_claim_is_free_while_its_client_stays_connected(fleet: "Fleet") -> None:
    holder = fleet.start(0, messages.Claim(owner="ann", wait_s=0), messages.Unclaim(), close=False)
    assert holder.stdout is not None
    while b'"claimed": false' not in holder.stdout.readline():  # the claim was held, and released
        pass
    assert fleet.send_request(0, messages.Claim(owner="bob", wait_s=5)).claimed
    assert holder.poll() is None
    holder.kill()
    holder.communicate()


def test_claim_expires_with_its_lease_and_a_launch_releases_its_claim(fleet: "Fleet") -> None:
    holder = fleet.start(0, messages.Claim(owner="ann", wait_s=0, lease_s=1), close=False)
    wait_until_claimed(holder)
    assert fleet.send_request(0, messages.Claim(owner="bob", wait_s=10)).claimed
    assert holder.poll() is None
    holder.kill()
    holder.communicate()

    launches = fleet.requests(SLEEP)
    fleet.jobs.append("job")
    holder = fleet.start(0, messages.Claim(owner="ann", wait_s=0), launches[0], close=False)
    until((fleet.folder(0) / "state.json").exists)
    assert fleet.send_request(0, messages.Claim(owner="bob", wait_s=5)).claimed
    assert holder.poll() is None
    holder.kill()
    holder.communicate()
