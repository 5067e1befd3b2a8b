"""A rank dies under each launcher: awsddp must name it as the cause, and all ranks must end within 2 s.

    python -m benchmarks.campaigns.deaths [--seed N] [--runs N] [--ranks N] [--state FILE]

Needs root for its two nodes of the local cloud. The runs take every launcher and every kind of death in turn.
The rank dies by a signal that ends a process, by an exit code, by an import error, by an exception, or by
os._exit in a thread. It dies before the rendezvous, in the middle of collectives, or at the end. The first,
the second or the last rank dies, chosen at random.
"""

import itertools
import json
import random
import sys
from signal import Signals
from typing import Any

from awsddp.agent_client.launchers import LAUNCHERS
from benchmarks._rehearsal import Rehearsal
from benchmarks.campaigns._campaign import Row, arguments, campaign, cluster

GONE_S = 2.0
_SIGNALS = "INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM XCPU SYS"
WAYS = (
    *(("signal", int(Signals[f"SIG{name}"])) for name in _SIGNALS.split()),
    *(("exit", code) for code in (1, 2, 3, 75, 127, 255)),
    ("import", 1),
    ("raise", 1),
    ("thread", 4),
)
MOMENTS = ("before", "middle", "end")
KINDS = tuple(itertools.product(WAYS, MOMENTS))
SCRIPT = """\
import os, signal, sys, threading, time

way, value, moment, victim = sys.argv[1:]
mine = os.environ['RANK'] == victim

def die():
    if way == 'signal':
        if int(value) != signal.SIGKILL:
            signal.signal(int(value), signal.SIG_DFL)
        os.kill(os.getpid(), int(value))
        time.sleep(600)
    # With its group open torch's gloo may abort an orderly exit.
    if way == 'exit':
        (os._exit if moment == 'middle' else sys.exit)(int(value))
    if moment == 'middle':
        show = sys.excepthook
        sys.excepthook = lambda *error: (show(*error), os._exit(1))
    if way == 'thread':
        threading.Thread(target=os._exit, args=(int(value),)).start()
        time.sleep(600)
    if way == 'import':
        import no_such_module
    raise ValueError('this rank dies')

if mine and moment == 'before':
    die()
import torch, torch.distributed as dist
dist.init_process_group('gloo')
for step in range(20):
    dist.all_reduce(torch.ones(1000))
    if mine and moment == 'middle' and step == 10:
        die()
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
if mine:
    die()
"""


def words(kind: tuple[tuple[str, int], str], victim: int) -> tuple[str, ...]:
    """Return the script's arguments."""
    (kind_of_end, value), moment = kind
    return kind_of_end, str(value), moment, str(victim)


def judged(kind: tuple[tuple[str, int], str], victim: int, job: dict[str, Any]) -> Row:
    """Return a row with the cause of failure in `job`, a job's state on node 0, after rank `victim` has died.

    `right` is True if this cause names the victim and the victim's exit code. `gone_s` is the time from the
    end of the victim, as its node recorded it, to the end of the last rank.
    """
    (kind_of_end, value), _ = kind
    code = -value if kind_of_end == "signal" else value
    ends = {row["rank"]: row["started"] + row["seconds"] for row in job["ranks"] if row.get("started")}
    cause = job["cause"] or {"rank": None, "exit_code": None}
    return {
        "cause": f"rank {cause['rank']} with {cause['exit_code']}",
        "right": (cause["rank"], cause["exit_code"]) == (victim, code),
        "gone_s": round(max(ends.values()) - ends[victim], 2),
    }


def run(lab: Rehearsal, number: int, dice: random.Random, *, ranks: int = 4) -> Row:
    """Let one of `ranks` ranks die, and return the row of the run."""
    launcher, kind = list(LAUNCHERS)[number % 2], KINDS[number // 2 % len(KINDS)]
    victim, name = dice.choice((0, 1, ranks - 1)), f"death{number}"
    options = ("--name", name, "-o", f"job.launcher={launcher}", "--world-size", str(ranks), "--json")
    follower = lab.started("train", "die.py", *options, "--", *words(kind, victim))
    follower.communicate(timeout=300)
    state = json.loads(lab.run("exec", "--json", "--node", "0", f"cat ~/.awsddp/jobs/{name}/state.json"))
    row = judged(kind, victim, json.loads(state["nodes"][0]["stdout"]))
    processes = json.loads(lab.run("exec", "--json", "pgrep -fc '[d]ie.py|[w]orker.py' || true"))
    stray = [node["stdout"].strip() for node in processes["nodes"]]
    parameters = {"launcher": launcher, "way": "{} {}".format(*kind[0]), "moment": kind[1], "victim": victim}
    is_ok = row["right"] and row["gone_s"] <= GONE_S and set(stray) == {"0"}
    return {**parameters, **row, "left": ",".join(stray), "ok": is_ok}


def main() -> int:
    parser = arguments(str(__doc__).splitlines()[0], runs=2 * len(KINDS))
    parser.add_argument("--ranks", type=int, default=4)
    args = parser.parse_args()
    with cluster(2, {"die.py": SCRIPT}) as lab:
        return campaign(args, lambda number, dice: run(lab, number, dice, ranks=args.ranks))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
