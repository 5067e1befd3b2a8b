"""Time of a training step while a job's notifier sends to dead, slow and lying URLs, compared with none.

    python benchmarks/notify.py [KIND ...] [--pairs 20] [--steps 40]

Needs root. One node of the local cloud trains a small network on one core, which its notifier has to share.
The launch says that the budget's share is spent, so that an event is waiting from the first second. The
notifier runs in one block of --steps steps, and in the other block of a pair it is stopped by a signal, as
if there were none; the blocks take turns to be first. `ratio` is the median of the pairs' ratios, and the
promise is at most 1.02. On a machine with other work, that ratio is not exact; `CPU` is: one plus the
notifier's CPU time per CPU time of the training in the same blocks, the longest delay that a shared core can
cause. `requests` are those that the server received, at most two per event. A KIND is one of
tests/support/webhook.py, or "ok"; all by default.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from _rehearsal import Rehearsal, rehearsal

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support

CLIENT = """
import sys, time
from awsddp.job import notify
notify.find_budget_time = lambda _: time.time()
from awsddp.cli.main import main
sys.argv[0] = "awsddp"
main()
"""
TRAIN = """
import json, os, pathlib, signal, sys, time
blocks, steps = map(int, sys.argv[1:])
lock = pathlib.Path(os.environ["AWSDDP_RUN_DIR"]).parent / "notify.lock"
while not lock.exists():
    time.sleep(0.1)
rows = [line.split() for line in open("/proc/locks")]
[notifier] = {int(row[-4]) for row in rows if row[-3].rpartition(":")[2] == str(lock.stat().st_ino)}
core = {min(os.sched_getaffinity(0))}
for pid in (0, notifier):
    os.sched_setaffinity(pid, core)
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.randn(256, 512)

def step():
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()

for _ in range(20):
    step()
def cpu_s(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

pairs, cpu = [], {pid: -cpu_s(pid) for pid in (os.getpid(), notifier)}
for pair in range(blocks):
    taken = {}
    for kind in sorted(("with", "without"), reverse=pair % 2 == 1):
        os.kill(notifier, signal.SIGCONT if kind == "with" else signal.SIGSTOP)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        taken[kind] = 1e3 * (time.perf_counter() - began) / steps
    pairs.append(taken)
cpu = [cpu_s(pid) + used for pid, used in cpu.items()]
os.kill(notifier, signal.SIGCONT)
print("measured " + json.dumps([pairs, *cpu]), flush=True)
"""


def measure(lab: Rehearsal, kind: str, *, network: str, pairs: int, steps: int) -> None:
    """Run one job whose events go to a server of a kind, and print its row."""
    from tests.support.webhook import serve_webhook

    with serve_webhook(kind, address=f"{network}.0.1") as hook:
        words = ("train", "steps.py", "--world-size", "1", "--name", f"job-{kind}", "--detach")
        client = [sys.executable, "-c", CLIENT, *words, "--", str(pairs), str(steps)]
        environ = lab.environ | {"AWSDDP_NOTIFY_URL": hook.url, "AWSDDP_NOTIFY_FORMAT": "json"}
        subprocess.run(client, cwd=lab.project, env=environ, check=True, stdout=subprocess.DEVNULL)
        output = lab.run("logs", "-f", f"job-{kind}")
        rows, rank_s, notifier_s = json.loads(output.partition("measured ")[2].partition("\n")[0])
    ratios = sorted(pair["with"] / pair["without"] for pair in rows)
    share = 1 + 2 * notifier_s / rank_s  # the notifier runs in half of the blocks
    print(
        f"{kind:10} step {statistics.median(pair['without'] for pair in rows):6.1f} ms   ratio "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(rows)} pairs)   "
        f"CPU {share:.4f}   {len(hook.bodies)} requests",
        flush=True,
    )


def main() -> None:
    from tests.support.webhook import LYING

    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"ok, {', '.join(LYING)}; default: all")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40, help="training steps of a block")
    chosen = parser.parse_args()
    kinds = chosen.kinds or ["ok", *LYING]
    if strange := sorted(set(kinds) - {"ok", *LYING}):
        parser.error(f"{strange[0]} is unknown")
    with rehearsal() as lab:
        (lab.project / "steps.py").write_text(TRAIN)
        lab.run("up", "--local", "--nodes", "1", "-y", "-o", "local.gpus=off")
        [node] = json.loads(lab.run("status", "--json"))["nodes"]
        network = node["private_ip"].rsplit(".", 2)[0]
        for kind in kinds:
            measure(lab, kind, network=network, pairs=chosen.pairs, steps=chosen.steps)


if __name__ == "__main__":
    main()
