"""Checkpoints: written aside and renamed, read back by every rank from rank 0's disk, with weights only."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from group import Place
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

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
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        full = error.__context__  # torch's zip writer hides why behind a RuntimeError of its own
        why = full if isinstance(full, OSError) else error
        raise CheckpointError(
            f"{path} could not be written: {why}. What was saved before is kept."
        ) from error


def save_step(state: State, folder: Path, *, step: int, best: bool = False, keep: int = 2) -> Path:
    """Write the checkpoint of `step` into `folder`, as best.pt too if it is; keep the last `keep`."""
    path = folder / f"step-{step:08d}.pt"
    save(state, path)
    if best:
        save(state, folder / "best.pt")
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def newest(places: list[Path]) -> Path | None:
    """Return the checkpoint of the latest step in `places`, files or folders; None where there is none."""
    found = [p for p in places if p.is_file()]
    for folder in places:
        found += [*folder.glob("step-*.pt"), *folder.glob("checkpoints/step-*.pt")]
    return max(found, key=_step_of, default=None)


def load(places: list[Path]) -> State | None:
    """Return on every rank the newest checkpoint that any rank finds in `places`, None where none does.

    A collective call: nodes share no file system, and after a restart another one may be rank 0's.
    Raises CheckpointError on every rank when it cannot be read.
    """
    found = newest(places)
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([_step_of(found) if found else -1]))
    source = max(range(len(steps)), key=lambda rank: int(steps[rank]))
    if steps[source].item() < 0:
        return None
    content = bytearray(found.read_bytes()) if found and dist.get_rank() == source else bytearray()
    size = torch.tensor([len(content)])
    dist.broadcast(size, src=source)
    content = content or bytearray(int(size))
    if content:
        dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), src=source)
    try:
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # torch.load raises whatever the damage leads to: EOFError, KeyError...
        raise CheckpointError(f"{found} is not a checkpoint, or is damaged: {error}") from error


def _step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; 0 for a file of another name."""
    digits = path.stem.removeprefix("step-")
    return int(digits) if digits.isdigit() else 0


def state(name: str, *, net: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> State:
    """Return what a checkpoint holds of the model called `name` and its training."""
    return {
        "name": name,
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
    }


def restore(state: State, *, name: str, net: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> State:
    """Put a checkpoint's state back; return the position it was taken at.

    Raises CheckpointError when it is of another model or another program.
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
    """Return on rank 0 the random number state of every rank, [] elsewhere. A collective call."""
    own = torch.get_rng_state()
    if device.type == "cuda":
        own = torch.cat([own, torch.cuda.get_rng_state(device)])
    states = [torch.empty_like(own) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(own, states, dst=0)
    return states or []


def restore_rng(states: list[torch.Tensor], *, place: Place, device: torch.device) -> bool:
    """Take up this rank's random numbers where gather_rng saw them; say whether that could be done."""
    if len(states) != place.world_size:
        return False
    own, size = states[place.rank], torch.get_rng_state().numel()
    torch.set_rng_state(own[:size])
    if device.type == "cuda" and own.numel() > size:
        torch.cuda.set_rng_state(own[size:], device)
    return True
