"""Which results are a checkpoint to resume from: one rule for what is here and for what is in S3.

What each library writes, the last file of rank 0 last (transformers 5.23, accelerate 1.15, deepspeed 0.19.8):

- Hugging Face's Trainer: checkpoint-N/ with optimizer.pt or optimizer.bin (FSDP: optimizer_0/, DeepSpeed:
  global_stepN/, latest), scheduler.pt, trainer_state.json (Trainer._save_checkpoint). The folder of the final
  model has that file, too, and no optimizer (Trainer.save_state): from there the Trainer resumes with a new
  optimizer and schedule, with an error under DeepSpeed alone (_load_optimizer_and_scheduler). What it saves
  at TERM (enable_jit_checkpoint) has checkpoint-is-incomplete.txt until the end, also where it replaces files
  of the same step (CheckpointManager.execute_jit_checkpoint).
- Accelerate's save_state: optimizer.bin or the folders above, scheduler.bin, random_states_N.pkl
  (accelerate/checkpointing.py, save_accelerator_state).
- torch.distributed.checkpoint, torchtitan: *.distcp, .metadata (FileSystemWriter.finish). The last step of
  torchtitan holds the model alone (checkpoint.last_save_model_only).
- Lightning: *.ckpt; a sharded one is a folder *.ckpt/ of torch.distributed.checkpoint, then meta.pt
  (FSDPStrategy.save_checkpoint), or of DeepSpeed.
- DeepSpeed: TAG/*_model_states.pt, with ZeRO TAG/*_optim_states.pt, and latest, which names TAG
  (DeepSpeedEngine.save_checkpoint); rank 0 writes it without waiting for the files of the other ranks.
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
"""Of files that may be checkpoints. Of *.tar those that torch.save wrote count (checkpoint.pth.tar)."""
MARKS = (".metadata", "trainer_state.json", "random_states_0.pkl", "latest")
"""Files that make their folder a checkpoint, where it has the rest."""
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""What Hugging Face's Trainer has in a checkpoint that it is writing at TERM."""
LATEST = "run/latest"
"""What counts before all others: a file, a folder, or a link to one."""
_PART = re.compile(
    r"(optimizer|scheduler|scaler|rng_state|meta|.*[_-](model|optim)_states)(_\d+)?\.pth?"
    r"|((diffusion_)?pytorch_|adapter_)?model(-\d+-of-\d+|_\d+)?\.safetensors"
)
"""Files that resume nothing by themselves: parts of the folders above, and Hugging Face's weights."""
_PART_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
_BESIDE_TAGS = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
_OF_AN_OPTIMIZER = (b"optim", b"param_groups")
_MOST = 16_000_000
"""How many bytes of a pickle are searched."""


class Found(NamedTuple):
    """A checkpoint: its path in the results of a node, and the folders of which everything belongs to it."""

    name: str
    trees: tuple[str, ...] = ()

    def is_weights(self, weights: Collection[str]) -> bool:
        """Tell whether it holds a model alone, by the files for which `flaw_of` returned "weights"."""
        return self.name in weights or f"{self.name}/.metadata" in weights


def find_checkpoints(paths: Iterable[str], named: Collection[str] = ()) -> dict[Found, list[str]]:
    """Return the checkpoints among the files of all nodes, given by their paths without the node, with their
    files.

    `named` are the paths to which links at LATEST lead. The content of files does not count (`flaw_of`).
    """
    files = set(paths)
    inside: defaultdict[str, set[str]] = defaultdict(set)
    for path in files:
        folder, _, name = path.rpartition("/")
        while name and name not in inside[folder]:
            inside[folder].add(name)
            folder, _, name = folder.rpartition("/")
    folders = {folder: trees for folder in list(inside) if folder and (trees := _trees(folder, inside))}
    preferred = {LATEST, *named} - {""}
    if _tags(dirname(LATEST), inside):
        preferred.discard(LATEST)  # it is a file of DeepSpeed's
    folders.update((one, (one,)) for one in preferred if one in inside and one not in folders)
    found: dict[Found, list[str]] = {Found(folder, trees): [] for folder, trees in folders.items()}
    owners_of: defaultdict[str, list[Found]] = defaultdict(list)
    for one in found:
        for tree in one.trees:
            owners_of[tree].append(one)
    for one, held in found.items():
        held += [
            path
            for name in _BESIDE_TAGS
            if (path := f"{one.name}/{name}") in files and one.name not in owners_of
        ]
    for path in files:
        above = folders_above(path) if owners_of else ()
        owners = {one for folder in above for one in owners_of.get(folder, ())}
        for one in owners:
            found[one].append(path)
        if path in preferred or (
            path.endswith(SUFFIXES) and not owners and not _PART.fullmatch(basename(path))
        ):
            found[Found(path)] = [path]
    return found


def worth(
    name: str, modified: float, *, is_weights: bool, named: Collection[str]
) -> tuple[bool, bool, float]:
    """Return a key by which checkpoints are compared, the best last.

    What LATEST names comes before all others, more than the weights of a model before those, then the newest.
    """
    return name == LATEST or name in named, not is_weights, modified


def folders_above(path: str) -> Iterator[str]:
    """Yield the folders that a path lies in, the nearest first."""
    while path := dirname(path):
        yield path


def flaw_of(path: Path, name: str) -> str:
    """Return what a file named `name` lacks: "torn" if it is no checkpoint or its end was not written (a rank
    may be killed while it saves), "weights" if it holds a model without an optimizer, "" if no lack is known.

    Raises OSError.
    """
    try:
        with path.open("rb") as file:
            if name.endswith("/.metadata"):
                return _by_words(file.read(_MOST))
            if not name.endswith(SUFFIXES):
                return ""
            if name.endswith(".safetensors"):
                return _of_safetensors(file)
            begin = file.read(4)
            if begin == b"PK\x03\x04":
                return _of_zip(file)
            return "torn" if name.endswith(".tar") and not begin.startswith(b"\x80") else ""
    except OSError:
        raise
    except Exception:  # a file that a rank did not write to its end, or that is something else
        return "torn"


def _trees(folder: str, inside: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return the folders that belong to a checkpoint which a folder is, () if it has not all of one."""
    names, tags, whole = inside[folder], _tags(folder, inside), (folder,)
    sharded = ".metadata" in inside.get(f"{folder}/optimizer_0", ())
    has_optimizer = bool(tags) or sharded or not names.isdisjoint(("optimizer.pt", "optimizer.bin"))
    if "trainer_state.json" in names:
        if _INCOMPLETE in names:
            return ()
        return whole if has_optimizer and (tags or "scheduler.pt" in names) else ()
    if "random_states_0.pkl" in names:
        return whole if has_optimizer else ()
    if ".metadata" in names and not _PART_FOLDER.fullmatch(basename(folder)):
        return () if folder.endswith(".ckpt") and "meta.pt" not in names else whole
    return tuple(f"{folder}/{tag}" for tag in tags)


def _tags(folder: str, inside: Mapping[str, set[str]]) -> list[str]:
    """Return the names of DeepSpeed's folders TAG in a folder that has `latest`."""
    names = inside.get(folder, set())
    if "latest" not in names:
        return []
    return sorted(
        name
        for name in names
        if any(file.endswith("model_states.pt") for file in inside.get(f"{folder}/{name}", ()))
    )


def _of_zip(file: BinaryIO) -> str:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not names:
            return ""
        with archive.open(names[0]) as pickled:
            return _by_words(pickled.read(_MOST))


def _of_safetensors(file: BinaryIO) -> str:
    """Compare the length of a file with what its header says: its length in 8 bytes, then JSON."""
    length = int.from_bytes(file.read(8), "little")
    size = file.seek(0, 2)
    if length > _MOST:
        return "weights" if length + 8 <= size else "torn"
    file.seek(8)
    tensors = json.loads(file.read(length))
    ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
    return "weights" if size == 8 + length + max(ends, default=0) else "torn"


def _by_words(described: bytes) -> str:
    """Search a pickle for the words by which a dict of states holds that of an optimizer."""
    return "" if any(word in described for word in _OF_AN_OPTIMIZER) else "weights"
