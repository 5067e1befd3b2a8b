"""Ctrl-C once and twice, a closed terminal, a closed pipe: handled in time, with advice and no traceback."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support.lab import Lab
from tests.support.seed import FULL, SEED, draw_cases
from tests.support.traces import find_traces

MOMENTS = 40 if FULL else 6

SAVES = """
import os, signal, sys, time
def save(*_):
    print("saving", flush=True)
    open(os.environ["AWSDDP_RUN_DIR"] + "/saved.txt", "w").write("in time")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
for step in range(3000):
    print("step", step, flush=True)
    time.sleep(0.02)
"""


def start_and_wait(lab: Lab, *args: str) -> subprocess.Popen[bytes]:
    """Start a job and return its client once it prints lines."""
    lab.script("saves.py", SAVES)
    client = lab.start(*(args or ("train", "saves.py", "--world-size", "2")))
    assert client.stdout is not None
    while b"step 9" not in client.stdout.readline():
        assert client.poll() is None
    return client


def wait_for_exit(client: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a client that must exit by itself."""
    out, err = client.communicate(timeout=60)
    assert b"Traceback" not in err
    return client.returncode, out.decode(), err.decode()


def test_ctrl_c_cancels_the_job_with_time_to_save_and_fetches_its_results(cluster: Lab) -> None:
    client = start_and_wait(cluster)
    os.killpg(client.pid, signal.SIGINT)
    code, out, err = wait_for_exit(client)
    assert code == 130
    assert "was cancelled, its results are in runs/" in err
    assert "awsddp down" in err
    lines = out.splitlines()
    assert "[rank 1 @ node1] saving" in lines
    assert len(lines) == len(set(lines))
    results_dir = cluster.project / err.partition("its results are in ")[2].partition("/\n")[0]
    assert (results_dir / "node1" / "run" / "saved.txt").read_text() == "in time"


DEAF = """
import time
from awsddp.cli.command_line import COMMAND
COMMAND.install_handlers(lambda error: print(error.message, flush=True))
while True:
    try:
        print("at work", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        continue
"""


@pytest.mark.parametrize("times", [1, 2], ids=["after its patience", "at the second signal"])
def test_a_command_that_ignores_ctrl_c_is_terminated(times: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(times):
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted before anything was changed" in out


LEAVING = {
    "ctrl-c twice": ([signal.SIGINT, signal.SIGINT], 130),
    "terminal closed": ([signal.SIGHUP], 129),
    "asked to end": ([signal.SIGTERM], 143),
}


@pytest.mark.prove
@pytest.mark.parametrize("reason", draw_cases(list(LEAVING), 1, label="ways to leave"))
def test_a_client_that_leaves_its_job_says_how_to_follow_it_again(cluster: Lab, reason: str) -> None:
    signals, code = LEAVING[reason]
    client = start_and_wait(cluster)
    for number in signals:
        os.killpg(client.pid, number)
        time.sleep(0.05)
    exit_code, _, err = wait_for_exit(client)
    assert exit_code == code
    assert "they expire at" in err
    (back,) = [line for line in err.splitlines() if "awsddp logs -f" in line]
    name = back.split("logs -f ")[1].split()[0]
    if len(signals) == 1:
        assert next(job for job in cluster.jobs() if job["job"] == name)["state"] == "running"
    assert cluster.json("cancel", name)["state"] == "cancelled"


@pytest.mark.prove
def test_a_closed_pipe_leaves_the_job_running(cluster: Lab) -> None:
    cluster.script("saves.py", SAVES)
    line = f"{sys.executable} -m awsddp train saves.py --world-size 2 --name piped -q | head -2"
    result = subprocess.run(
        ["sh", "-c", line], cwd=cluster.project, env=cluster.environ, capture_output=True, text=True
    )
    assert (len(result.stdout.splitlines()), result.stderr) == (2, "")
    assert next(job for job in cluster.jobs() if job["job"] == "piped")["state"] == "running"
    cluster.json("cancel", "piped")


@pytest.mark.prove
def test_run_interrupted_leaves_nothing_but_its_results(lab: Lab) -> None:
    before = find_traces(lab.home)
    args = ("run", "saves.py", "--local", "--nodes", "2", "--world-size", "2", "-y", "--name", "cut")
    client = start_and_wait(lab, *args)
    os.killpg(client.pid, signal.SIGINT)
    code, _, err = wait_for_exit(client)
    assert code == 130
    assert "nothing is left" in err
    assert (lab.project / "runs" / "cut" / "node0" / "run" / "saved.txt").is_file()
    assert find_traces(lab.home) == before


STAGES = {"up": b"preparing", "train": b"step 9", "fetch": b"fetching", "down": b"ending i-"}
"""The stages of `run`, and the output of each."""
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
CASES = [(stage, number) for stage in STAGES for number in SIGNALS]


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_run_terminates_everything_after_each_signal_in_each_stage(lab: Lab) -> None:
    result = 'open(os.environ["AWSDDP_RUN_DIR"] + "/large", "wb").write(bytes(5_000_000))\n'
    lab.script("steps.py", SAVES.replace("3000", "20") + result)  # large enough for a fetch of its own
    chosen = CASES if FULL else random.Random(SEED).sample(CASES, 3)
    for stage, number in chosen:
        steps = "steps.py" if stage in ("fetch", "down") else "saves.py"
        lab.script("saves.py", SAVES)
        client = lab.start("run", steps, "--local", "--nodes", "2", "--world-size", "2", "-y")
        stream = client.stdout if stage == "train" else client.stderr
        assert stream is not None
        while STAGES[stage] not in (line := stream.readline()):
            assert line, (stage, number)
        os.killpg(client.pid, number)
        if number != signal.SIGINT:  # CI sends its signal again; only a second Ctrl-C leaves at once
            time.sleep(0.2)
            os.killpg(client.pid, number)
        code, _, err = wait_for_exit(client)
        assert (code, "nothing is left" in err) == (SIGNALS[number], True), (stage, number, err)
        assert lab.json("status", "--local")["state"] == "absent", (stage, number)
    lab.close()
    assert find_traces(lab.home) == []


@pytest.mark.prove
def test_ctrl_c_while_aws_fails_continues_the_termination_and_a_second_one_leaves(lab: Lab) -> None:
    lab.script("short.py", "import time\nprint('begun', flush=True)\ntime.sleep(5)\n")
    assert lab.run("local", "start", "--loopback").returncode == 0
    for presses in (1, 2):
        client = lab.start("run", "short.py", "--local", "--nodes", "1", "-y", "-o", "local.gpus=off")
        assert client.stdout is not None
        assert b"begun" in client.stdout.readline()
        assert lab.run("local", "fault", "add", "*", "InternalError", "--for", "5m").returncode == 0
        _read_to(client, b"terminating again")
        os.killpg(client.pid, signal.SIGINT)
        _read_to(client, b"interrupted: terminating everything")
        if presses == 2:
            os.killpg(client.pid, signal.SIGINT)
        else:
            _read_to(client, b"terminating again")
            assert lab.run("local", "fault", "clear").returncode == 0
        assert client.stderr is not None
        err = client.stderr.read().decode()
        assert client.wait() == 130
        text = "nothing is left" if presses == 1 else "1 x g6.xlarge may run"
        assert (text in err, "awsddp down" in err) == (True, presses == 2), err
    assert lab.run("local", "fault", "clear").returncode == 0
    assert lab.run("down", "-y").returncode == 0


def _read_to(client: subprocess.Popen[bytes], text: bytes) -> None:
    assert client.stderr is not None
    while text not in (line := client.stderr.readline()):
        assert line, text


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_an_interrupted_verb_ends_cleanly_at_any_moment(lab: Lab) -> None:
    lab.script("saves.py", SAVES)
    moments = random.Random(SEED)
    up = ("up", "--local", "--nodes", "2", "-y")
    verbs = {"up": up, "train": ("train", "saves.py", "--world-size", "2"), "down": ("down", "-y")}
    for number in range(MOMENTS):
        verb = list(verbs)[number % 3]
        if verb == "up":
            assert lab.run("down", "--local", "-y").returncode == 0
        else:
            assert lab.run(*up).returncode == 0
        client = lab.start(*verbs[verb])
        delay = moments.uniform(0.5, 6.0 if verb != "down" else 2.0)
        time.sleep(delay)
        os.killpg(client.pid, signal.SIGINT)
        if number % 2:
            time.sleep(0.1)
            os.killpg(client.pid, signal.SIGINT)
        code, _, err = wait_for_exit(client)
        case = (verb, delay, number % 2, err)
        assert code in ((130,) if verb == "train" else (130, 0)), case
        assert "interrupted" in err or code == 0, case
        exists = lab.json("status", "--local")["nodes"]
        assert not exists or code == 0 or "awsddp down" in err, case
    assert lab.run("down", "--local", "-y").returncode == 0
    lab.close()
    assert find_traces(lab.home) == []


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_run_stops_the_nodes_if_results_cannot_be_fetched(lab: Lab) -> None:
    """The job removes the SSH keys, so that nothing can be fetched: its results are on the disks alone."""
    lab.script(
        "locks.py",
        "import os, subprocess\n"
        "subprocess.run('sudo rm -f /home/*/.ssh/authorized_keys', shell=True, check=True)\n"
        "open('result.bin', 'wb').write(os.urandom(8 << 20))\n",  # too large for a connection that is open
    )
    result = lab.run("run", "locks.py", "--local", "--nodes", "2", "--world-size", "2", "-y", timeout=300)
    assert result.returncode == 6
    assert "the nodes were stopped" in result.stderr
    assert "awsddp down --discard" in result.stderr
    assert not list(lab.project.rglob("result.bin"))
    assert lab.json("status")["state"] == "stopped"
    assert lab.run("down", "-y").returncode == 6
    assert lab.run("down", "-y", "--discard").returncode == 0
