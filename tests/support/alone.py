"""Run main.py in this process, as a job of one rank."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  # isort: skip
import main
import torch
import torch.distributed as dist

LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "AWSDDP_RESUME",
)


@contextmanager
def single_process(folder: Path) -> Iterator[None]:
    """Set the run folder and one thread, remove a launcher's variables; restore the process afterwards.

    The garbage collector never frees objects of the run: torch 2.13 may hang where it destroys a gloo group,
    as it then waits for a thread that waits for the interpreter.
    """
    gc.disable()
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    os.environ.update(AWSDDP_RUN_DIR=str(folder), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, handler)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.freeze()
        gc.enable()


def train(folder: Path, *argv: str) -> list[dict[str, Any]]:
    """Train in `folder`; return the rows of its metrics."""
    with single_process(folder):
        assert main.run(list(argv)) == 0
    return read_metrics(folder)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the metrics in `folder`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_weights(folder: Path) -> torch.Tensor:
    """Return all weights of the newest checkpoint in `folder`, one after the other."""
    path = max((folder / "checkpoints").glob("step-*.pt"))
    model = torch.load(path, weights_only=True)["model"]
    return torch.cat([tensor.flatten().double() for tensor in model.values()])
