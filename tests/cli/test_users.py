"""Four users type what they typed on 2026-11-23: commands, failed commands and stumbles are counted.

A stumble is what made a user stop and wonder then: words that should not be on the screen, or such that
were missing. The second user needed 27 commands, of which 8 failed, and stumbled 25 times.
"""

import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.conftest import Lab
from tests.cli.terminal import CTRL_C, Terminal

pytestmark = pytest.mark.prove

ROOT = Path(__file__).resolve().parents[2]
TRAIN = '''
import argparse, os, pathlib, struct, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--resume", default="")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()
pixels = pathlib.Path("data/pixels.bin").read_bytes()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
first = int(args.resume.rpartition("_")[2].partition(".")[0]) + 1 if args.resume else 0
if args.resume and dist.get_rank() == 0:
    print(f"resumed at epoch {first}", flush=True)


def event(step, loss):
    """Append to TensorBoard's event file, as torch.utils.tensorboard does."""
    tag = b"train/loss"
    value = b"\\x0a" + bytes([len(tag)]) + tag + b"\\x15" + struct.pack("<f", loss)
    summary = b"\\x0a" + bytes([len(value)]) + value
    data = b"\\x10" + bytes([step]) + b"\\x2a" + bytes([len(summary)]) + summary
    with open("out/events.out.tfevents.1", "ab") as file:
        file.write(struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4))


for epoch in range(first, args.epochs):
    x = torch.randn(64, 8)
    loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    if args.hang and dist.get_rank() == 1:
        time.sleep(3600)
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        pathlib.Path("out").mkdir(exist_ok=True)
        event(epoch, loss.item())
        torch.save(model.module.state_dict(), f"out/ckpt_{epoch}.pt")
        print(f"epoch {epoch} loss={loss.item():.3f}", flush=True)
    time.sleep(0.3)
dist.destroy_process_group()
'''


@dataclass
class Story:
    """A user at a terminal of 80x24, and what went wrong for them."""

    terminal: Terminal
    commands: int = 0
    failed: list[str] = field(default_factory=list)
    stumbles: list[str] = field(default_factory=list)

    def type(
        self,
        command: str,
        answers: Sequence[tuple[str, str]] = (),
        *,
        code: int = 0,
        says: Sequence[str] = (),
        never: Sequence[str] = (),
        order: Sequence[str] = (),
    ) -> str:
        """Type a command. Stumbles: a pattern of `says` missing, of `never` there, `order` not kept."""
        shown = self.terminal.type(command, answers)
        self.commands += 1
        if shown.code != code:
            self.failed.append(f"{command}: exit {shown.code}\n{shown.text}")
        flat = re.sub(r"\s+", " ", shown.text)
        wrong = [f"{command}: does not say {one}" for one in says if not re.search(one, flat)]
        wrong += [f"{command}: says {one}" for one in never if re.search(one, flat)]
        places = [flat.find(one) for one in order]
        wrong += [f"{command}: not in this order: {order}"] * (places != sorted(places) or -1 in places)
        self.stumbles += [f"{one}\n{shown.text}" for one in wrong]
        return shown.text

    def told(self) -> str:
        """Return the count, and each failure and stumble with its screen."""
        count = f"{self.commands} commands, {len(self.failed)} failed, {len(self.stumbles)} stumbles"
        return "\n\n".join([count, *self.failed, *self.stumbles])


@pytest.fixture
def story(lab: Lab) -> Story:
    """A user with an empty folder and a home of their own."""
    return Story(Terminal(lab.project, lab.environ))


@pytest.fixture
def says(record_property: Callable[[str, object], None]) -> Callable[[str, Story], None]:
    """Adds a story's count to the summary of the run."""

    def add(who: str, story: Story) -> None:
        record_property("says", f"{who}: {story.told().splitlines()[0]}")

    return add


def wait_for_a_hang(lab: Lab) -> None:
    """Wait until one rank of the last job waits for the other, as a person does before they ask."""
    ends = time.monotonic() + 60
    while not lab.json("why")["behind"]:
        assert time.monotonic() < ends, "the job does not hang"
        time.sleep(1)


def test_a_stranger_looks_at_it(lab: Lab, story: Story, says: Callable[[str, Story], None]) -> None:
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"^    (.+)$", readme, re.MULTILINE)
    story.stumbles += [f"README: cut at 80 columns: {line}" for line in code if len(line) > 78]
    first = readme[:1500]
    for wanted in ("never", "--instance-type g6.xlarge", "--local"):
        story.stumbles += [f"README: the first screen lacks {wanted}"] * (wanted not in first)
    cheap = ["run train.py --nodes 2 --instance-type g6.xlarge --budget 2", "--local"]
    story.type("awsddp", says=cheap)
    story.type("awsddp --help", says=cheap)
    text = story.type(
        "awsddp run --local -y",
        says=["nothing is left", "free"],
        never=["EFA", "quota", r"\[y/N\]", "us-east-1[a-f]", "awsddp[0-9a-f]{8}"],
    )
    own = [line for line in text.splitlines() if not line.startswith("[rank ")]
    story.stumbles += [f"run --local: {len(own)} lines beside the ranks'\n{text}"] * (len(own) > 25)
    story.type("awsddp jobs", says=["main-1 ", "succeeded"])
    story.type("awsddp report", says=["main-1", r"report\.html"])
    says("stranger", story)
    assert (story.failed, story.stumbles) == ([], []), story.told()


def test_an_engineer_trains_a_model_of_her_own(
    lab: Lab, story: Story, says: Callable[[str, Story], None]
) -> None:
    lab.script("train.py", TRAIN)
    lab.script("data/pixels.bin", "0" * 2_000_000)
    lab.script("requirements.txt", "torch\n")
    lab.script(".gitignore", "data/\n")
    no_clipped = [r"n… ", r"node\d…", r"✓ node\d+ (linking|installing)", r"[ ,]0 MB"]
    story.type(
        "awsddp init",
        [
            *[("region", "\n"), ("Number of nodes", "\n"), ("Instance type", "\n")],
            *[("US dollars", "\n"), ("script", "\n"), ("packages", "\n"), ("data/", "y\n")],
        ],
        says=[r"data/ \(2 MB\)", r"awsddp run --local\b.*$"],
    )
    story.type(
        "awsddp run --local --world-size 2",
        says=["2 ranks", "checkpoint", r"awsddp.* report train-1", "nothing is left"],
        never=["EFA", "quota", r"\[y/N\]", "other choices", *no_clipped],
        order=["synced", "train-1", "epoch 0", "fetched", "terminated"],
    )
    story.type("awsddp up --local", says=["2 nodes", "g6.xlarge"], never=[r"\[y/N\]", "cost money"])
    story.type(
        "awsddp train -- --epochs 3",
        says=["train-2", "2 ranks: 2 nodes", "ckpt_2", "loss"],
        never=no_clipped,
    )
    story.type(
        "awsddp train --detach -- --epochs 200", says=["train-3", "awsddp logs -f"], never=["go to each"]
    )
    story.type("awsddp status", says=["train-3 running"], never=["last seen"])
    story.type(
        "awsddp logs -f",
        [("epoch 1 ", CTRL_C)],
        code=130,
        says=["train-3 keeps running", "awsddp logs -f"],
        never=["error", "expire"],
    )
    story.type("awsddp logs 3 -n 1", says=["epoch"], never=["epoch 0 "])
    story.type("awsddp fetch", says=["node0"], never=["does not match"])
    story.type("awsddp cancel", says=["train-3", "cancelled"])
    story.type(
        "awsddp train --resume last -- --resume {resume} --epochs 300", [("resumed", CTRL_C)], code=130
    )
    for lr in ("0.1", "0.03"):
        story.type(f"awsddp train -q --name lr-{lr} -- --lr {lr}")
    story.type("awsddp jobs lr-0.1 lr-0.03", says=["--lr 0.1", "--lr 0.03", "loss"], never=["train-1"])
    story.type("awsddp train --name hangs --detach -- --hang")
    wait_for_a_hang(lab)
    story.type(
        "awsddp why",
        says=["Rank 1", r"train\.py:\d+", r"time\.sleep\(3600\)", r"loss\.backward\(\)"],
        never=["is not where", "worker processes at"],
    )
    story.type("awsddp report lr-0.1", says=["loss", r"report\.html"])
    story.type("awsddp down -y", says=["nothing is left", "Free"])
    internal = [path.name for path in lab.project.glob("runs/*/logs/*") if "rank" not in path.name]
    story.stumbles += [f"internal files among the results: {internal}"] * bool(internal)
    says("engineer", story)
    assert story.commands <= 18, story.told()
    assert not story.failed, story.told()
    assert len(story.stumbles) <= 0, story.told()


def test_a_power_user_makes_mistakes(lab: Lab, story: Story, says: Callable[[str, Story], None]) -> None:
    lab.script("train.py", "print('trained')\n")
    lab.script("awsddp.toml", '[cluster]\nnodes = 2\ninstance_type = "g6.xlarge"\n')
    text = story.type(
        "awsddp -c x up --local --nodes 1 -y",
        [("asking for", CTRL_C)],
        code=130,
        says=["free"],
        never=["at .[0-9]"],
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
    story.type("awsddp -c x logs --tail 1", says=["trained"])
    for word, meant in (("rm", "down"), ("clusters", "status --all"), ("top", "jobs"), ("metrics", "report")):
        story.type(f"awsddp {word}", code=2, says=[f"awsddp {meant}"])
    story.type("awsddp -c x stop -y", says=["free"], never=[r"disks cost, \$"])
    story.type("awsddp -c x status", says=["stopped"])
    story.type("awsddp -c x down -y", says=["nothing is left"])
    story.type("awsddp train train.py", code=3, says=["run --local"])
    jobs = story.type("awsddp jobs")
    story.stumbles += [f"jobs: wider than 80: {line}" for line in jobs.splitlines() if len(line) > 80]
    says("power user", story)
    assert (story.failed, story.stumbles) == ([], []), story.told()


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
    found = story.type(f"{sys.executable} -m mypy --strict bad.py", code=1)
    story.stumbles += [] if "Found 3 errors" in found else [f"mypy --strict\n{found}"]
    says("developer", story)
    assert (story.failed, story.stumbles) == ([], []), story.told()
