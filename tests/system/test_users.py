"""Three users type what they typed on 2026-11-23 and 2026-11-28; the fourth is in test_engineer.py.

A stumble is what made a user stop then: text that should not be on the screen, or text that is missing.
"""

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab import Lab
from tests.support.terminal import CTRL_C, Story

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_new_user_explores_the_commands(lab: Lab, story: Story, says: Callable[[str, Story], None]) -> None:
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"^    (.+)$", readme, re.MULTILINE)
    story.stumbles += [f"README: cut at 80 columns: {line}" for line in code if len(line) > 78]
    top = readme[:1500]
    for text in ("never", "--instance-type g6.xlarge", "--local"):
        story.stumbles += [f"README: the first screen lacks {text}"] * (text not in top)
    cheap = ["run train.py --nodes 2 --instance-type g6.xlarge --budget 2", "--local"]
    story.type("awsddp", says=cheap)
    story.type("awsddp --help", says=cheap)
    text = story.type(
        "awsddp run --local -y",
        says=["nothing is left", "free"],
        never=["EFA", "quota", r"\[y/N\]", "us-east-1[a-f]", "awsddp[0-9a-f]{8}"],
    )
    rows = [line for line in text.splitlines() if not line.startswith("[rank ")]
    story.stumbles += [f"run --local: {len(rows)} lines beside the ranks'\n{text}"] * (len(rows) > 25)
    story.type("awsddp jobs", says=["main-1 ", "succeeded"])
    story.type("awsddp report", says=["main-1", r"report\.html"])
    story.type("awsddp", says=["1 cluster ended", "main-1: succeeded"], never=["on this machine yet"])
    story.type("awsddp init", [("AWS region", CTRL_C)], code=130, says=[r"no awsddp\.toml"], never=["down"])
    lab.script("train.py", "print('trained')\n")
    lab.script("requirements.txt", "torch\n")
    story.type(
        "awsddp init",
        [
            *[("AWS region", "us-est-1\n"), ("us-east-1", "us-east-1\n"), ("Number of nodes", "\n")],
            *[
                ("Instance type", "g6.xlrge\n"),
                ("Did you mean g6.xlarge", "g6.xlarge\n"),
                ("US dollars", "\n"),
            ],
            *[("Training script", "tran.py\n"), ("Did you mean train.py", "train.py\n")],
            *[("File with the script's packages", "5\n"), ("file not found: 5", "\n")],
        ],
        says=["It sets cluster.region"],
    )
    story.type("awsddp --local plan", says=["g6.xlarge", r"\$"], never=["error"])
    story.type("awsddp --local run tran.py -y", code=2, says=["did you mean train.py"])
    text = story.type("awsddp --local run -y", [("asking for", CTRL_C)], code=130, says=["nothing is left"])
    story.stumbles += ["run: speaks of results without a job"] * ("fetched" in text)
    says("stranger", story)
    assert (story.failed, story.stumbles) == ([], []), story.report()


ADVICE = {
    "-c x run train.py --dry-run": "-c x plan",
    "-c x train train.py --budget 3": "-c x up --budget 3 && awsddp -c x train train.py",
    "-c x train train.py --idle 5m": "-c x up --idle 5m && awsddp -c x train train.py",
    "-c x train train.py --spot": "-c x up --spot && awsddp -c x train train.py",
    "-c x train train.py --nodes 3": "-c x up --nodes 3 && awsddp -c x train train.py",
    "-c x train train.py --gpus 2": "-c x train train.py --nproc-per-node 2",
    "-c x train train.py --save s3://x/y": "-c x train train.py --save-to s3://x/y",
    "-c x train train.py --priority 5": "-c x train train.py --after all",
    "-c x up --detach": "-c x up",
    "-c x plan train.py": "-c x plan",
    "-c x train -- torchrun --nproc_per_node 2 train.py": "-c x train --nproc-per-node 2 train.py",
    "-c x train accelerate launch train.py": "-c x train -o job.launcher=torchrun train.py",
    "-c x train python train.py": "-c x train train.py",
    "-c x scale 4": "-c x up --nodes 4",
    "-c x pause": "-c x stop",
    "autostop -i 60": "up --idle 60m",
    "launch -c c train.py": "-c c up && awsddp -c c train train.py",
    "-c x down --nodes 1": "-c x down --help",
    "submit train.py": "train --detach train.py",
    "history": "jobs -v",
}
"""Command lines of users of Slurm and SkyPilot, and the advised command."""


def test_a_power_user_is_advised(lab: Lab, story: Story, says: Callable[[str, Story], None]) -> None:
    lab.script("train.py", "print('trained')\n")
    lab.script("awsddp.toml", '[cluster]\nnodes = 2\ninstance_type = "g6.xlarge"\n')
    text = story.type(
        "awsddp -c x up --local --nodes 1 -y",
        [("asking for", CTRL_C)],
        code=130,
        says=["free"],
        never=[r"at \$"],
    )
    again = re.search(r"next: (awsddp .*?)\s+#", text)
    assert again, text
    story.type(again[1], says=["1 x g6.xlarge"], never=["2 x g6.xlarge"])
    story.type("awsddp -c x train --lr 0.1", code=2, says=[r"awsddp -c x train -- --lr 0\.1"])
    story.type("awsddp -c x down --all", code=2, says=["status --all"], never=["Did you mean '--local'"])
    story.type("awsddp up --node 3", code=2, says=["--nodes 3"], never=["--idle", "--zone"])
    story.type("awsddp up --nodes 0", code=3, says=["--nodes"], never=[r"cluster\.nodes"])
    story.type("awsddp -c x train train.py --world-size 16", code=2, says=["16", "1 GPU"])
    story.type("awsddp -c x train train.py", says=["train-1", "1 rank"])
    for line, meant in ADVICE.items():
        story.type(f"awsddp {line}", code=2, says=[re.escape(f"next: awsddp {meant}")])
    story.type("awsddp -c x cancel trian-1", code=7, says=["did you mean train-1"])
    story.type("awsddp -c x train train.py --name train-1", code=2, says=["exists: succeeded, [0-9]+ file"])
    story.type("awsddp -c x exec nvidia-smi -L", code=1, says=["GPUs of a rehearsal are simulated"])
    lab.script("fails.py", "raise ValueError('the shapes differ')\n")
    text = story.type(
        "awsddp -c x train fails.py",
        code=1,
        says=[r"next: awsddp -c x train fails\.py", "awsddp -c x down"],
        never=[r"cause: .*rehearsal"],
    )
    story.stumbles += ["train: the traceback twice"] * (text.count("Traceback") > 1)
    story.type("awsddp -c x logs train-1 --tail 1", says=["trained"])
    for verb, meant in (("rm", "down"), ("clusters", "status --all"), ("top", "jobs"), ("metrics", "report")):
        story.type(f"awsddp {verb}", code=2, says=[f"awsddp {meant}"])
    story.type(
        "awsddp -c x stop -y", says=["free", r"on EC2 its disks would cost \$"], never=[r"disks cost, \$"]
    )
    story.type("awsddp -c x status", says=["stopped"])
    story.type("awsddp -c x down -y", says=["nothing is left"])
    story.type("awsddp train train.py", code=3, says=["plan --local"])
    jobs = story.type("awsddp jobs")
    story.stumbles += [f"jobs: wider than 80: {line}" for line in jobs.splitlines() if len(line) > 80]
    says("power user", story)
    assert (story.failed, story.stumbles) == ([], []), story.report()


NOTEBOOK = """
import threading
import awsddp

threads = set()
nb = awsddp.Cluster("nb", local=True, on_event=lambda _: threads.add(threading.current_thread()))
plan = nb.plan(nodes=1, instance_type="g6.xlarge")
print("plan", len(repr(plan)) < 300)
nb.up(plan)
try:
    nb.plan(nodez=2)
except awsddp.UsageError as error:
    print("keyword", "nodes" in error.next)
job = nb.train("fails.py")
try:
    job.wait()
except awsddp.JobFailed as error:
    print("failed", "awsddp -c nb" in f"{error.why} {error.next} {error}")
print("shown", job.name in repr(job))
print("parts", all(hasattr(nb, name) for name in ("exec", "sync", "fetch", "doctor", "stop")))
print("why", job.why().job == job.name)
print("threads", threads == {threading.current_thread()})
print("part of a name", nb.job("fails").name == job.name)
nb.down()
"""


def test_a_developer_writes_a_notebook(lab: Lab, story: Story, says: Callable[[str, Story], None]) -> None:
    lab.script("fails.py", "raise SystemExit(3)\n")
    lab.script("notebook.py", NOTEBOOK)
    lab.environ["PYTHONPATH"] = str(ROOT)
    text = story.type(f"{sys.executable} notebook.py")
    story.stumbles += [f"notebook: {line}" for line in text.splitlines() if line.endswith("False")]
    story.stumbles += [] if text.count("True") == 8 else [f"notebook: incomplete\n{text}"]
    lab.script(
        "bad.py",
        textwrap.dedent("""
            import awsddp
            nb = awsddp.Cluster("x", instance_typ="g6.xlarge")
            nb.plan(nodez=2)
            nb.train("a.py", world_sise="four")
        """),
    )
    output = story.type(f"{sys.executable} -m mypy --strict bad.py", code=1)
    story.stumbles += [] if "Found 3 errors" in output else [f"mypy --strict\n{output}"]
    says("developer", story)
    assert (story.failed, story.stumbles) == ([], []), story.report()
