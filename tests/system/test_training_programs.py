"""Published programs by two addresses on one machine; test_training_page_on_one_machine.py has the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.fleet import free_ports
from tests.support.launching import TRAIN, run_program, run_ranks

from mnist import read_mnist  # isort: skip
import mnist_convnet  # isort: skip
import obtain  # isort: skip
import probe  # isort: skip


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    obtain.make("mnist", folder, train=2000, test=200)
    return folder


@pytest.mark.prove
def test_the_probe_prints_its_rank_and_world_size(tmp_path: Path) -> None:
    for rank, ended in enumerate(run_ranks("probe.py", ranks=2, folder=tmp_path)):
        assert ended.code == 0 and f"world_size = 2, rank = {rank}, backend = " in ended.out


@pytest.mark.prove
def test_the_probe_times_its_all_reduce_as_nccl_tests_does(tmp_path: Path) -> None:
    """Algorithm bandwidth times 2(n-1)/n: equal to it for two ranks, 1.75 of it for eight."""
    assert probe.bus_gbyte_s(10**9, 0.5, ranks=2) == pytest.approx(2.0)
    assert probe.bus_gbyte_s(10**9, 0.5, ranks=8) == pytest.approx(3.5)
    for rank, ended in enumerate(run_ranks("probe.py", "--json", ranks=2, folder=tmp_path)):
        lines = [json.loads(line) for line in ended.out.splitlines()]
        assert [(line["rank"], line["at"]) for line in lines] == [
            (rank, at) for at in ("started", "arrived", "joined", "reduced")
        ]
        assert lines[-1]["gbyte_s"] > 0


@pytest.mark.prove
def test_the_convnet_has_equal_losses_in_one_process_and_on_two_machines(mnist: Path, tmp_path: Path) -> None:
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
    args = ["--data-dir", str(mnist), "--epochs", "3", "--init-method", f"tcp://127.0.0.1:{free_ports()}"]
    named = ["--rank", "{rank}"] if program == "mnist_mlp.py" else []
    ended = run_program(
        [sys.executable, str(TRAIN / program), *named, *args, "--world-size", "2"], ranks=2, folder=tmp_path
    )
    for rank, process in enumerate(ended):
        assert process.code == 0, process
        means = [float(line.split(": ")[1].split()[0]) for line in process.out.splitlines() if "mean" in line]
        assert len(means) == 3 and means[-1] < means[0] and f"of rank {rank}" in process.out
    assert (tmp_path / "mlp.pt").exists()


def test_missing_gpus_are_reported_with_their_number(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit):
        mnist_convnet.arguments(["--num-gpu-processes", "8"])
    assert "8 GPU processes need as many GPUs; this machine has 0" in capsys.readouterr().err


def test_synthetic_data_has_its_name_and_incomplete_or_missing_files_are_named(tmp_path: Path) -> None:
    obtain.make("mnist", tmp_path, train=50, test=20)
    assert read_mnist(tmp_path, "train")[2] == "made data, not MNIST"
    images = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"train-images-idx3-ubyte does not hold 50 images.*cut short"):
        read_mnist(tmp_path, "train")
    images.unlink()
    with pytest.raises(SystemExit, match=r"no MNIST in .* get mnist"):
        read_mnist(tmp_path, "train")
