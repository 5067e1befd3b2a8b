"""Drawn histories of results: what a job made is at home or was named, whatever happens in between."""

import random
import shutil
import subprocess
import sys
import time

import pytest

from tests.support import drawn_job
from tests.support.lab import Lab
from tests.support.seed import FULL, SEED
from tests.support.traces import traces
from tests.system.test_many_clients import second_machine
from tests.system.test_reservations import client

HISTORIES, EPISODES = (40, 4) if FULL else (2, 2)
pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]


class History:
    """A cluster of two nodes, and one job after the other on it."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.draw = random.Random(seed)
        self.told: list[str] = []
        shutil.copy(drawn_job.__file__, lab.project / "drawn_job.py")
        assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0

    def episode(self, number: int) -> None:
        """Run a job, let something happen, and hold what is at home against what was made."""
        seed = self.draw.randrange(1 << 30)
        act = self.draw.choice((self.attached, self.clients, self.limited, self.shut_down, self.lost))
        self.told.append(f"{act.__name__} with seed {seed}")
        act(f"job{number}", seed)

    def train(self, name: str, seed: int, *more: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
        """Start the job and return what its client said."""
        words = ("drawn_job.py", "--world-size", "2", "--name", name, *more)
        return self.lab.run("train", *words, "--", str(seed), "{rank}", str(seconds))

    def attached(self, name: str, seed: int) -> None:
        shown = self.train(name, seed)
        self.settle(name, seed, shown.returncode, shown.stderr)

    def clients(self, name: str, seed: int) -> None:
        """Two machines start a job of one name at once: one does, and the other harms nothing."""
        words = ("train", "drawn_job.py", "--world-size", "2", "--name", name, "--", str(seed), "{rank}", "1")
        other = second_machine(self.lab, name)
        shutil.copy(drawn_job.__file__, other.project / "drawn_job.py")
        both = [machine.start(*words) for machine in (self.lab, other)]
        ended = [(one.communicate(timeout=170)[1].decode(), one.returncode) for one in both]
        refused = [said for said, code in ended if code in (2, 3)]
        assert len(refused) == 1, ended
        home = self.lab if ended[1][1] in (2, 3) else other
        said, code = next(one for one in ended if one[1] not in (2, 3))
        self.settle(name, seed, code, said, lab=home)

    def limited(self, name: str, seed: int) -> None:
        shown = self.train(name, seed, "-o", "job.results_limit=1kB")
        assert (shown.returncode, "job.results_limit" in shown.stderr) == (6, True), shown.stderr
        refused = self.lab.run("down", "-y", "-o", "job.results_limit=1kB", stdin="")
        if refused.returncode == 6:  # -y agrees to fetch more than the limit; what is closed stays owed
            assert drawn_job.KINDS[-1] in self.kinds(seed), refused.stderr
        again = self.lab.run("up", "--local", "-y")
        assert again.returncode == 0, again.stderr
        if refused.returncode == 6:
            self.settle(name, seed, 6, refused.stderr)
        else:
            self.check(name, seed, self.lab)

    def shut_down(self, name: str, seed: int) -> None:
        """The machines go while the job runs: it has time to save, and all comes home later."""
        assert self.train(name, seed, "--detach", seconds=300).returncode == 0
        while "made" not in self.lab.run("logs", name).stdout:
            time.sleep(0.2)
        if self.draw.random() < 0.5:
            assert self.lab.run("stop", "-y").returncode == 0
        else:
            self.lab.run("exec", "sudo systemctl poweroff --no-block")
            while self.lab.json("status")["state"] != "stopped":
                time.sleep(0.5)
        assert self.lab.run("up", "-y").returncode == 0
        shown = self.lab.run("fetch", name)
        self.settle(name, seed, shown.returncode, shown.stderr)
        for node in range(2):
            assert (self.lab.project / f"runs/{name}/node{node}/run/saved").read_text() == "in time"

    def lost(self, name: str, seed: int) -> None:
        """A machine ends with its part of the results: it is named, and the other's part comes home."""
        assert self.train(name, seed, "--detach").returncode == 0
        while self.lab.jobs()[-1]["state"] == "running":
            time.sleep(0.2)
        gone = self.lab.json("status")["nodes"][1]["instance_id"]
        ec2 = client(self.lab)
        ec2.terminate_instances(InstanceIds=[gone])
        ec2.get_waiter("instance_terminated").wait(InstanceIds=[gone], WaiterConfig={"Delay": 1})
        if self.draw.random() < 0.5:
            assert self.lab.run("up", "-y").returncode == 0
        shown = self.lab.run("fetch", name)
        assert (shown.returncode, f"({gone}) is gone" in shown.stderr) == (6, True), shown.stderr
        assert self.lab.run("up", "-y").returncode == 0  # `exec` takes no part of a cluster
        self.settle(name, seed, 6, shown.stderr, nodes=(0,), final=6)

    def kinds(self, seed: int) -> set[str]:
        return {kind for node in range(2) for kind in drawn_job.drawn(seed, node).values()}

    def settle(
        self,
        name: str,
        seed: int,
        code: int,
        said: str,
        *,
        lab: Lab | None = None,
        nodes: tuple[int, ...] = (0, 1),
        final: int = 0,
    ) -> None:
        """Open what nobody could read and fetch it, where that is all that is missing."""
        lab = lab or self.lab
        closed = [p for n in nodes for p, kind in drawn_job.drawn(seed, n).items() if kind == "closed"]
        if closed:
            assert code == 6, said
            assert all(path in said for path in closed), said
            lab.run("exec", f"cd ~/awsddp/work && chmod -f u+rw {' '.join(closed)} || true")
            code = lab.run("fetch", name).returncode
        assert code == final, said
        self.check(name, seed, lab, nodes=nodes)

    def check(self, name: str, seed: int, lab: Lab, *, nodes: tuple[int, ...] = (0, 1)) -> None:
        for node in nodes:
            home = lab.project / "runs" / name / f"node{node}"
            for path in drawn_job.drawn(seed, node):
                real = f"always{node}.txt" if drawn_job.drawn(seed, node)[path] == "link" else path
                named = path.replace("\n", r"\n")  # no control character in a name at home
                assert (home / named).read_bytes() == drawn_job.content(seed, node, real), (path, self.told)


@pytest.mark.parametrize("number", range(HISTORIES))
def test_what_a_job_made_comes_home_or_is_named(lab: Lab, number: int) -> None:
    history = History(lab, SEED * 1000 + number)
    try:
        for episode in range(EPISODES):
            history.episode(episode)
        ended = lab.run("down", "-y")
        assert (ended.returncode, "nothing is left" in ended.stdout) == (0, True), ended.stderr
    finally:
        sys.stdout.write("\n  ".join([f"history {number}:", *history.told]))
    lab.close()
    assert traces(lab.home) == []
