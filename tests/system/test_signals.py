"""Ctrl-C once and twice, a closed terminal, a reader that goes away: said, in time, and never ugly."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support.lab import Lab
from tests.support.seed import FULL, SEED, drawn
from tests.support.traces import traces

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


def following(lab: Lab, *words: str) -> subprocess.Popen[bytes]:
    """Start a job and return once its lines come."""
    lab.script("saves.py", SAVES)
    client = lab.start(*(words or ("train", "saves.py", "--world-size", "2")))
    assert client.stdout is not None
    while b"step 9" not in client.stdout.readline():
        assert client.poll() is None
    return client


def ended(client: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a client that must end by itself."""
    out, err = client.communicate(timeout=60)
    assert b"Traceback" not in err
    return client.returncode, out.decode(), err.decode()


def test_ctrl_c_ends_the_job_in_time_to_save_and_brings_it_home(cluster: Lab) -> None:
    client = following(cluster)
    os.killpg(client.pid, signal.SIGINT)
    code, out, err = ended(client)
    assert code == 130
    assert "was cancelled, its results are in runs/" in err
    assert "awsddp down" in err
    lines = out.splitlines()
    assert "[rank 1 @ node1] saving" in lines
    assert len(lines) == len(set(lines))
    home = cluster.project / err.partition("its results are in ")[2].partition("/\n")[0]
    assert (home / "node1" / "run" / "saved.txt").read_text() == "in time"


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
def test_a_command_that_does_not_leave_is_ended(times: int) -> None:
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
@pytest.mark.parametrize("way", drawn(list(LEAVING), 1, what="ways to leave"))
def test_the_job_is_left_and_the_way_back_is_said(cluster: Lab, way: str) -> None:
    signals, code = LEAVING[way]
    client = following(cluster)
    for number in signals:
        os.killpg(client.pid, number)
        time.sleep(0.05)
    left, _, err = ended(client)
    assert left == code
    assert "they expire at" in err
    (back,) = [line for line in err.splitlines() if "awsddp logs -f" in line]
    name = back.split("logs -f ")[1].split()[0]
    if len(signals) == 1:
        assert next(job for job in cluster.jobs() if job["job"] == name)["state"] == "running"
    assert cluster.json("cancel", name)["state"] == "cancelled"


@pytest.mark.prove
def test_a_reader_that_goes_away_leaves_the_job(cluster: Lab) -> None:
    cluster.script("saves.py", SAVES)
    line = f"{sys.executable} -m awsddp train saves.py --world-size 2 --name piped -q | head -2"
    shown = subprocess.run(
        ["sh", "-c", line], cwd=cluster.project, env=cluster.environ, capture_output=True, text=True
    )
    assert (len(shown.stdout.splitlines()), shown.stderr) == (2, "")
    assert next(job for job in cluster.jobs() if job["job"] == "piped")["state"] == "running"
    cluster.json("cancel", "piped")


@pytest.mark.prove
def test_run_interrupted_leaves_nothing_but_its_results(lab: Lab) -> None:
    before = traces(lab.home)
    words = ("run", "saves.py", "--local", "--nodes", "2", "--world-size", "2", "-y", "--name", "cut")
    client = following(lab, *words)
    os.killpg(client.pid, signal.SIGINT)
    code, _, err = ended(client)
    assert code == 130
    assert "nothing is left" in err
    assert (lab.project / "runs" / "cut" / "node0" / "run" / "saved.txt").is_file()
    assert traces(lab.home) == before


STAGES = {"up": b"preparing", "train": b"step 9", "fetch": b"fetching", "down": b"ending i-"}
"""The stages of `run`, and what is said in each."""
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
CASES = [(stage, number) for stage in STAGES for number in SIGNALS]


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_run_ends_everything_whatever_signal_comes_in_whatever_stage(lab: Lab) -> None:
    result = 'open(os.environ["AWSDDP_RUN_DIR"] + "/large", "wb").write(bytes(5_000_000))\n'
    lab.script("steps.py", SAVES.replace("3000", "20") + result)  # large enough to be fetched by itself
    chosen = CASES if FULL else random.Random(SEED).sample(CASES, 3)
    for stage, number in chosen:
        steps = "steps.py" if stage in ("fetch", "down") else "saves.py"
        lab.script("saves.py", SAVES)
        client = lab.start("run", steps, "--local", "--nodes", "2", "--world-size", "2", "-y")
        stream = client.stdout if stage == "train" else client.stderr
        assert stream is not None
        while STAGES[stage] not in (said := stream.readline()):
            assert said, (stage, number)
        os.killpg(client.pid, number)
        if number != signal.SIGINT:  # who stops a job in CI sends it again; only a person leaves at once
            time.sleep(0.2)
            os.killpg(client.pid, number)
        code, _, err = ended(client)
        assert (code, "nothing is left" in err) == (SIGNALS[number], True), (stage, number, err)
        assert lab.json("status", "--local")["state"] == "absent", (stage, number)
    lab.close()
    assert traces(lab.home) == []


@pytest.mark.prove
def test_ctrl_c_while_aws_does_not_end_a_run_goes_on_with_it_and_leaves_at_the_second(lab: Lab) -> None:
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
        words = "nothing is left" if presses == 1 else "1 x g6.xlarge may run"
        assert (words in err, "awsddp down" in err) == (True, presses == 2), err
    assert lab.run("local", "fault", "clear").returncode == 0
    assert lab.run("down", "-y").returncode == 0


def _read_to(client: subprocess.Popen[bytes], text: bytes) -> None:
    assert client.stderr is not None
    while text not in (line := client.stderr.readline()):
        assert line, text


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_interrupted_at_any_moment_of_any_verb(lab: Lab) -> None:
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
        code, _, err = ended(client)
        case = (verb, delay, number % 2, err)
        assert code in ((130,) if verb == "train" else (130, 0)), case
        assert "interrupted" in err or code == 0, case
        exists = lab.json("status", "--local")["nodes"]
        assert not exists or code == 0 or "awsddp down" in err, case
    assert lab.run("down", "--local", "-y").returncode == 0
    lab.close()
    assert traces(lab.home) == []


@pytest.mark.prove
@pytest.mark.timeout(400)
def test_run_stops_the_machines_when_results_cannot_come_home(lab: Lab) -> None:
    """The job takes the login away, so that nothing can be fetched: the disks are what is left of it."""
    lab.script(
        "locks.py",
        "import os, subprocess\n"
        "subprocess.run('sudo rm -f /home/*/.ssh/authorized_keys', shell=True, check=True)\n"
        "open('result.bin', 'wb').write(os.urandom(8 << 20))\n",  # too large to come over what is open
    )
    shown = lab.run("run", "locks.py", "--local", "--nodes", "2", "--world-size", "2", "-y", timeout=300)
    assert shown.returncode == 6
    assert "the nodes were stopped" in shown.stderr
    assert "awsddp down --discard" in shown.stderr
    assert not list(lab.project.rglob("result.bin"))
    assert lab.json("status")["state"] == "stopped"
    assert lab.run("down", "-y").returncode == 6
    assert lab.run("down", "-y", "--discard").returncode == 0
