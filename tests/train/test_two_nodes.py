"""Every training row of docs/training.md that takes two machines, by its own command, on two local nodes."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import Lab

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Row:
    """A command of the table; what makes it short here; and patterns of lines that must be seen."""

    command: str
    more: str
    seen: tuple[str, ...]


EPOCH = r"\[rank 3 @ node1\] Begin Validation @ Epoch 1$"
SUMMARY = r"\[rank 0 @ node0\] Epoch Summary: epoch 1, accuracy 0\.\d+"
ALIKE = r"\[rank 3 @ node1\] {}: rank 3 of 4 on cpu, cpu: loss \d\.\d+, weights alike$"
MEAN = r"\[rank {0} @ node{0}\] epoch 2  mean training loss of rank {0}: "

ROWS = {
    "argv": Row("train train/main.py --world-size 4 -- {rank} {local_rank}", "--epochs 1", (EPOCH, SUMMARY)),
    "local_rank": Row(
        "train train/main.py --world-size 4 -- --local_rank={local_rank}", "--epochs 1", (EPOCH, SUMMARY)
    ),
    "tcp": Row(
        "train --world-size 4 -- {rank} {local_rank} --init-method tcp://{master_addr}:{master_port}",
        "--epochs 1",
        (EPOCH, SUMMARY),
    ),
    "file": Row(
        "train --world-size 2 --nproc-per-node 2 -- --init-method file://{init_file}",
        "--epochs 1",
        (r"\[rank 1 @ node0\] Begin Validation @ Epoch 1$", SUMMARY),
    ),
    "digits on 16 ranks": Row(
        "train --world-size 16", "", (r"Epoch Summary: epoch 8, accuracy 0\.9[789]", r"\[rank 15 @ node1\]")
    ),
    "stl10": Row(
        "train --world-size 4 -- --recipe stl10-resnet18",
        "--epochs 1 --image-size 32 --batch-size 4",
        (
            EPOCH,
            SUMMARY,
            r"\[rank 3 @ node1\] Epoch: \[1\]\[10/20\]  Time .* Data .* Loss .* Prec@1 .* Prec@5",
        ),
    ),
    "cifar10": Row(
        "train --world-size 4 -- --recipe cifar10-resnet18", "--epochs 1 --batch-size 16", (EPOCH, SUMMARY)
    ),
    "convnet": Row(
        "train train/mnist_convnet.py --nproc-per-node 1 -- --num-machines {world_size} --machine-id {rank} "
        "--num-processes 2 --batch-size 32",
        "",
        (
            r"\[rank 0 @ node0\] epoch 0 \[10/16\]  training loss (\S+)$(?s:.*)"
            r"\[rank 1 @ node1\] epoch 0 \[10/16\]  training loss \1$"
            r"|\[rank 1 @ node1\] epoch 0 \[10/16\]  training loss (\S+)$(?s:.*)"
            r"\[rank 0 @ node0\] epoch 0 \[10/16\]  training loss \2$",
            r"Finished training in",
        ),
    ),
    "a file a rank": Row(
        "train train/train_rank{rank}.py --nproc-per-node 1", "--epochs 3", (MEAN.format(0), MEAN.format(1))
    ),
    "perceptron": Row(
        "train train/mnist_mlp.py --nproc-per-node 1 -- --rank {rank} "
        "--init-method tcp://{master_addr}:{master_port}",
        "--epochs 3",
        (MEAN.format(0), MEAN.format(1)),
    ),
    "DataParallel": Row(
        "train train/ladder.py --world-size 1 -- dataparallel", "", (r"step 20  loss 0\.18851\d$",)
    ),
    "DDP": Row("train train/ladder.py --world-size 4 -- ddp", "", (r"step 20  loss 0\.18851\d$",)),
    **{
        demo: Row(f"train train/ddp_demos.py --world-size 4 -- {demo}", "", (ALIKE.format(demo),))
        for demo in ("basic", "checkpoint", "split")
    },
    "probe": Row(
        "train train/probe.py --world-size 4",
        "",
        (r"\[rank 3 @ node1\] \[\d+\] world_size = 4, rank = 3, backend = gloo, sum of ranks right",),
    ),
    "parameter server": Row(
        "train train/parameter_server.py --world-size 4",
        "--epochs 4",
        (r"\[rank 0 @ node0\] 3 trainers, 204 updates, accuracy 0\.[6-9]",),
    ),
    "elastic": Row(
        "exec -- env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 "
        "--max-restarts 3 --rdzv-backend c10d --rdzv-id job1 --rdzv-endpoint HOST:29400 train/elastic.py",
        "--fail-at 3",
        (r"\[node1\] rank 3 of 4: 3 epochs are done$", r"\[node0\] epoch 10  loss .* on 4 workers$"),
    ),
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes with the training programs and small made data on each."""
    lab = Lab(tmp_path_factory.mktemp("two"))
    shutil.copytree(ROOT / "train", lab.project / "train", ignore=shutil.ignore_patterns("__pycache__"))
    made = " && ".join(
        f"python train/data.py make {name} data --train {count} --test 40"
        for name, count in (("mnist", 2048), ("stl10", 320), ("cifar10", 320))
    )
    try:
        for words in (("up", "--local", "--nodes", "2", "-y"), ("sync",), ("exec", "--", "sh", "-c", made)):
            shown = lab.run(*words)
            assert shown.returncode == 0, shown.stderr
        yield lab
        assert lab.run("down", "-y").returncode == 0
    finally:
        lab.close()


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table_does_what_the_table_says(name: str, nodes: Lab) -> None:
    row = ROWS[name]
    assert f"`awsddp {row.command}`" in (ROOT / "docs" / "training.md").read_text()
    words = row.command
    if row.more and words.startswith("train") and " -- " not in words:
        words += " --"
    if "HOST" in words:
        words = words.replace("HOST", nodes.json("status")["nodes"][0]["private_ip"])
    shown = nodes.run(*shlex.split(f"{words} {row.more}"))
    assert shown.returncode == 0, shown.stderr + shown.stdout
    for pattern in row.seen:
        assert re.search(pattern, shown.stdout, re.MULTILINE), f"{pattern}\n{shown.stdout}"


def test_the_launch_script_s_own_flags_by_hand_on_both_nodes(nodes: Lab) -> None:
    host = nodes.json("status")["nodes"][0]["private_ip"]
    torchrun = f"torchrun --nnodes 2 --nproc-per-node 2 --master-addr {host} --master-port 29500"
    hands = [
        nodes.start(
            "exec", "--node", str(node), "--", *f"{torchrun} --node-rank {node}".split(), "train/probe.py"
        )
        for node in (0, 1)
    ]
    said = [hand.communicate(timeout=120) for hand in hands]
    assert [hand.returncode for hand in hands] == [0, 0], said
    assert all(f"rank = {rank}, backend = gloo" in said[rank // 2][0].decode() for rank in range(4))
