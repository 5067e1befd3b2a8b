"""Drawn histories of results: what a job wrote is fetched or reported, whatever happens in between."""

import random
import shutil
import subprocess
import sys
import time

import pytest

from tests.support import drawn_job
from tests.support.lab import Lab
from tests.support.seed import FULL, SEED
from tests.support.traces import find_traces
from tests.system.test_many_clients import copy_machine
from tests.system.test_reservations import make_client

HISTORIES, EPISODES = (40, 4) if FULL else (2, 2)
pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]


class History:
    """A cluster of two nodes, and one job after the other on it."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.draw = random.Random(seed)
        self.acts: list[str] = []
        shutil.copy(drawn_job.__file__, lab.project / "drawn_job.py")
        assert lab.run("up", "--local", "--nodes", "2", "-y").returncode == 0

    def run_episode(self, number: int) -> None:
        """Run a job, let something happen, and compare the fetched files with what the job wrote."""
        seed = self.draw.randrange(1 << 30)
        acts = (self.run_attached, self.race_clients, self.exceed_limit, self.shut_down, self.lose_node)
        act = self.draw.choice(acts)
        self.acts.append(f"{act.__name__} with seed {seed}")
        act(f"job{number}", seed)

    def train(self, name: str, seed: int, *more: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
        """Start the job and return its finished client."""
        args = ("drawn_job.py", "--world-size", "2", "--name", name, *more)
        return self.lab.run("train", *args, "--", str(seed), "{rank}", str(seconds))

    def run_attached(self, name: str, seed: int) -> None:
        result = self.train(name, seed)
        self.fetch_rest(name, seed, result.returncode, result.stderr)

    def race_clients(self, name: str, seed: int) -> None:
        """Two clients start a job of one name at once: one succeeds, and the other changes nothing."""
        args = ("train", "drawn_job.py", "--world-size", "2", "--name", name, "--", str(seed), "{rank}", "1")
        other = copy_machine(self.lab, name)
        shutil.copy(drawn_job.__file__, other.project / "drawn_job.py")
        clients = [machine.start(*args) for machine in (self.lab, other)]
        outcomes = [(client.communicate(timeout=170)[1].decode(), client.returncode) for client in clients]
        refused = [stderr for stderr, code in outcomes if code in (2, 3)]
        assert len(refused) == 1, outcomes
        winner = self.lab if outcomes[1][1] in (2, 3) else other
        stderr, code = next(outcome for outcome in outcomes if outcome[1] not in (2, 3))
        self.fetch_rest(name, seed, code, stderr, lab=winner)

    def exceed_limit(self, name: str, seed: int) -> None:
        result = self.train(name, seed, "-o", "job.results_limit=1kB")
        assert (result.returncode, "job.results_limit" in result.stderr) == (6, True), result.stderr
        refused = self.lab.run("down", "-y", "-o", "job.results_limit=1kB", stdin="")
        if refused.returncode == 6:  # -y agrees to fetch more than the limit; unreadable files stay unfetched
            assert drawn_job.KINDS[-1] in self.list_kinds(seed), refused.stderr
        again = self.lab.run("up", "--local", "-y")
        assert again.returncode == 0, again.stderr
        if refused.returncode == 6:
            self.fetch_rest(name, seed, 6, refused.stderr)
        else:
            self.check_results(name, seed, self.lab)

    def shut_down(self, name: str, seed: int) -> None:
        """The nodes stop while the job runs: it has time to save, and all is fetched later."""
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
        result = self.lab.run("fetch", name)
        self.fetch_rest(name, seed, result.returncode, result.stderr)
        for node in range(2):
            assert (self.lab.project / f"runs/{name}/node{node}/run/saved").read_text() == "in time"

    def lose_node(self, name: str, seed: int) -> None:
        """A node is terminated with its part of the results: it is named, and the other part is fetched."""
        assert self.train(name, seed, "--detach").returncode == 0
        while self.lab.jobs()[-1]["state"] == "running":
            time.sleep(0.2)
        terminated = self.lab.json("status")["nodes"][1]["instance_id"]
        ec2 = make_client(self.lab)
        ec2.terminate_instances(InstanceIds=[terminated])
        ec2.get_waiter("instance_terminated").wait(InstanceIds=[terminated], WaiterConfig={"Delay": 1})
        if self.draw.random() < 0.5:
            assert self.lab.run("up", "-y").returncode == 0
        result = self.lab.run("fetch", name)
        assert (result.returncode, f"({terminated}) is gone" in result.stderr) == (6, True), result.stderr
        assert self.lab.run("up", "-y").returncode == 0  # `exec` needs every node
        self.fetch_rest(name, seed, 6, result.stderr, nodes=(0,), final=6)

    def list_kinds(self, seed: int) -> set[str]:
        return {kind for node in range(2) for kind in drawn_job.draw_files(seed, node).values()}

    def fetch_rest(
        self,
        name: str,
        seed: int,
        code: int,
        stderr: str,
        *,
        lab: Lab | None = None,
        nodes: tuple[int, ...] = (0, 1),
        final: int = 0,
    ) -> None:
        """Make the unreadable files readable and fetch them, if nothing else is missing."""
        lab = lab or self.lab
        closed = [p for n in nodes for p, kind in drawn_job.draw_files(seed, n).items() if kind == "closed"]
        if closed:
            assert code == 6, stderr
            assert all(path in stderr for path in closed), stderr
            lab.run("exec", f"cd ~/awsddp/work && chmod -f u+rw {' '.join(closed)} || true")
            code = lab.run("fetch", name).returncode
        assert code == final, stderr
        self.check_results(name, seed, lab, nodes=nodes)

    def check_results(self, name: str, seed: int, lab: Lab, *, nodes: tuple[int, ...] = (0, 1)) -> None:
        for node in nodes:
            folder = lab.project / "runs" / name / f"node{node}"
            for path in drawn_job.draw_files(seed, node):
                real = f"always{node}.txt" if drawn_job.draw_files(seed, node)[path] == "link" else path
                local = path.replace("\n", r"\n")  # a fetched name has no control character
                assert (folder / local).read_bytes() == drawn_job.content(seed, node, real), (path, self.acts)


@pytest.mark.parametrize("number", range(HISTORIES))
def test_each_result_of_a_job_is_fetched_or_reported_as_missing(lab: Lab, number: int) -> None:
    history = History(lab, SEED * 1000 + number)
    try:
        for episode in range(EPISODES):
            history.run_episode(episode)
        ended = lab.run("down", "-y")
        assert (ended.returncode, "nothing is left" in ended.stdout) == (0, True), ended.stderr
    finally:
        sys.stdout.write("\n  ".join([f"history {number}:", *history.acts]))
    lab.close()
    assert find_traces(lab.home) == []
