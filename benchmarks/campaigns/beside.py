"""Run two commands on one cluster at once: each must end as if it ran alone, or name the other command.

    python -m benchmarks.campaigns.beside [--seed N] [--runs N] [--parallel N] [--state FILE]

Needs root for the nodes of the local cloud. The runs take the pairs in `PAIRS` in turn. Both commands use the
same AWSDDP_HOME, or the second command uses another AWSDDP_HOME that has a copy of the cluster's folder. The
second command starts at a random moment. A pair with `down` or `stop` gets its own cluster of one node; all
other pairs share a cluster of two or three nodes.
"""

import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, rehearsal

LATEST_S = 4.0
"""The longest time between the starts of the two commands."""
ENDS_S = 150.0
SCRIPT = """\
import os, time
for number in range(40):
    print("line", number, flush=True)
    time.sleep(0.1)
open("result.bin", "wb").write(os.urandom(2 << 20))
"""
VERBS: dict[str, tuple[str, ...]] = {
    "train": ("train", "job.py", "--nproc-per-node", "1", "--name", "{job}"),
    "up": ("up", "-y"),
    "down": ("down", "-y"),
    "fetch": ("fetch", "{base}", "-o", "job.results={to}"),
    "exec --node 0": ("exec", "--node", "0", "sleep 3; pwd"),
    "exec": ("exec", "pwd"),
    "ssh": ("ssh", "--node", "0", "--", "pwd"),
    "sync": ("sync", "-y"),
    "train --on 0": ("train", "job.py", "--on", "0", "--nproc-per-node", "1", "--name", "{job}"),
    "logs": ("logs", "{base}"),
    "jobs": ("jobs",),
    "cancel": ("cancel",),
    "status": ("status", "-v"),
    "doctor": ("doctor",),
    "plan": ("plan",),
    "stop": ("stop", "-y"),
}
FIRSTS = ("train", "up", "down", "fetch", "exec --node 0")
ENDING = ("down", "stop")
# Commands that use two homes share no lock: if they request different sizes, the later request applies.
LEFT_OUT = (("up", "up", 2),)
PAIRS = tuple(pair for pair in itertools.product(FIRSTS, VERBS, (1, 2)) if pair not in LEFT_OUT)

NEVER = re.compile(
    r"Traceback|bug in awsddp|unknown host key|host key (mismatch|verification)|resolve hostname",
    re.IGNORECASE,
)
# A message that names the holder of the lock, or the job that uses the nodes.
NAMED = re.compile(
    r"`awsddp [a-z]+` on \S+, process \d+|job \S+ (runs|is running|still runs) on|is being prepared"
)


@dataclass
class Command:
    """One command of a pair. `code` is its exit code, or None if the command did not end."""

    verb: str
    process: "subprocess.Popen[str]"
    output: str = ""
    code: int | None = None
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        self.output, _ = self.process.communicate()
        self.code = self.process.returncode

    def end(self, deadline: float) -> None:
        """Wait until the command ends; kill the command at the deadline."""
        self.reader.join(max(0.0, deadline - time.monotonic()))
        if self.code is None:
            self.process.kill()
            self.reader.join()
            self.code = None

    def problem(self, other: str) -> str:
        """Return what is wrong with the command's end, or "" if nothing is; `other` is the other command's
        verb."""
        if self.code is None:
            return f"{self.verb} did not end"
        if match := NEVER.search(self.output):
            return f"{self.verb}: {match[0]}: {' | '.join(self.output.splitlines()[-6:])}"
        if self.code == 0 or self._is_explained(other):
            return ""
        return f"{self.verb} exit {self.code}: {' | '.join(self.output.splitlines()[-6:])}"

    def _is_explained(self, other: str) -> bool:
        if self.verb == "cancel" and "no job is running" in self.output:
            return True
        if other in ENDING and re.search(
            r"no cluster|is stopped|is stopping|shutting-down|EC2 says|ended while it was started"
            r"|has terminated the cluster|a signal ended the command",
            self.output,
        ):
            return True
        if other in ENDING and self.verb in ("plan", "doctor") and "no AWS region configured" in self.output:
            return True  # the region came from the cluster, which has ended
        if (
            self.verb == "fetch"
            and other.startswith("train")
            and "it changed while it was fetched" in self.output
        ):
            return True  # every job writes the same file
        ended = re.search(r"cancelled|Job \S+: interrupted", self.output)
        if self.verb.startswith("train") and other in ("cancel", *ENDING) and ended:
            return True
        # The record in a second home still has the node that `up` from the first home has terminated.
        return bool(NAMED.search(self.output)) or (other == "up" and "is gone" in self.output)


class Laboratory:
    """A local cloud, a cluster that pairs share, and a second home."""

    def __init__(self, lab: Rehearsal) -> None:
        self.lab = lab
        self.sharing = threading.Lock()
        self.size = 2
        (lab.project / "job.py").write_text(SCRIPT)
        self.make("shared", 2)

    def make(self, name: str, nodes: int) -> None:
        """Launch the cluster `name` and run its first job, whose results other commands fetch."""
        self.lab.run("-c", name, "up", "--local", "--nodes", str(nodes), "--instance-type", "g6.xlarge", "-y")
        self.lab.run("-c", name, "train", *VERBS["train"][1:-1], f"base-{name}")

    def second_home(self, name: str) -> Path:
        """Return a second home with a copy of the cluster's folder."""
        first, second = self.lab.root / "home", self.lab.root / f"home-{name}"
        shutil.rmtree(second / "clusters" / name, ignore_errors=True)
        shutil.copytree(first / "clusters" / name, second / "clusters" / name)
        if not (second / "local").exists():
            (second / "local").symlink_to(first / "local")
        return second

    def start(self, verb: str, home: Path, name: str, *more: str, **words: str) -> Command:
        """Start a command of a pair."""
        argv = [argument.format(**words) if "{" in argument else argument for argument in VERBS[verb]]
        process = subprocess.Popen(
            [sys.executable, "-m", "awsddp", "-c", name, *argv, *more],
            cwd=self.lab.project,
            env=self.lab.environ | {"AWSDDP_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Command(verb, process)

    def run(self, number: int, dice: random.Random) -> Row:
        """Run a pair and return its row."""
        first, second, homes = PAIRS[number % len(PAIRS)]
        delay_s = round(dice.uniform(0.0, LATEST_S), 1)
        if set(ENDING) & {first, second}:
            name = f"pair{number}"
            self.make(name, 1)
            try:
                problems = self._pair(name, number, first, second, homes, delay_s)
            finally:
                self.lab.run("-c", name, "down", "-y", "--discard")
        else:
            with self.sharing:
                problems = self._pair("shared", number, first, second, homes, delay_s)
                problems += self._damage()
        return {
            "first": first,
            "second": second,
            "homes": homes,
            "after": delay_s,
            "ended": "; ".join(problems) or "as alone, or with the holder's name",
            "ok": not any(problems),
        }

    def _pair(self, name: str, number: int, first: str, second: str, homes: int, delay_s: float) -> list[str]:
        home = self.lab.root / "home"
        other = home if homes == 1 else self.second_home(name)
        more: tuple[str, ...] = ()
        if first == "up" and name == "shared":  # the cluster grows and shrinks in turn
            self.size = 5 - self.size
            more = ("--nodes", str(self.size))
        words = {
            "job": f"first-{number}",
            "to": str(self.lab.root / f"to/{number}-first"),
            "base": f"base-{name}",
        }
        earlier = self.start(first, home, name, *more, **words)
        time.sleep(delay_s)
        words |= {"job": f"second-{number}", "to": str(self.lab.root / f"to/{number}-second")}
        later = self.start(second, other, name, **words)
        deadline = time.monotonic() + ENDS_S
        for command in (earlier, later):
            command.end(deadline)
        if more and earlier.code:  # the command was refused and changed nothing
            self.size = 5 - self.size
        return [problem for problem in (earlier.problem(second), later.problem(first)) if problem]

    def _damage(self) -> list[str]:
        """Repair the shared cluster, and return what the pair broke."""
        status = json.loads(self.lab.run("-c", "shared", "status", "--json"))
        config = (self.lab.root / "home/clusters/shared/ssh_config").read_text()
        lacking = [node["node"] for node in status["nodes"] if f"Host node{node['node']}\n" not in config]
        problems = [f"ssh_config lacks node{node}" for node in lacking]
        if (status["state"], len(status["nodes"])) != ("ready", self.size):
            problems.append(f"{status['state']}, {len(status['nodes'])} of {self.size} nodes")
            self.lab.run("-c", "shared", "up", "--nodes", str(self.size), "-y")
        with contextlib.suppress(subprocess.CalledProcessError):
            self.lab.run("-c", "shared", "cancel")
        return problems


@contextlib.contextmanager
def laboratory() -> Iterator[Laboratory]:
    """Yield a laboratory; it is removed afterwards."""
    with rehearsal() as lab:
        yield Laboratory(lab)


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=len(PAIRS))
    parser.add_argument("--parallel", type=int, default=2, help="the number of pairs at the same time")
    args = parser.parse_args()
    with laboratory() as lab:
        return campaign(args, lab.run, parallel=args.parallel)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
