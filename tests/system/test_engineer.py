"""An engineer trains her own model in at most 18 commands.

On 2026-11-23 it took 27, with 8 failures and 25 stumbles. What stopped an engineer on 2026-11-28 is included.
"""

import json
import re
import time
from collections.abc import Callable

import pytest

from tests.support.lab import Lab
from tests.support.terminal import CTRL_C, Story

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]

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


def wait_for_a_hang(lab: Lab) -> None:
    """Wait until one rank of the last job waits for the other.

    While a rank imports its modules, it may be behind for a moment.
    """
    ends = time.monotonic() + 60
    while "time.sleep(3600)" not in json.dumps(lab.json("why")):
        assert time.monotonic() < ends, "the job does not hang"
        time.sleep(1)


def test_an_engineer_trains_her_own_model_in_at_most_18_commands(
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
        "awsddp train --resume last -- --resume {resume} --epochs 300",
        [("resumed", CTRL_C)],
        code=130,
        says=[r"next: awsddp train .*--resume\s+train-4 .*\{resume\}", "awsddp down"],
    )
    output = story.type("awsddp train -q --name lr-0.03 -- --lr 0.03")
    loss = re.search(r"loss ([0-9.]+)", output)
    story.type(
        "awsddp jobs train-2 lr",
        says=["--epochs 3", "--lr 0.03", re.escape(loss[1]) if loss else "a loss"],
        never=["train-1"],
    )
    story.type(
        "awsddp train -- --lr none",
        code=1,
        says=["invalid float value", "next: awsddp train .*awsddp down"],
        never=["cause: .*rehearsal", "Traceback.*Traceback"],
    )
    story.type("awsddp train --name hangs --detach -- --hang")
    wait_for_a_hang(lab)
    story.type(
        "awsddp why",
        says=["[Rr]ank 1", r"train\.py:\d+", r"time\.sleep\(3600\)", r"loss\.backward\(\)"],
        never=["is not where", "worker processes at"],
    )
    story.type("awsddp report lr", says=["loss", r"report\.html"])
    page = (lab.project / "runs" / "lr-0.03" / "report.html").read_text()
    story.stumbles += ["report: another loss than train"] * (loss is None or loss[1] not in page)
    story.type("awsddp down -y", says=["nothing is left", "Free"])
    internal = [path.name for path in lab.project.glob("runs/*/logs/*") if "rank" not in path.name]
    story.stumbles += [f"internal files among the results: {internal}"] * bool(internal)
    says("engineer", story)
    assert story.commands <= 18, story.report()
    assert not story.failed, story.report()
    assert len(story.stumbles) <= 3, story.report()
