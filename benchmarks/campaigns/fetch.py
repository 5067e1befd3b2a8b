"""Run `fetch` every second while a job's files grow, rotate and vanish; interrupt another `fetch` 20 times.

    python -m benchmarks.campaigns.fetch [--seed N] [--runs N] [--state FILE]

Needs root for its two nodes of the local cloud. In run 0 the job has ended: signals at random moments
interrupt `fetch`, and the bytes that the nodes send are counted. Each other run fetches ten times from a job
whose ranks print, rotate a log, append metrics, write checkpoints in two halves and delete old ones. Every
`fetch` must exit with 0, no fetched checkpoint may be partial, each fetched log must be the beginning of the
rank's log, and the last `fetch` must copy all files.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, cluster, instances

FETCHES = 10
CUTS = 20
ON_THE_WAY = 4_000_000
"""The most bytes that a node has sent, but the client has not received, when a `fetch` is cut."""
SCRIPTS = {
    "grows.py": """\
import os, random, sys, time
from pathlib import Path
chance = random.Random(f"{sys.argv[1]}/{os.environ['RANK']}")
folder = Path(sys.argv[1])
folder.mkdir()
metrics = Path(os.environ["AWSDDP_RUN_DIR"], "metrics.jsonl").open("a")
log, step, saved = (folder / "app.log").open("a"), 0, []
while not (folder / "end").exists():
    step += 1
    print("step", step, flush=True)
    print("step", step, file=log, flush=True)
    print('{"step": %d}' % step, file=metrics, flush=True)
    (folder / "latest").write_text(str(step))
    if chance.random() < 0.1:
        (folder / "app.log").rename(folder / "app.log.1")
        log = (folder / "app.log").open("a")
    if chance.random() < 0.2:
        size = chance.choice((1000, 100_000, 5_000_000))
        saved.append(folder / f"{step}-{size}.pt")
        with saved[-1].open("wb") as file:
            file.write(bytes(size // 2))
            file.flush()
            time.sleep(chance.uniform(0, 0.5))
            file.write(bytes(size - size // 2))
    if len(saved) > 3:
        saved.pop(0).unlink()
    time.sleep(chance.uniform(0, 0.1))
print("the end", flush=True)
""",
    "saves.py": """\
import os
from pathlib import Path
Path(os.environ["AWSDDP_RUN_DIR"], "model.pt").write_bytes(os.urandom(100_000_000))
""",
}


def run_fetch(lab: Rehearsal, name: str) -> int:
    """Fetch the job `name`, and return the exit code."""
    with lab.started("fetch", name) as process:
        process.communicate()
    return process.returncode


def is_right(home: Path) -> bool:
    """Return True if no fetched file is partial, and each log is the beginning of its rank's output."""
    whole = all(path.stat().st_size == int(path.stem.split("-")[1]) for path in home.glob("node*/*/*.pt"))
    logs = [path.read_text().removesuffix("the end\n") for path in home.glob("logs/rank*.log")]
    return whole and all(
        "".join(f"step {number + 1}\n" for number in range(text.count("\n") + 1)).startswith(text)
        for text in logs
    )


def grow(lab: Rehearsal, number: int) -> Row:
    """Fetch ten times, once per second, from a running job, and once after it has ended."""
    name = f"grows{number}"
    home = lab.project / "runs" / name
    lab.run("train", "grows.py", "--name", name, "--world-size", "2", "--detach", "--", name)
    good = 0
    for _ in range(FETCHES):
        until = time.monotonic() + 1
        good += run_fetch(lab, name) == 0 and is_right(home)
        time.sleep(max(0.0, until - time.monotonic()))
    lab.run("exec", "--", f"touch ~/awsddp/work/{name}/end")
    lab.run("logs", "-f", name)
    logs = [path.read_text() for path in sorted(home.glob("logs/rank*.log"))]
    latest = [(home / f"node{node}/{name}/latest").read_text() for node in (0, 1)]
    ends = [log.endswith(f"step {step}\nthe end\n") for log, step in zip(logs, latest, strict=True)]
    whole = all(ends) and is_right(home) and not (home / ".part").exists()
    return {"kind": "grows", "good": good, "of": FETCHES, "whole": whole, "ok": good == FETCHES and whole}


def cut(lab: Rehearsal, number: int, dice: random.Random, *, cuts: int = CUTS) -> Row:
    """End `fetch` by a signal `cuts` times, then let it finish; count the bytes that the nodes sent.

    After SIGKILL of `fetch`, its rsync is killed too: it could copy the rest before the next cut.
    """
    name = f"saves{number}"
    home = lab.project / "runs" / name
    lab.run("train", "saves.py", "--name", name, "--world-size", "2", "--detach")
    while json.loads(lab.run("jobs", "--json"))["jobs"][-1]["state"] == "running":
        time.sleep(0.5)
    before, size, done = count_sent_bytes(lab), 200_000_000, 0
    while done < cuts:
        step = dice.uniform(0.2, 0.6) * size / (cuts + 1)
        start = count_copied_bytes(home)
        process = lab.started("fetch", name, process_group=0)
        while process.poll() is None and count_copied_bytes(home) < start + step:
            time.sleep(0.002)
        if process.poll() is not None:
            break
        process.send_signal(dice.choice((signal.SIGKILL, signal.SIGINT, signal.SIGTERM)))
        process.communicate()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        done += 1
    code, total = run_fetch(lab, name), count_sent_bytes(lab) - before
    files = [path.stat().st_size for path in home.glob("node*/run/model.pt")]
    whole = files == [100_000_000] * 2 and not (home / ".part").exists()
    ok = code == 0 and done == cuts and whole and total < size * 1.02 + done * ON_THE_WAY
    return {"kind": "cut", "cuts": done, "sent": f"{total / size:.2f} of the size", "whole": whole, "ok": ok}


def count_copied_bytes(home: Path) -> int:
    """Return the number of bytes copied so far. os.walk is used because it skips folders that vanish."""
    count = 0
    for folder, _, names in os.walk(home):
        if "model.pt" in names:
            with contextlib.suppress(FileNotFoundError):
                count += Path(folder, "model.pt").stat().st_size
    return count


def count_sent_bytes(lab: Rehearsal) -> int:
    """Return the number of bytes that the nodes have sent since they booted."""
    count = 0
    for instance_id in instances(lab):
        (namespace,) = Path("/run/netns").glob(f"*-{instance_id}")
        words = ["ip", "netns", "exec", namespace.name, "cat", "/sys/class/net/ens5/statistics/tx_bytes"]
        count += int(subprocess.run(words, capture_output=True, check=True).stdout)
    return count


def run(lab: Rehearsal, number: int, dice: random.Random) -> Row:
    """Run one case, and return its row; in case 0, `fetch` is cut."""
    return grow(lab, number) if number else cut(lab, number, dice)


def main() -> int:
    args = arguments(str(__doc__).splitlines()[0], runs=21).parse_args()
    with cluster(2, SCRIPTS) as lab:
        return campaign(args, lambda number, dice: run(lab, number, dice))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
