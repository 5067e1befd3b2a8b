"""A cluster is forgotten, in one of many ways: it must end by itself, in time, at the price that was shown.

    python -m benchmarks.campaigns.forgotten [--seed N] [--runs N] [--parallel N] [--state FILE]

Needs root: one node of the local cloud per run. Each run forgets its cluster in the next way of `WAYS`, at a
moment that is drawn, and never comes back. Deadline: the expiry, or the idle time after the last use.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, rehearsal

LATE_S = 60
EARLY_S = 15
UNUSED_S = 1800  # a node that nobody used since its boot waits this long at least
SCRIPT = """\
import os, signal, sys, time
seconds, stubborn = float(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("result.txt", "w").write("mine")
print("started", flush=True)
time.sleep(seconds)
"""
# What the node takes for the time of day: nobody can set the clock of one container alone.
CLOCK = '#!/bin/sh\nshifted=$(($(/usr/bin/date +%s) + {shift}))\nexec /usr/bin/date -d "@$shifted" "$@"\n'


@dataclass
class Forgotten:
    """One cluster of one node, and what is seen of its instance; times are seconds since 1970."""

    lab: Rehearsal
    ec2: Any
    name: str
    dice: random.Random
    expires_s: int
    idle_s: int
    said: str = ""
    clients: list["subprocess.Popen[str]"] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """The options of `up` and `run`."""
        return (
            "--local",
            "--nodes",
            "1",
            "-y",
            "--expires",
            f"{self.expires_s}s",
            "--idle",
            f"{self.idle_s}s",
        )

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start `awsddp` on this cluster; stderr comes with stdout."""
        client = subprocess.Popen(
            [sys.executable, "-m", "awsddp", "-c", self.name, *words],
            cwd=self.lab.project,
            env=self.lab.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.clients.append(client)
        return client

    def until(self, client: "subprocess.Popen[str]", marker: str) -> None:
        """Read what a client says up to a line that holds `marker`; later lines are read and dropped."""
        assert client.stdout is not None
        for line in client.stdout:
            self.said += line
            if marker in line:
                break
        threading.Thread(target=client.stdout.read, daemon=True).start()

    def run(self, *words: str) -> None:
        """Carry `awsddp` out. Raises RuntimeError where it fails."""
        client = self.start(*words)
        self.said += client.communicate()[0]
        if client.returncode:
            raise RuntimeError(f"{words}: {self.said}")

    def up(self) -> float:
        """Bring the cluster up; return the time of its last use."""
        self.run("up", *self.words)
        return time.time()

    def job(self, *words: str, seconds: float = 9999, kind: str = "gentle") -> "subprocess.Popen[str]":
        """Start a job and return its client once a rank has started."""
        options = ("--world-size", "1", "--name", self.name)
        client = self.start("train", "job.py", *options, *words, "--", str(seconds), kind)
        self.until(client, ("--detach" in words and "follow it") or "started")
        return client

    def look(self) -> None:
        """Note when each instance was first seen running, and when it no longer was."""
        filters = [{"Name": "tag:awsddp:cluster", "Values": [self.name]}]
        found = self.ec2.describe_instances(Filters=filters)["Reservations"]
        for one in (one for reservation in found for one in reservation["Instances"]):
            key, state = one["InstanceId"], one["State"]["Name"]
            self.described[key] = one
            if state == "running":
                self.began.setdefault(key, time.time())
            elif state != "pending":
                self.ended.setdefault(key, time.time())

    @property
    def instance(self) -> str:
        """The id of the instance."""
        self.look()
        return next(iter(self.described))

    def tag(self, name: str) -> str:
        """Return a tag of the instance."""
        tags = {tag["Key"]: tag["Value"] for one in self.described.values() for tag in one["Tags"]}
        return tags.get(f"awsddp:{name}", "")

    def expiry(self) -> float:
        """Return when the instance has to end at the latest."""
        self.look()
        return datetime.fromisoformat(self.tag("expires")).timestamp() if self.described else time.time()

    def processes(self, group: str) -> list[int]:
        """Return the processes of a systemd unit of the node."""
        folder = Path("/sys/fs/cgroup")
        found = folder.glob(f"**/{self.instance}/payload/{group}/cgroup.procs")
        return sorted({int(line) for file in found for line in file.read_text().split()})

    def inside(self, *words: str) -> None:
        """Run a command on the node, with no login."""
        init = self.processes("init.scope")[0]
        subprocess.run(["nsenter", "-t", str(init), "-a", *words], check=True, stdout=subprocess.DEVNULL)

    def fault(self, effect: str) -> None:
        """Break the node for good."""
        self.lab.run("local", "fault", "add", self.instance, effect)

    def pause(self, least: float, most: float) -> None:
        time.sleep(self.dice.uniform(least, most))

    def login(self) -> None:
        """Log in and stay."""
        folder = Path(self.lab.environ["AWSDDP_HOME"]) / "clusters" / self.name
        words = ["ssh", "-F", str(folder / "ssh_config"), "node0", "echo in; sleep 9999"]
        client = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.clients.append(client)
        self.until(client, "in")


def kill(client: "subprocess.Popen[str]") -> float:
    """End a client as no signal handler can prevent, and return when."""
    client.kill()
    client.wait()
    return time.time()


# A way returns the deadline, and whether the node must live until then.
Way = Callable[[Forgotten], tuple[float, bool]]


def up_killed(one: Forgotten) -> tuple[float, bool]:
    client = one.start("up", *one.words)
    one.until(client, "asking for")
    one.pause(0, 5)
    kill(client)
    time.sleep(2)
    return one.expiry(), False


def up_alone(one: Forgotten) -> tuple[float, bool]:
    return one.up() + one.idle_s, True


def train_killed(one: Forgotten) -> tuple[float, bool]:
    one.up()
    seconds = one.dice.uniform(2, 15)
    client = one.job(seconds=seconds)
    ends = time.time() + seconds
    one.pause(0, seconds)
    kill(client)
    return ends + one.idle_s, True


def run_killed(one: Forgotten) -> tuple[float, bool]:
    words = ("--world-size", "1", "--name", one.name, "--", "4", "gentle")
    client = one.start("run", "job.py", *one.words, *words)
    one.until(client, one.dice.choice(["asking for", "preparing", "ready", "started", "ending"]))
    one.pause(0, 2)
    kill(client)
    time.sleep(2)
    return one.expiry(), False


def detached_killed(one: Forgotten) -> tuple[float, bool]:
    words = ("--world-size", "1", "--name", one.name, "--", "4", "gentle")
    client = one.start("run", "--detach", "job.py", *one.words, *words)
    one.until(client, one.dice.choice(["asking for", "preparing", "ready"]))
    one.pause(0, 3)
    kill(client)
    time.sleep(2)
    return one.expiry(), False


def detached(one: Forgotten) -> tuple[float, bool]:
    seconds = one.dice.uniform(2, 12)
    words = ("--world-size", "1", "--name", one.name, "--", str(seconds), "gentle")
    one.run("run", "--detach", "job.py", *one.words, *words)
    return time.time() + seconds + one.idle_s, False


def down_killed(one: Forgotten) -> tuple[float, bool]:
    one.up()
    client = one.start("down", "-y")
    one.pause(0.3, 2)
    return kill(client) + one.idle_s, False


def login_cut(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.login()
    one.fault("cut")
    return time.time() + one.idle_s, True


def train_cut(one: Forgotten) -> tuple[float, bool]:
    one.up()
    seconds = one.dice.uniform(2, 12)
    one.job(seconds=seconds)
    ends = time.time() + seconds
    one.fault("cut")
    return ends + one.idle_s, True


def reboot(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.pause(0, 5)
    one.inside("systemctl", "reboot")
    return min(one.expiry(), time.time() + UNUSED_S), False


def reboot_in_job(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.job("--detach")
    one.pause(0, 5)
    one.inside("systemctl", "reboot")
    return min(one.expiry(), time.time() + UNUSED_S), False


def _shift_clock(one: Forgotten) -> None:
    init = one.processes("init.scope")[0]
    file = Path(f"/proc/{init}/root/usr/local/bin/date")
    file.write_text(CLOCK.format(shift=one.dice.choice([-86400, -3600, -600, 600, 3600, 86400])))
    file.chmod(0o755)


def clock_idle(one: Forgotten) -> tuple[float, bool]:
    used = one.up()
    one.pause(0, 5)
    _shift_clock(one)
    return used + one.idle_s, True


def clock_busy(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.login()
    one.pause(0, 20)
    _shift_clock(one)
    return one.expiry(), True


def _signal_watchdog(one: Forgotten, number: signal.Signals) -> None:
    for process in one.processes("system.slice/awsddp-expiry.service"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def watchdog_killed(one: Forgotten) -> tuple[float, bool]:
    used = one.up()
    for _ in range(one.dice.randrange(1, 6)):
        _signal_watchdog(one, signal.SIGKILL)
        one.pause(0, 2)
    return used + one.idle_s, True


def watchdog_killed_late(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.job("--detach")
    while time.time() < one.expiry() - 5:
        one.pause(0, 5)
        _signal_watchdog(one, signal.SIGKILL)
    return one.expiry(), False


def watchdog_hangs(one: Forgotten) -> tuple[float, bool]:
    used = one.up()
    _signal_watchdog(one, signal.SIGSTOP)
    return used + one.idle_s, True


def full_disk(one: Forgotten) -> tuple[float, bool]:
    used = one.up()
    one.fault("full-disk")
    return used + one.idle_s, True


def full_disk_in_job(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.job("--detach")
    one.fault("full-disk")
    return one.expiry(), False


def job_hangs(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.job("--detach", "-o", "job.grace=30m", kind="stubborn")
    return one.expiry(), True


def job_hangs_followed(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.job("-o", "job.grace=30m", kind="stubborn")
    return one.expiry(), True


def login_stays(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.login()
    return one.expiry(), True


def exec_stays(one: Forgotten) -> tuple[float, bool]:
    one.up()
    one.until(one.start("exec", "echo in; trap '' HUP TERM; while :; do sleep 1; done"), "in")
    return one.expiry(), True


def exec_killed(one: Forgotten) -> tuple[float, bool]:
    one.up()
    client = one.start("exec", "echo in; trap '' HUP TERM; while :; do sleep 1; done")
    one.pause(1, 5)
    return kill(client) + one.idle_s, True


def busy_service(one: Forgotten) -> tuple[float, bool]:
    """A process of somebody that ends by no signal but KILL, in a unit of its own."""
    used = one.up()
    one.inside("systemd-run", "-q", "sh", "-c", "trap '' HUP TERM INT; while :; do sleep 1; done")
    return used + one.idle_s, True


BY_IDLE: tuple[Way, ...] = (
    up_alone,
    train_killed,
    detached,
    down_killed,
    login_cut,
    train_cut,
    exec_killed,
    clock_idle,
    watchdog_killed,
    watchdog_hangs,
    full_disk,
    busy_service,
)
BY_EXPIRY: tuple[Way, ...] = (
    up_killed,
    run_killed,
    run_killed,
    detached_killed,
    reboot,
    reboot_in_job,
    clock_busy,
    watchdog_killed_late,
    full_disk_in_job,
    job_hangs,
    job_hangs_followed,
    login_stays,
    exec_stays,
)
WAYS = (*BY_EXPIRY, *BY_IDLE)


def run(lab: Rehearsal, ec2: Any, number: int, dice: random.Random) -> Row:
    """Forget one cluster and return what came of it."""
    way = WAYS[number % len(WAYS)]
    expires_s = 900 if way in BY_IDLE else dice.randrange(80, 110)
    idle_s = dice.randrange(15, 25)
    one = Forgotten(lab, ec2, f"forgotten{number}", dice, expires_s, idle_s)
    with _watching(one):
        try:
            due, lives = way(one)
            due = min(due, one.expiry())
            while time.time() < due + 2 * LATE_S and not _over(one):
                time.sleep(1)
        finally:
            for client in one.clients:
                client.kill()
    return {"way": way.__name__, **_row(one, due, lives)}


def _over(one: Forgotten) -> bool:
    return len(one.ended) == len(one.described)


@contextlib.contextmanager
def _watching(one: Forgotten) -> Iterator[None]:
    """Look at the instances every second."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1):
            one.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _row(one: Forgotten, due: float, lives: bool) -> Row:
    prices = re.search(r"price +\$([\d,.]+) per hour.*?\$([\d,.]+) until it expires", one.said, re.S)
    hourly, shown = (float(price.replace(",", "")) for price in prices.groups()) if prices else (0.0, 0.0)
    states = {described["State"]["Name"] for described in one.described.values()}
    wanted = {"stopping", "stopped"} if one.tag("unfetched") else {"shutting-down", "terminated"}
    late = max(one.ended.values(), default=0.0) - due if one.described else 0.0
    if not _over(one):
        late = time.time() - due
    hours = [max(60.0, one.ended.get(key, time.time()) - one.began.get(key, 0)) for key in one.began]
    cost = sum(hours) / 3600 * hourly
    return {
        "expires": one.expires_s,
        "idle": one.idle_s,
        "deadline": time.strftime("%H:%M:%S", time.gmtime(due)),
        "ended": time.strftime("%H:%M:%S", time.gmtime(due + late)),
        "late": round(late),
        "state": "+".join(sorted(states)) or "never launched",
        "cost": round(cost, 2),
        "shown": shown,
        "ok": _over(one)
        and states <= wanted
        and late <= LATE_S
        and (not lives or late >= -EARLY_S)
        and round(cost, 2) <= shown,
    }


@contextlib.contextmanager
def laboratory() -> Iterator[tuple[Rehearsal, Any]]:
    """Yield a local cloud with the job's script, and an EC2 client of it."""
    with rehearsal() as lab:
        (lab.project / "job.py").write_text(SCRIPT)
        yield lab, lab.client("ec2")


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=50)
    parser.add_argument("--parallel", type=int, default=4, help="clusters side by side")
    asked = parser.parse_args()
    with laboratory() as (lab, ec2):
        return campaign(asked, lambda number, dice: run(lab, ec2, number, dice), parallel=asked.parallel)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
