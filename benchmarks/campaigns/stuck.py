"""Silent jobs: those that hang are reported with the right rank, and those that are only slow are not.

    python -m benchmarks.campaigns.stuck [--seed N] [--runs N] [--state FILE]

Real agents and ranks run on two nodes of this machine, without root. The runs take all programs in turn, and
choose the rank and the launcher at random. A job that hangs must end in every second run of a program, and
must only be reported in the others. The nodes look after 4 s of silence and again 3 s later, not after
30 min and 1 min; a slow program is watched for three pairs of looks.
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from awsddp.agent_client import launch_requests
from awsddp.agent_client.launchers import LAUNCHERS
from benchmarks.campaigns._campaign import Row, arguments, campaign
from benchmarks.campaigns.hangs import GROUP, HANGS, line_of
from tests.support.fleet import Fleet
from tests.support.waiting import until

LOOKS = (4.0, 3.0)
SPIN = (
    GROUP
    + """\
def train(step):
    if rank == culprit: time.sleep(6000)  # here
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while not work.is_completed(): pass
train(3)
"""
)
QUEUE = (
    GROUP
    + """\
import queue
def feed(batches):
    return batches.get()  # here
if rank == culprit: feed(queue.Queue())
dist.barrier()
"""
)
PIPE = (
    GROUP
    + """\
reader, writer = os.pipe()
def receive():
    return os.read(reader, 1)  # here
if rank == culprit: receive()
dist.barrier()
"""
)
THREAD = (
    GROUP
    + """\
def save():
    threading.Event().wait()  # here
if rank == culprit:
    threading.Thread(target=save).start()
else:
    dist.barrier()
"""
)
HUNG = {name: script for name, (script, _) in HANGS.items()} | {"spin": SPIN, "queue": QUEUE, "pipe": PIPE}
HUNG["thread"] = THREAD
_SLOW = {
    # a long evaluation in Python, and one in a single call
    "evaluation": "while True: sum(range(1000))",
    "sort": "torch.rand(1 << 22).sort()\n    while True: torch.rand(1 << 22).sort()",
    # a checkpoint that is written slowly
    "checkpoint": "file = open(os.environ['AWSDDP_RUN_DIR'] + '/model.pt', 'wb', buffering=0)\n"
    "    while True: time.sleep(file.write(b'x' * 100) / 400)",
    # slow data: batches from a pipe, with hardly any CPU time
    "data": "import subprocess\n"
    "    code = 'import sys, time\\nwhile True: sys.stdout.write(\"x\" * 16384); time.sleep(0.3)'\n"
    "    feeder = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, bufsize=0)\n"
    "    while True: feeder.stdout.read(16384)",
    "files": "while True: time.sleep(len(open(sys.executable, 'rb').read(16384)) / 50000)",
    # slow data: received over a network, at 80 kB/s
    "download": "import socket\n"
    "    server, client = socket.socketpair()\n"
    "    if os.fork() == 0:\n"
    "        while True: time.sleep(0.05); server.sendall(b'x' * 4096)\n"
    "    while True: client.recv(4096)",
    # another program that computes, or many short ones
    "program": "import subprocess\n    subprocess.run(['sh', '-c', 'while :; do :; done'])",
    "programs": "import subprocess\n    while True: subprocess.run(['sleep', '0.3'])",
    # a thread that works while the main thread waits
    "thread": "thread = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)])\n"
    "    thread.start()\n    thread.join()",
}
SLOW = {
    name: f"{GROUP}def work():\n    {body}\nif rank == culprit: work()\ndist.barrier()\n"
    for name, body in _SLOW.items()
}
# short steps that hardly use the CPU, and a loader that does
SLOW["steps"] = GROUP + "while True:\n    time.sleep(0.5)\n    dist.all_reduce(torch.ones(4))\n"
SLOW["loader"] = (
    GROUP
    + """\
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        while rank == culprit: sum(range(1000))
        return torch.ones(4)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    dist.all_reduce(batch)
    dist.barrier()
"""
)
SCRIPTS = {"hung": HUNG, "slow": SLOW}
PROGRAMS = [(kind, name) for kind, scripts in SCRIPTS.items() for name in scripts]


def launch(fleet: Fleet, script: str, dice: random.Random, *, ends: bool) -> tuple[int, str]:
    """Launch a silent job and return its culprit and its launcher. With `ends`, it ends when it hangs."""
    culprit, launcher = dice.randrange(4), dice.choice(sorted(LAUNCHERS))
    fleet.write("silent.py", script)
    with patch.object(launch_requests, "LOOKS", LOOKS):
        variables = {"CULPRIT": str(culprit), "OMP_NUM_THREADS": "1"}
        recover = 1 if ends else None
        fleet.launch("silent.py", launcher=launcher, variables=variables, recover=recover, grace="1s")
    until(fleet.ranks_are_up, seconds=180)
    return culprit, launcher


def watch_hung(fleet: Fleet, name: str, culprit: int, *, ends: bool) -> tuple[bool, str]:
    """Wait until a job is reported as hung, or has ended. Return whether that was right, and a text."""
    script = HUNG[name]
    place = f"silent.py:{line_of(script)} in" if "# here" in script else ""
    if ends:
        job = fleet.wait(seconds=180)
        found = (job.cause.kind, job.cause.rank, job.cause.values.get("place", "")) if job.cause else ()
        is_right = job.state == "failed" and found[:2] == ("hang", culprit) and place in found[2]
        return is_right, str(found)
    until(lambda: (fleet.document(0)["hang"] or {}).get("state") == "hung", seconds=180)
    hang = fleet.document(0)["hang"]
    is_alive = all(fleet.document(node)["state"] == "running" for node in (0, 1))
    return is_alive and hang["rank"] == culprit and place in hang["place"], hang["text"]


def watch_slow(fleet: Fleet, pairs: int) -> tuple[bool, str]:
    """Watch a slow job for `pairs` more pairs of looks. Return True if it was always alive, and why."""
    until(lambda: fleet.document(0)["hang"], seconds=180)
    texts: list[str] = []
    end = time.monotonic() + pairs * (sum(LOOKS) + 1)
    while time.monotonic() < end:
        document: dict[str, Any] = fleet.document(0)
        hang = document["hang"]
        if document["state"] != "running" or (hang and hang["state"] != "alive"):
            return False, str(hang or document["cause"])
        texts += [hang["text"]] if hang and hang["text"] not in texts else []
        time.sleep(0.1)
    return True, " / ".join(texts)


def run(number: int, dice: random.Random, *, pairs: int = 2) -> Row:
    """Run one silent job, and return its row."""
    kind, name = PROGRAMS[number % len(PROGRAMS)]
    ends = kind == "slow" or number // len(PROGRAMS) % 2 == 1
    with tempfile.TemporaryDirectory() as folder:
        fleet, start = Fleet(Path(folder), 2), time.monotonic()
        try:
            culprit, launcher = launch(fleet, SCRIPTS[kind][name], dice, ends=ends)
            if kind == "hung":
                ok, said = watch_hung(fleet, name, culprit, ends=ends)
            else:
                ok, said = watch_slow(fleet, pairs)
        except AssertionError as error:
            culprit, launcher, ok, said = -1, "", False, f"{error} {fleet.document(0)['hang']}"
        finally:
            fleet.end()
    took = round(time.monotonic() - start, 1)
    row = {"kind": kind, "program": name, "launcher": launcher, "rank": culprit, "ends": ends, "took": took}
    return {**row, "ok": ok, "said": said[:300]}


if __name__ == "__main__":
    parser = arguments(str(__doc__).splitlines()[0], runs=2 * len(PROGRAMS))
    sys.exit(min(campaign(parser.parse_args(), run), 1))
