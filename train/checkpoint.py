"""Checkpoints: written aside and renamed, read back by every rank from rank 0's disk, with weights only."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

State = dict[str, Any]


class CheckpointError(Exception):
    """A checkpoint cannot be written or read back. The text says which file, and why."""


def save(state: State, path: Path) -> None:
    """Write `state` to `path`: whole or not at all, also when the disk fills or the machine goes.

    Raises CheckpointError when the disk refuses.
    """
    aside = path.with_name(path.name + ".aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, RuntimeError) as error:  # torch's zip writer turns a full disk into a RuntimeError
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written: {error}. The one before it is kept.") from error


def save_step(state: State, folder: Path, *, step: int, keep: int = 2) -> Path:
    """Write the checkpoint of `step` into `folder`, and remove all but the last `keep` of them."""
    path = folder / f"step-{step:08d}.pt"
    save(state, path)
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def newest(path: Path) -> Path:
    """Return `path`, or if it is a folder the newest checkpoint in it or in its checkpoints/.

    Raises CheckpointError when there is none.
    """
    if not path.is_dir():
        return path
    found = sorted([*path.glob("step-*.pt"), *path.glob("checkpoints/step-*.pt")], key=lambda p: p.name)
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint (step-*.pt).")
    return found[-1]


def load(path: Path, *, rank: int) -> State:
    """Return the checkpoint at `path` of rank 0's disk, on every rank: the nodes share no file system.

    A collective call. Raises CheckpointError on every rank when rank 0 cannot read it.
    """
    content, refusal = b"", ""
    if rank == 0:
        try:
            content = newest(path).read_bytes()
        except (OSError, CheckpointError) as error:
            refusal = str(error)
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=0)
    if not size.item():
        raise CheckpointError(refusal or f"rank 0 has no checkpoint at {path}.")
    buffer = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if rank == 0
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(buffer, src=0)
    try:
        return dict(
            torch.load(
                io.BytesIO(bytes(buffer.tolist()) if rank else content), map_location="cpu", weights_only=True
            )
        )
    except (
        Exception
    ) as error:  # torch.load raises whatever the damage leads to: EOFError, KeyError, UnpicklingError...
        raise CheckpointError(f"{path} is no checkpoint of this program, or damaged: {error}") from error


def gather_rng(device: torch.device) -> list[torch.Tensor]:
    """Return on rank 0 the random number state of every rank, [] elsewhere. A collective call."""
    own = torch.cat([torch.get_rng_state(), _cuda_rng(device)])
    states = [torch.empty_like(own) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(own, states, dst=0)
    return states or []


def restore_rng(states: list[torch.Tensor], *, rank: int, device: torch.device) -> None:
    """Take up this rank's random number state where gather_rng saw it."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(states[rank][:size])
    if device.type == "cuda" and states[rank].numel() > size:
        torch.cuda.set_rng_state(states[rank][size:], device)


def _cuda_rng(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8)
