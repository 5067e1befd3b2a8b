"""Each row of docs/training.md that takes two machines, by its own command, on two local nodes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator

import pytest

from tests.support.lab import Lab
from tests.support.seed import draw_cases
from tests.support.table import ROOT, Row, commands

EPOCH = r"\[rank 3 @ node1\] Begin Validation @ Epoch 1$"
SUMMARY = r"\[rank 0 @ node0\] Epoch Summary: epoch 1, accuracy 0\.\d+"
ON = r"\[rank 3 @ node1\] Initialize Process Group: rank 3 of 4 on cuda:1$"
ALIKE = r"\[rank 3 @ node1\] {}: rank 3 of 4 on cuda:{}, cuda:{}: loss \d\.\d+, weights alike$"
MEANS = tuple(
    pattern.format(rank)
    for rank in (0, 1)
    for pattern in (
        r"\[rank {0} @ node{0}\] rank {0} of 2 on cuda:0: made data, not MNIST$",
        r"\[rank {0} @ node{0}\] epoch 2  mean training loss of rank {0}: ",
    )
)
CONVNET = (
    "train train/mnist_convnet.py --nproc-per-node 1 -- --num-machines {world_size} --machine-id {rank} "
)
BOTH_FALL = (
    r"\[rank 0 @ node0\] epoch 0 \[10/16\]  training loss (\S+)$(?s:.*)"
    r"\[rank 1 @ node1\] epoch 0 \[10/16\]  training loss \1$"
    r"|\[rank 1 @ node1\] epoch 0 \[10/16\]  training loss (\S+)$(?s:.*)"
    r"\[rank 0 @ node0\] epoch 0 \[10/16\]  training loss \2$",
    r"Finished training on made data, not MNIST in",
)

ROWS = (
    Row("train train/main.py --world-size 4 -- {rank} {local_rank}", "--epochs 1", (EPOCH, SUMMARY, ON)),
    Row("train train/main.py --world-size 4 -- --local_rank={local_rank}", "--epochs 1", (EPOCH, SUMMARY)),
    Row(
        "train --world-size 4 -- {rank} {local_rank} --init-method tcp://{master_addr}:{master_port}",
        "--epochs 1",
        (EPOCH, SUMMARY),
    ),
    Row(
        "train --world-size 2 --nproc-per-node 2 -- --init-method file://{init_file}",
        "--epochs 1",
        (r"\[rank 1 @ node0\] Begin Validation @ Epoch 1$", SUMMARY),
    ),
    Row(
        "train",
        "--epochs 3",
        (r"\[rank 0 @ node0\] Epoch Summary: epoch 3, accuracy 0\.9", r"\[rank 15 @ node1\]"),
    ),
    Row(
        "train --world-size 4 -- --recipe stl10-resnet18",
        "--epochs 1 --image-size 32 --batch-size 8",
        (
            EPOCH,
            SUMMARY,
            r"\[rank 3 @ node1\] Epoch: \[1\]\[10/10\]  Time .* Data .* Loss .* Prec@1 .* Prec@5",
            r"accuracy on held-out data: \d.*, stl10 \(made data, not the real set\)$",
        ),
    ),
    Row("train --world-size 4 -- --recipe cifar10-resnet18", "--epochs 1 --batch-size 16", (EPOCH, SUMMARY)),
    Row(CONVNET + "--num-processes 2 --batch-size 32", "", BOTH_FALL),
    Row(CONVNET + "--num-gpu-processes 2 --batch-size 32", "", BOTH_FALL),
    Row(
        "exec --node 0 -- python train/mnist_convnet.py --num-gpu-processes 2 --batch-size 64",
        "",
        (
            r"\[node0\] epoch 0 \[10/16\]  training loss [12]\.",
            r"Finished training on made data, not MNIST in",
        ),
    ),
    Row("train train/train_rank{rank}.py --nproc-per-node 1", "--epochs 3", MEANS),
    Row(
        "train train/mnist_mlp.py --nproc-per-node 1 -- --rank {rank} "
        "--init-method tcp://{master_addr}:{master_port}",
        "--epochs 3",
        MEANS,
    ),
    Row("train train/ladder.py --world-size 1 -- dataparallel", "", (r"step 20  loss 0\.18851\d$",)),
    Row("train train/ladder.py --world-size 4 -- ddp", "", (r"step 20  loss 0\.18851\d$",)),
    Row("train train/ddp_demos.py --world-size 4 -- basic", "", (ALIKE.format("basic", 1, 1),)),
    Row(
        "train train/ddp_demos.py --world-size 4 -- checkpoint",
        "",
        (r"\[rank 1 @ node0\] rank 1 loaded ddp_demos\.pt$", ALIKE.format("checkpoint", 1, 1)),
    ),
    Row("train train/ddp_demos.py --world-size 4 -- split", "", (ALIKE.format("split", 2, 3),)),
    Row(
        "train train/ddp_demos.py --world-size 4 -- split --local_rank={local_rank} "
        "--local_world_size={local_world_size}",
        "",
        (ALIKE.format("split", 2, 3),),
    ),
    Row(
        "train train/probe.py --world-size 4",
        "",
        (r"\[rank 3 @ node1\] \[\d+\] world_size = 4, rank = 3, backend = nccl, sum of ranks right",),
    ),
    Row(
        "train train/parameter_server.py --world-size 4",
        "--epochs 4",
        (r"\[rank 0 @ node0\] 3 trainers, 204 updates, accuracy 0\.[6-9]",),
    ),
    Row(
        "exec -- env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 "
        "--max-restarts 3 --rdzv-backend c10d --rdzv-id job1 --rdzv-endpoint HOST:29400 train/elastic.py",
        "--fail-at 3",
        (r"\[node1\] rank 3 of 4: 3 epochs are done$", r"\[node0\] epoch 10  loss .* on 4 workers$"),
    ),
)
BY_HAND = (
    "exec --node I -- torchrun --nnodes 2 --nproc-per-node 2 --node-rank I --master-addr HOST "
    "--master-port 29500 train/probe.py"
)


def test_every_row_of_two_nodes_is_in_this_file() -> None:
    in_file = {f"awsddp {command}" for command in (*(row.command for row in ROWS), BY_HAND)}
    assert in_file == commands(on_nodes=True)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two nodes, each with the training programs and small synthetic data."""
    lab = Lab(tmp_path_factory.mktemp("two"))
    shutil.copytree(ROOT / "train", lab.project / "train", ignore=shutil.ignore_patterns("__pycache__"))
    made = " && ".join(
        f"python train/data.py make {name} data --train {count} --test 40"
        for name, count in (("mnist", 2048), ("stl10", 320), ("cifar10", 320))
    )
    try:
        for args in (
            ("up", "--local", "--nodes", "2", "-y"),
            ("sync",),
            ("exec", "--", "sh", "-c", made),
        ):
            result = lab.run(*args)
            assert result.returncode == 0, result.stderr
        yield lab
        assert lab.run("down", "-y").returncode == 0
    finally:
        lab.close()


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", draw_cases(ROWS, 2, label="two nodes"), ids=lambda row: row.command)
def test_a_row_of_two_nodes_prints_what_the_table_says(row: Row, nodes: Lab) -> None:
    command = row.command
    if row.short_options and command.startswith("train") and " -- " not in command:
        command += " --"
    if "HOST" in command:
        command = command.replace("HOST", nodes.json("status")["nodes"][0]["private_ip"])
    result = nodes.run(*shlex.split(f"{command} {row.short_options}"))
    assert result.returncode == 0, result.stderr + result.stdout
    assert row.missing(result.stdout + result.stderr) == [], result.stdout


@pytest.mark.prove
def test_torchrun_by_hand_on_both_nodes_forms_one_group(nodes: Lab) -> None:
    host = nodes.json("status")["nodes"][0]["private_ip"]
    lines = [shlex.split(BY_HAND.replace("HOST", host).replace(" I ", f" {node} ")) for node in (0, 1)]
    clients = [nodes.start(*args) for args in lines]
    outputs = [client.communicate(timeout=120) for client in clients]
    assert [client.returncode for client in clients] == [0, 0], outputs
    assert all(f"rank = {rank}, backend = nccl" in outputs[rank // 2][0].decode() for rank in range(4))
