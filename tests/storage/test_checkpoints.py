"""The checkpoint of a job's results that --resume takes."""

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest

from awsddp.agent.s3.checkpoint_index import CheckpointIndex
from awsddp.agent.s3.checkpoints import find_flaw
from awsddp.storage.checkpoints import find_newest_checkpoint


def find_parts(results: Path) -> list[Path]:
    checkpoint = find_newest_checkpoint(results)
    return list(checkpoint.parts) if checkpoint else []


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
                "node0/out/checkpoint-2/optimizer.pt",
                "node0/out/checkpoint-2/scheduler.pt",
                "node0/out/checkpoint-2/trainer_state.json",
                "node1/out/checkpoint-2/rng_state_2.pth",
            ],
            ["node0/out/checkpoint-2", "node1/out/checkpoint-2"],
        ),
    ],
)
def test_the_newest_checkpoint_is_found(tmp_path: Path, files: list[str], expected: list[str]) -> None:
    for mtime, name in enumerate(files):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (mtime, mtime))
    assert [str(path.relative_to(tmp_path)) for path in find_parts(tmp_path)] == expected


def test_a_link_named_latest_counts_if_it_stays_in_the_results(tmp_path: Path) -> None:
    run = tmp_path / "job" / "node0" / "run"
    run.mkdir(parents=True)
    (run / "step-3.pt").touch()
    (run / "step-4.pt").touch()
    (run / "latest").symlink_to("step-3.pt")
    assert find_parts(tmp_path / "job") == [run / "step-3.pt"]
    (run / "latest").unlink()
    (run / "latest").symlink_to(tmp_path)
    os.utime(run / "step-3.pt", (0, 0))
    assert find_parts(tmp_path / "job") == [run / "step-4.pt"]


def test_the_path_of_the_results_may_be_relative_or_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = tmp_path / "disk" / "job" / "node0" / "run" / "latest"
    latest.mkdir(parents=True)
    (latest / "__0.distcp").touch()
    (tmp_path / "runs").symlink_to("disk")
    monkeypatch.chdir(tmp_path)
    assert find_parts(Path("runs", "job")) == [latest]


def test_a_truncated_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "node0" / "run"
    run.mkdir(parents=True)
    with zipfile.ZipFile(run / "whole.pt", "w") as file:
        file.writestr("data", "x" * 100)
    content = (run / "whole.pt").read_bytes()
    (run / "half.pt").write_bytes(content[:-1])
    os.utime(run / "whole.pt", (0, 0))
    assert find_parts(tmp_path) == [run / "whole.pt"]


STATES = {"model": {}, "optimizer": {"param_groups": []}}


def make_torch_file(states: dict[str, Any]) -> bytes:
    """Return the part of torch.save's output that awsddp reads: a zip with the pickle in a folder."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(states))
    return file.getvalue()


def make_safetensors(length: int, write_files: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(write_files)


WHOLE, WEIGHTS = make_torch_file(STATES), make_torch_file({"layer.weight": []})
TENSORS = make_safetensors(4, 4)
TRAINER = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "trainer_state.json")
FINAL = ("model.safetensors", "config.json", "training_args.bin", "trainer_state.json")
FSDP = ("pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/.metadata", "optimizer_0/__0_0.distcp")
ACCELERATE = ("model.safetensors", "optimizer.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl")
ZERO = ("mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")


def tree(folder: str, *names: str, node: int = 0) -> list[str]:
    return [f"node{node}/{folder}/{name}" for name in names]


LAYOUTS: dict[str, tuple[list[str], str | None]] = {
    "Trainer, finished: the folder of the model is no checkpoint": (
        [
            *tree("out/checkpoint-10", *TRAINER),
            *tree("out/checkpoint-20", *TRAINER),
            *tree("out/checkpoint-20", "rng_state_2.pth", node=1),
            *tree("out", *FINAL),
        ],
        "out/checkpoint-20",
    ),
    "Trainer, killed before the last file of the next one": (
        [*tree("out/checkpoint-10", *TRAINER), *tree("out/checkpoint-20", *TRAINER[:-1])],
        "out/checkpoint-10",
    ),
    "Trainer, killed while it saved at TERM what it had saved at the same step": (
        [
            *tree("out/checkpoint-10", *TRAINER),
            *tree("out/checkpoint-20", *TRAINER),
            *tree("out/checkpoint-20", "checkpoint-is-incomplete.txt", node=1),
        ],
        "out/checkpoint-10",
    ),
    "Trainer, only the model is saved": ([*tree("out/checkpoint-20", *FINAL), *tree("out", *FINAL)], None),
    "Trainer with FSDP, sharded": (
        [
            *tree("out/checkpoint-20", *FSDP),
            *tree("out/checkpoint-20", "optimizer_0/__1_0.distcp", node=1),
            *tree("out/checkpoint-20", "optimizer_0/.metadata", "scheduler.pt", "trainer_state.json"),
        ],
        "out/checkpoint-20",
    ),
    "Trainer with FSDP, killed before the optimizer": (
        [*tree("out/checkpoint-10", *TRAINER), *tree("out/checkpoint-20", *FSDP)],
        "out/checkpoint-10",
    ),
    "Trainer with DeepSpeed": (
        [
            *(f"node0/out/checkpoint-20/global_step20/{name}" for name in ZERO),
            *tree("out/checkpoint-20", "latest", "zero_to_fp32.py", "trainer_state.json"),
            *tree("out", *FINAL),
        ],
        "out/checkpoint-20",
    ),
    "Accelerate, and the model that it saves at the end": (
        [*tree("checkpoints/checkpoint_0", *ACCELERATE), *tree("final", "config.json", "model.safetensors")],
        "checkpoints/checkpoint_0",
    ),
    "Accelerate, killed before the last file": (
        [*tree("checkpoints/checkpoint_0", *ACCELERATE), *tree("checkpoints/checkpoint_1", *ACCELERATE[:-1])],
        "checkpoints/checkpoint_0",
    ),
    "Accelerate with FSDP": (
        tree("state", *FSDP, "optimizer_0/.metadata", "scheduler.bin", "random_states_0.pkl"),
        "state",
    ),
    "Accelerate with DeepSpeed": (
        [
            *(f"node0/state/pytorch_model/{name}" for name in ZERO),
            *tree("state", "latest", "random_states_0.pkl"),
        ],
        "state",
    ),
    "Lightning": (["node0/lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt"], None),
    "Lightning, sharded": (
        tree("logs/epoch=1-step=8.ckpt", "__0_0.distcp", ".metadata", "meta.pt"),
        "logs/epoch=1-step=8.ckpt",
    ),
    "Lightning, sharded, killed before the last file": (
        [
            *tree("logs/epoch=0-step=4.ckpt", "__0_0.distcp", ".metadata", "meta.pt"),
            *tree("logs/epoch=1-step=8.ckpt", "__0_0.distcp", ".metadata"),
        ],
        "logs/epoch=0-step=4.ckpt",
    ),
    "Lightning with DeepSpeed": (
        [*(f"node0/logs/last.ckpt/checkpoint/{name}" for name in ZERO), "node0/logs/last.ckpt/latest"],
        "logs/last.ckpt",
    ),
    "DeepSpeed in the run folder, whose `latest` is the name of a folder": (
        [
            *(f"node0/run/global_step10/{name}" for name in ZERO),
            *(f"node1/run/global_step10/{name}" for name in ZERO[1:]),
            *tree("run", "zero_to_fp32.py", "zero_to_torch.py", "latest"),
            *(f"node0/run/global_step20/{name}" for name in ZERO[:1]),
            "node0/run/metrics.jsonl",
        ],
        "run",
    ),
    "DeepSpeed, killed in its first save": ([f"node0/ds/global_step10/{name}" for name in ZERO], None),
    "torchtitan": (
        [*tree("outputs/checkpoint/step-5", "__0_0.distcp", ".metadata"), "node0/outputs/tb/x"],
        "outputs/checkpoint/step-5",
    ),
}
LAYOUTS["Lightning"] = (LAYOUTS["Lightning"][0], LAYOUTS["Lightning"][0][0].removeprefix("node0/"))


def make_content(name: str) -> bytes:
    if name.endswith(".metadata"):
        return pickle.dumps(STATES)
    return make_safetensors(4, 4) if name.endswith(".safetensors") else WHOLE


def write_files(results: Path, files: dict[str, bytes]) -> None:
    for mtime, (name, content) in enumerate(files.items()):
        path = results / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (mtime, mtime))


def find_in_s3(results: Path) -> str | None:
    """Return the checkpoint that the first node names in S3, once all files are saved and quiet."""
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in results.rglob("*") if path.is_file()):
        result = path.relative_to(results).as_posix()
        flaw = find_flaw(path, result)
        row = {"modified": path.stat().st_mtime_ns, "parts": []}
        rows[result] = {**row, flaw: True} if flaw else row
    index = CheckpointIndex()
    for scan in (1, 9):  # a log that grows is always pending
        index.update({node: {"look": scan, "pending": [f"node{node}/run"]} for node in (0, 1)}, rows, {})
    return index.checkpoint["name"] if index.checkpoint else None


def find_locally(results: Path) -> str | None:
    checkpoint = find_newest_checkpoint(results)
    return "/".join(checkpoint.parts[0].relative_to(results).parts[1:]) if checkpoint else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_complete_checkpoint_is_found_locally_and_in_s3(tmp_path: Path, layout: str) -> None:
    files, expected = LAYOUTS[layout]
    write_files(tmp_path, {name: make_content(name) for name in files})
    assert find_locally(tmp_path) == expected
    assert find_in_s3(tmp_path) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"checkpoint.pth.tar": WHOLE}, "checkpoint.pth.tar"),
        ({"a.tar": WHOLE, "shard-0.tar": b"a file" + bytes(2000)}, "a.tar"),
        ({"a.tar": WHOLE, "b.tar": WHOLE[:-1], "c.tar": b""}, "a.tar"),
        ({"old.tar": pickle.dumps(STATES, protocol=2)}, "old.tar"),
        ({"step-1.pt": WHOLE, "final.pt": WEIGHTS}, "step-1.pt"),
        ({"step-1.pt": WEIGHTS, "step-2.pt": WEIGHTS}, "step-2.pt"),
        ({"step-1.pt": WHOLE, "step-2.safetensors": TENSORS}, "step-1.pt"),
        ({"step-1.safetensors": TENSORS}, "step-1.safetensors"),
        ({"step-1.safetensors": TENSORS, "step-2.safetensors": make_safetensors(4, 3)}, "step-1.safetensors"),
        ({"step-1.safetensors": TENSORS, "step-2.safetensors": b""}, "step-1.safetensors"),
        ({"model.safetensors": TENSORS, "adapter_model.safetensors": TENSORS}, None),
        ({"1/.metadata": pickle.dumps(STATES), "2/.metadata": pickle.dumps({"model": 0})}, "1"),
        (
            {
                "ckpt/gs1/.metadata": pickle.dumps(STATES),
                "ckpt/gs1/mp_rank_00_model_states.pt": WHOLE,
                "ckpt/latest": b"gs1",
            },
            "ckpt",
        ),
        ({"run/latest": b"any", "step-9.pt": WHOLE}, "run/latest"),
        ({"run/latest/any": b"any", "step-9.pt": WHOLE}, "run/latest"),
    ],
)
def test_a_complete_file_is_a_checkpoint_and_weights_alone_rank_last(
    tmp_path: Path, files: dict[str, bytes], expected: str | None
) -> None:
    write_files(tmp_path, {f"node0/{name}": content for name, content in files.items()})
    assert find_locally(tmp_path) == expected
    assert find_in_s3(tmp_path) == expected


def test_only_the_checkpoint_in_a_folder_is_sent(tmp_path: Path) -> None:
    files, _ = LAYOUTS["DeepSpeed in the run folder, whose `latest` is the name of a folder"]
    write_files(tmp_path, {name: make_content(name) for name in files})
    checkpoint = find_newest_checkpoint(tmp_path)
    assert checkpoint is not None
    with checkpoint.stage() as folder:
        sent = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert sent == {
        *(f"run/{name}" for name in ("latest", "zero_to_fp32.py", "zero_to_torch.py")),
        *(f"run/global_step10/{name}" for name in ZERO),
        f"run/global_step20/{ZERO[0]}",
    }
