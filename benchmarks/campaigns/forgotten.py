"""A cluster is forgotten in one of many ways: it must end in time, and cost no more than the shown price.

    python -m benchmarks.campaigns.forgotten [--seed N] [--runs N] [--parallel N] [--state FILE]

Needs root for one node of the local cloud per run. Each run takes the next way in `WAYS`, leaves its cluster
at a random moment, and never uses the cluster again. The deadline is the expiry or, if that is earlier, the
end of the idle time after the last use.
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
UNUSED_S = 1800  # the shortest idle time of a node that has not been used since its boot
SCRIPT = """\
import os, signal, sys, time
seconds, stubborn = float(sys.argv[1]), sys.argv[2] == "stubborn"
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("result.txt", "w").write("mine")
print("started", flush=True)
time.sleep(seconds)
"""
# This replaces `date` on the node, because the clock of a single container cannot be set.
CLOCK = '#!/bin/sh\nshifted=$(($(/usr/bin/date +%s) + {shift}))\nexec /usr/bin/date -d "@$shifted" "$@"\n'


@dataclass
class Forgotten:
    """A cluster of one node, and the states of its instance; times are seconds since 1970."""

    lab: Rehearsal
    ec2: Any
    name: str
    dice: random.Random
    expires_s: int
    idle_s: int
    output: str = ""
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
        """Start `awsddp` on this cluster; stderr is part of stdout."""
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
        """Read the output of a client up to a line that contains `marker`; discard later lines."""
        assert client.stdout is not None
        for line in client.stdout:
            self.output += line
            if marker in line:
                break
        threading.Thread(target=client.stdout.read, daemon=True).start()

    def run(self, *words: str) -> None:
        """Run `awsddp`. Raises RuntimeError if it fails."""
        client = self.start(*words)
        self.output += client.communicate()[0]
        if client.returncode:
            raise RuntimeError(f"{words}: {self.output}")

    def up(self) -> float:
        """Launch the cluster; return the time of its last use."""
        self.run("up", *self.words)
        return time.time()

    def job(self, *words: str, seconds: float = 9999, kind: str = "gentle") -> "subprocess.Popen[str]":
        """Start a job and return its client once a rank has started."""
        options = ("--world-size", "1", "--name", self.name)
        client = self.start("train", "job.py", *options, *words, "--", str(seconds), kind)
        self.until(client, ("--detach" in words and "follow it") or "started")
        return client

    def look(self) -> None:
        """Record when each instance was first seen running, and when it was first seen in a later state."""
        filters = [{"Name": "tag:awsddp:cluster", "Values": [self.name]}]
        reservations = self.ec2.describe_instances(Filters=filters)["Reservations"]
        for instance in (row for reservation in reservations for row in reservation["Instances"]):
            key, state = instance["InstanceId"], instance["State"]["Name"]
            self.described[key] = instance
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
        tags = {tag["Key"]: tag["Value"] for instance in self.described.values() for tag in instance["Tags"]}
        return tags.get(f"awsddp:{name}", "")

    def expiry(self) -> float:
        """Return the time at which the instance must end at the latest."""
        self.look()
        return datetime.fromisoformat(self.tag("expires")).timestamp() if self.described else time.time()

    def processes(self, group: str) -> list[int]:
        """Return the ids of the processes in a systemd unit of the node."""
        folder = Path("/sys/fs/cgroup")
        files = folder.glob(f"**/{self.instance}/payload/{group}/cgroup.procs")
        return sorted({int(line) for file in files for line in file.read_text().split()})

    def inside(self, *words: str) -> None:
        """Run a command on the node, without a login."""
        init = self.processes("init.scope")[0]
        subprocess.run(["nsenter", "-t", str(init), "-a", *words], check=True, stdout=subprocess.DEVNULL)

    def fault(self, effect: str) -> None:
        """Add a permanent fault to the node."""
        self.lab.run("local", "fault", "add", self.instance, effect)

    def pause(self, least: float, most: float) -> None:
        time.sleep(self.dice.uniform(least, most))

    def login(self) -> None:
        """Log in and stay connected."""
        folder = Path(self.lab.environ["AWSDDP_HOME"]) / "clusters" / self.name
        words = ["ssh", "-F", str(folder / "ssh_config"), "node0", "echo in; sleep 9999"]
        client = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.clients.append(client)
        self.until(client, "in")


def kill(client: "subprocess.Popen[str]") -> float:
    """Kill a client with SIGKILL, and return the time."""
    client.kill()
    client.wait()
    return time.time()


# A function that forgets a cluster in one way. It returns the deadline, and True if the node must exist until
# the deadline.
Way = Callable[[Forgotten], tuple[float, bool]]


def up_killed(cluster: Forgotten) -> tuple[float, bool]:
    client = cluster.start("up", *cluster.words)
    cluster.until(client, "asking for")
    cluster.pause(0, 5)
    kill(client)
    time.sleep(2)
    return cluster.expiry(), False


def up_alone(cluster: Forgotten) -> tuple[float, bool]:
    return cluster.up() + cluster.idle_s, True


def train_killed(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    seconds = cluster.dice.uniform(2, 15)
    client = cluster.job(seconds=seconds)
    ends = time.time() + seconds
    cluster.pause(0, seconds)
    kill(client)
    return ends + cluster.idle_s, True


def run_killed(cluster: Forgotten) -> tuple[float, bool]:
    words = ("--world-size", "1", "--name", cluster.name, "--", "4", "gentle")
    client = cluster.start("run", "job.py", *cluster.words, *words)
    cluster.until(client, cluster.dice.choice(["asking for", "preparing", "ready", "started", "ending"]))
    cluster.pause(0, 2)
    kill(client)
    time.sleep(2)
    return cluster.expiry(), False


def detached_killed(cluster: Forgotten) -> tuple[float, bool]:
    words = ("--world-size", "1", "--name", cluster.name, "--", "4", "gentle")
    client = cluster.start("run", "--detach", "job.py", *cluster.words, *words)
    cluster.until(client, cluster.dice.choice(["asking for", "preparing", "ready"]))
    cluster.pause(0, 3)
    kill(client)
    time.sleep(2)
    return cluster.expiry(), False


def detached(cluster: Forgotten) -> tuple[float, bool]:
    seconds = cluster.dice.uniform(2, 12)
    words = ("--world-size", "1", "--name", cluster.name, "--", str(seconds), "gentle")
    cluster.run("run", "--detach", "job.py", *cluster.words, *words)
    return time.time() + seconds + cluster.idle_s, False


def down_killed(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    client = cluster.start("down", "-y")
    cluster.pause(0.3, 2)
    return kill(client) + cluster.idle_s, False


def login_cut(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.login()
    cluster.fault("cut")
    return time.time() + cluster.idle_s, True


def train_cut(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    seconds = cluster.dice.uniform(2, 12)
    cluster.job(seconds=seconds)
    ends = time.time() + seconds
    cluster.fault("cut")
    return ends + cluster.idle_s, True


def reboot(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.pause(0, 5)
    cluster.inside("systemctl", "reboot")
    return min(cluster.expiry(), time.time() + UNUSED_S), False


def reboot_in_job(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.job("--detach")
    cluster.pause(0, 5)
    cluster.inside("systemctl", "reboot")
    return min(cluster.expiry(), time.time() + UNUSED_S), False


def _shift_clock(cluster: Forgotten) -> None:
    init = cluster.processes("init.scope")[0]
    file = Path(f"/proc/{init}/root/usr/local/bin/date")
    file.write_text(CLOCK.format(shift=cluster.dice.choice([-86400, -3600, -600, 600, 3600, 86400])))
    file.chmod(0o755)


def clock_idle(cluster: Forgotten) -> tuple[float, bool]:
    used = cluster.up()
    cluster.pause(0, 5)
    _shift_clock(cluster)
    return used + cluster.idle_s, True


def clock_busy(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.login()
    cluster.pause(0, 20)
    _shift_clock(cluster)
    return cluster.expiry(), True


def _signal_watchdog(cluster: Forgotten, number: signal.Signals) -> None:
    for process in cluster.processes("system.slice/awsddp-expiry.service"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def watchdog_killed(cluster: Forgotten) -> tuple[float, bool]:
    used = cluster.up()
    for _ in range(cluster.dice.randrange(1, 6)):
        _signal_watchdog(cluster, signal.SIGKILL)
        cluster.pause(0, 2)
    return used + cluster.idle_s, True


def watchdog_killed_late(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.job("--detach")
    while time.time() < cluster.expiry() - 5:
        cluster.pause(0, 5)
        _signal_watchdog(cluster, signal.SIGKILL)
    return cluster.expiry(), False


def watchdog_hangs(cluster: Forgotten) -> tuple[float, bool]:
    used = cluster.up()
    _signal_watchdog(cluster, signal.SIGSTOP)
    return used + cluster.idle_s, True


def full_disk(cluster: Forgotten) -> tuple[float, bool]:
    used = cluster.up()
    cluster.fault("full-disk")
    return used + cluster.idle_s, True


def full_disk_in_job(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.job("--detach")
    cluster.fault("full-disk")
    return cluster.expiry(), False


def job_hangs(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.job("--detach", "-o", "job.grace=30m", kind="stubborn")
    return cluster.expiry(), True


def job_hangs_followed(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.job("-o", "job.grace=30m", kind="stubborn")
    return cluster.expiry(), True


def login_stays(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.login()
    return cluster.expiry(), True


def exec_stays(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    cluster.until(cluster.start("exec", "echo in; trap '' HUP TERM; while :; do sleep 1; done"), "in")
    return cluster.expiry(), True


def exec_killed(cluster: Forgotten) -> tuple[float, bool]:
    cluster.up()
    client = cluster.start("exec", "echo in; trap '' HUP TERM; while :; do sleep 1; done")
    cluster.pause(1, 5)
    return kill(client) + cluster.idle_s, True


def busy_service(cluster: Forgotten) -> tuple[float, bool]:
    """A process that awsddp did not start runs in a separate unit and ignores SIGHUP, SIGTERM and SIGINT."""
    used = cluster.up()
    cluster.inside("systemd-run", "-q", "sh", "-c", "trap '' HUP TERM INT; while :; do sleep 1; done")
    return used + cluster.idle_s, True


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
    """Forget one cluster and return its row."""
    forget = WAYS[number % len(WAYS)]
    expires_s = 900 if forget in BY_IDLE else dice.randrange(80, 110)
    idle_s = dice.randrange(15, 25)
    cluster = Forgotten(lab, ec2, f"forgotten{number}", dice, expires_s, idle_s)
    with _watching(cluster):
        try:
            due, lives = forget(cluster)
            due = min(due, cluster.expiry())
            while time.time() < due + 2 * LATE_S and not _over(cluster):
                time.sleep(1)
        finally:
            for client in cluster.clients:
                client.kill()
    return {"way": forget.__name__, **_row(cluster, due, lives)}


def _over(cluster: Forgotten) -> bool:
    return len(cluster.ended) == len(cluster.described)


@contextlib.contextmanager
def _watching(cluster: Forgotten) -> Iterator[None]:
    """Record the states of the instances every second."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(1):
            cluster.look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _row(cluster: Forgotten, due: float, lives: bool) -> Row:
    prices = re.search(r"price +\$([\d,.]+) per hour.*?\$([\d,.]+) until it expires", cluster.output, re.S)
    hourly, shown = (float(price.replace(",", "")) for price in prices.groups()) if prices else (0.0, 0.0)
    states = {described["State"]["Name"] for described in cluster.described.values()}
    wanted = {"stopping", "stopped"} if cluster.tag("unfetched") else {"shutting-down", "terminated"}
    late = max(cluster.ended.values(), default=0.0) - due if cluster.described else 0.0
    if not _over(cluster):
        late = time.time() - due
    hours = [
        max(60.0, cluster.ended.get(key, time.time()) - cluster.began.get(key, 0)) for key in cluster.began
    ]
    cost = sum(hours) / 3600 * hourly
    return {
        "expires": cluster.expires_s,
        "idle": cluster.idle_s,
        "deadline": time.strftime("%H:%M:%S", time.gmtime(due)),
        "ended": time.strftime("%H:%M:%S", time.gmtime(due + late)),
        "late": round(late),
        "state": "+".join(sorted(states)) or "never launched",
        "cost": round(cost, 2),
        "shown": shown,
        "ok": _over(cluster)
        and states <= wanted
        and late <= LATE_S
        and (not lives or late >= -EARLY_S)
        and round(cost, 2) <= shown,
    }


@contextlib.contextmanager
def laboratory() -> Iterator[tuple[Rehearsal, Any]]:
    """Yield a local cloud with the job's script, and an EC2 client for this cloud."""
    with rehearsal() as lab:
        (lab.project / "job.py").write_text(SCRIPT)
        yield lab, lab.client("ec2")


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=50)
    parser.add_argument("--parallel", type=int, default=4, help="the number of clusters at the same time")
    args = parser.parse_args()
    with laboratory() as (lab, ec2):
        return campaign(args, lambda number, dice: run(lab, ec2, number, dice), parallel=args.parallel)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
