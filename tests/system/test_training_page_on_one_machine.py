"""Each row of docs/training.md that takes one machine, by its own command."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.alone import LAUNCHER
from tests.support.launching import TRAIN, gpus_for
from tests.support.seed import draw_cases
from tests.support.table import Row, commands

import obtain  # isort: skip

LOSSES = (r"^step 20  loss 0\.18851\d$", r"^step 100  loss 0\.07678\d$")
FALLS = (
    r"^epoch 0 \[0/16\]  training loss 2\.3",
    r"^epoch 0 \[10/16\]  training loss [12]\.[0-2]",
    r"^Finished training on made data, not MNIST in \d",
)
GROUP = tuple(rf"world_size = 2, rank = {rank}, backend = gloo, sum of ranks right" for rank in (0, 1))

ROWS = (
    Row("python train/main.py", "", (r"^Begin Validation @ Epoch 8$", r"epoch 8, accuracy 0\.9[789]")),
    Row(
        "python train/main.py --spawn 2",
        "--epochs 1",
        (r"rank 1 of 2 on cpu$", r"^Epoch Summary: epoch 1, accuracy 0\.\d"),
    ),
    Row("python train/mnist_convnet.py", "", FALLS),
    Row("python train/mnist_convnet.py --num-processes 1", "", FALLS),
    Row("python train/mnist_convnet.py --num-processes 2 --batch-size 64", "", FALLS),
    Row("python train/mnist_convnet.py --num-processes 4 --batch-size 32", "", FALLS),
    Row(
        "python train/mnist_mlp.py --rank 0 --world-size 1",
        "--epochs 2",
        (r"^rank 0 of 1 on cpu: made data, not MNIST$", r"^epoch 1  mean training loss of rank 0: "),
    ),
    Row("python train/ladder.py single", "", LOSSES),
    Row("python train/ladder.py dataparallel", "", LOSSES),
    Row("torchrun --standalone --nproc-per-node 2 train/ladder.py ddp", "", LOSSES),
    *(
        Row(
            f"python train/ddp_demos.py {demo}",
            "",
            tuple(f"^{demo}: rank {n} of 2 .* alike$" for n in (0, 1)),
        )
        for demo in ("basic", "checkpoint", "split")
    ),
    Row("torchrun --standalone --nproc-per-node 2 train/probe.py", "", GROUP),
    Row(
        "env INIT_METHOD=file:///tmp/meeting torchrun --standalone --nproc-per-node 2 train/probe.py",
        "",
        GROUP,
    ),
    Row(
        "python train/main.py --recipe cifar10-resnet18",
        "--epochs 1 --batch-size 32",
        (r"^cifar10 \(made data, not the real set\): 32 images x 1 ranks", r"^Epoch Summary: epoch 1"),
    ),
    Row(
        "env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 "
        "train/elastic.py",
        "--fail-at 3",
        (
            *(f"^rank {rank} of 2: 3 epochs are done$" for rank in (0, 1)),
            r"(?s)\A(?!.*^epoch (\d+) .*^epoch \1 ).*^epoch 10  loss [^\n]* on 2 workers$",  # each once
        ),
    ),
    Row(
        "torchrun --standalone --nproc-per-node 3 train/parameter_server.py",
        "",
        (r"^2 trainers, 500 updates, accuracy 0\.[89]",),
    ),
)


def test_every_row_of_one_machine_is_in_this_file() -> None:
    assert {row.command for row in ROWS} == commands(on_nodes=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs and small synthetic data."""
    path = tmp_path_factory.mktemp("one")
    (path / "train").symlink_to(TRAIN)
    obtain.make("mnist", path / "data", train=2048, test=40)
    obtain.make("cifar10", path / "data", train=320, test=40)
    return path


@pytest.mark.prove
@pytest.mark.parametrize("row", draw_cases(ROWS, 4, label="one machine"), ids=lambda row: row.command)
def test_a_row_of_one_machine_prints_what_the_table_says(row: Row, folder: Path, tmp_path: Path) -> None:
    args = shlex.split(
        f"{row.command} {row.short_options}".replace("/tmp/meeting", str(tmp_path / "meeting"))
    )
    start = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    command = [part for arg in args for part in start.get(arg, [arg])]
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    environ |= {"OMP_NUM_THREADS": "1", "AWSDDP_RUN_DIR": str(tmp_path), **gpus_for(2)}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended
    assert row.missing(ended.stdout) == [], ended
