"""Starts the ranks of a training program without a launcher: processes with an environment."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.fleet import free_ports

TRAIN = Path(__file__).resolve().parents[2] / "train"


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a rank."""

    code: int
    out: str
    err: str


def gpus_for(ranks: int) -> dict[str, str]:
    """Return the variables that hide the GPUs of this machine if there are fewer than ranks."""
    return {} if torch.cuda.device_count() >= ranks else {"CUDA_VISIBLE_DEVICES": ""}


def start(
    command: list[str], *, ranks: int, folder: Path, env: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start `command` `ranks` times in `folder`, with the rendezvous in the environment.

    `{rank}` in an argument is the rank. If there are fewer GPUs than ranks, all train on the CPU.
    """
    env = {**gpus_for(ranks), **(env or {})}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "WORLD_SIZE": str(ranks)}
    common = {**os.environ, **rendezvous, "OMP_NUM_THREADS": "1", "AWSDDP_RUN_DIR": str(folder), **env}
    folder.mkdir(parents=True, exist_ok=True)
    return [
        subprocess.Popen(
            [part.replace("{rank}", str(rank)) for part in command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(ranks)
    ]


def wait_all(processes: list[subprocess.Popen[str]], *, timeout_s: float = 180) -> list[Ended]:
    """Wait for all to end and return how they ended; none outlives the call."""
    try:
        ended = [(p, *p.communicate(timeout=timeout_s)) for p in processes]
        return [Ended(process.returncode, out, err) for process, out, err in ended]
    finally:
        for process in processes:
            process.kill()


def run_program(
    command: list[str], *, ranks: int, folder: Path, env: dict[str, str] | None = None
) -> list[Ended]:
    """Start `command` as `start` does and wait for the end of all."""
    return wait_all(start(command, ranks=ranks, folder=folder, env=env))


def run_ranks(
    program: str, *args: str, ranks: int, folder: Path, env: dict[str, str] | None = None
) -> list[Ended]:
    """Run train/`program` on `ranks` ranks."""
    return run_program([sys.executable, str(TRAIN / program), *args], ranks=ranks, folder=folder, env=env)
