"""The other published programs, by two addresses on one machine; test_one_machine.py has their own lines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import TRAIN, free_port, run_program, run_ranks

import obtain  # isort: skip


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    obtain.make("mnist", folder, train=2000, test=200)
    return folder


def test_the_probe_says_who_is_there(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks("probe.py", ranks=2, folder=tmp_path)):
        assert ended.code == 0 and f"world_size = 2, rank = {rank}, backend = " in ended.out


@pytest.mark.prove
def test_the_convnet_falls_alike_undistributed_and_on_two_machines(mnist: Path, tmp_path: Path) -> None:
    def losses(folder: Path, machine: int) -> list[float]:
        rows = (folder / f"loss-{machine}.csv").read_text().splitlines()[1:]
        return [float(row.split(",")[4]) for row in rows]

    program = [
        sys.executable,
        str(TRAIN / "mnist_convnet.py"),
        "--data-dir",
        str(mnist),
        "--float64",
        "--no-dropout",
    ]
    assert run_program(program, ranks=1, folder=tmp_path / "one")[0].code == 0
    two = ["--num-machines", "2", "--machine-id", "{rank}", "--num-processes", "2", "--batch-size", "32"]
    ended = run_program([*program, *two], ranks=2, folder=tmp_path / "two")
    assert [e.code for e in ended] == [0, 0], ended
    assert all("Finished training on made data, not MNIST in" in e.out for e in ended)
    alone = losses(tmp_path / "one", 0)
    assert losses(tmp_path / "two", 0) == losses(tmp_path / "two", 1) == pytest.approx(alone, rel=1e-9)
    assert alone[-1] < alone[0]


@pytest.mark.prove
@pytest.mark.parametrize("program", ["mnist_mlp.py", "train_rank{rank}.py"])
def test_the_perceptron_learns_on_two_machines(program: str, mnist: Path, tmp_path: Path) -> None:
    args = ["--data-dir", str(mnist), "--epochs", "3", "--init-method", f"tcp://127.0.0.1:{free_port()}"]
    named = ["--rank", "{rank}"] if program == "mnist_mlp.py" else []
    ended = run_program(
        [sys.executable, str(TRAIN / program), *named, *args, "--world-size", "2"], ranks=2, folder=tmp_path
    )
    for rank, one in enumerate(ended):
        assert one.code == 0, one
        means = [float(line.split(": ")[1].split()[0]) for line in one.out.splitlines() if "mean" in line]
        assert len(means) == 3 and means[-1] < means[0] and f"of rank {rank}" in one.out
    assert (tmp_path / "mlp.pt").exists()
