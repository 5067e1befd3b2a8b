"""Which checkpoint of a job's results --resume takes."""

import os
import zipfile
from pathlib import Path

import pytest

from awsddp.jobs.files import newest_checkpoint


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], []),
        (["node0/run/metrics.jsonl", "logs/rank0.pt"], []),
        (["node0/run/a.pt", "node0/run/b.pth", "node0/c.ckpt"], ["node0/c.ckpt"]),
        (["node0/run/latest", "node0/run/z.pt"], ["node0/run/latest"]),
        (["node0/run/a.pt", "node1/a.pt"], ["node1/a.pt"]),
        (
            [
                "node0/run/s1/.metadata",
                "node0/run/s1/__0.distcp",
                "node1/run/s1/__2.distcp",
                "node1/run/s0/x",
            ],
            ["node0/run/s1", "node1/run/s1"],
        ),
        (
            ["node0/run/latest/__0.distcp", "node1/run/latest/__2.distcp"],
            ["node0/run/latest", "node1/run/latest"],
        ),
        (  # Hugging Face's Trainer: each rank adds its own file after the last one of rank 0
            [
                "node0/out/checkpoint-2/model.safetensors",
                "node0/out/checkpoint-2/trainer_state.json",
                "node1/out/checkpoint-2/rng_state_2.pth",
            ],
            ["node0/out/checkpoint-2", "node1/out/checkpoint-2"],
        ),
    ],
)
def test_newest_checkpoint(tmp_path: Path, files: list[str], expected: list[str]) -> None:
    for moment, name in enumerate(files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (moment, moment))
    assert [str(path.relative_to(tmp_path)) for path in newest_checkpoint(tmp_path)] == expected


def test_link_latest_counts_if_it_stays_in_the_results(tmp_path: Path) -> None:
    run = tmp_path / "job" / "node0" / "run"
    run.mkdir(parents=True)
    (run / "step-3.pt").touch()
    (run / "step-4.pt").touch()
    (run / "latest").symlink_to("step-3.pt")
    assert newest_checkpoint(tmp_path / "job") == [run / "step-3.pt"]
    (run / "latest").unlink()
    (run / "latest").symlink_to(tmp_path)
    os.utime(run / "step-3.pt", (0, 0))
    assert newest_checkpoint(tmp_path / "job") == [run / "step-4.pt"]


def test_results_may_be_named_from_the_current_folder_or_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = tmp_path / "disk" / "job" / "node0" / "run" / "latest"
    latest.mkdir(parents=True)
    (latest / "__0.distcp").touch()
    (tmp_path / "runs").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    assert newest_checkpoint(Path("runs", "job")) == [latest]


def test_file_whose_end_was_not_written_is_no_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "node0" / "run"
    run.mkdir(parents=True)
    with zipfile.ZipFile(run / "whole.pt", "w") as file:
        file.writestr("data", "x" * 100)
    content = (run / "whole.pt").read_bytes()
    (run / "half.pt").write_bytes(content[:-1])
    os.utime(run / "whole.pt", (0, 0))
    assert newest_checkpoint(tmp_path) == [run / "whole.pt"]
