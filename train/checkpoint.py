"""Checkpoints: rank 0 writes them, and the newest one that any rank finds is sent to all ranks."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from group import World
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

State = dict[str, Any]


class CheckpointError(Exception):
    """A checkpoint cannot be written or read. The message names the file and the reason."""


def save(state: State, path: Path) -> None:
    """Write `state` to `path` completely or not at all, even if the disk fills or the machine fails.

    Raises CheckpointError if the file could not be written.
    """
    aside = path.with_name(path.name + ".aside")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise the rename may reach the disk before the content
        aside.replace(path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        cause = error.__context__  # torch's zip writer replaces an OSError with a RuntimeError
        reason = cause if isinstance(cause, OSError) else error
        raise CheckpointError(
            f"{path} could not be written: {reason}. Earlier checkpoints are kept."
        ) from error


def save_step(state: State, folder: Path, *, step: int, is_best: bool = False, keep: int = 2) -> None:
    """Write the checkpoint for `step` into `folder`, and best.pt if `is_best`; keep the last `keep` steps."""
    save(state, folder / f"step-{step:08d}.pt")
    if is_best:
        save(state, folder / "best.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()


def newest(paths: list[Path]) -> Path | None:
    """Return the latest step's checkpoint in `paths` (files or folders), or None if there is none."""
    files = [path for path in paths if path.is_file()]
    for folder in paths:
        files += [*folder.glob("step-*.pt"), *folder.glob("checkpoints/step-*.pt")]
    return max(files, key=_step_of, default=None)


def load(paths: list[Path]) -> State | None:
    """Return on every rank the newest checkpoint that any rank finds in `paths`, or None if there is none.

    This is a collective call, because nodes share no file system, and after a restart another node may have
    rank 0. Raises CheckpointError on every rank if the checkpoint cannot be read.
    """
    path = newest(paths)
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([_step_of(path) if path else -1]))
    source = max(range(len(steps)), key=lambda rank: int(steps[rank]))
    if steps[source].item() < 0:
        return None
    content = bytearray(path.read_bytes()) if path and dist.get_rank() == source else bytearray()
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=source)
    content = content or bytearray(int(size))
    if content:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=source)
    try:
        # weights_only is set because a pickle can run code. Without map_location, rank 1 would load tensors
        # onto rank 0's GPU.
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file can cause any error: EOFError, KeyError...
        raise CheckpointError(f"{path} is not a checkpoint, or is damaged: {error}") from error


def _step_of(path: Path) -> int:
    """Return the step that a checkpoint's name contains, or 0 for a file with another name."""
    digits = path.stem.removeprefix("step-")
    return int(digits) if digits.isdigit() else 0


def state(name: str, *, net: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> State:
    """Return a checkpoint of the model called `name`, but without the position and the random numbers."""
    return {
        "name": name,
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }


def restore(state: State, *, name: str, net: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> State:
    """Load a checkpoint's state into these objects; return the checkpoint's position.

    Raises CheckpointError if the checkpoint belongs to another model or another program.
    """
    try:
        if state["name"] != name:
            raise CheckpointError(f"the checkpoint is of the model {state['name']}, not {name}.")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] and scaler.is_enabled():
            scaler.load_state_dict(state["scaler"])
        return dict(state["at"])
    except (KeyError, RuntimeError, ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint does not fit {name}: {error}") from error


def gather_rng(device: torch.device) -> list[torch.Tensor]:
    """Return the random number states of all ranks on rank 0, and [] on other ranks.

    This is a collective call.
    """
    state = torch.get_rng_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.get_rng_state(device)])
    states = [torch.empty_like(state) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(state, states, dst=0)
    return states or []


def restore_rng(states: list[torch.Tensor], *, world: World, device: torch.device) -> bool:
    """Restore this rank's random number state; return False if `states` come from another world size."""
    if len(states) != world.size:
        return False
    state, size = states[world.rank], torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda" and state.numel() > size:
        torch.cuda.set_rng_state(state[size:], device)
    return True
