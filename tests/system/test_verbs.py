"""Other verbs on two nodes: a command on the nodes, a shell, detached jobs that are followed later, stop."""

import json
import os
import pty
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from awsddp.settings.loader import ONE_COMMAND_KEYS, load
from tests.support.lab import Lab

COUNTS = """
import os, time
for number in range(100):
    print("rank", os.environ["RANK"], "line", number, flush=True)
    time.sleep(0.02)
"""

PATIENT = """
import os, signal, sys, time
def save(*_):
    open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write("in time")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("waiting", flush=True)
time.sleep(600)
"""


def test_exec_labels_the_output_of_each_node_and_separates_the_streams(cluster: Lab) -> None:
    shown = cluster.run("exec", 'echo "out $1"; echo err >&2')
    assert sorted(shown.stdout.splitlines()) == ["[node0] out ", "[node1] out "]
    assert sorted(shown.stderr.splitlines()) == ["[node0] err", "[node1] err"]
    assert shown.returncode == 0


def test_login_sessions_linger_so_that_shared_memory_of_a_job_stays(cluster: Lab) -> None:
    lingering = cluster.run("exec", "--node", "1", "loginctl show-user $USER -p Linger")
    assert lingering.stdout == "[node1] Linger=yes\n"


def test_exec_passes_arguments_unchanged_and_reports_each_exit_code(cluster: Lab) -> None:
    program = "import sys; print(sys.argv[1:], end=''); raise SystemExit(len(sys.argv))"
    result = cluster.json("exec", "--", "python", "-c", program, "a b", "$(touch canary)", "'", code=1)
    assert [(node["node"], node["exit_code"]) for node in result["nodes"]] == [(0, 4), (1, 4)]
    assert result["nodes"][0]["stdout"] == str(["a b", "$(touch canary)", "'"])
    typed = cluster.run("exec", "--node", "1", "-i", "cat", stdin="typed")
    assert (typed.returncode, typed.stdout) == (0, "[node1] typed\n")
    assert "node0: exited with code 3" in cluster.run("exec", "exit 3").stderr
    assert "node0: a signal ended the command" in cluster.run("exec", "--node", "0", "kill -9 $$").stderr
    assert cluster.run("exec", "--node", "7", "true").returncode == 7


def test_exec_fills_placeholders_and_names_a_file_that_is_only_on_the_client(cluster: Lab) -> None:
    (cluster.project / "here-alone.txt").write_text("x")
    shown = cluster.run("exec", "[[ 1 ]] && echo {node_rank}/{nnodes} ${rank:-unset}; cat here-alone.txt")
    assert sorted(shown.stdout.splitlines()) == ["[node0] 0/2 unset", "[node1] 1/2 unset"]
    assert "here-alone.txt is on this machine, but not on the nodes: awsddp sync" in shown.stderr
    (cluster.project / "here-alone.txt").unlink()


@pytest.mark.prove
def test_ranks_exec_and_ssh_find_the_same_programs(cluster: Lab) -> None:
    cluster.script("which.py", "import shutil\nprint(shutil.which('torchrun'), shutil.which('python'))\n")
    cluster.run("train", "which.py", "--world-size", "1", "--name", "which")
    programs = b"/opt/pytorch/bin/torchrun /opt/pytorch/bin/python\n"
    assert (cluster.project / "runs/which/logs/rank0.log").read_bytes() == programs
    line = "echo $(command -v torchrun) $(command -v python)"
    for args in (["ssh", "--", line], ["ssh", "--", f"bash -lc '{line}'"], ["exec", "--node", "0", line]):
        assert cluster.run(*args).stdout.removeprefix("[node0] ").encode() == programs


def test_files_of_awsddp_are_readable_by_their_owner_alone(cluster: Lab) -> None:
    cluster.script("private.py", "print('done')")
    shown = cluster.run("train", "--name", "private", "private.py")
    assert shown.returncode == 0, shown.stderr
    job = cluster.project / "runs/private"
    below, clouds = cluster.home.rglob("*"), {"local", "local-s3"}
    private = [cluster.home, *(path for path in below if clouds.isdisjoint(path.parts))]
    private += [job / "job.json", job / "logs", *(job / "logs").iterdir(), *cluster.home.glob("local*")]
    private += [job / ".awsddp", *(job / ".awsddp").iterdir()]
    assert {"rank0.log", "supervisor0.log", "known_hosts", "default"} <= {path.name for path in private}
    assert {path: oct(path.stat().st_mode) for path in private if path.stat().st_mode & 0o077} == {}


def test_ssh_has_a_terminal_if_the_client_has_one_and_returns_the_exit_code(cluster: Lab) -> None:
    plain = cluster.run("ssh", "--node", "1", "--", "cat; test -t 0; exit 5", stdin="through")
    assert (plain.returncode, plain.stdout) == (5, "through")
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "awsddp", "ssh", "--", "test -t 0 && test -t 1 && echo terminal"]
    shell = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=cluster.project, env=cluster.environ
    )
    os.close(slave)
    output = b""
    while b"terminal" not in output:
        output += os.read(master, 4096)
    assert shell.wait(60) == 0
    os.close(master)


def test_the_ssh_config_reaches_the_nodes_by_name(cluster: Lab) -> None:
    args = cluster.json("ssh")["command"]
    config = args[args.index("-F") + 1]
    for program in (["ssh", "-F", config, "node1", "true"], ["scp", "-F", config, config, "node0:copied"]):
        assert subprocess.run(program, capture_output=True, env=cluster.environ, timeout=60).returncode == 0


LISTENS = """
import os, socket

server = socket.create_server(("", 4444))
print("listening", flush=True)
server.accept()
open("result.bin", "wb").write(os.urandom(2 << 20))
"""


def test_a_command_on_one_node_does_not_affect_a_job_on_another(cluster: Lab) -> None:
    cluster.script("listens.py", LISTENS)
    job = cluster.start("train", "listens.py", "--on", "0", "--world-size", "1", "--name", "beside")
    assert job.stdout is not None
    assert job.stdout.readline() == b"[rank 0 @ node0] listening\n"
    shown = cluster.run("exec", "--node", "1", "echo > /dev/tcp/{master_addr}/4444")
    stderr = job.communicate(timeout=60)[1].decode()
    assert (shown.returncode, job.returncode) == (0, 0), shown.stderr + stderr
    (result,) = (cluster.project / "runs" / "beside").rglob("result.bin")  # by rsync, as it is large
    assert result.stat().st_size == 2 << 20
    for config in ("ssh_config", "hosts"):
        assert "node0" in (cluster.home / "clusters/default" / config).read_text()


@pytest.mark.prove
def test_a_detached_job_is_followed_to_its_end(cluster: Lab) -> None:
    cluster.script("counts.py", COUNTS)
    begun = cluster.json("train", "counts.py", "--world-size", "2", "--name", "left", "--detach")
    assert begun["state"] == "running"
    shown = cluster.run("logs", "-f")
    lines = sorted(f"[rank {rank} @ node{rank}] rank {rank} line {n}" for rank in (0, 1) for n in range(100))
    assert (shown.returncode, sorted(shown.stdout.splitlines())) == (0, lines)
    assert json.loads((cluster.project / begun["home"] / "job.json").read_text())["state"] == "succeeded"
    tail = cluster.run("logs", "left", "--rank", "1", "-n", "2")
    assert tail.stdout.splitlines() == [f"[rank 1 @ node1] rank 1 line {n}" for n in (98, 99)]
    assert sorted(cluster.run("logs", "-n", "20").stdout.splitlines()) == sorted(
        f"[rank {rank} @ node{rank}] rank {rank} line {n}" for rank in (0, 1) for n in range(90, 100)
    )
    assert cluster.run("logs", "left", "-n", "0").returncode == 2

    cluster.json("train", "counts.py", "--world-size", "1", "--name", "tail", "--detach")
    while len(cluster.run("logs", "tail", "-n", "3").stdout.splitlines()) < 3:
        time.sleep(0.1)
    shown = cluster.run("logs", "tail", "-f", "-n", "3").stdout.splitlines()
    assert 3 <= len(shown) < 97
    assert shown == [f"[rank 0 @ node0] rank 0 line {n}" for n in range(100 - len(shown), 100)]
    assert cluster.run("logs", "left", "--rank", "9").returncode == 7


@pytest.mark.prove
def test_a_cancelled_job_has_time_to_save_and_its_results_can_be_fetched(cluster: Lab) -> None:
    cluster.script("patient.py", PATIENT)
    name = cluster.json("train", "patient.py", "--world-size", "2", "--detach")["job"]
    while "waiting" not in cluster.run("logs", name, "--rank", "1").stdout:
        time.sleep(0.1)
    assert [job["state"] for job in cluster.jobs() if job["job"] == name] == ["running"]
    refused = cluster.json("train", "patient.py", "--detach", code=3)["error"]
    assert (f"job {name} runs on node0, node1", f"awsddp cancel {name}") == (
        refused["message"],
        refused["next"].splitlines()[1].partition("   #")[0],
    )
    unanswered = cluster.run("sync")
    assert (unanswered.returncode, f"Job {name} runs" in unanswered.stderr) == (2, True)
    assert cluster.run("sync", "-y").returncode == 0
    assert cluster.json("cancel")["state"] == "cancelled"
    assert cluster.run("cancel").returncode == 7
    assert cluster.json("cancel", name)["state"] == "cancelled"
    results_dir = cluster.project / cluster.json("fetch", name)["home"]
    assert (results_dir / "node1" / "run" / "saved.txt").read_text() == "in time"
    page = cluster.run("report", name)
    assert (page.returncode, "cancelled" in page.stdout) == (0, True)
    assert len(cluster.json("report", name)["ranks"]) == 2


KILLS_ALL = """
import os, time
print("ready", flush=True)
time.sleep(2)
os.kill(-1, 9) if os.environ["RANK"] == "1" else time.sleep(600)
"""


@pytest.mark.prove
def test_a_rank_that_kills_every_process_of_its_user_does_not_break_the_node(cluster: Lab) -> None:
    before = [node["instance_id"] for node in cluster.json("status")["nodes"]]
    cluster.script("kills_all.py", KILLS_ALL)
    job = cluster.json("train", "kills_all.py", "--world-size", "2", "--name", "kills-all", code=1)
    cause = job["cause"]
    assert (job["state"], cause["node"]) == ("failed", 1)
    assert "its agent" in cause["explanation"], cause
    assert cause["next"] == "awsddp recover kills-all   # on repaired nodes, from its newest checkpoint"
    up = cluster.json("up", "-y")
    assert (up["state"], [node["instance_id"] for node in up["nodes"]]) == ("ready", before)
    cluster.script("short.py", "print('short')\n")
    assert cluster.run("train", "short.py", "--world-size", "2").stdout.count("short") == 2
    assert cluster.run("fetch", "kills-all").returncode == 0
    assert "rank 1 @ node1] ready" in cluster.run("logs", "kills-all").stdout


@pytest.mark.prove
def test_stopped_nodes_keep_their_disks_and_up_starts_them(cluster: Lab) -> None:
    before = cluster.json("status")
    cluster.run("exec", "touch kept; sudo sh -c 'echo 1 passed > /etc/awsddp/expires.test'")
    assert cluster.json("stop", "-y")["state"] == "stopped"
    assert cluster.json("stop", "-y")["state"] == "stopped"
    shown = cluster.run("jobs")
    assert (shown.returncode, "awsddp up" in shown.stderr) == (6, True)
    assert cluster.run("ssh").returncode == 6
    after = cluster.json("up", "-y", "--expires", "5h")
    assert after["state"] == "ready"
    assert [node["instance_id"] for node in after["nodes"]] == [n["instance_id"] for n in before["nodes"]]
    assert after["expires"] < before["expires"]
    outputs = cluster.json("exec", "cat /etc/awsddp/expires; ls kept")["nodes"]
    assert all(after["expires"] in node["stdout"] and "kept" in node["stdout"] for node in outputs)
    assert cluster.json("status")["expires"] == after["expires"]


@pytest.mark.prove
def test_up_checks_each_node_and_its_advice_restarts_a_dead_sshd(cluster: Lab) -> None:
    cluster.run("exec", "--node", "1", "sudo systemctl stop ssh.socket ssh; sudo pkill -x sshd")
    error = cluster.json("up", "-y", code=6)["error"]
    assert error["message"].startswith("node1: no sshd is listening")
    restart, replaced = error["next"].splitlines()
    assert replaced.startswith("awsddp up -o cluster.replace=i-")
    for command in restart.partition("   #")[0].split(" && "):
        assert cluster.run(*command.split()[1:], "-y").returncode == 0
    assert cluster.run("exec", "--node", "1", "true").returncode == 0


SUM = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
print("sum", int(total), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SAVES = """
import os, pathlib

pathlib.Path(os.environ["AWSDDP_RUN_DIR"], "saved.txt").write_text(os.environ["RANK"])
"""


@pytest.mark.prove
def test_a_cluster_grows_and_shrinks_and_old_and_new_nodes_train_together(cluster: Lab) -> None:
    before = [node["instance_id"] for node in cluster.json("status")["nodes"]]
    grown = cluster.json("up", "--nodes", "3", "-y")
    assert (grown["state"], [node["node"] for node in grown["nodes"]]) == ("ready", [0, 1, 2])
    cluster.script("sum.py", SUM)
    shown = cluster.run("train", "sum.py", "--world-size", "3")
    assert shown.stdout.count("sum 3 of 3") == 3, shown.stderr
    assert cluster.run("ssh", "--node", "2", "true").returncode == 0

    cluster.script("sleeps.py", "import time; time.sleep(100)")
    assert (
        cluster.run("train", "sleeps.py", "--world-size", "3", "--detach", "--name", "long").returncode == 0
    )
    refused = cluster.run("up", "--nodes", "2", "-y")
    assert (refused.returncode, "job long runs" in refused.stderr) == (3, True), refused.stderr
    assert len(cluster.json("status")["nodes"]) == 3
    cluster.run("cancel", "long")

    cluster.script("saves.py", SAVES)
    assert cluster.run("train", "saves.py", "--world-size", "3", "--detach", "--name", "owed").returncode == 0
    while any(job["state"] == "running" for job in cluster.jobs()):
        continue
    unanswered = cluster.run("up", "--nodes", "2")
    assert (unanswered.returncode, "end node2" in unanswered.stderr) == (2, True)
    shrunk = cluster.json("up", "--nodes", "2", "-y")
    assert [node["instance_id"] for node in shrunk["nodes"]] == before
    assert (cluster.project / "runs/owed/node2/run/saved.txt").read_text() == "2"
    assert "node2" not in (cluster.home / "clusters/default/ssh_config").read_text()
    assert cluster.json("status")["state"] == "ready"
    assert cluster.run("train", "sum.py", "--world-size", "2").stdout.count("sum 1 of 2") == 2


def test_awsddp_without_arguments_shows_the_cluster_and_next_steps(cluster: Lab, tmp_path: Path) -> None:
    shown = cluster.run()
    assert shown.returncode == 0
    assert "Cluster default: 2 x " in shown.stdout
    assert "awsddp down" in shown.stdout
    assert "The local cloud is running" in shown.stdout
    empty = Lab(tmp_path / "empty").run()
    cheap = "  awsddp run --local train.py --nodes 2 --instance-type g6.xlarge --budget 2"
    assert (empty.returncode, cheap in empty.stdout.splitlines()) == (0, True)


def test_a_verb_with_subcommands_lists_them(lab: Lab) -> None:
    shown = lab.run("local")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "fault" in shown.stdout


def test_the_starter_file_is_written_once_and_names_every_key(lab: Lab) -> None:
    assert lab.run("init").returncode == 0
    assert lab.run("init").returncode == 3
    path = lab.project / "awsddp.toml"
    assert load(file=path, environ={}) == load(environ={})
    starter = path.read_text()
    live = "\n".join(line.removeprefix("# ") if " = " in line else line for line in starter.splitlines()[2:])
    path.write_text(live)
    load(file=path, environ={})
    named = {f"{section}.{key}" for section, table in tomllib.loads(live).items() for key in table}
    cluster, job = load(environ={})
    sections = {**vars(cluster), **vars(job)}
    all_keys = {
        f"{name}.{key}"
        for name, part in sections.items()
        if hasattr(part, "__slots__") or hasattr(part, "__dict__")
        for key in vars(part)
    }
    assert named == (all_keys - ONE_COMMAND_KEYS) | {"tags.team"}
    assert len(named) == 66
    assert starter != live


@pytest.mark.parametrize(
    ("shell", "checks"),
    [("bash", ["bash", "-n"]), ("zsh", None), ("fish", None)],
    ids=["bash", "zsh", "fish"],
)
def test_completion_suggests_verbs(lab: Lab, shell: str, checks: list[str] | None) -> None:
    lab.environ["_AWSDDP_COMPLETE"] = f"{shell}_source"
    script = lab.run()
    assert (script.returncode, "_AWSDDP_COMPLETE" in script.stdout) == (0, True)
    if checks:
        assert subprocess.run(checks, input=script.stdout, text=True).returncode == 0
    lab.environ |= {"_AWSDDP_COMPLETE": f"{shell}_complete", "COMP_WORDS": "awsddp tr", "COMP_CWORD": "1"}
    if shell == "fish":
        lab.environ["COMP_CWORD"] = "tr"
    assert "train" in lab.run().stdout


def test_jobs_reports_the_cost_of_a_terminated_cluster(lab: Lab) -> None:
    folder = lab.home / "history" / "default-0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text(
        '{"time": "2026-11-21T10:00:00Z", "event": "launched", "id": "0a1b2c3d", "target": "aws", '
        '"region": "us-east-1", "instance_type": "g6.xlarge", "instances": ["i-1", "i-2"], '
        '"node_usd_per_hour": 1.0}\n'
        '{"time": "2026-11-21T11:00:00Z", "event": "stopped"}\n'
        '{"time": "2026-11-21T12:00:00Z", "event": "started"}\n'
        '{"time": "2026-11-21T12:30:00Z", "event": "ended"}\n{"time": "20'
    )
    result = lab.json("jobs")
    assert (result["total_usd"], result["clusters"][0]["cost_usd"]) == (3.0, 3.0)
    (cluster,) = result["clusters"]
    assert (cluster["idle_usd"], cluster["ended"]) == (3.0, "2026-11-21T12:30:00Z")
    assert "$3.00, $3.00 of it while idle" in lab.run("jobs", "-v").stdout
    assert lab.run("jobs").stdout.splitlines()[-1].startswith("On AWS: $3.00 (list price).")
