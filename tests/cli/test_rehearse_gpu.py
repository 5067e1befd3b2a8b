"""A script written for GPUs runs unchanged on a node that pretends them, and says what was pretended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from awsddp.resources import template

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(int(sys.argv[1]) if len(sys.argv) > 1 else local_rank)
dist.init_process_group(backend="nccl")
device = torch.device("cuda", local_rank)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    data = torch.randn(8, 4).to(device, non_blocking=True)
    with torch.autocast("cuda"):
        loss = model(data).square().mean() + torch.zeros(1, device="cuda").sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
total = torch.ones(1, device=device)
dist.all_reduce(total)
torch.cuda.synchronize()
print("done", torch.cuda.device_count(), int(total), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def rehearse(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run the script as two ranks where `sitecustomize` pretends two GPUs."""
    (folder / "sitecustomize.py").write_text(template("rehearse_gpu.py"))
    (folder / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": str(folder), "AWSDDP_REHEARSE_GPUS": "2", "OMP_NUM_THREADS": "1"}
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    return subprocess.run(
        [sys.executable, *launch, "script.py", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
    )


def test_a_script_for_gpus_runs_unchanged_and_is_told_what_was_pretended(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shown = rehearse(tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("done 2 2") == 2
    assert "CUDA is answered by the CPU (2 devices are pretended), nccl by gloo" in shown.stderr


def test_a_device_that_the_node_would_not_have_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shown = rehearse(tmp_path, "5")
    assert shown.returncode != 0
    assert "invalid device ordinal: cuda:5, and this node would have 2 devices" in shown.stderr
