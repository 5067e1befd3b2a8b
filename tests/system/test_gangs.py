"""Real jobs of real processes on two nodes of this machine."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from awsddp.agent import messages
from awsddp.agent_client.logs import Merger
from awsddp.errors import JobError, NodeError, NotFoundError, UsageError
from awsddp.util.parallel import run_in_thread
from tests.support.gangs import SLEEP, exit_codes
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.fleet import Fleet


def unread_bytes(port: int) -> list[int]:
    """Return the bytes in transit from `port`, and those that its clients have not read: proc_pid_net(5)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ends = [[address.split(":")[1] for address in row[1:3]] + row[4].split(":") for row in rows]
    sockets = [(int(local, 16), int(remote, 16), sent, unread) for local, remote, sent, unread in ends]
    in_transit = [int(sent, 16) for local, _, sent, _ in sockets if local == port]
    return in_transit + [int(unread, 16) for _, remote, _, unread in sockets if remote == port]


def test_job_of_four_ranks_on_two_nodes_succeeds(fleet: "Fleet") -> None:
    job = fleet.run("import os\nprint('rank', os.environ['RANK'])\n")
    assert (job.state, job.cause, exit_codes(job)) == ("succeeded", None, [0, 0, 0, 0])
    assert [(rank.rank, rank.local_rank, rank.node) for rank in job.ranks] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert [fleet.log(rank) for rank in range(4)] == [b"rank %d\n" % rank for rank in range(4)]
    until(lambda: not fleet.supervisors(0) + fleet.supervisors(1))


def test_both_nodes_record_the_same_end_of_the_job(fleet: "Fleet") -> None:
    fleet.run("import os, sys\nsys.exit(3 * (os.environ['RANK'] == '2'))\n")
    first, second = fleet.document(0), fleet.document(1)
    for key in ("state", "cause", "ranks", "complete"):
        assert first[key] == second[key]


def test_failing_rank_ends_the_others_and_is_named(fleet: "Fleet") -> None:
    job = fleet.run(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '2':\n"
        "    time.sleep(0.5)\n"
        "    for line in range(30): print('line', line)\n"
        "    sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node, job.cause.instance_id) == (2, 1, "i-1")
    assert (job.cause.exit_code, job.cause.signal) == (3, None)
    assert job.cause.tail == tuple(f"line {line}" for line in range(10, 30))
    assert "exit code 3" in job.cause.explanation
    assert exit_codes(job) == [-15, -15, 3, -15]
    assert fleet.processes() == []


def test_exit_0_does_not_end_the_others(fleet: "Fleet") -> None:
    job = fleet.run("import os, time\nif os.environ['RANK'] == '0': time.sleep(2)\n")
    assert job.state == "succeeded"
    assert job.ranks[0].seconds > 1.5 > job.ranks[3].seconds


def test_rank_that_ended_early_is_named_before_the_one_that_failed(fleet: "Fleet") -> None:
    job = fleet.run("import os, time\nif os.environ['RANK'] != '1': time.sleep(1); raise ValueError('x')\n")
    assert job.cause is not None
    assert job.cause.explanation.startswith("Rank 1 had ended 1 s before, with exit code 0; ")
    assert job.cause.explanation.endswith(" ValueError: x.")


def test_all_of_16_ranks_that_end_at_once_have_an_exit_code(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    fleet.hosts[0] = replace(fleet.hosts[0], prepared=replace(fleet.hosts[0].prepared, python="/bin/true"))
    assert exit_codes(fleet.run("x\n", world_size=16)) == [0] * 16


def test_log_of_a_rank_that_cannot_be_started_says_why(make_fleet: "Callable[[int], Fleet]") -> None:
    fleet = make_fleet(1)
    job = fleet.run("x\n", args=("x" * 200_000,))
    assert exit_codes(job) == [127, 127]
    assert b"could not start this process: [Errno 7]" in fleet.log(0)


def test_killed_rank_is_named_with_its_signal(fleet: "Fleet") -> None:
    job = fleet.run(
        "import os, time\nif os.environ['RANK'] == '3': os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    )
    assert job.cause is not None
    assert (job.cause.rank, job.cause.exit_code, job.cause.signal) == (3, -9, 9)
    assert "SIGKILL" in job.cause.explanation


def test_ranks_that_ignore_term_are_killed(fleet: "Fleet") -> None:
    job = fleet.run(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '0': time.sleep(1); raise SystemExit(7)\ntime.sleep(600)\n"
    )
    assert exit_codes(job) == [7, -9, -9, -9]
    assert fleet.processes() == []


def test_grandchildren_in_sessions_of_their_own_are_ended(fleet: "Fleet") -> None:
    job = fleet.run(
        "import os, signal, subprocess, sys\n"
        "sleep = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        "subprocess.Popen([sys.executable, '-c', sleep], start_new_session=True, env={})\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0: os.execv(sys.executable, [sys.executable, '-c', sleep, os.environ['HOME']])\n"
        "    os._exit(0)\n"
    )
    assert job.state == "succeeded"
    assert fleet.processes() == []


def test_killed_supervisor_ends_its_ranks_and_fails_the_job(fleet: "Fleet") -> None:
    fleet.launch(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    until(lambda: len(fleet.processes()) == 8)
    os.kill(fleet.document(1)["pid"], signal.SIGKILL)
    job = fleet.wait()
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.rank, job.cause.node) == (None, 1)
    assert "node1 left the job while it ran: " in job.cause.explanation
    assert fleet.document(1)["state"] == "interrupted"
    assert "agent of node1 was killed" in fleet.document(1)["cause"]["explanation"]
    until(lambda: fleet.processes() == [])


def test_node_whose_agent_and_guard_were_killed_is_not_reported_as_lost(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(lambda: len(fleet.processes()) == 4)
    first_pid = fleet.document(0)["pid"]
    os.kill(first_pid, signal.SIGSTOP)  # sends nothing more: unread bytes of a dead process reset its link
    stopped = Path(f"/proc/{first_pid}/stat")
    until(lambda: stopped.read_text().rpartition(")")[2].split()[0] == "T")  # no send is in progress
    port = fleet.requests(SLEEP)[0].link_port
    until(lambda: not any(unread_bytes(port)))
    for pid in fleet.supervisors(1):  # as kill(-1, SIGKILL) does to all processes of its user on the node
        os.kill(pid, signal.SIGKILL)
    until(lambda: not fleet.supervisors(1))  # bytes that arrive while they die would reset the link, too
    os.kill(first_pid, signal.SIGCONT)
    job = fleet.wait()
    assert job.cause is not None
    reason = job.cause.explanation
    assert reason.startswith("node1 left the job while it ran: its agent has ended and closed"), reason
    assert job.cause.next.startswith("awsddp recover job ")
    until(lambda: fleet.processes() == [])


def test_guard_reports_a_killed_supervisor_whose_link_was_broken(fleet: "Fleet") -> None:
    from tests.agent.test_peers import Relay

    launches = fleet.requests(SLEEP)
    first_ip = launches[0].first_node.private_ip
    relay = Relay(first_ip.rpartition(".")[0] + ".99", (first_ip, launches[0].link_port))
    far = messages.LaunchNode(node=0, private_ip=relay.host, instance_id="i-0")
    launches[1].nodes = [far, launches[1].nodes[1]]

    def pump_and_check(condition: Any) -> Any:
        relay.pump()
        return condition()

    for node, request in launches.items():
        fleet.send_request(node, request)
    until(lambda: pump_and_check(lambda: len(fleet.processes()) == 4))
    os.kill(fleet.document(1)["pid"], signal.SIGKILL)
    relay.reset()
    until(lambda: pump_and_check(lambda: fleet.document(0)["state"] == "failed"))
    explanation = fleet.document(0)["cause"]["explanation"]
    assert explanation == "node1 left the job while it ran: its agent was killed (signal 9)."
    relay.close()


def test_ranks_end_when_node_0_is_lost(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(lambda: len(fleet.processes()) == 4)
    os.kill(fleet.document(0)["pid"], signal.SIGKILL)
    job = fleet.wait()
    assert (job.state, exit_codes(job)) == ("interrupted", [None, None, -15, -15])
    assert fleet.processes() == []
    alone = fleet.wait(nodes=[1])
    assert alone.state == "failed"
    assert alone.cause is not None
    assert alone.cause.node == 0
    assert "lost node0" in alone.cause.explanation


def test_silent_node_fails_the_job_and_is_named(fleet: "Fleet") -> None:
    fleet.launch(SLEEP, heartbeat_timeout="5s")
    until(lambda: len(fleet.processes()) == 4)
    os.kill(fleet.document(1)["pid"], signal.SIGSTOP)
    job = fleet.wait(nodes=[0])
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.node, job.cause.instance_id) == (1, "i-1")
    assert "no heartbeat" in job.cause.explanation
    os.kill(fleet.document(1)["pid"], signal.SIGCONT)
    fleet.wait(nodes=[1])
    assert fleet.processes() == []


def make_lost(why: str) -> messages.Lost:
    """Return the message to a node that the first node of the job is gone."""
    return messages.Lost(job="job", node=0, why=why, kind="node_lost")


def test_nodes_end_their_ranks_when_a_client_reports_that_their_first_node_is_gone(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(lambda: len(fleet.processes()) == 4)
    first = fleet.document(0)["pid"]
    os.kill(first, signal.SIGSTOP)
    assert fleet.send_request(1, make_lost("its instance is terminated")).heard
    job = fleet.wait(nodes=[1])
    os.kill(first, signal.SIGCONT)
    assert job.state == "failed"
    assert job.cause is not None
    assert (job.cause.node, job.cause.kind) == (0, "node_lost")
    assert "lost node0 (its instance is terminated)" in job.cause.explanation
    assert not fleet.send_request(1, make_lost("again")).heard
    fleet.wait()
    assert fleet.processes() == []


def test_a_cancelled_job_whose_first_node_is_gone_stays_cancelled(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(lambda: len(fleet.processes()) == 4)
    first = fleet.document(0)["pid"]
    os.kill(first, signal.SIGSTOP)
    cancelled = run_in_thread(fleet.send_request, 1, messages.Cancel(job="job", grace=1))
    until((fleet.folder(1) / "cancel.json").exists)
    until(lambda: len(fleet.processes()) == 2)
    assert fleet.send_request(1, make_lost("its instance is terminated")).heard
    assert cancelled.result().state == "cancelled"
    assert cancelled.result().cause.kind == "cancelled"
    os.kill(first, signal.SIGCONT)
    fleet.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
@pytest.mark.parametrize("node", [0, 1])
def test_full_disk_is_the_cause_and_the_end_of_the_job_is_still_written(fleet: "Fleet", node: int) -> None:
    disk = fleet.homes[node] / ".awsddp"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    try:
        job = fleet.run(
            "import os, time\n"
            f"if os.environ['RANK'] != '{2 * node}': time.sleep(600)\n"
            "with open(os.environ['AWSDDP_RUN_DIR'] + '/checkpoint', 'wb', buffering=0) as file:\n"
            "    while True: file.write(bytes(4096))\n"
        )
        assert [fleet.document(index)["state"] for index in (0, 1)] == ["failed", "failed"]
        assert job.cause is not None
        assert (job.cause.rank, job.cause.node) == (2 * node, node)
        assert f"No space left on {disk} (0.00419 GB)." in job.cause.explanation
        until(lambda: not fleet.supervisors(node))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_missing_node_fails_the_job_and_is_named(fleet: "Fleet") -> None:
    request = fleet.requests(SLEEP)[0]
    request.join_s = 1.0
    fleet.send_request(0, request)
    job = fleet.wait(nodes=[0])
    assert job.cause is not None
    assert (job.state, job.cause.node) == ("failed", 1)
    assert "node1 did not report within 1 s" in job.cause.explanation
    assert exit_codes(job) == [None] * 4


def test_unknown_connections_to_the_port_do_not_disturb_the_job(fleet: "Fleet") -> None:
    import socket

    launches = fleet.requests("import time\ntime.sleep(1)\n")
    fleet.send_request(0, launches[0])
    address = launches[0].first_node.private_ip, launches[0].link_port
    first = socket.create_connection(address)
    first.sendall(b'{"node": 1, "challenge": "x", "proof": "x"}\n{"is": "here"}\n')
    second = socket.create_connection(address)
    second.sendall(b"\0" * 10_000)
    fleet.send_request(1, launches[1])
    assert fleet.wait().state == "succeeded"
    first.close()
    second.close()


def test_node_with_another_secret_does_not_join(fleet: "Fleet") -> None:
    launches = fleet.requests(SLEEP)
    launches[1].secret = "x"
    for node, launch in launches.items():
        launch.join_s = 2.0
        fleet.send_request(node, launch)
    job = fleet.wait()
    assert job.cause is not None
    assert (job.state, job.cause.node, exit_codes(job)) == ("failed", 1, [None] * 4)


def test_timeout_ends_the_job_and_is_its_cause(fleet: "Fleet") -> None:
    job = fleet.run(SLEEP, timeout="1s")
    assert job.state == "failed"
    assert job.cause is not None
    assert job.cause.rank is None
    assert "timeout of 1 s" in job.cause.explanation


def test_hangup_of_a_node_does_not_end_the_job(fleet: "Fleet") -> None:
    fleet.launch("import time\ntime.sleep(2)\n")
    until(lambda: len(fleet.processes()) == 4)  # before it is executed a rank looks like its supervisor
    for pid in fleet.supervisors(0) + fleet.supervisors(1) + fleet.processes():
        os.kill(pid, signal.SIGHUP)
    assert fleet.wait().state == "succeeded"


def test_node_that_shuts_down_interrupts_the_job(fleet: "Fleet") -> None:
    fleet.launch(SLEEP)
    until(lambda: len(fleet.processes()) == 4)
    os.kill(fleet.document(1)["pid"], signal.SIGTERM)
    job = fleet.wait()
    assert (job.state, exit_codes(job)) == ("interrupted", [-15] * 4)
    assert job.cause is not None
    assert job.cause.node == 1
    assert "node1 was shut down while the job ran" in job.cause.explanation


def test_shutdown_is_the_cause_even_if_the_supervisor_was_killed_before_the_end(fleet: "Fleet") -> None:
    fleet.launch(
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    until(fleet.ranks_are_up)
    pid = fleet.document(1)["pid"]
    os.kill(pid, signal.SIGTERM)
    until(lambda: fleet.document(1)["cause"])
    os.kill(pid, signal.SIGKILL)
    until(lambda: fleet.document(1)["state"] == "interrupted")
    assert "was shut down" in fleet.document(1)["cause"]["explanation"]
    fleet.send_request(0, messages.Cancel(job="job", grace=0))


def test_job_of_a_restarted_node_is_interrupted(fleet: "Fleet") -> None:
    fleet.run("pass\n")
    for node in (0, 1):
        path = fleet.folder(node) / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "running", "boot": "another"}))
    job = fleet.wait()
    assert job.state == "interrupted"
    assert job.cause is not None
    assert "was restarted" in job.cause.explanation


def test_special_characters_of_arguments_reach_the_script_unchanged(fleet: "Fleet") -> None:
    args = (
        "--flag",
        "-x",
        "a b",
        'it\'s "quoted"',
        "new\nline",
        "$(touch canary)",
        "`x`",
        "",
        "ä€😀",
        "{{}}",
        "\\",
    )
    fleet.write("-it's {odd}.py", "import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    job = fleet.run("-it's {{odd}}.py", args=(*args, "{rank}", "{local_rank}"))
    assert job.state == "succeeded"
    for rank in range(4):
        expected = [arg.replace("{{}}", "{}") for arg in args] + [str(rank), str(rank % 2)]
        assert json.loads(fleet.log(rank)) == expected
    assert not list(fleet.homes[0].rglob("canary"))


def test_launch_reports_its_error_and_leaves_no_job_folder(fleet: "Fleet") -> None:
    import socket

    with pytest.raises(UsageError, match=r"nowhere\.py not found on this node"):
        fleet.send_request(1, fleet.requests("nowhere.py")[1])
    request = fleet.requests(SLEEP)[0]
    with socket.socket() as taken:
        taken.bind((request.first_node.private_ip, request.link_port))
        taken.listen()
        with pytest.raises(JobError, match=r"port \d+ .* is taken"):
            fleet.send_request(0, request)
    with pytest.raises(NodeError, match="cannot be run"):
        request.processes[0].argv = ["/no/python"]
        fleet.send_request(0, request)
    with pytest.raises(NotFoundError, match="job other not found"):
        fleet.send_request(0, messages.Cancel(job="other"))
    with pytest.raises(UsageError, match="invalid job name"):
        fleet.send_request(0, messages.Cancel(job="../job"))
    assert not list((fleet.homes[0] / ".awsddp").glob("jobs/*"))


def test_existing_job_is_not_overwritten(fleet: "Fleet") -> None:
    fleet.run("print('first')\n")
    with pytest.raises(UsageError, match="already exists"):
        fleet.send_request(1, fleet.requests("print('second')\n")[1])
    assert fleet.log(2) == b"first\n"


def test_secret_is_neither_in_the_ranks_environment_nor_readable_by_others(fleet: "Fleet") -> None:
    fleet.run("import os, sys\nprint(dict(os.environ), sys.argv)\n")
    file = fleet.folder(0) / "job.json"
    secret = json.loads(file.read_text())["secret"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert fleet.folder(0).stat().st_mode & 0o777 == 0o700
    assert not any(secret.encode() in fleet.log(rank) for rank in range(4))


def test_job_has_an_upload_state_before_its_uploader_reports_and_stores_how_to_restart_it(
    fleet: "Fleet",
) -> None:
    saver = "import pathlib, sys; pathlib.Path('~/got').expanduser().write_text(sys.stdin.read())"
    saving = {"argv": [sys.executable, "-c", saver], "stdin": base64.b64encode(b"the secret").decode()}
    launches = fleet.requests(SLEEP)
    fleet.jobs.append("job")
    for node, launch in launches.items():
        launch.saving = saving
        fleet.send_request(node, launch)
    until(lambda: all((home / "got").exists() for home in fleet.homes))
    folder = fleet.folder(0)
    assert (fleet.homes[0] / "got").read_text() == "the secret"
    assert json.loads((folder / "saver.json").read_text()) == saving
    assert (folder / "saver.json").stat().st_mode & 0o777 == 0o600
    assert (folder / "saver.lock").exists()
    assert saving["stdin"] not in (folder / "job.json").read_text()
    [job] = fleet.send_request(0, messages.State()).jobs
    assert job.saving is not None
    assert (job.saving.files, job.saving.ended, job.saving.silent_s < 60) == (0, False, True)

    progress = json.loads((folder / "saving.json").read_text())
    for at, ended, is_silent in (
        (progress["at"] - 90, False, True),
        (progress["at"] - 90, True, False),
        ("?", False, False),
    ):
        (folder / "saving.json").write_text(json.dumps({**progress, "at": at, "ended": ended}))
        [job] = fleet.send_request(0, messages.State()).jobs
        assert job.saving is not None
        assert job.saving.is_silent == is_silent


def test_rank_has_the_environment_that_torchrun_sets(fleet: "Fleet") -> None:
    fleet.run(
        "import json, os\nprint(json.dumps(dict(os.environ)))\n",
        variables={"NCCL_DEBUG": "INFO", "RANK": "9"},
    )
    environment = json.loads(fleet.log(3))
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": fleet.hosts[0].node.private_ip,
        "MASTER_PORT": str(fleet.port),
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "AWSDDP_RUN_DIR": str(fleet.folder(1) / "run"),
        "NCCL_DEBUG": "INFO",
        "HOME": str(fleet.homes[1]),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    assert {name: environment.get(name) for name in expected} == expected
    assert Path(environment["AWSDDP_RUN_DIR"]).is_dir()


@pytest.mark.prove
def test_gloo_group_forms_over_two_nodes(fleet: "Fleet", tmp_path: Path) -> None:
    job = fleet.run(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([float(dist.get_rank())]); dist.all_reduce(x); print('sum', x.item())\n"
        "dist.barrier(); time.sleep(0.2); dist.destroy_process_group()\n"
    )
    assert job.state == "succeeded", fleet.log(0)
    merger = Merger({rank.rank: rank.node for rank in fleet.ranks}, folder=tmp_path / "logs")
    shown = fleet.follow(merger, 0) + fleet.follow(merger, 1)
    assert b"[rank 3 @ node1] sum 6.0\n" in shown
