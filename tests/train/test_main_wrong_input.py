"""An error is one line that names its cause, with the documented exit code and no traceback."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quiet  # noqa: F401  # isort: skip
import checkpoint
import main
import models
import obtain
import torch
import torch.distributed as dist

from tests.support.alone import single_process
from tests.support.launching import run_ranks

ONE = ["--epochs", "1"]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run main in this process, in a folder of its own and without a launcher's variables."""
    monkeypatch.chdir(tmp_path)
    with single_process(tmp_path / "run"):
        yield


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main.run(list(argv))
    if dist.is_initialized():  # the process would have ended here
        dist.destroy_process_group()
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("main.py: ")
    return code, error


@pytest.mark.parametrize(
    ("argv", "env", "text"),
    [
        (["3", "0", "--world-size", "2"], {}, "ranks go from 0 to 1"),
        (["0"], {}, "RANK without LOCAL_RANK"),
        (["0", "0"], {}, "--world-size"),
        (["0", "0", "--world-size", "2"], {}, "--init-method"),
        ([], {"RANK": "0", "WORLD_SIZE": "two"}, "must be numbers"),
        ([], {"RANK": "4", "WORLD_SIZE": "4"}, "ranks go from 0 to 3"),
        (["--device", "cuda"], {}, "has 0"),
        (["--global-batch", "0"], {}, "without an image"),
        (["--backend", "smoke-signals"], {}, "smoke"),
    ],
)
def test_a_launch_that_does_not_fit_is_exit_2(
    argv: list[str],
    env: dict[str, str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, error = refused(capsys, *argv)
    assert code == 2 and text in error


def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"tcp://127.0.0.1:{port}"
        code, error = refused(
            capsys, "0", "0", "--world-size", "2", "--init-method", address, "--timeout", "2"
        )
    assert code == 2 and address in error


def test_ranks_that_do_not_come_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    address = f"file://{tmp_path}/meeting"
    code, error = refused(capsys, "0", "0", "--world-size", "2", "--init-method", address, "--timeout", "1")
    assert code == 2 and "rank 0 of 2" in error


def test_a_rank_with_another_world_size_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    other = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    other.set("world_size", "2")
    address = f"tcp://127.0.0.1:{other.port}"
    code, error = refused(capsys, "1", "0", "--world-size", "3", "--init-method", address)
    assert code == 2 and "rank 1 has world size 3, another rank has 2" in error


def test_a_data_set_that_is_not_there_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refused(capsys, "--recipe", "stl10-resnet18")
    assert code == 1 and "get stl10 data" in error


def test_a_missing_torchvision_is_one_line_that_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as Python marks what cannot be imported
    code, error = refused(capsys, "--recipe", "cifar10-resnet18")
    assert code == 1 and error.count("\n") == 1
    assert "needs torchvision" in error and "-m pip install torchvision torch==2." in error


def test_a_loss_that_is_not_a_number_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = refused(capsys, "--lr", "1e30", *ONE)
    assert code == 1 and "the loss is" in error and "--lr" in error


def test_a_checkpoint_of_another_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = models.build("resnet18")
    optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler("cpu", enabled=False)
    state = checkpoint.state("resnet18", net=net, optimizer=optimizer, scaler=scaler)
    checkpoint.save({**state, "at": {}, "rng": []}, tmp_path / "other.pt")
    code, error = refused(capsys, "--resume", str(tmp_path / "other.pt"), *ONE)
    assert code == 1 and "resnet18, not digits-net" in error


def test_a_checkpoint_that_would_run_code_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save({"name": os.system}, tmp_path / "evil.pt")
    code, error = refused(capsys, "--resume", str(tmp_path / "evil.pt"), *ONE)
    assert code == 1 and "evil.pt is not a checkpoint" in error


def test_a_damaged_checkpoint_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run(ONE) == 0
    path = max((tmp_path / "run" / "checkpoints").glob("step-*.pt"))
    content = path.read_bytes()
    for size in (0, 10, 20_000):
        path.write_bytes(content[:size])
        code, error = refused(capsys, *ONE)
        assert code == 1 and path.name in error


def test_no_checkpoint_where_one_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, error = refused(capsys, "--resume", str(tmp_path / "nowhere"), *ONE)
    assert code == 1 and "no rank finds a checkpoint" in error


def test_a_disk_that_fills_while_saving_leaves_the_checkpoint_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main.run(ONE) == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").iterdir()}
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a write past this fails as on a full disk
    try:
        code, error = refused(capsys, "--epochs", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 1 and "could not be written" in error
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").iterdir()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
@pytest.mark.parametrize(
    ("size", "epochs", "text"),
    [
        ("4k", "1", "a file of the run could not be written or read: [Errno 28]"),  # the first row of metrics
        ("200k", "1", "step-00000023.pt could not be written: [Errno 28]"),
        ("400k", "1", "best.pt could not be written: [Errno 28]"),
        ("700k", "2", "step-00000046.pt could not be written: [Errno 28]"),
    ],
)
def test_a_disk_that_is_full_is_said_and_nothing_half_written_stays(
    size: str, epochs: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disk = tmp_path / "run"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]).returncode:
        pytest.skip("this root may not mount")
    try:
        code, error = refused(capsys, "--epochs", epochs)
        assert code == 1 and text in error
        assert list(disk.rglob("*.aside")) == []
        for path in disk.glob("checkpoints/*.pt"):
            assert torch.load(path, weights_only=True)["name"] == "digits-net"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.prove
def test_a_rank_without_its_data_is_named_and_the_other_says_the_group_broke(tmp_path: Path) -> None:
    obtain.make("stl10", tmp_path / "data0", train=50, test=20)
    args = ["--recipe", "stl10-resnet18", "--image-size", "32", "--data-dir", str(tmp_path / "data{rank}")]
    healthy, failed = run_ranks("main.py", *args, ranks=2, folder=tmp_path / "run")
    assert failed.code == 1 and "stl10 cannot be read" in failed.err
    assert healthy.code == 1 and "the process group failed" in healthy.err and "Traceback" not in healthy.err
