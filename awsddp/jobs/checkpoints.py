"""The newest checkpoint among a job's results."""

import zipfile
from pathlib import Path

SUFFIXES = (".pt", ".pth", ".ckpt")
_MARKS = (".metadata", "trainer_state.json")
"""Files that make their folder a checkpoint, of torch.distributed.checkpoint and Hugging Face's Trainer: one
node writes them, as the last."""


def newest(results: Path) -> list[Path]:
    """Return the newest checkpoint of `results` (runs/JOB), a file or the parts of a folder, one per node.

    A file or folder run/latest counts before all others. Nodes share no file system: a folder may have files
    on each. Files of such a folder, and those whose end is missing, are not counted. Empty where there is
    none.
    """
    results = results.resolve()
    nodes = sorted(path for path in results.glob("node*") if path.is_dir())
    latest = [one for node in nodes if (one := _inside(node / "run" / "latest", results)) is not None]
    if not latest:
        latest = _checkpoints(nodes)
    if not latest:
        return []
    chosen = max(latest, key=_modified)
    if chosen.is_file():
        return [chosen]
    path = Path(*chosen.relative_to(results).parts[1:])
    return [node / path for node in nodes if (node / path).is_dir()]


def _inside(path: Path, results: Path) -> Path | None:
    """Return what `path` leads to, None where that is nothing, or outside of the results."""
    found = path.resolve()
    return found if found.exists() and found.is_relative_to(results) else None


def _checkpoints(nodes: list[Path]) -> list[Path]:
    paths = [(node, path.relative_to(node)) for node in nodes for path in node.rglob("*") if _is_file(path)]
    folders = {path.parent for _, path in paths if path.name in _MARKS}
    files = [
        node / path
        for node, path in paths
        if path.suffix in SUFFIXES and folders.isdisjoint(path.parents) and _is_whole(node / path)
    ]
    return files + [node / folder for node in nodes for folder in folders if (node / folder).is_dir()]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_whole(path: Path) -> bool:
    """Tell whether the end of a file of torch.save was written: a rank may be killed while it saves."""
    with path.open("rb") as file:
        begin = file.read(4)
    return begin != b"PK\x03\x04" or zipfile.is_zipfile(path)


def _modified(path: Path) -> float:
    if path.is_file():
        return path.stat().st_mtime
    files = [one.stat().st_mtime for one in path.rglob("*") if one.is_file()]
    return max(files, default=0.0)
