"""Find the checkpoints among results, with the same rules for the client and for S3.

This list has the files that each library writes (transformers 5.23, accelerate 1.15, deepspeed 0.19.8). In
each entry, the file that rank 0 writes last is at the end.

- Hugging Face's Trainer: checkpoint-N/ with optimizer.pt or optimizer.bin (FSDP: optimizer_0/, DeepSpeed:
  global_stepN/, latest), scheduler.pt, trainer_state.json (Trainer._save_checkpoint). The folder of the final
  model also has trainer_state.json, but no optimizer (Trainer.save_state). The Trainer resumes from this
  folder with a new optimizer and schedule, but fails with DeepSpeed (_load_optimizer_and_scheduler). A
  checkpoint that is written at TERM (enable_jit_checkpoint) has checkpoint-is-incomplete.txt until it is
  complete, even if it replaces files of the same step (CheckpointManager.execute_jit_checkpoint).
- Accelerate's save_state: optimizer.bin or the folders above, scheduler.bin, random_states_N.pkl
  (accelerate/checkpointing.py, save_accelerator_state).
- torch.distributed.checkpoint, torchtitan: *.distcp, .metadata (FileSystemWriter.finish). The checkpoint of
  torchtitan's last step holds only the model (checkpoint.last_save_model_only).
- Lightning: *.ckpt. A sharded checkpoint is a folder *.ckpt/ that torch.distributed.checkpoint writes, with
  meta.pt last (FSDPStrategy.save_checkpoint), or that DeepSpeed writes.
- DeepSpeed: TAG/*_model_states.pt, with ZeRO TAG/*_optim_states.pt, and latest, which names TAG
  (DeepSpeedEngine.save_checkpoint); rank 0 writes `latest` without waiting for the other ranks' files.
  load_checkpoint() takes the folder that holds `latest`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from posixpath import basename, dirname
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt", ".tar", ".safetensors")
"""Suffixes of checkpoint files. A *.tar counts if torch.save wrote it (checkpoint.pth.tar)."""
MARKER_FILES = (".metadata", "trainer_state.json", "random_states_0.pkl", "latest")
"""A folder with one of these files is a checkpoint if it also has the other files of a checkpoint."""
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""A checkpoint with this file is incomplete, because Hugging Face's Trainer has not finished writing it."""
LATEST = "run/latest"
"""The preferred checkpoint: a file, a folder, or a link to a file or folder."""
_PART = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|meta|.*[_-](model|optim)_states)(_\d+)?\.pth?"
    r"|((diffusion_)?pytorch_|adapter_)?model(-\d+-of-\d+|_\d+)?\.safetensors"
)
"""Files that are not complete checkpoints: parts of checkpoint folders, and Hugging Face's weights."""
_PART_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_FILES_NEXT_TO_TAGS = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
_OPTIMIZER_KEYS = (b"optim", b"param_groups")
_MAX_BYTES = 16_000_000
"""The maximum number of bytes that are read from a pickle or a header."""


class CheckpointPath(NamedTuple):
    """A checkpoint: its path `name` in a node's results, and the folders `trees` that belong to it."""

    name: str
    trees: tuple[str, ...] = ()

    def is_weights_only(self, weights: Collection[str]) -> bool:
        """Return True if the checkpoint holds only a model.

        `weights` are the files for which `find_flaw` returned "weights".
        """
        return self.name in weights or f"{self.name}/.metadata" in weights


def find_checkpoints(
    paths: Iterable[str], latest_targets: Collection[str] = ()
) -> dict[CheckpointPath, list[str]]:
    """Return the checkpoints among all nodes' files (paths without the node), each with its files.

    `latest_targets` are the targets of links at LATEST. The files' content is not checked here; `find_flaw`
    does that.
    """
    files = set(paths)
    inside: defaultdict[str, set[str]] = defaultdict(set)
    for path in files:
        folder, _, name = path.rpartition("/")
        while name and name not in inside[folder]:
            inside[folder].add(name)
            folder, _, name = folder.rpartition("/")
    folders = {folder: trees for folder in list(inside) if folder and (trees := _trees(folder, inside))}
    preferred = {LATEST, *latest_targets} - {""}
    if _deepspeed_tags(dirname(LATEST), inside):
        preferred.discard(LATEST)  # this `latest` is DeepSpeed's file
    folders.update((path, (path,)) for path in preferred if path in inside and path not in folders)
    checkpoints: dict[CheckpointPath, list[str]] = {
        CheckpointPath(folder, trees): [] for folder, trees in folders.items()
    }
    owners_of: defaultdict[str, list[CheckpointPath]] = defaultdict(list)
    for checkpoint in checkpoints:
        for tree in checkpoint.trees:
            owners_of[tree].append(checkpoint)
    for checkpoint, checkpoint_files in checkpoints.items():
        if checkpoint.name not in owners_of:
            paths_next_to_tags = (f"{checkpoint.name}/{name}" for name in _FILES_NEXT_TO_TAGS)
            checkpoint_files += [path for path in paths_next_to_tags if path in files]
    for path in files:
        parents = parent_folders(path) if owners_of else ()
        owners = {owner for folder in parents for owner in owners_of.get(folder, ())}
        for owner in owners:
            checkpoints[owner].append(path)
        if path in preferred or (
            path.endswith(SUFFIXES) and not owners and not _PART.fullmatch(basename(path))
        ):
            checkpoints[CheckpointPath(path)] = [path]
    return checkpoints


def checkpoint_sort_key(
    name: str, modified: float, *, is_weights: bool, named: Collection[str]
) -> tuple[bool, bool, float]:
    """Return a checkpoint's sort key; the best checkpoint sorts last.

    LATEST and the checkpoints in `named`, to which it links, are preferred to all others. Next are
    checkpoints with an optimizer, and then newer checkpoints.
    """
    return name == LATEST or name in named, not is_weights, modified


def parent_folders(path: str) -> Iterator[str]:
    """Yield a path's parent folders, nearest first."""
    while path := dirname(path):
        yield path


def find_flaw(path: Path, name: str) -> str:
    """Return the flaw of the checkpoint file `name`, or "" if no flaw is known. Raises OSError.

    "torn": the file is not a checkpoint, or it is truncated (for example because a rank was killed while it
    saved). "weights": the file holds a model without an optimizer.
    """
    try:
        with path.open("rb") as file:
            if name.endswith("/.metadata"):
                return _flaw_of_pickle(file.read(_MAX_BYTES))
            if not name.endswith(SUFFIXES):
                return ""
            if name.endswith(".safetensors"):
                return _flaw_of_safetensors(file)
            begin = file.read(4)
            if begin == b"PK\x03\x04":
                return _flaw_of_zip(file)
            return "torn" if name.endswith(".tar") and not begin.startswith(b"\x80") else ""
    except OSError:
        raise
    except Exception:  # the file is truncated or is not a checkpoint
        return "torn"


def _trees(folder: str, inside: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return the folders that belong to a folder's checkpoint, or () if the checkpoint is incomplete."""
    names, tags, whole = inside[folder], _deepspeed_tags(folder, inside), (folder,)
    is_sharded = ".metadata" in inside.get(f"{folder}/optimizer_0", ())
    has_optimizer = bool(tags) or is_sharded or not names.isdisjoint(("optimizer.pt", "optimizer.bin"))
    if "trainer_state.json" in names:
        if _INCOMPLETE in names:
            return ()
        return whole if has_optimizer and (tags or "scheduler.pt" in names) else ()
    if "random_states_0.pkl" in names:
        return whole if has_optimizer else ()
    if ".metadata" in names and not _PART_FOLDER.fullmatch(basename(folder)):
        return () if folder.endswith(".ckpt") and "meta.pt" not in names else whole
    return tuple(f"{folder}/{tag}" for tag in tags)


def _deepspeed_tags(folder: str, inside: Mapping[str, set[str]]) -> list[str]:
    """Return the names of DeepSpeed's TAG folders in a folder with a file `latest`."""
    names = inside.get(folder, set())
    if "latest" not in names:
        return []
    return sorted(
        name
        for name in names
        if any(file.endswith("model_states.pt") for file in inside.get(f"{folder}/{name}", ()))
    )


def _flaw_of_zip(file: BinaryIO) -> str:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            return ""
        with archive.open(names[0]) as pickled:
            return _flaw_of_pickle(pickled.read(_MAX_BYTES))


def _flaw_of_safetensors(file: BinaryIO) -> str:
    """Return "weights" if the file has the size that its header implies, or else "torn".

    The header consists of 8 bytes with the length of the JSON, and the JSON.
    """
    length = int.from_bytes(file.read(8), "little")
    size = file.seek(0, 2)
    if length > _MAX_BYTES:
        return "weights" if length + 8 <= size else "torn"
    file.seek(8)
    tensors = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    return "weights" if size == 8 + length + max(ends, default=0) else "torn"


def _flaw_of_pickle(data: bytes) -> str:
    """Return "weights", or "" if the pickle contains a key of an optimizer's state."""
    return "" if any(key in data for key in _OPTIMIZER_KEYS) else "weights"
